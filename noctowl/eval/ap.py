"""Average precision of boxes by the rules of COCO and LVIS: exact greedy matching, vectorised, in float64.

Legend: D detections, G ground-truth boxes, E edges (detection-object pairs that overlap enough), K classes with ground
truth, A area ranges (all, small, medium, large), T IoU thresholds, M detection limits.

The figures equal pycocotools' (the LVIS API's under `federated`), which loop over every image, class and area. Here:
1. only pairs (image, class) that hold both detections and objects are matched, and of these only the edges with IoU
   over the lowest threshold; the k-th detections of all pairs are matched at once, for all A and T;
2. precision is looked at where it can be a maximum, at true positives, so no curve is ever laid out.
Ids are used as they come: from 0, with gaps, in any order. A figure without ground truth is absent, never -1.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from noctowl.errors import DataError

AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
BLOCK = 2_000_000  # detections and overlaps worked on at a time; bounds the memory, not the result
Thresholds = Literal["float64", "float32"]


@dataclass(frozen=True)
class Detections:
    image: Int[ndarray, "D"]
    label: Int[ndarray, "D"]
    boxes: Float[ndarray, "D 4"]  # xyxy, pixels
    scores: Float[ndarray, "D"]  # any increasing scale; ties keep their order

    @classmethod
    def concatenate(cls, parts: Sequence["Detections"]) -> "Detections":
        """All parts in order; none gives an empty one."""
        empty = cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
        names = ("image", "label", "boxes", "scores")
        return cls(*(np.concatenate([getattr(part, name) for part in (parts or [empty])]) for name in names))


@dataclass(frozen=True)
class GroundTruth:
    image: Int[ndarray, "G"]
    label: Int[ndarray, "G"]
    boxes: Float[ndarray, "G 4"]  # xyxy, pixels
    area: Float[ndarray, "G"]  # decides small, medium, large; of the box or of the mask, as the benchmark says
    crowd: Bool[ndarray, "G"] | None = None  # ignored regions that any number of detections may fall into

    def take(self, rows: ndarray) -> "GroundTruth":
        """A selection, by mask or by index."""
        crowd = None if self.crowd is None else self.crowd[rows]
        return GroundTruth(self.image[rows], self.label[rows], self.boxes[rows], self.area[rows], crowd)


@dataclass(frozen=True)
class Federated:
    """LVIS: which classes were looked for in which image. Rows are (image, class).

    With it, detections and objects without area take no part, as in the LVIS API (after the cut of an image).
    """

    negative: Int[ndarray, "J 2"]  # class verified absent; without this or ground truth its detections are dropped
    not_exhaustive: Int[ndarray, "J 2"]  # not all objects marked: an unmatched detection is ignored


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
    iou, recall_at = _thresholds(thresholds)
    p = prepare(
        detections=detections,
        ground_truth=ground_truth,
        federated=federated,
        max_detections=max_detections[-1],
        max_per_image=max_per_image,
    )
    n_class, n_image = len(p.classes), len(p.images)
    ignored = ~_in_area(p.area) | p.crowd  # [A, G]
    ap = np.full((len(AREAS), len(iou), n_class), np.nan)
    recall = np.full((len(max_detections), *ap.shape), np.nan)
    for first, last in _class_blocks(p.det_pair, p.gt_pair, n_class, n_image):
        pairs = np.array([first, last]) * n_image
        d, g = (slice(*np.searchsorted(pair, pairs)) for pair in (p.det_pair, p.gt_pair))
        hit = _match(p.det_pair[d], p.gt_pair[g], p.det_boxes[d], p.gt_boxes[g], ignored[:, g], p.crowd[g], iou)
        ap[..., first:last], recall[..., first:last] = _accumulate(
            hit=hit,
            counts_unmatched=_in_area(p.det_boxes[d, 2] * p.det_boxes[d, 3]) & ~p.exempt[d],
            det_class=p.det_pair[d] // max(n_image, 1) - first,
            scores=p.scores[d],
            rank=p.rank[d],
            objects=np.stack(
                [np.bincount(p.gt_pair[g][~i] // n_image - first, minlength=last - first) for i in ignored[:, g]]
            ),
            limits=max_detections,
            recall_at=recall_at,
        )
    return BoxScores(classes=p.classes, iou=iou, limits=tuple(max_detections), ap=ap, recall=recall)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Detections and objects that can meet, in the order in which they are matched.

    A pair is the class-major code class * images + image: sorted by it, a class is one slice, a pair a slice of that.
    """

    classes: Int[ndarray, "K"]  # sorted ids of the classes that have ground truth
    images: Int[ndarray, "I"]  # sorted ids
    det_pair: Int[ndarray, "D"]  # ascending; inside a pair by falling score, ties in their first order
    rank: Int[ndarray, "D"]  # place inside its pair
    exempt: Bool[ndarray, "D"]  # LVIS: unmatched is no false positive
    det_boxes: Float[ndarray, "D 4"]  # xywh
    scores: Float[ndarray, "D"]
    gt_pair: Int[ndarray, "G"]  # ascending
    gt_boxes: Float[ndarray, "G 4"]  # xywh
    area: Float[ndarray, "G"]
    crowd: Bool[ndarray, "G"]


