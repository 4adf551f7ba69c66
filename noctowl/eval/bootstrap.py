"""Intervals over images and paired comparisons: how sure is a figure, and do two runs differ?

Legend: I images, B resamples, A objects, K classes, T IoU thresholds, D detections, R runs.

The image is the unit of sampling: its objects share a scene, a photographer and the detector's mood. A resample draws I
images with replacement, which is a multiplicity of each image, [B, I]. No detection is matched again: every figure here
is a ratio of sums over images, or can be read off matched detections with weights, and all resamples are done at once.
Intervals are percentile intervals (Efron and Tibshirani, 1993, ch. 13).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from noctowl.errors import DataError


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
