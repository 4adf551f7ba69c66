"""Trained heads on disk: a few-megabyte head file, and a folder that transformers loads without noctowl.

A head file holds the trainable weights and the identity of their base. An export holds everything: weights, config,
image processor, tokenizer, a model card and provenance.json; `AutoModelForZeroShotObjectDetection` and `AutoProcessor`
load it offline and give the logits of the module it came from.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from noctowl import __version__
from noctowl.architectures import FAMILY
from noctowl.errors import ModelError
from noctowl.model import TRAINABLE, OwlDetector
from noctowl.runfolder import atomic

CARD = """---
library_name: transformers
pipeline_tag: zero-shot-object-detection
base_model: {base}
tags: [open-vocabulary detection, {family}, noctowl]
---
# {family} with a class head trained by noctowl

All weights are those of `{base}` but for the class head's first layer (`class_head.dense0`).

```python
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

processor = AutoProcessor.from_pretrained("path/to/this/folder")
model = AutoModelForZeroShotObjectDetection.from_pretrained("path/to/this/folder")
```

Captions are limited to {limit} tokens. Boxes are relative to the {frame} square. `provenance.json` beside this file
says how it was made: base hash, image processor settings (the pad value among them), training settings and versions.

Data, figures, intended use and licence: to be filled in by whoever publishes this folder.
"""


def export(detector: OwlDetector, out_dir: str | Path, provenance: Mapping[str, Any] | None = None) -> Path:
    """Writes the detector as a transformers folder, whole or not at all; returns the folder.

    `provenance` (JSON-able) is stored beside what is known here: base, hashes, versions, processor settings. Give the
    training's `pad_value` in it if it differs from the library's 0.0.

    Raises ModelError if the folder is not empty, or if any weight but the trainable layer changed since loading.
    """
    out = Path(out_dir)
    _refuse_filled(out)
    if detector.compute_base_hash() != detector.content_hash():
        raise ModelError(
            f"weights of {detector.base_id} outside {', '.join(TRAINABLE)} changed since they were loaded "
            f"(sha256 {detector.content_hash()} -> {detector.compute_base_hash()}): such a model is not exported"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        detector.model.save_pretrained(temporary)
        detector.processor.save_pretrained(temporary)
        card = CARD.format(
            base=detector.base_id,
            family=FAMILY[detector.model_type],
            limit=detector.text_limit,
            frame=detector.frame,
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")
        known = _known(detector, temporary)
        text = json.dumps({**dict(provenance or {}), **known}, indent=2, sort_keys=True, allow_nan=False)
        (temporary / "provenance.json").write_text(text + "\n", encoding="utf-8")
        temporary.chmod(0o777 & ~_umask())  # mkdtemp and safetensors make them readable to the owner only
        for file in temporary.iterdir():
            file.chmod(0o666 & ~_umask())
        _refuse_filled(out)
        temporary.replace(out)  # also over an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def verify_export(folder: str | Path, base: Mapping[str, Tensor]) -> None:
    """Raises ModelError unless the folder's weights equal `base` bit by bit everywhere but in the trainable layer.

    `base` is a state dict of the base model (`OwlDetector.base_state`).
    """
    found = load_weights_file(folder)
    names = set(found) ^ set(base)
    if names:
        raise ModelError(f"{folder}: weights are not those of the base, first difference {min(names)}")
    for name, value in found.items():
        same_kind = value.shape == base[name].shape and value.dtype == base[name].dtype
        if not same_kind or (name not in TRAINABLE and not torch.equal(value, base[name].cpu())):
            raise ModelError(f"{folder}: {name} differs from the base; only {', '.join(TRAINABLE)} may")


def load_weights_file(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files by name; raises ModelError if there are none or they are damaged."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors file")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: weights are damaged ({error}): export or copy the folder again") from error


def save_head(detector: OwlDetector, file: str | Path, facts: Mapping[str, str] | None = None) -> Path:
    """Writes the trainable weights and the identity of their base to one safetensors file, atomically.

    `facts` (epoch, the figures it was chosen by) go into the file's metadata.
    """
    file = Path(file)
    metadata = {
        **(facts or {}),
        "format": "noctowl-head",
        "base_id": detector.base_id,
        "base_sha256": detector.content_hash(),
        "model_type": detector.model_type,
        "noctowl": __version__,
    }
    with atomic(file) as handle:
        handle.write(save(detector.trainable_state(), metadata=metadata))
    return file


def read_head(file: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Trainable weights and metadata (base_id, base_sha256, model_type) of a head file.

    Raises ModelError if the file is absent, damaged or no head file.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a readable head file ({error})") from error
    if metadata.get("format") != "noctowl-head":
        raise ModelError(f"{file} holds no head of noctowl: metadata is {metadata}, 'format': 'noctowl-head' needed")
    return state, metadata


def load_head(detector: OwlDetector, file: str | Path) -> None:
    """Puts a head file's weights into the detector; raises ModelError for another base (names both)."""
    state, metadata = read_head(file)
    try:
        detector.load_trainable(state, metadata["base_sha256"])
    except ModelError as error:
        raise ModelError(f"{file} (trained on {metadata['base_id']}): {error}") from error


def _known(detector: OwlDetector, folder: Path) -> dict[str, Any]:
    import transformers

    processor = detector.image_processor
    return {
        "base": {"id": detector.base_id, "revision": detector.revision, "sha256": detector.content_hash()},
        "model_type": detector.model_type,
        "trained": list(TRAINABLE),
        "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.glob("*.safetensors"))},
        "image_processor": {
            "class": type(processor).__name__,
            "frame": detector.frame,
            "image_size": detector.image_size,
            "resample": int(processor.resample),
            "image_mean": list(processor.image_mean),
            "image_std": list(processor.image_std),
            "library_pad_value": 0.0 if detector.frame == "padded" else None,
        },
        "versions": {
            "noctowl": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    }


def _refuse_filled(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder: choose another one, nothing is overwritten")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
