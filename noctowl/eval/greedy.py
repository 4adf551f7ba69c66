"""Greedy matching of detections to objects: all pairs (image, class), areas and IoU thresholds at once; array tools.

Legend: D detections, G ground-truth boxes, E edges (a detection and an object that overlap enough), A area ranges,
T IoU thresholds. What holds of a detection in each of the A x T settings is one 64-bit number: bit a T + t.
"""

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64
from numpy import ndarray

SETTINGS = 64  # bits of a number: A x T at most


def match(
    *,
    det_pair: Int[ndarray, "D"],
    gt_pair: Int[ndarray, "G"],
    det_boxes: Float[ndarray, "D 4"],
    gt_boxes: Float[ndarray, "G 4"],
    ignored: Bool[ndarray, "A G"],
    crowd: Bool[ndarray, "G"],
    iou: Float[ndarray, "T"],
) -> tuple[UInt64[ndarray, "D"], UInt64[ndarray, "D"]]:
    """Settings in which a detection takes a counted object, and those in which it takes an ignored one.

    Pairs ascending, inside them detections from best to worst; boxes xywh, thresholds ascending. By pycocotools' rules:
    a detection takes the free object with the highest IoU, of equal ones the later; an ignored one where no counted one
    is left; a crowd is never taken up.
    """
    assert ignored.shape[0] * len(iou) <= SETTINGS
    taker = np.zeros((2, len(det_pair)), np.uint64)  # by kind: counted, ignored
    det, obj, overlap = _edges(det_pair, gt_pair, det_boxes, gt_boxes, crowd, iou)
    if not len(det):
        return taker[0], taker[1]
    met = (np.uint64(1) << np.arange(len(iou) + 1, dtype=np.uint64)) - np.uint64(1)  # by number of thresholds met
    one_area = np.uint64(1) << (np.arange(len(ignored), dtype=np.uint64) * np.uint64(len(iou)))  # [A]
    counted = np.where(ignored, np.uint64(0), one_area[:, None] * met[-1]).sum(0, dtype=np.uint64)[obj]
    wanted = (met * one_area.sum(dtype=np.uint64))[np.searchsorted(_reach(iou), overlap, side="right")]
    first = run_starts(det)  # edges of a detection stand together, the best one first
    depth = np.repeat(position(det_pair[det[first]]), np.diff(first, append=len(det)))
    # One step holds the j-th choices of the k-th detections of all pairs: no two are of one detection, or of one pair.
    choice = position(det)
    step = (2 * depth + np.array([[0], [1]])) * (choice.max() + 1) + choice  # [2, E]
    wanted = np.stack([wanted & counted, wanted & ~counted])
    kind, edge = np.nonzero(wanted)
    order = stable_order(step[kind, edge])
    kind, edge = kind[order], edge[order]
    starts = run_starts(step[kind, edge])
    det, obj, wanted = det[edge], obj[edge], wanted[kind, edge]
    holds = np.where(crowd[obj], np.uint64(0), ~np.uint64(0))
    taken = np.zeros(len(gt_pair), np.uint64)
    for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(edge)]):
        d, o = det[low:high], obj[low:high]
        takes = wanted[low:high] & ~(taker[0, d] | taker[1, d] | taken[o])
        taker[kind[low], d] |= takes
        taken[o] |= takes & holds[low:high]
    return taker[0], taker[1]


def _reach(iou: Float[ndarray, "T"]) -> Float[ndarray, "T"]:
    return np.minimum(iou, 1 - 1e-10)


