"""Intervals over images and paired comparisons: how sure is a figure, and do two runs differ?

Legend: I images, B resamples, A objects, K classes, T IoU thresholds, D detections, R runs.

The image is the unit of sampling: its objects share a scene, a photographer and the detector's mood. A resample draws I
images with replacement, which is a multiplicity of each image, [B, I]. No detection is matched again: every figure here
is a ratio of sums over images, or can be read off matched detections with weights, and all resamples are done at once.
Intervals are percentile intervals (Efron and Tibshirani, 1993, ch. 13), those of coarse figures see `centred`.
"""

from collections.abc import Collection, Mapping
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from noctowl.errors import DataError
from noctowl.eval.ap import AREAS, BoxScores, Detections, GroundTruth
from noctowl.eval.greedy import rows_of
from noctowl.eval.matching import Matched, match_boxes
from noctowl.eval.ranks import median_rank
from noctowl.eval.weighted import FIGURES, weighted_ap

Resampled = Literal["with_image", "fixed"]


class Interval(NamedTuple):
    """A figure with the bounds of its interval; a list of three numbers in JSON."""

    value: float
    low: float
    high: float


def image_weights(n_images: int, *, resamples: int = 1000, seed: int = 0) -> Int[ndarray, "B I"]:
    """How often each image is drawn: every row sums to I. Equal arguments give equal rows, for paired use.

    Raises DataError where there is no image or no resample.
    """
    if n_images < 1 or resamples < 1:
        raise DataError(f"{n_images} images and {resamples} resamples; at least one of each is needed for an interval.")
    rng = np.random.default_rng(seed)
    weights = np.empty((resamples, n_images), np.uint16)
    for b in range(resamples):
        weights[b] = np.bincount(rng.integers(n_images, size=n_images), minlength=n_images)
    return weights


def percentile(value: float, samples: Float[ndarray, "B"], level: float = 0.95) -> Interval:
    """The interval that holds the central `level` of the resampled figures; those that do not exist (NaN) are left out.

    Where none exists, which takes a figure of nothing, the bounds are the value itself.
    """
    samples = samples[~np.isnan(samples)]
    if not len(samples):
        return Interval(float(value), float(value), float(value))
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def centred(value: float, samples: Float[ndarray, "B"], level: float = 0.95, *, least: float = 0) -> Interval:
    """The value +- z times the standard deviation of the resamples; for figures from `least` to 1.

    AP of a class with few objects rises when images are drawn twice, as there is less to find out of order: resampled
    means over such classes stand beside the figure, not around it. Their spread is what is wanted, and 100 resamples
    tell it to 7 %, where percentiles need a thousand (Efron and Tibshirani, 1993, ch. 6 and 13).
    """
    samples = samples[~np.isnan(samples)]
    half = NormalDist().inv_cdf((1 + level) / 2) * (samples.std(ddof=1) if len(samples) > 1 else 0.0)
    return Interval(float(value), max(float(value - half), least), min(float(value + half), 1.0))


def ratio_samples(
    numerator: Float[ndarray, "I *s"], denominator: Float[ndarray, "I *s"], weights: Int[ndarray, "B I"]
) -> Float[ndarray, "B *s"]:
    """sum_i w_i numerator_i / sum_i w_i denominator_i of every resample; NaN where the denominator is 0."""
    w = weights.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((total := w @ denominator) > 0, (w @ numerator) / total, np.nan)


def mean_interval(
    values: Float[ndarray, "A"], images: Int[ndarray, "A"], weights: Int[ndarray, "B I"], level: float = 0.95
) -> Interval | None:
    """Mean over objects; `images` are columns of the weights. None where there is no object."""
    if not len(values):
        return None
    sums, counts = (np.bincount(images, x, minlength=weights.shape[1]) for x in (values, np.ones(len(values))))
    return percentile(float(np.mean(values)), ratio_samples(sums, counts, weights), level)


# Ranks


