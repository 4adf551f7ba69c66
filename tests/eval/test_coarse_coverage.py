"""Coverage of the intervals of coarse figures, on a made-up detector whose expected AP is known from many draws."""

import numpy as np
import pytest

from noctowl.eval.ap import Detections, GroundTruth, score_matched
from noctowl.eval.bootstrap import box_samples, centred, image_weights
from noctowl.eval.matching import match_boxes

IMAGES, CLASSES = 300, 120
SHOWN = np.repeat([2.5, 10.0, 50.0], 40)  # images in which a class is to be expected
GROUPS = {"rare": range(40), "common": range(40, 80), "frequent": range(80, 120)}
HARD = np.random.default_rng(123).normal(0, 0.8, CLASSES)  # a property of the class


def draw(seed: int) -> tuple[Detections, GroundTruth]:
    """Other images of the same world: objects of an image are alike in how easy they are."""
    rng = np.random.default_rng(seed)
    image, label = np.nonzero(rng.random((IMAGES, CLASSES)) < SHOWN / IMAGES)
    easy = rng.normal(HARD[label], 0.8)
    rows = np.repeat(np.arange(len(image)), rng.integers(1, 4, len(image)))
    image, label, easy = image[rows], label[rows], easy[rows]
    left = 100.0 * np.arange(len(rows))  # objects never meet
    boxes = np.stack([left, 0 * left, left + 50, 0 * left + 50], axis=1)
    found = rng.random(len(rows)) < 1 / (1 + np.exp(-easy - 0.7))
    hits = boxes[found] - np.array([0, 0, 1, 0]) * rng.integers(0, 14, (found.sum(), 1))
    wrong = np.repeat(np.arange(CLASSES), rng.poisson(0.8 * SHOWN + 1))
    detections = Detections(
        np.r_[image[found], rng.integers(0, IMAGES, len(wrong))],
        np.r_[label[found], wrong],
        np.r_[hits, np.tile([-99.0, -99.0, -50.0, -50.0], (len(wrong), 1))],
        np.r_[easy[found] + rng.normal(0.8, 1, found.sum()), rng.normal(0, 1, len(wrong))],
    )
    return detections, GroundTruth(image, label, boxes, np.full(len(boxes), 2500.0))


def measured(seed: int, resamples: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Figures and their resamples, as `evidence.coarse_intervals` has them."""
    detections, truth = draw(seed)
    images = np.arange(IMAGES)
    matched = match_boxes(detections=detections, ground_truth=truth, max_detections=300, images=images)
    scores = score_matched(matched, max_detections=(300,))
    options = {"images": images, "resampled": "fixed", "groups": GROUPS, "matched": matched, "widened": True}
    once = np.ones((1, IMAGES), np.int64)
    figures = box_samples(scores, detections=detections, ground_truth=truth, weights=once, **options)
    weights = image_weights(IMAGES, resamples=resamples, seed=seed) if resamples else once
    samples = box_samples(scores, detections=detections, ground_truth=truth, weights=weights, **options)
    names = ("map", *GROUPS)
    return {name: float(figures[name][0]) for name in names}, {name: samples[name] for name in names}


@pytest.mark.slow
def test_coverage_of_coarse_figures():
    """95 % within 3 sigma of 200 repeats, also of groups whose classes have two or three images each."""
    drawn = [measured(10_000 + i, 0)[0] for i in range(300)]
    truth = {name: np.mean([figures[name] for figures in drawn]) for name in drawn[0]}
    inside = dict.fromkeys(truth, 0)
    for seed in range(200):
        figures, samples = measured(seed, 100)
        for name, value in figures.items():
            interval = centred(value, samples[name])
            inside[name] += interval.low <= truth[name] <= interval.high
    shares = {name: count / 200 for name, count in inside.items()}
    print(shares)
    assert all(abs(share - 0.95) < 3 * (0.95 * 0.05 / 200) ** 0.5 for share in shares.values()), shares
