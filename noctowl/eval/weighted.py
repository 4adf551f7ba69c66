"""Average precision under image weights, for classes that occur in several images: all resamples at once.

Legend: D detections, K classes, A area ranges, T IoU thresholds, I images, B resamples, C curves (area, threshold,
class), E true positives of curves, F figures.

Which detection takes which object is settled inside an image, so weights change no match: they only say how often each
true and false positive counts. As in `ap.py` a curve is read at its true positives: precision there is
tp / (tp + fp), and its largest value from there on is read at each recall point that this true positive is the first to
reach. All curves are walked from their ends at once, so that each step is arithmetic on an array [curves, resamples];
it costs some nanoseconds for each true positive of each curve and resample. Counts are exact, ratios are in float32.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy import sparse

from noctowl.eval.ap import recall_table
from noctowl.eval.greedy import position, run_starts
from noctowl.eval.matching import AREAS, Matched, settings_of, thresholds_of

BLOCK = 256_000  # curves x resamples walked at a time, or one class; bounds the memory, not the result
FIGURES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


def weighted_ap(
    matched: Matched, weights: Int[ndarray, "B I"], classes: Int[ndarray, "S"] | None = None
) -> Float[ndarray, "F S B"]:
    """FIGURES of the given classes (rows; all by default) in every resample; NaN where no object was drawn.

    Columns of the weights are `matched.images`.
    """
    rows = np.arange(len(matched.classes)) if classes is None else classes
    by_image = np.ascontiguousarray(weights.T, np.float32)  # [I, B]
    found = np.empty((len(FIGURES), len(rows), len(weights)), np.float32)
    edges = np.searchsorted(matched.label, np.arange(len(matched.classes) + 1))
    object_edges = np.searchsorted(matched.object_label, np.arange(len(matched.classes) + 1))
    hits = np.bincount(matched.label[matched.hit > 0], minlength=len(matched.classes))[rows]
    alike = np.argsort(hits, kind="stable")  # curves that are walked together should be of one length
    n_iou = len(thresholds_of(matched.thresholds)[0])
    some = -(-BLOCK // (len(AREAS) * n_iou * len(weights)))
    for first in range(0, len(rows), some):
        own = alike[first : first + some]
        d, g = (
            np.concatenate([np.arange(e[k], e[k + 1]) for k in rows[own]] or [rows[:0]]) for e in (edges, object_edges)
        )
        row = np.full(len(matched.classes), -1)
        row[rows[own]] = np.arange(len(own))
        ap = _curves(matched.take(d, g), row[matched.label[d]], row[matched.object_label[g]], len(own), by_image)
        found[:, own] = _figures(ap, thresholds_of(matched.thresholds)[0])
    return found


def _figures(ap: Float[ndarray, "A T k B"], iou: Float[ndarray, "T"]) -> Float[ndarray, "F k B"]:
    at = [ap[0, np.isclose(iou, v)].mean(0) for v in (0.5, 0.75)]
    return np.stack([ap[0].mean(0), *at, *ap[1:].mean(1)])


class _Events(NamedTuple):
    """True positives of all curves: curve by curve, each by falling score."""

    first: Int[ndarray, "C"]  # where a curve begins; curves from the longest to the shortest
    length: Int[ndarray, "C"]
    curve: Int[ndarray, "C"]  # (area * T + threshold) * k + class
    image: Int[ndarray, "E"]
    base: Int[ndarray, "E"]  # row of the running sums of false positives
    mend: Int[ndarray, "E"]  # row of the corrections, -1 for none


def _curves(
    m: Matched, label: Int[ndarray, "d"], object_label: Int[ndarray, "g"], n_class: int, by_image: Float[ndarray, "I B"]
) -> Float[ndarray, "A T k B"]:
    """AP of all curves of a few classes, whose detections and objects these are."""
    n_iou, recall_at = len(thresholds_of(m.thresholds)[0]), thresholds_of(m.thresholds)[1]
    a, g = np.nonzero(m.wanted)
    objects = _sums(a * n_class + object_label[g], m.object_image[g], len(AREAS) * n_class, by_image)  # [A k, B]
    ap = np.zeros((len(AREAS) * n_iou * n_class, by_image.shape[1]), np.float32)
    setting, d, true = settings_of(m, len(AREAS) * n_iou)
    curve, area = setting * n_class + label[d], setting // n_iou
    if true.any():
        # False positives if nothing were matched, summed up to each place where any curve of the area has a hit ...
        place = area * len(label) + d  # by area, class, falling score
        places = np.unique(place[true])
        base = _running(places, m, label, n_class, by_image)
        # ... and what matches change in that: a hit counts wherever its box lies, an ignored match never does.
        change = true.astype(np.int64) - m.false[area, d]
        slot = np.cumsum(true) - true  # the true positive at or after each match
        ends = np.append(curve[true], -1)
        inside = (change != 0) & (ends[slot] == curve)  # not after the last one
        mended, row = np.unique(slot[inside], return_inverse=True)
        image = m.image[d]
        mends = _sums(row, image[inside], len(mended), by_image, change[inside])
        mend = np.full(len(ends), -1)
        mend[mended] = np.arange(len(mended))
        first = run_starts(curve[true])
        length = np.diff(first, append=true.sum())
        order = np.argsort(-length, kind="stable")
        events = _Events(
            first=first[order],
            length=length[order],
            curve=ends[first[order]],
            image=image[true],
            base=np.searchsorted(places, place[true]),
            mend=mend[:-1],
        )
        walked = _walk(events, base, mends, objects, n_iou, n_class, by_image, recall_at)
        ap[events.curve] = walked
    none = (objects == 0).reshape(len(AREAS), 1, n_class, -1)
    return np.where(none, np.float32(np.nan), ap.reshape(len(AREAS), n_iou, n_class, -1))


def _walk(events, base, mends, objects, n_iou, n_class, by_image, recall_at) -> Float[ndarray, "C B"]:
    """AP of each curve, from its last true positive to its first."""
    e, n = events, len(events.first)
    rows = np.repeat(np.arange(n), e.length)  # [E]
    own = position(rows) + np.repeat(e.first, e.length)  # true positives, curves in order
    tp = _sums(rows, e.image[own], n, by_image)  # [C, B]
    extra = np.zeros_like(tp)
    corrected = e.mend[own] >= 0
    if corrected.any():
        extra = _sums(rows[corrected], e.mend[own][corrected], n, mends)
    numbers, of = np.unique(objects, return_inverse=True)
    reached, begin = recall_table(numbers.astype(np.int64), recall_at)
    reached = reached.astype(np.float32)
    area, label = e.curve // (n_iou * n_class), e.curve % n_class
    begin = begin[of.reshape(objects.shape)[area * n_class + label]]  # [C, B]
    points = reached[begin + tp.astype(np.int64)]
    best, ap, work, before = (np.zeros_like(tp) for _ in range(4))
    one, place = np.ones_like(tp), np.empty(tp.shape, np.int64)
    active = np.searchsorted(-e.length, -np.arange(e.length[0]), side="left")  # curves longer than 0, 1, ...
    for j in range(int(e.length[0]) - 1, -1, -1):  # mode="wrap" is the fastest; all indices are inside
        c = slice(0, active[j])
        i = e.first[c] + j
        np.take(base, e.base[i], axis=0, out=work[c], mode="wrap")
        work[c] += extra[c]
        np.maximum(work[c], one[c], out=work[c])  # nothing drawn so far: 0 / 1
        np.divide(tp[c], work[c], out=work[c])
        np.maximum(best[c], work[c], out=best[c])
        np.take(by_image, e.image[i], axis=0, out=work[c], mode="wrap")
        tp[c] -= work[c]
        place[c] = tp[c]
        place[c] += begin[c]
        np.take(reached, place[c], out=before[c], mode="wrap")
        points[c] -= before[c]  # recall points that this one is first to reach
        points[c] *= best[c]
        ap[c] += points[c]
        points[c] = before[c]
        mended = np.flatnonzero(e.mend[i] >= 0)
        if len(mended):
            extra[mended] -= mends[e.mend[i[mended]]]
    return ap / len(recall_at)


def _running(places, m: Matched, label, n_class: int, by_image: Float[ndarray, "I B"]) -> Float[ndarray, "P B"]:
    """Weights of the detections that are false positives unless they match, from the start of class and area."""
    n = len(label)
    area, d = np.nonzero(m.false)
    stretch = np.searchsorted(places, area * n + d)
    group = np.append(places // n * n_class + label[places % n], -1)
    within = group[stretch] == area * n_class + label[d]
    sums = _sums(stretch[within], m.image[d[within]], len(places), by_image)
    first = run_starts(group[:-1])
    length = np.diff(first, append=len(places))
    for p in range(1, length.max()):  # all classes and areas at once
        rows = first[length > p] + p
        sums[rows] += sums[rows - 1]
    return sums


def _sums(
    row: Int[ndarray, "N"],
    column: Int[ndarray, "N"],
    n: int,
    table: Float[ndarray, "I B"],
    times: ndarray | None = None,
) -> Float[ndarray, "n B"]:
    """Sums of the table's rows `column`, by row."""
    times = np.ones(len(row), np.float32) if times is None else times.astype(np.float32)
    return sparse.csr_matrix((times, (row, column)), shape=(n, len(table))) @ table