def prepare(
    *,
    detections: Detections,
    ground_truth: GroundTruth,
    federated: Federated | None = None,
    max_detections: int,
    max_per_image: int | None = None,
    images: Int[ndarray, "I"] | None = None,
) -> Prepared:
    """What is left to match after the cut of each image, the federated rules and the cut of each image and class.

    `images`: sorted ids that hold all others; None takes those that occur. Raises DataError as `score_boxes` does.
    """
    det, gt = detections, ground_truth
    _check("detections", det.image, det.label, det.boxes, det.scores)
    _check("ground truth", gt.image, gt.label, gt.boxes, gt.area)
    if federated is not None:
        gt = gt.take(gt.area > 0)
    classes, gt_class = np.unique(gt.label, return_inverse=True)
    keep = np.arange(len(det.scores))
    if max_per_image is not None:
        keep = _best_of_each(det.image, det.scores, max_per_image)
    if federated is not None:
        keep = keep[(det.boxes[keep, 2:] > det.boxes[keep, :2]).all(1)]
    det_class = np.searchsorted(classes, det.label[keep])
    known = np.append(classes, 0)[det_class] == det.label[keep]
    known &= det_class < len(classes)
    keep, det_class = keep[known], det_class[known]
    if images is None:
        images = np.union1d(gt.image, det.image[keep])
    det_pair = det_class * len(images) + np.searchsorted(images, det.image[keep])
    gt_pair = gt_class * len(images) + np.searchsorted(images, gt.image)
    exempt = np.zeros(len(keep), dtype=bool)
    if federated is not None:
        judged = np.isin(det_pair, np.append(_pairs(federated.negative, classes, images), gt_pair))
        keep, det_pair = keep[judged], det_pair[judged]
        exempt = np.isin(det_pair, _pairs(federated.not_exhaustive, classes, images))

    order = np.lexsort((-det.scores[keep], det_pair))  # stable: tied scores keep their order
    rank = _position(det_pair[order])
    order, rank = order[rank < max_detections], rank[rank < max_detections]
    keep = keep[order]
    gt_order = np.argsort(gt_pair, kind="stable")
    crowd = np.zeros(len(gt_pair), dtype=bool) if gt.crowd is None else gt.crowd.astype(bool)
    return Prepared(
        classes=classes,
        images=images,
        det_pair=det_pair[order],
        rank=rank,
        exempt=exempt[order],
        det_boxes=_xywh(det.boxes[keep]),
        scores=det.scores[keep],
        gt_pair=gt_pair[gt_order],
        gt_boxes=_xywh(gt.boxes[gt_order]),
        area=gt.area[gt_order],
        crowd=crowd[gt_order],
    )


