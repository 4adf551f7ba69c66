"""What can count of detections and ground truth by the rules of COCO and LVIS, matched once for all figures.

Legend: D detections, G ground-truth boxes, K classes with ground truth, I images, A area ranges (all, small, medium,
large), T IoU thresholds.

Only pairs (image, class) that hold both detections and objects have to be matched, and of these only what overlaps
enough (`greedy.py`). Ids are used as they come: from 0, with gaps, in any order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt64
from numpy import ndarray

from noctowl.errors import DataError
from noctowl.eval.greedy import falling_order, match, position, rows_of, run_starts, spread, stable_order

AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
BLOCK = 500_000  # detections and overlaps worked on at a time; bounds the memory, not the result
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


@dataclass(frozen=True, eq=False)
class Matched:
    """Detections that can count, matched, by class, then falling score (ties: by image); and what is to be found.

    All that figures and their intervals are made of. A number of 64 bits tells of a setting in bit a T + t.
    """

    classes: Int[ndarray, "K"]  # sorted ids of the classes that have ground truth
    images: Int[ndarray, "I"]  # sorted ids
    thresholds: Thresholds
    label: Int[ndarray, "D"]  # row into classes
    image: Int[ndarray, "D"]  # row into images
    rank: Int[ndarray, "D"]  # place among those of its image and class
    hit: UInt64[ndarray, "D"]  # settings in which it is a true positive
    lost: UInt64[ndarray, "D"]  # settings in which it falls on an ignored object and does not count
    false: Bool[ndarray, "A D"]  # areas in which it is a false positive where it takes no object
    object_label: Int[ndarray, "G"]
    object_image: Int[ndarray, "G"]
    wanted: Bool[ndarray, "A G"]  # objects that are to be found

    def take(self, detections: ndarray | slice, objects: ndarray | slice = slice(None)) -> "Matched":
        """A selection of both."""
        own = {
            name: getattr(self, name)[..., detections] for name in ("label", "image", "rank", "hit", "lost", "false")
        }
        of_objects = ("object_label", "object_image", "wanted")
        return replace(self, **own, **{name: getattr(self, name)[..., objects] for name in of_objects})

    def blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Runs of classes (rows) with their detections, of `size` detections or one class."""
        edges = np.searchsorted(self.label, np.arange(len(self.classes) + 1))
        first = 0
        while first < len(self.classes):
            last = max(int(np.searchsorted(edges, edges[first] + size, side="right")) - 1, first + 1)
            yield slice(first, last), slice(int(edges[first]), int(edges[last]))
            first = last


def match_boxes(
    *,
    detections: Detections,
    ground_truth: GroundTruth,
    federated: Federated | None = None,
    max_detections: int = 100,
    max_per_image: int | None = None,
    thresholds: Thresholds = "float64",
    images: Int[ndarray, "I"] | None = None,
) -> Matched:
    """Cut, federated rules and matching; arguments and errors as of `score_boxes`.

    `images`: sorted ids that hold all others; None takes those that occur.
    """
    p = _prepare(detections, ground_truth, federated, max_detections, max_per_image, images)
    iou, n_image = thresholds_of(thresholds)[0], max(len(p.images), 1)
    ignored = ~_in_area(p.area) | p.crowd  # [A, G]
    hit, lost = np.zeros((2, len(p.det_pair)), np.uint64)
    for first, last in _class_blocks(p.det_pair, p.gt_pair, len(p.classes), n_image):
        pairs = np.array([first, last]) * n_image
        d, g = (slice(*np.searchsorted(pair, pairs)) for pair in (p.det_pair, p.gt_pair))
        hit[d], lost[d] = match(
            det_pair=p.det_pair[d],
            gt_pair=p.gt_pair[g],
            det_boxes=p.det_boxes[d],
            gt_boxes=p.gt_boxes[g],
            ignored=ignored[:, g],
            crowd=p.crowd[g],
            iou=iou,
        )
    order = p.by_class
    label, image = np.divmod(p.det_pair[order], n_image)
    object_label, object_image = np.divmod(p.gt_pair, n_image)
    return Matched(
        classes=p.classes,
        images=p.images,
        thresholds=thresholds,
        label=label,
        image=image,
        rank=p.rank[order],
        hit=hit[order],
        lost=lost[order],
        false=(_in_area(p.det_boxes[:, 2] * p.det_boxes[:, 3]) & ~p.exempt)[:, order],
        object_label=object_label,
        object_image=object_image,
        wanted=~ignored,
    )


def settings_of(matched: Matched, count: int) -> tuple[Int[ndarray, "N"], Int[ndarray, "N"], Bool[ndarray, "N"]]:
    """All matches: setting and detection, in that order, and whether it is a true positive."""
    either = matched.hit | matched.lost
    some = np.flatnonzero(either)
    setting, d = np.nonzero(spread(either[some], count))
    d = some[d]
    return setting, d, (matched.hit[d] >> setting.astype(np.uint64) & np.uint64(1)).astype(bool)


