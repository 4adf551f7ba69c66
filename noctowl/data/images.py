"""Image files to RGB pixels in the annotations' frame, and pixels to the model's input.

Legend: W, H image size in pixels; S side of the model's square.

Decisions, made once:
- Colour. 16-bit grey is scaled by 255/65535 and rounded (also where the file's samples are stored as 32-bit integers);
  transparent pixels lie on white, as in transformers; palettes, CMYK, YCbCr and 1-bit images are converted; the first
  frame of an animation is taken; colour profiles are ignored, as all COCO readers do.
- EXIF orientation. The annotation file's width x height is the frame that boxes are in, so it decides: pixels as they
  are stored if that is their size, turned upright if the upright picture has it. Where both fit (square images, and the
  orientations that mirror or turn by 180 degrees) the pixels as stored are taken: COCO's boxes are drawn on those.
  Without an expected size (a user's own photograph) the picture is turned upright. TIFFs are turned by Pillow itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torchvision
import transformers
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor
from transformers import Owlv2ImageProcessor, Owlv2ImageProcessorPil, OwlViTImageProcessor, OwlViTImageProcessorPil

from noctowl.boxes import Frame
from noctowl.data.records import relative_path
from noctowl.errors import DataError, ModelError

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]
Turn = Literal["none", "stored", "upright", "ambiguous"]

MAX_PIXELS = 89_478_485  # Pillow's own warning level for decompression bombs: a quarter of a gigabyte of RGB
ORIENTATION = 0x0112  # EXIF tag; 1 = upright, 5..8 swap width and height
RGB_RULES = 1  # raised when the decisions above change pixel values: part of `Preprocessor.settings`
OPAQUE_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
ALPHA_MODES = ("LA", "PA", "RGBA", "RGBa")


class ImageError(DataError):
    """An image that cannot be used; `kind` tells why."""

    def __init__(self, kind: Literal["missing", "corrupt", "size"], message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, str(self))  # survives the way back from a worker process


@dataclass(frozen=True)
class LoadedImage:
    """RGB pixels and what was decided about an EXIF orientation ("none": there was none)."""

    pixels: Pixels
    turn: Turn


def resolve_image(root: str | Path, file_name: str) -> Path:
    """The image file below `root`. Raises DataError where `file_name` would leave it."""
    return Path(root) / relative_path(file_name, where=f"image of {root}")


def load_rgb(path: str | Path, *, expected_size: tuple[int, int] | None = None) -> Pixels:
    """RGB pixels, uint8 [H, W, 3], in the frame that `expected_size` (width, height) names; see the head of the file.

    Raises:
        ImageError (a DataError): missing, truncated, empty or foreign file; too many pixels; a mode without a defined
            conversion; a size that is neither the stored nor the upright one.
    """
    return load_image(path, expected_size=expected_size).pixels


def load_image(path: str | Path, *, expected_size: tuple[int, int] | None = None) -> LoadedImage:
    """`load_rgb` with the decision about the orientation."""
    path = Path(path)
    if not path.is_file():
        raise ImageError(
            "missing", f"{path}: the image file is missing. Check data.root, data.images and the download."
        )
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    "corrupt", f"{path}: {image.width} x {image.height} pixels; at most {MAX_PIXELS} are read."
                )
            header = image.size
            image.load()
            if image.size != header:  # Pillow scrambles uncompressed TIFFs whose orientation swaps the sides
                sizes = f"{image.width} x {image.height} pixels, its header says {header[0]} x {header[1]}"
                raise ImageError("corrupt", f"{path}: decoded to {sizes}. Save it again without an orientation.")
            upright, turn = _orient(image, path, expected_size)
            return LoadedImage(_to_rgb(upright, path), turn)
    except ImageError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, … on bad bytes
        size = path.stat().st_size
        raise ImageError(
            "corrupt",
            f"{path}: cannot be read as an image ({type(error).__name__}: {error}); the file is empty, truncated or no "
            f"image ({size} bytes). Download it again.",
        ) from error


def _orient(image: Image.Image, path: Path, expected: tuple[int, int] | None) -> tuple[Image.Image, Turn]:
    """The image in the annotations' frame; see the head of the file."""
    orientation = image.getexif().get(ORIENTATION, 1)
    turned = orientation in range(2, 9)
    stored = image.size
    upright = stored[::-1] if orientation in range(5, 9) else stored
    if expected is None:
        return (ImageOps.exif_transpose(image), "upright") if turned else (image, "none")
    expected = (int(expected[0]), int(expected[1]))
    if expected == stored:
        return image, "none" if not turned else "ambiguous" if upright == stored else "stored"
    if expected == upright:
        return ImageOps.exif_transpose(image), "upright"
    frames = f"{stored[0]} x {stored[1]}" + (f" ({upright[0]} x {upright[1]} upright)" if upright != stored else "")
    raise ImageError(
        "size",
        f"{path}: size mismatch: the file has {frames} pixels, the annotations say {expected[0]} x {expected[1]}. "
        "Boxes would not fit: use the images that the annotations were made on, or correct width and height.",
    )