def _thresholds(kind: Thresholds) -> tuple[Float[ndarray, "T"], Float[ndarray, "101"]]:
    if kind == "float32":
        return torch.linspace(0.5, 0.95, 10).double().numpy(), torch.linspace(0.0, 1.0, 101).double().numpy()
    return np.linspace(0.5, 0.95, 10), np.linspace(0.0, 1.0, 101)


def _match(det_pair, gt_pair, det_boxes, gt_boxes, ignored, crowd, iou) -> Int[ndarray, "A T D"]:
    """Greedy assignment of every pair at once: 0 no match, 1 true positive, 2 on an ignored object."""
    areas, n_gt = ignored.shape
    status = np.zeros((areas, len(iou), len(det_pair)), dtype=np.int8)
    low, high = (np.searchsorted(gt_pair, det_pair, side=s) for s in ("left", "right"))
    many = high - low  # objects that each detection could take
    det = np.repeat(np.arange(len(det_pair)), many)  # [E]
    obj = np.arange(len(det)) + np.repeat(low - np.cumsum(many) + many, many)
    overlap = _iou(det_boxes[det], gt_boxes[obj], crowd[obj])
    threshold = np.minimum(iou, 1 - 1e-10)  # [T]
    near = overlap >= threshold.min()
    det, obj, overlap = det[near], obj[near], overlap[near]
    order = np.lexsort((overlap, det))  # an edge's place in its detection = how good it is; ties: the later object
    det, obj, overlap = det[order], obj[order], overlap[order]
    if not len(det):
        return status
    first_edge = np.flatnonzero(np.diff(det, prepend=-1))
    depth = np.repeat(_position(det_pair[det[first_edge]]), np.diff(first_edge, append=len(det)))  # [E]
    taken = np.zeros((areas, len(iou), n_gt), dtype=bool)
    for step in range(depth.max() + 1):
        e = np.flatnonzero(depth == step)
        free = ~taken[:, :, obj[e]] | crowd[obj[e]]  # [A, T, e]
        free &= overlap[e] >= threshold[:, None]
        value = np.arange(1, len(e) + 1) + (len(e) + 1) * ~ignored[:, None, obj[e]]  # counted objects come first
        starts = np.flatnonzero(np.diff(det[e], prepend=-1))
        best = np.maximum.reduceat(np.where(free, value, 0), starts, axis=-1)  # [A, T, detections of this step]
        a, t, u = np.nonzero(best)
        chosen = e[best[a, t, u] % (len(e) + 1) - 1]
        taken[a, t, obj[chosen]] = True
        status[a, t, det[chosen]] = 1 + ignored[a, obj[chosen]]
    return status


def _accumulate(*, hit, counts_unmatched, det_class, scores, rank, objects, limits, recall_at):
    """AP [A, T, K] and recall [M, A, T, K] from the matches; objects [A, K] counts what is to be found."""
    order = np.lexsort((-scores, det_class))  # class, then score; ties by image, as the pairs are sorted
    hit, det_class, rank = hit[:, :, order], det_class[order], rank[order]
    (areas, n_iou, n_det), n_class = hit.shape, objects.shape[1]
    counted = np.where(hit == 0, counts_unmatched[:, None, order], hit == 1)
    seen = np.zeros((areas, n_iou, n_det + 1), dtype=np.int64)
    np.cumsum(counted, axis=-1, out=seen[:, :, 1:])
    a, t, d = np.nonzero(hit == 1)  # true positives, by area, threshold, class, falling score
    k = det_class[d]
    curve = (a * n_iou + t) * n_class + k
    tp = _position(curve) + 1.0
    total = seen[a, t, d + 1] - seen[a, t, np.searchsorted(det_class, k)]  # true and false positives so far
    step = np.searchsorted(recall_at, tp / objects[a, k], side="right")  # recall points reached
    precision = _best_from_here(tp / (total + np.spacing(1)), curve)
    gained = step - np.where(tp == 1, 0, np.roll(step, 1))  # points at which this precision is read
    shape = (areas, n_iou, n_class)
    size = areas * n_iou * n_class
    absent = np.broadcast_to((objects == 0)[:, None], shape)
    ap = np.bincount(curve, precision * gained, minlength=size).reshape(shape) / len(recall_at)
    with np.errstate(invalid="ignore"):
        recall = np.stack(
            [np.bincount(curve[rank[d] < m], minlength=size).reshape(shape) / objects[:, None] for m in limits]
        )
    return np.where(absent, np.nan, ap), np.where(absent, np.nan, recall)