def thresholds_of(kind: Thresholds) -> tuple[Float[ndarray, "T"], Float[ndarray, "101"]]:
    if kind == "float32":
        return torch.linspace(0.5, 0.95, 10).double().numpy(), torch.linspace(0.0, 1.0, 101).double().numpy()
    return np.linspace(0.5, 0.95, 10), np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Detections and objects that can meet, in the order in which they are matched.

    A pair is the class-major code class * images + image: sorted by it, a class is one slice, a pair a slice of that.
    """

    classes: Int[ndarray, "K"]
    images: Int[ndarray, "I"]
    det_pair: Int[ndarray, "D"]  # ascending; inside a pair by falling score, ties in their first order
    by_class: Int[ndarray, "D"]  # the order by class, then falling score, ties by image
    rank: Int[ndarray, "D"]  # place inside its pair
    exempt: Bool[ndarray, "D"]  # LVIS: unmatched is no false positive
    det_boxes: Float[ndarray, "D 4"]  # xywh
    gt_pair: Int[ndarray, "G"]  # ascending
    gt_boxes: Float[ndarray, "G 4"]  # xywh
    area: Float[ndarray, "G"]
    crowd: Bool[ndarray, "G"]


def _prepare(
    det: Detections,
    gt: GroundTruth,
    federated: Federated | None,
    max_detections: int,
    max_per_image: int | None,
    images: Int[ndarray, "I"] | None,
) -> _Prepared:
    """What is left to match after the cut of each image, the federated rules and the cut of each image and class."""
    _check("detections", det.image, det.label, det.boxes, det.scores)
    _check("ground truth", gt.image, gt.label, gt.boxes, gt.area)
    if federated is not None:
        gt = gt.take(gt.area > 0)
    classes, gt_class = np.unique(gt.label, return_inverse=True)
    if images is None:
        images = np.union1d(gt.image, det.image[run_starts(det.image)])
    n_image = max(len(images), 1)
    det_class, det_image = rows_of(det.label, classes), rows_of(det.image, images)
    taking_part = det_class >= 0
    if max_per_image is not None:
        taking_part &= _among_best(det_image, det.scores, max_per_image)
    if federated is not None:
        taking_part &= (det.boxes[:, 2] > det.boxes[:, 0]) & (det.boxes[:, 3] > det.boxes[:, 1])
    keep = np.flatnonzero(taking_part)
    det_pair = det_class[keep] * n_image + det_image[keep]
    gt_pair = gt_class * n_image + rows_of(gt.image, images)
    exempt = np.zeros(len(keep), dtype=bool)
    if federated is not None:
        judged = np.isin(det_pair, np.append(_pairs(federated.negative, classes, images), gt_pair))
        keep, det_pair = keep[judged], det_pair[judged]
        exempt = np.isin(det_pair, _pairs(federated.not_exhaustive, classes, images))

    best = falling_order(det.scores[keep], det_image[keep])
    order = best[stable_order(det_pair[best])]
    rank = position(det_pair[order])
    order, rank = order[rank < max_detections], rank[rank < max_detections]
    place = np.empty(len(best), np.int64)
    place[best] = np.arange(len(best))
    keep, det_pair, place = keep[order], det_pair[order], place[order]
    gt_order = np.argsort(gt_pair, kind="stable")
    crowd = np.zeros(len(gt_pair), dtype=bool) if gt.crowd is None else gt.crowd.astype(bool)
    return _Prepared(
        classes=classes,
        images=images,
        det_pair=det_pair,
        by_class=np.argsort((det_pair // n_image << len(best).bit_length()) | place),
        rank=rank,
        exempt=exempt[order],
        det_boxes=_xywh(det.boxes[keep]),
        gt_pair=gt_pair[gt_order],
        gt_boxes=_xywh(gt.boxes[gt_order]),
        area=gt.area[gt_order],
        crowd=crowd[gt_order],
    )


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


def _among_best(image: ndarray, scores: ndarray, limit: int) -> Bool[ndarray, "D"]:
    """The best `limit` of each image; of equal scores the earlier."""
    among = np.ones(len(image), bool)
    over = np.flatnonzero((np.bincount(image) > limit)[image])
    best = over[falling_order(scores[over], image[over])]
    order = best[stable_order(image[best])]
    among[order[position(image[order]) >= limit]] = False
    return among


def _pairs(rows: ndarray, classes: ndarray, images: ndarray) -> ndarray:
    """(image, class) rows -> class-major codes; rows of unknown images or classes cannot matter and are left out."""
    rows = rows[np.isin(rows[:, 0], images) & np.isin(rows[:, 1], classes)]
    return np.searchsorted(classes, rows[:, 1]) * len(images) + np.searchsorted(images, rows[:, 0])


def _in_area(area: Float[ndarray, "N"]) -> Bool[ndarray, "A N"]:
    return np.stack([(area >= low) & (area <= high) for low, high in AREAS.values()])


def _xywh(boxes: Float[ndarray, "N 4"]) -> Float[ndarray, "N 4"]:
    boxes = boxes.astype(np.float64)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _check(what: str, image: ndarray, label: ndarray, boxes: ndarray, number: ndarray) -> None:
    lengths = {len(image), len(label), len(boxes), len(number)}
    if len(lengths) > 1 or boxes.shape[1:] != (4,):
        raise DataError(f"{what}: arrays of unequal length {sorted(lengths)}, boxes {boxes.shape}; all need one length")
    if not np.isfinite(boxes).all() or np.isnan(number).any():
        raise DataError(f"{what}: non-finite boxes, or NaN scores or areas; mend the predictions before scoring them")
