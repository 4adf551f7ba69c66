"""Boxes: formats, the two frames of OWL models, overlaps.

Conventions, written once and used everywhere:
  xyxy    (x1, y1, x2, y2), corners; the format of every box in this package unless a name says otherwise
  cxcywh  (centre x, centre y, width, height); what the box head of OWL predicts
  pixels  the annotation file's frame, 0..W by 0..H
  frame   the model's square, 0..1: "padded" (OWLv2: image padded at the bottom and right to a square, so both axes are
          divided by max(W, H)) or "warped" (OWL-ViT: image stretched to the square, so x is divided by W and y by H)

Degenerate boxes (zero width or height) are legal predictions: their overlap with anything is 0, never NaN. Boxes that
are inverted or not finite are errors of the caller; `check_boxes` names the first one.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torchvision import ops

Frame = Literal["padded", "warped"]


def cxcywh_to_xyxy(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """Centre and size to corners. No clipping: OWL predicts boxes that reach outside its square."""
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack((cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h), dim=-1)


def xyxy_to_cxcywh(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """Corners to centre and size."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack(((x1 + x2) * 0.5, (y1 + y2) * 0.5, x2 - x1, y2 - y1), dim=-1)


def frame_scale(width: int | float, height: int | float, frame: str) -> tuple[float, float]:
    """Pixels along x and along y that make up one side of the model's square.

    Raises ValueError for an unknown frame and for a size that is not positive.
    """
    if width <= 0 or height <= 0:
        raise ValueError(f"image size {width}x{height}: width and height must be positive")
    if frame == "padded":
        side = float(max(width, height))
        return side, side
    if frame == "warped":
        return float(width), float(height)
    raise ValueError(f"box frame {frame!r} is unknown; allowed: {', '.join(get_args(Frame))}")


def to_frame(
    boxes: Float[Tensor, "*n 4"], width: int | float, height: int | float, frame: Frame
) -> Float[Tensor, "*n 4"]:
    """Pixel boxes of a width x height image, relative to the model's square."""
    sx, sy = frame_scale(width, height, frame)
    return boxes / boxes.new_tensor((sx, sy, sx, sy))


def from_frame(
    boxes: Float[Tensor, "*n 4"], width: int | float, height: int | float, frame: Frame, *, clip: bool = False
) -> Float[Tensor, "*n 4"]:
    """Boxes relative to the model's square, in pixels of a width x height image.

    Not clipped by default: the published evaluation scores boxes as predicted, also where they leave the image.
    """
    sx, sy = frame_scale(width, height, frame)
    pixels = boxes * boxes.new_tensor((sx, sy, sx, sy))
    if not clip:
        return pixels
    return torch.minimum(pixels.clamp(min=0), boxes.new_tensor((width, height, width, height)))


def areas(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n"]:
    """Width times height."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def iou(a: Float[Tensor, "*b n 4"], b: Float[Tensor, "*b m 4"]) -> Float[Tensor, "*b n m"]:
    """Intersection over union of every pair; 0 where both boxes are empty (0/0)."""
    return _zero_empty(_batched(ops.box_iou, a, b), a, b, value=0.0)


def generalized_iou(a: Float[Tensor, "*b n 4"], b: Float[Tensor, "*b m 4"]) -> Float[Tensor, "*b n m"]:
    """GIoU of every pair, in [-1, 1] (Rezatofighi et al., CVPR 2019).

    -1 where both boxes are empty: they share nothing, and the enclosing box may be empty too.
    """
    return _zero_empty(_batched(ops.generalized_box_iou, a, b), a, b, value=-1.0)


def nms(boxes: Float[Tensor, "n 4"], scores: Float[Tensor, "n"], threshold: float) -> Int64[Tensor, "k"]:
    """Indices kept by greedy non-maximum suppression, best score first; empty boxes never suppress nor are suppressed.

    Raises ValueError for boxes that are inverted or not finite and for NaN scores (torchvision would keep or drop them
    at random).
    """
    check_boxes(boxes, "nms boxes")
    if scores.isnan().any():
        raise ValueError("nms scores contain NaN")
    return ops.nms(boxes.float(), scores.float(), threshold)


def valid_boxes(boxes: Float[Tensor, "*n 4"]) -> Bool[Tensor, "*n"]:
    """True for boxes that are finite and not inverted (zero width or height is allowed)."""
    return boxes.isfinite().all(-1) & (boxes[..., 2:] >= boxes[..., :2]).all(-1)


def check_boxes(boxes: Float[Tensor, "*n 4"], name: str) -> None:
    """Raises ValueError that names the first box which is inverted or not finite."""
    bad = ~valid_boxes(boxes)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        found = boxes[where].tolist()
        raise ValueError(
            f"{name}{list(where)} = {found} ({int(bad.sum())} such): finite xyxy with x1 <= x2 and y1 <= y2 needed"
        )


def _batched(pairwise, a: Tensor, b: Tensor) -> Tensor:
    """torchvision's pairwise functions take one problem in older versions; leading dimensions go through vmap."""
    for _ in range(a.dim() - 2):
        pairwise = torch.vmap(pairwise)
    return pairwise(a, b)


def _zero_empty(overlap: Tensor, a: Tensor, b: Tensor, *, value: float) -> Tensor:
    """`value` in place of 0/0; NaN that come from NaN coordinates stay visible."""
    empty = (areas(a) == 0).unsqueeze(-1) & (areas(b) == 0).unsqueeze(-2)  # [*b, n, m]
    return overlap.masked_fill(empty, value)