def median_samples(
    ranks: Int[ndarray, "A"], images: Int[ndarray, "A"], weights: Int[ndarray, "B I"], *, published: bool = False
) -> Float[ndarray, "B"]:
    """Median rank of every resample, from the number of objects of each rank; NaN where none was drawn.

    published: see `ranks.median_rank`.
    """
    most = int(ranks.max(initial=0))
    counts = np.zeros((weights.shape[1], most + 1))
    np.add.at(counts, (images, ranks), 1)
    below = np.cumsum(weights.astype(np.float64) @ counts, axis=1)  # [B, ranks]
    total = below[:, -1]

    def element(place: Float[ndarray, "B"]) -> Float[ndarray, "B"]:  # of the sorted ranks, from 0
        return np.where(place < total, (below <= place[:, None]).sum(1), np.nan)

    if published:
        return element(total // 2 + 1)
    return (element((total - 1) // 2) + element(total // 2)) / 2 if most else np.full(len(weights), np.nan)


def rank_intervals(
    ranks: Int[ndarray, "A"],
    images: Int[ndarray, "A"],
    weights: Int[ndarray, "B I"],
    *,
    published_median: bool = False,
    level: float = 0.95,
) -> dict[str, Interval]:
    """rank_mean and rank_median; `images` are columns of the weights. A figure without objects is absent."""
    mean = mean_interval(ranks, images, weights, level)
    if mean is None:
        return {}
    found = {"rank_mean": mean}
    median = median_rank(ranks, published=published_median)
    if median is not None:
        samples = median_samples(ranks, images, weights, published=published_median)
        found["rank_median"] = percentile(median, samples, level)
    return found


# Average precision


def home_images(
    scores: BoxScores, *, detections: Detections, ground_truth: GroundTruth, images: Int[ndarray, "I"]
) -> Int[ndarray, "K"]:
    """The one image (column) that holds all objects and detections of each class; -1 where there are several.

    In FG-OVD a class is one caption of one image.
    """
    label = np.concatenate([ground_truth.label, detections.label])
    column = rows_of(np.concatenate([ground_truth.image, detections.image]), images)
    row = rows_of(label, scores.classes)
    row, column = row[row >= 0], column[row >= 0]
    low, high = np.full(len(scores.classes), len(images)), np.full(len(scores.classes), -1)
    np.minimum.at(low, row, column)
    np.maximum.at(high, row, column)
    return np.where(low == high, low, -1)


def box_samples(
    scores: BoxScores,
    *,
    detections: Detections,
    ground_truth: GroundTruth,
    images: Int[ndarray, "I"],
    weights: Int[ndarray, "B I"],
    resampled: Resampled = "with_image",
    groups: Mapping[str, Collection[int]] | None = None,
    matched: Matched | None = None,
    widened: bool = False,
) -> dict[str, Float[ndarray, "B"]]:
    """Figures of `BoxScores.summary` in every resample, and mean APs of groups of classes.

    A class that lives in one image has the same AP however often that is drawn: the mean over such classes is a ratio
    of sums over images, exactly. Classes of several images go through `weighted_ap`; where there are any, recalls are
    left out.

    images: sorted ids, the columns of the weights. groups: name -> class ids.
    resampled: "with_image": a copy of an image brings copies of its classes, which count again (FG-OVD: classes are
        captions of images). "fixed": the classes are a given list, and each that is drawn counts once (LVIS, COCO).
    matched: what `match_boxes` gave with these `images`, for classes of several images; None matches by COCO's rules.
    widened: by sqrt(n / (n - 1)) for a class with objects in n images, which the spread of a bootstrap falls short of;
        for intervals of means over classes of which many have few images.
    """
    home = home_images(scores, detections=detections, ground_truth=ground_truth, images=images)
    alone, spanning = np.flatnonzero(home >= 0), np.flatnonzero(home < 0)
    by_class = _class_figures(scores, recalls=not len(spanning))  # name -> [K]
    source = {name: name for name in by_class}
    for name, members in (groups or {}).items():
        by_class[name] = np.where(np.isin(scores.classes, list(members)), by_class["map"], np.nan)
        source[name] = "map"
    values = np.stack(list(by_class.values()))  # [F, K]
    present = (~np.isnan(values)).astype(np.float64)
    count = weights.T[home[alone]].astype(np.float64)  # how much each class counts, [K alone, B]
    if resampled == "fixed":
        count = (count > 0).astype(np.float64)
    number, total = present[:, alone] @ count, np.nan_to_num(values[:, alone]) @ count  # [F, B]
    if len(spanning):
        if matched is None:
            matched = match_boxes(
                detections=detections, ground_truth=ground_truth, max_detections=scores.limits[-1], images=images
            )
        factor = _small_sample(matched, spanning) if widened else None
        for name, ap in zip(FIGURES, weighted_ap(matched, weights, spanning)):  # [S, B]
            if factor is not None:
                middle = np.nan_to_num(ap).sum(1) / np.maximum((~np.isnan(ap)).sum(1), 1)
                ap = middle[:, None] + factor[:, None] * (ap - middle[:, None])
            rows = np.array([f for f, figure in enumerate(by_class) if source[figure] == name], np.int64)
            counts = (~np.isnan(ap)).astype(np.float32)
            if resampled == "with_image":
                counts *= _mean_weights(matched, weights, spanning)
            members_of = present[np.ix_(rows, spanning)].astype(np.float32)
            number[rows] += members_of @ counts
            total[rows] += members_of @ (np.nan_to_num(ap) * counts)
    means = np.divide(total, number, out=np.full_like(total, np.nan), where=number > 0)
    return dict(zip(by_class, means))


def _small_sample(matched: Matched, classes: Int[ndarray, "S"]) -> Float[ndarray, "S"]:
    """sqrt(n / (n - 1)) of each class, n the images that hold objects of it; 1 for a single image."""
    pairs = np.unique(matched.object_label * len(matched.images) + matched.object_image)
    n = np.bincount(pairs // len(matched.images), minlength=len(matched.classes))[classes]
    return np.sqrt(n / np.maximum(n - 1, 1)).astype(np.float32)


def _mean_weights(matched: Matched, weights: Int[ndarray, "B I"], classes: Int[ndarray, "S"]) -> Float[ndarray, "S B"]:
    """Mean weight of the images that hold objects of each class."""
    found = np.zeros((len(classes), len(weights)))
    for s, k in enumerate(classes):
        own = np.unique(matched.object_image[matched.object_label == k])
        found[s] = weights[:, own].mean(1) if len(own) else 0
    return found


def _class_figures(scores: BoxScores, *, recalls: bool) -> dict[str, Float[ndarray, "K"]]:
    """What `BoxScores.summary` averages over classes; NaN where a class has no object of the size."""
    figures = {"map": scores.ap[0].mean(0)}
    figures |= {f"map_{v}": scores.ap[0][np.isclose(scores.iou, v / 100)].mean(0) for v in (50, 75)}
    figures |= {f"map_{area}": scores.ap[a].mean(0) for a, area in enumerate(AREAS) if a}
    if recalls:
        figures |= {f"mar_{m}": scores.recall[i, 0].mean(0) for i, m in enumerate(scores.limits)}
        figures |= {f"mar_{area}": scores.recall[-1, a].mean(0) for a, area in enumerate(AREAS) if a}
    return {name: values for name, values in figures.items() if not np.isnan(values).all()}


def fgovd_intervals(
    scores: BoxScores,
    *,
    detections: Detections,
    ground_truth: GroundTruth,
    ranks: Int[ndarray, "A"],
    object_images: Int[ndarray, "A"],
    resamples: int = 1000,
    seed: int = 0,
    published_median: bool = False,
    level: float = 0.95,
) -> dict[str, Interval]:
    """Every figure of one benchmark and N with its interval, under the names of `fgovd.score`.

    scores, ranks: what `score_boxes` and `object_ranks` gave for a `fgovd.Case`, whose are the detections and the
    ground truth; images are rows there. object_images: the image row of each ranked object,
    `annotations.vocab_image[annotations.object_vocab[case.inside]]`. Sampled are the images that take part.
    """
    images = np.unique(np.concatenate([ground_truth.image, object_images]))
    if not len(images):
        return {}
    weights = image_weights(len(images), resamples=resamples, seed=seed)
    samples = box_samples(scores, detections=detections, ground_truth=ground_truth, images=images, weights=weights)
    values = scores.summary()
    found = {name: percentile(values[name], drawn, level) for name, drawn in samples.items() if name in values}
    columns = np.searchsorted(images, object_images)
    return found | rank_intervals(ranks, columns, weights, published_median=published_median, level=level)
