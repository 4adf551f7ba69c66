"""Rank of the right caption: where the detector finds the object, how many captions does it like at least as well?

Legend: A objects, D detections after NMS, G groups (vocabularies), N negatives.
Source: FG-OVD paper, "mean rank". Ties count against the positive; an object that no detection covers has rank N + 1.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

IOU = 0.5  # a detection covers an object when their IoU is over this


def object_ranks(
    *,
    object_boxes: Float[ndarray, "A 4"],
    object_group: Int[ndarray, "A"],
    boxes: Float[ndarray, "D 4"],
    offsets: Int[ndarray, "G+1"],
    logits: Float[ndarray, "D 1+N"],
) -> Int[ndarray, "A"]:
    """Rank 1..N+1 of each object's positive caption, read at the best-scoring detection of its group that covers it.

    Boxes are xyxy in one frame. Detections of group g lie at offsets[g]:offsets[g+1], best first. Column 0 is the
    positive; captions that a short vocabulary lacks are -inf and never count.
    """
    low, many = offsets[object_group], np.diff(offsets)[object_group]
    obj = np.repeat(np.arange(len(object_group)), many)  # every object with every detection of its group
    det = np.arange(len(obj)) + np.repeat(low - np.cumsum(many) + many, many)
    covered = _iou(object_boxes[obj], boxes[det]) > IOU
    found, first = np.unique(obj[covered], return_index=True)  # the first of an object is its best-scoring one
    ranks = np.full(len(object_group), logits.shape[1], dtype=np.int64)  # N + 1
    at = logits[det[covered][first]]
    ranks[found] = (at >= at[:, :1]).sum(1)
    return ranks


def mean_rank(ranks: Sequence[int] | Int[ndarray, "A"]) -> float | None:
    """Mean over objects; None where there is none."""
    return float(np.mean(ranks)) if len(ranks) else None


def median_rank(ranks: Sequence[int] | Int[ndarray, "A"], *, published: bool = False) -> float | None:
    """Median over objects; None where there is none.

    published: element len // 2 + 1 of the sorted list, which the published figures took for the median. It lies
    beyond the end for one or two objects; there the published code stops, and the figure is None here.
    """
    if not published:
        return float(np.median(ranks)) if len(ranks) else None
    place = len(ranks) // 2 + 1
    return float(np.sort(ranks)[place]) if place < len(ranks) else None


def _iou(a: Float[ndarray, "E 4"], b: Float[ndarray, "E 4"]) -> Float[ndarray, "E"]:
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.clip(np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]), 0, None)
    inter = size.prod(1)
    union = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter
    return np.divide(inter, union, out=np.zeros_like(inter), where=inter > 0)