def _to_rgb(image: Image.Image, path: Path) -> Pixels:
    """uint8 [H, W, 3] of an image in any mode that has a defined conversion."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            found = f"{values.min()}..{values.max()}"
            raise ImageError("corrupt", f"{path}: grey values {found}; allowed is 16 bit, 0..65535. Convert the image.")
        return np.repeat(((values + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if image.mode in ALPHA_MODES or (image.mode in OPAQUE_MODES and "transparency" in image.info):
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    elif image.mode not in OPAQUE_MODES:
        allowed = ", ".join((*OPAQUE_MODES, *ALPHA_MODES, "I", "I;16"))
        raise ImageError(
            "corrupt", f"{path}: mode {image.mode!r} has no defined RGB values; allowed: {allowed}. Convert it."
        )
    return np.array(image.convert("RGB"))


class Preprocessor:
    """RGB pixels to the model's input, exactly as the model's own transformers processor does it.

    frame: "padded" or "warped"; None takes what the processor does. pad_value: colour of the padding in [0, 1] before
    normalisation: 0.0 in today's transformers, 0.5 in the releases before OWLv2's processor was corrected.
    """

    def __init__(self, image_processor: Any, frame: Frame | None = None, pad_value: float = 0.0) -> None:
        owlv2, owlvit = (Owlv2ImageProcessor, Owlv2ImageProcessorPil), (OwlViTImageProcessor, OwlViTImageProcessorPil)
        if not isinstance(image_processor, owlv2 + owlvit):
            raise ModelError(f"image processor {type(image_processor).__name__}; allowed are OWL-ViT's and OWLv2's.")
        size: Any = image_processor.size
        steps = {name: bool(getattr(image_processor, name)) for name in ("do_resize", "do_rescale", "do_normalize")}
        if size.height != size.width or not size.height or not all(steps.values()) or image_processor.do_center_crop:
            raise ModelError(
                f"image processor with size {dict(size)}, {steps}, do_center_crop {image_processor.do_center_crop}: a "
                "square size, all three steps and no crop are needed. Correct preprocessor_config.json."
            )
        if not 0.0 <= pad_value <= 1.0:
            raise ModelError(f"pad_value is {pad_value}; allowed is 0.0 to 1.0.")
        self.image_processor = image_processor
        self.frame: Frame = frame or ("padded" if getattr(image_processor, "do_pad", False) else "warped")
        self.pad_value = float(pad_value)
        self.side = int(size.height)
        self._rescales_first = isinstance(image_processor, owlv2)  # OWL-ViT's resizes bytes and rescales afterwards

    def __call__(self, rgb: Pixels) -> Float[Tensor, "3 S S"]:
        """float32 [3, S, S] of uint8 [H, W, 3]."""
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise DataError(f"pixels are {rgb.dtype} {rgb.shape}; needed is uint8 [H, W, 3], as load_rgb returns.")
        image = torch.from_numpy(rgb).permute(2, 0, 1)  # [3, H, W]
        options: dict[str, Any] = {"do_pad": False, "input_data_format": "channels_first", "return_tensors": "pt"}
        if self.frame == "padded":
            image = self._pad(image)  # [3, max(H, W), max(H, W)]
            options["do_rescale"] = not self._rescales_first
        return self.image_processor(images=image, **options)["pixel_values"][0].float()

    def _pad(self, image: Tensor) -> Tensor:
        """Pad at the bottom and right to a square; in [0, 1] where the library rescales first, in bytes otherwise."""
        height, width = image.shape[1:]
        side, fill = max(height, width), self.pad_value
        if self._rescales_first:
            image = image * self.image_processor.rescale_factor
        else:
            fill = round(255 * fill)
        square = image.new_full((3, side, side), fill)
        square[:, :height, :width] = image
        return square

    def settings(self) -> dict[str, Any]:
        """All that the values depend on besides the file: JSON-able, the same in every process; goes into hashes.

        OWLv2's processor resizes bilinearly after a Gaussian blur, whatever `resample` says (antialias "gaussian");
        OWL-ViT's uses the resampling filter widened to the scale ("filter").
        """
        processor = self.image_processor
        bilinear = self._rescales_first
        return {
            "processor": type(processor).__name__,
            "backend": processor.backend,
            "library": {"transformers": transformers.__version__, "torchvision": torchvision.__version__},
            "rgb_rules": RGB_RULES,
            "frame": self.frame,
            "pad_value": self.pad_value,
            "size": [self.side, self.side],
            "interpolation": "bilinear" if bilinear else Image.Resampling(processor.resample).name.lower(),
            "antialias": "gaussian" if bilinear else "filter",
            "rescale_factor": float(processor.rescale_factor),
            "mean": [float(value) for value in processor.image_mean],
            "std": [float(value) for value in processor.image_std],
        }