def _edges(det_pair, gt_pair, det_boxes, gt_boxes, crowd, iou) -> tuple[ndarray, ndarray, ndarray]:
    """Detection, object and IoU of each edge; by detection, then from its best object to its worst."""
    runs = run_starts(det_pair)
    low, high = (np.searchsorted(gt_pair, det_pair[runs], side=s) for s in ("left", "right"))
    length = np.diff(runs, append=len(det_pair))
    low, many = np.repeat(low, length), np.repeat(high - low, length)  # objects that each detection could take
    det = np.repeat(np.arange(len(det_pair)), many)
    obj = np.arange(len(det)) + np.repeat(low - np.cumsum(many) + many, many)
    (d_left, d_top, d_wide, d_high), (g_left, g_top, g_wide, g_high) = det_boxes.T.copy(), gt_boxes.T.copy()
    d_right, d_bottom, g_right, g_bottom = d_left + d_wide, d_top + d_high, g_left + g_wide, g_top + g_high
    least = _reach(iou)[0]
    # IoU is at most the shared part of the detection's width, and of its height; a hundredth is for rounding.
    need_wide, need_high = (np.maximum((least - 0.01) * side, 0) for side in (d_wide, d_high))
    wide = np.minimum(d_right[det], g_right[obj]) - np.maximum(d_left[det], g_left[obj])
    near = np.flatnonzero(wide > need_wide[det])
    det, obj, wide = det[near], obj[near], wide[near]
    high = np.minimum(d_bottom[det], g_bottom[obj]) - np.maximum(d_top[det], g_top[obj])
    near = np.flatnonzero(high > need_high[det])
    det, obj = det[near], obj[near]
    inter = wide[near] * high[near]  # pycocotools' order of operations
    area, other = (d_wide * d_high)[det], (g_wide * g_high)[obj]
    overlap = inter / np.where(crowd[obj], area, area + other - inter)  # a crowd is measured by the detection's area
    near = np.flatnonzero(overlap >= least)
    det, obj, overlap = det[near], obj[near], overlap[near]
    several = np.zeros(len(det), bool)  # edges of detections that have more than one
    several[1:] = det[1:] == det[:-1]
    several[:-1] |= several[1:]
    own = np.flatnonzero(several)
    own_order = own[np.lexsort((-obj[own], -overlap[own], det[own]))]
    obj[own], overlap[own] = obj[own_order], overlap[own_order]
    return det, obj, overlap


# Arrays


def rows_of(ids: Int[ndarray, "N"], known: Int[ndarray, "M"]) -> Int[ndarray, "N"]:
    """Place of each id among the known ones, which are sorted and distinct; -1 where it is not one of them."""
    if not len(known) or not len(ids):
        return np.full(len(ids), -1)
    least, most = int(known[0]), int(known[-1])
    if most - least > 4 * (len(ids) + len(known)):
        row = np.searchsorted(known, ids).clip(max=len(known) - 1)
        return np.where(known[row] == ids, row, -1)
    table = np.full(most - least + 2, -1)  # the last place is for ids out of range
    table[known - least] = np.arange(len(known))
    return table[np.where((ids < least) | (ids > most), most + 1, ids) - least]


def run_starts(group: ndarray) -> Int[ndarray, "R"]:
    """Where runs of equal values begin: [7, 7, 9] -> [0, 2]."""
    return np.flatnonzero(np.diff(group, prepend=group[:1] - 1))


def position(group: ndarray) -> Int[ndarray, "N"]:
    """Position inside its run of equal values: [7, 7, 9] -> [0, 1, 0]."""
    first = run_starts(group)
    return np.arange(len(group)) - np.repeat(first, np.diff(first, append=len(group)))


def running_sum(values: ndarray, group: ndarray) -> Int[ndarray, "N"]:
    """Sum up to each place, from the start of its run of equal groups."""
    first = run_starts(group)
    summed = np.cumsum(values, dtype=np.int64)
    return summed - np.repeat(summed[first] - values[first], np.diff(first, append=len(group)))


def stable_order(key: Int[ndarray, "N"]) -> Int[ndarray, "N"]:
    """`np.argsort(key, kind="stable")` of numbers from 0 on, by one fast sort of key and place in 64 bits."""
    bits = len(key).bit_length()
    assert int(key.max(initial=0)).bit_length() + bits < 64
    return np.sort((key << bits) | np.arange(len(key))) & ((1 << bits) - 1)


def falling_order(scores: ndarray, ties: Int[ndarray, "N"]) -> Int[ndarray, "N"]:
    """Order by falling score, of equal ones by rising `ties`, then by place: a fast unstable sort, mended."""
    falling = -scores
    order = np.argsort(falling)
    equal = falling[order[1:]] == falling[order[:-1]]
    tied = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False)) if equal.any() else order[:0]
    member = order[tied]
    order[tied] = member[np.lexsort((member, ties[member], falling[member]))]
    return order


def best_from_here(values: Float[ndarray, "N"], group: Int[ndarray, "N"]) -> Float[ndarray, "N"]:
    """Largest value from each place to the end of its group (groups ascending)."""
    key = np.empty(len(values), np.complex128)  # ordered by the real part, then by the imaginary one
    key.real, key.imag = group.max(initial=0) - group, values
    return np.maximum.accumulate(key[::-1])[::-1].imag


def spread(bits: UInt64[ndarray, "N"], count: int) -> Bool[ndarray, "S N"]:
    """The first `count` bits of each number."""
    octets = bits.astype("<u8").view(np.uint8).reshape(len(bits), 8)
    return np.ascontiguousarray(np.unpackbits(octets, axis=1, count=count, bitorder="little").T).view(bool)
