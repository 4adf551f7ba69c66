"""Average precision of boxes by the rules of COCO and LVIS: exact greedy matching, vectorised, in float64.

Legend: D detections, G ground-truth boxes, K classes with ground truth, A area ranges (all, small, medium, large),
T IoU thresholds, M detection limits.

The figures equal pycocotools' (the LVIS API's under `federated`), which loop over every image, class and area. Here all
is matched at once (`matching.py`), and precision is looked at where it can be a maximum, at true positives, so no curve
is ever laid out. A figure without ground truth is absent, never -1.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from noctowl.eval.greedy import best_from_here, position, running_sum
from noctowl.eval.matching import (
    AREAS,
    Detections,
    Federated,
    GroundTruth,
    Matched,
    Thresholds,
    match_boxes,
    settings_of,
    thresholds_of,
)

BLOCK = 500_000  # detections worked on at a time; bounds the memory, not the result


@dataclass(frozen=True)
class BoxScores:
    classes: Int[ndarray, "K"]
    iou: Float[ndarray, "T"]
    limits: tuple[int, ...]
    ap: Float[ndarray, "A T K"]  # NaN where the class has no object of that size
    recall: Float[ndarray, "M A T K"]

    def mean_ap(
        self, *, iou: float | None = None, area: str = "all", classes: Collection[int] | None = None
    ) -> float | None:
        """Mean over thresholds (or at one) and classes (or a group); None where nothing is to be averaged."""
        ap = self.ap[list(AREAS).index(area)]  # [T, K]
        if iou is not None:
            ap = ap[np.isclose(self.iou, iou)]
        if classes is not None:
            ap = ap[:, np.isin(self.classes, list(classes))]
        return _mean(ap)

    def mean_recall(self, *, limit: int, area: str = "all") -> float | None:
        return _mean(self.recall[self.limits.index(limit), list(AREAS).index(area)])

    def per_class(self) -> dict[int, float]:
        """AP over all thresholds and sizes of each class that has ground truth."""
        ap = self.ap[0].mean(0)  # [K]
        return {int(k): float(v) for k, v in zip(self.classes, ap) if not np.isnan(v)}

    def summary(self) -> dict[str, float]:
        """The COCO figures under torchmetrics' names; absent ones are left out."""
        figures = {"map": self.mean_ap(), "map_50": self.mean_ap(iou=0.5), "map_75": self.mean_ap(iou=0.75)}
        figures |= {f"map_{area}": self.mean_ap(area=area) for area in AREAS if area != "all"}
        figures |= {f"mar_{m}": self.mean_recall(limit=m) for m in self.limits}
        figures |= {f"mar_{a}": self.mean_recall(limit=self.limits[-1], area=a) for a in AREAS if a != "all"}
        return {name: value for name, value in figures.items() if value is not None}


def score_boxes(
    *,
    detections: Detections,
    ground_truth: GroundTruth,
    federated: Federated | None = None,
    max_detections: Sequence[int] = (1, 10, 100),
    max_per_image: int | None = None,
    thresholds: Thresholds = "float64",
) -> BoxScores:
    """COCO's figures, or LVIS's with `federated`, `max_detections=(300,)` and `max_per_image=300`.

    max_detections: best detections of an image *and class* that count; recall is given at each, AP at the last.
    max_per_image: best detections of an image over all classes, cut before anything else (LVIS).
    thresholds: "float32" takes those of torchmetrics (torch.linspace in float32): it moves AP's fourth digit.
    Raises DataError for arrays of unequal length, non-finite boxes and NaN scores.
    """
    matched = match_boxes(
        detections=detections,
        ground_truth=ground_truth,
        federated=federated,
        max_detections=max_detections[-1],
        max_per_image=max_per_image,
        thresholds=thresholds,
    )
    return score_matched(matched, max_detections=max_detections)


def score_matched(matched: Matched, *, max_detections: Sequence[int]) -> BoxScores:
    """The figures of what has been matched; limits as of `score_boxes`, the last one that of the matching."""
    iou, recall_at = thresholds_of(matched.thresholds)
    objects = np.stack([np.bincount(matched.object_label[w], minlength=len(matched.classes)) for w in matched.wanted])
    ap = np.zeros((len(AREAS), len(iou), len(matched.classes)))
    recall = np.zeros((len(max_detections), *ap.shape))
    for k, d in matched.blocks(BLOCK):
        label = matched.label[d] - k.start
        found = _accumulate(matched.take(d), label, objects[:, k], max_detections, recall_at, len(iou))
        ap[..., k], recall[..., k] = found
    absent = np.broadcast_to((objects == 0)[:, None], ap.shape)
    ap[absent], recall[:, absent] = np.nan, np.nan
    return BoxScores(classes=matched.classes, iou=iou, limits=tuple(max_detections), ap=ap, recall=recall)


def _accumulate(
    m: Matched, label: Int[ndarray, "D"], objects: Int[ndarray, "A k"], limits, recall_at, n_iou: int
) -> tuple[Float[ndarray, "A T k"], Float[ndarray, "M A T k"]]:
    """AP and recall of a run of classes, rows of which `label` has; `objects` counts what is to be found."""
    shape = (len(objects), n_iou, objects.shape[1])
    size = math.prod(shape)
    false = m.false
    false_before = np.zeros((len(false), false.shape[1] + 1), np.int64)  # false positives if nothing were matched
    np.cumsum(false, axis=1, out=false_before[:, 1:])
    setting, d, true = settings_of(m, shape[0] * n_iou)
    curve, area = setting * shape[2] + label[d], setting // n_iou
    spared = running_sum(false[area, d], curve)  # matched, hence no false positives
    d, curve, area, spared = d[true], curve[true], area[true], spared[true]
    k = label[d]
    tp = position(curve) + 1
    fp = false_before[area, d + 1] - false_before[area, np.searchsorted(label, np.arange(shape[2]))[k]] - spared
    precision = best_from_here(tp / (tp + fp + np.spacing(1)), curve)
    reached, begin = recall_table(objects.ravel(), recall_at)
    entry = begin[area * shape[2] + k] + tp
    gained = reached[entry] - reached[entry - 1]  # points at which this precision is read
    ap = np.bincount(curve, precision * gained, minlength=size).reshape(shape) / len(recall_at)
    rank = m.rank[d]
    found = np.stack([np.bincount(curve[rank < limit], minlength=size).reshape(shape) for limit in limits])
    return ap, found / np.maximum(objects, 1)[:, None]


def recall_table(
    objects: Int[ndarray, "C"], recall_at: Float[ndarray, "101"]
) -> tuple[Int[ndarray, "N"], Int[ndarray, "C"]]:
    """Recall points reached with 0, 1, ... all true positives of so many objects, and where each such row begins."""
    begin = np.cumsum(objects + 1) - (objects + 1)
    tp = np.arange((objects + 1).sum()) - np.repeat(begin, objects + 1)
    reached = np.searchsorted(recall_at, tp / np.repeat(np.maximum(objects, 1), objects + 1), side="right")
    return np.where(tp == 0, 0, reached), begin


def _mean(values: ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else None
