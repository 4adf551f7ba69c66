"""What a feature store depends on, its key, and how one image's features lie in it.

Legend: P patches, Dv vision width. An image's *identity* is the sha256 of its file and the size that the annotations
expect (it decides about EXIF orientation): "<sha256>-<width>x<height>".

Where only a sample of the patches is kept (`noctowl.store.sample`), "+<digest of its objects>" follows.

The key is the sha256 of everything that the numbers depend on besides the image. Two runs share a store exactly if all
of it is equal; loss, head, margin, rate, seed and split are not among it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from noctowl.data.images import Preprocessor
from noctowl.errors import ConfigError, DataError
from noctowl.model import ImageFeatures, OwlDetector

Dtype = Literal["fp32", "fp16", "int8"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
ENCODER_VERSION = 1  # raise it whenever `OwlDetector.encode_images` or the way to RGB gives other numbers
LAYOUT_VERSION = 1  # raise it whenever shards or indexes are written differently


class Field(NamedTuple):
    """One tensor of a shard: shape without the leading dimension."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the leading dimension."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Spec:
    """All ingredients of a store's key, and the shapes that follow from them."""

    base_sha256: str
    processor: dict[str, Any]
    dtype: Dtype
    arithmetic: str  # "float32" is exact; TF32 and autocast are other numbers, so other stores
    encoder_version: int
    layout_version: int
    patches: int
    width: int
    objectness: bool
    sample: dict[str, Any] | None = None  # `noctowl.store.sample.settings`; None: all patches are stored

    @property
    def ingredients(self) -> dict[str, Any]:
        """What the key is made of; no word about samples where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "sample" or value is not None}

    @property
    def key(self) -> str:
        """sha256 over all fields."""
        return hashlib.sha256(canonical(self.ingredients)).hexdigest()

    @property
    def fields(self) -> list[Field]:
        """Tensors of a shard in their order: fp32 ones first, so that all are aligned. Boxes are fp32 always.

        Their leading dimension is that of images, or of patches where each image has a number of its own (`sample`).
        """
        patches = (self.patches,) if self.sample is None else ()
        fields = [Field("boxes", torch.float32, (*patches, 4))]
        if self.objectness and self.sample is None:  # training does not read it
            fields.append(Field("objectness", torch.float32, patches))
        if self.dtype == "int8":
            fields.append(Field("scales", torch.float32, patches))
        if self.sample is not None:
            fields.append(Field("weights", torch.float32, ()))
        return [*fields, Field("tokens", DTYPES[self.dtype], (*patches, self.width))]

    @property
    def unit_bytes(self) -> int:
        """Bytes along the leading dimension: of an image's tensors, of a patch's where there is a sample."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def bytes_per_image(self) -> int:
        """Bytes of one image's tensors; its line in the index comes to some 400 more, twice.

        Of a sample the most: how many patches can become foreground is only known once an image is encoded.
        """
        return self.unit_bytes * (1 if self.sample is None else self.patches)


def canonical(value: Any) -> bytes:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signed(content: Any) -> bytes:
    """An index file: the content, with a digest of its own."""
    return canonical({"digest": hashlib.sha256(canonical(content)).hexdigest(), "index": content})


def read_signed(path: Path) -> Any:
    """What `signed` was given. Raises OSError, KeyError, TypeError or ValueError for a damaged file."""
    stored = json.loads(path.read_bytes())
    if hashlib.sha256(canonical(stored["index"])).hexdigest() != stored["digest"]:
        raise ValueError("its digest does not fit its content")
    return stored["index"]


def describe(
    detector: OwlDetector,
    preprocessor: Preprocessor,
    *,
    dtype: str = "fp32",
    device: torch.device,
    autocast: torch.dtype | None = None,
    sample: dict[str, Any] | None = None,
) -> Spec:
    """The spec of features that `detector` computes on `device` of images that `preprocessor` prepares.

    Raises ConfigError for a dtype that is not offered.
    """
    return Spec(
        base_sha256=detector.content_hash(),
        processor=preprocessor.settings(),
        dtype=check_dtype(dtype),
        arithmetic=arithmetic(device, autocast),
        encoder_version=ENCODER_VERSION,
        layout_version=LAYOUT_VERSION,
        patches=detector.num_patches,
        width=int(detector.config.vision_config.hidden_size),
        objectness=detector.model_type == "owlv2",
        sample=sample,
    )


def check_dtype(dtype: str) -> Dtype:
    """Raises ConfigError for anything but fp32, fp16 and int8."""
    if dtype in ("bf16", "bfloat16"):
        raise ConfigError(
            "features.dtype=bf16 is not offered: it takes as much room as fp16 and rounds 8 times as coarsely "
            "(8 bits of precision against 11). Use fp16, or fp32 for exact features."
        )
    if dtype not in DTYPES:
        raise ConfigError(f"features.dtype={dtype!r}: allowed are {', '.join(DTYPES)}.")
    return dtype  # type: ignore[return-value]


def arithmetic(device: torch.device, autocast: torch.dtype | None) -> str:
    """How products are computed on a device: part of a key, since other arithmetic gives other numbers."""
    if autocast is not None:
        return f"autocast {str(autocast).removeprefix('torch.')} on {device.type}"
    if device.type != "cuda":
        return "float32"
    reduced = [("convolutions", torch.backends.cudnn.allow_tf32), ("products", torch.backends.cuda.matmul.allow_tf32)]
    return ", ".join(["float32", *(f"TF32 {name}" for name, on in reduced if on)])


def pack(features: ImageFeatures, spec: Spec) -> dict[str, Tensor]:
    """Tensors of a batch [B, P, ...] in the shard's dtypes, on the CPU.

    int8: one scale per token, max |x| / 127. Raises DataError for values that the dtype cannot hold.
    """
    tokens = features.tokens.float()  # [B, P, Dv]
    packed = {"boxes": features.boxes.float()}
    if spec.objectness and spec.sample is None:
        assert features.objectness is not None
        packed["objectness"] = features.objectness.float()
    if spec.dtype == "int8":
        largest = torch.linalg.vector_norm(tokens, torch.inf, dim=-1)  # [B, P]
        scales = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
        packed["scales"] = scales
        packed["tokens"] = (tokens / scales.unsqueeze(-1)).round_().to(torch.int8)
    else:
        packed["tokens"] = tokens.to(DTYPES[spec.dtype])
    for name, value in packed.items():
        if value.is_floating_point() and not bool(torch.stack(torch.aminmax(value)).isfinite().all()):
            raise DataError(
                f"features: {name} in {spec.dtype} are not all finite (largest token {float(tokens.abs().max()):.3g}). "
                + ("The weights or the image are broken." if spec.dtype != "fp16" else "Use features.dtype=fp32.")
            )
    return {field.name: packed[field.name].cpu() for field in spec.fields if field.name in packed}


def unpack(tokens: Tensor, scales: Tensor | None) -> Tensor:
    """fp32 tokens [*n, P, Dv] of stored ones; fp32 is handed through without a copy."""
    return tokens.float() if scales is None else tokens.float() * scales.unsqueeze(-1)