def _best_from_here(values: ndarray, group: ndarray) -> ndarray:
    """Largest value from each place to the end of its group (groups ascending), through exact integer ranks."""
    n = len(values)
    ascending = np.argsort(values, kind="stable")
    place = np.empty(n, dtype=np.int64)
    place[ascending] = np.arange(n)
    key = (group.max(initial=0) - group) * n + place
    best = np.maximum.accumulate(key[::-1])[::-1]
    return values[ascending[best % n]] if n else values


def _best_of_each(group: ndarray, scores: ndarray, limit: int) -> ndarray:
    """Indices of the best `limit` of each group, in their first order."""
    order = np.lexsort((-scores, group))
    return np.sort(order[_position(group[order]) < limit])


def _position(group: ndarray) -> ndarray:
    """Position inside its run of equal values: [7, 7, 9] -> [0, 1, 0]."""
    n = np.arange(len(group))
    start = np.ones(len(group), dtype=bool)
    start[1:] = group[1:] != group[:-1]
    return n - np.maximum.accumulate(np.where(start, n, 0)) if len(group) else n


def _class_blocks(det_pair, gt_pair, n_class: int, n_image: int) -> Iterator[tuple[int, int]]:
    """Runs of classes whose detections and overlaps fit in BLOCK."""
    objects = np.searchsorted(gt_pair, det_pair, "right") - np.searchsorted(gt_pair, det_pair, "left")
    weight = np.bincount(det_pair // max(n_image, 1), 1 + objects, minlength=n_class)
    first, load = 0, 0.0
    for k in range(n_class):
        if load and load + weight[k] > BLOCK:
            yield first, k
            first, load = k, 0.0
        load += weight[k]
    if n_class:
        yield first, n_class


def _pairs(rows: ndarray, classes: ndarray, images: ndarray) -> ndarray:
    """(image, class) rows -> class-major codes; rows of unknown images or classes cannot matter and are left out."""
    rows = rows[np.isin(rows[:, 0], images) & np.isin(rows[:, 1], classes)]
    return np.searchsorted(classes, rows[:, 1]) * len(images) + np.searchsorted(images, rows[:, 0])


def _in_area(area: Float[ndarray, "N"]) -> Bool[ndarray, "A N"]:
    return np.stack([(area >= low) & (area <= high) for low, high in AREAS.values()])


def _xywh(boxes: Float[ndarray, "N 4"]) -> Float[ndarray, "N 4"]:
    boxes = boxes.astype(np.float64)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _iou(a: Float[ndarray, "E 4"], b: Float[ndarray, "E 4"], crowd: Bool[ndarray, "E"]) -> Float[ndarray, "E"]:
    """IoU of xywh boxes row by row, in pycocotools' order of operations; of the detection's area where b is a crowd."""
    size = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    inter = np.where((size > 0).all(1), size[:, 0] * size[:, 1], 0.0)
    area = a[:, 2] * a[:, 3]
    union = np.where(crowd, area, area + b[:, 2] * b[:, 3] - inter)
    return np.divide(inter, union, out=np.zeros_like(inter), where=inter > 0)


def _mean(values: ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else None


def _check(what: str, image: ndarray, label: ndarray, boxes: ndarray, number: ndarray) -> None:
    lengths = {len(image), len(label), len(boxes), len(number)}
    if len(lengths) > 1 or boxes.shape[1:] != (4,):
        raise DataError(f"{what}: arrays of unequal length {sorted(lengths)}, boxes {boxes.shape}; all need one length")
    if not np.isfinite(boxes).all() or np.isnan(number).any():
        raise DataError(f"{what}: non-finite boxes, or NaN scores or areas; mend the predictions before scoring them")
