"""Coarse figures of two runs: against each run's own scoring, exchanges written out, and like runs."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from noctowl.data.records import Strings
from noctowl.errors import DataError
from noctowl.eval.ap import Detections, Federated
from noctowl.eval.bootstrap import image_weights
from noctowl.eval.compare_coarse import (
    FIGURES,
    difference,
    exchange_p,
    group_ap,
    image_differences,
    run_figures,
    seed_pairs,
    side_by_side,
)
from noctowl.eval.lvis import LvisAnnotations, score
from tests.eval.test_bootstrap import world

pytestmark = pytest.mark.lvis


def annotated(rng, *, images, classes=6, shift=0):
    """A federated problem with ids in gaps and no order, and detections for it; a third of the classes each r, c, f."""
    ids = rng.permutation(3 * images)[:images]
    detections, truth = world(rng, images=images, classes=classes, own_classes=False)
    rows = np.stack(np.meshgrid(ids, np.arange(classes)), -1).reshape(-1, 2)
    federated = Federated(rows[rng.random(len(rows)) < 0.5], rows[rng.random(len(rows)) < 0.2])
    annotations = LvisAnnotations(
        path=Path("lvis.json"),
        sha256="",
        image_ids=ids,
        image_files=Strings(f"val2017/{i}.jpg" for i in ids),
        image_sizes=np.full((images, 2), 300, np.int32),
        category_ids=np.arange(classes),
        names=Strings(f"class {k}" for k in range(classes)),
        frequency=np.array(["r", "c", "f"])[np.arange(classes) * 3 // classes],
        objects=replace(truth, image=ids[truth.image]),
        federated=federated,
    )
    return annotations, replace(detections, image=ids[detections.image])


def noisy(detections, rng, noise):
    """Another run: the same boxes, other scores; and some boxes are its own."""
    keep = rng.random(len(detections.image)) < 0.9
    scores = detections.scores + rng.normal(0, noise, len(detections.image))
    return Detections(detections.image[keep], detections.label[keep], detections.boxes[keep], scores[keep])


def own(detections, annotations):
    found = score(detections, annotations)
    return [found.get(name, np.nan) for name in FIGURES]


def swap(a, b, ids):
    """Both runs after the detections of the images `ids` have changed sides."""

    def mixed(x, y):
        parts = [(x, ~np.isin(x.image, ids)), (y, np.isin(y.image, ids))]
        return Detections.concatenate([Detections(*(v[rows] for v in vars(run).values())) for run, rows in parts])

    return mixed(a, b), mixed(b, a)


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_equal_a_second_scoring(seed):
    """No image, all, and random ones: the weights of the doubled problem against the scorer on exchanged detections."""
    rng = np.random.default_rng(seed)
    annotations, a = annotated(rng, images=9)
    b = noisy(a, rng, 0.5)
    doubled = side_by_side(a, b, annotations)
    ids = np.sort(annotations.image_ids)
    swapped = np.stack([np.zeros(9, bool), np.ones(9, bool), *(rng.random((6, 9)) < 0.5)])
    found = image_differences([doubled], swapped, annotations)
    for column, row in zip(found.T, swapped):
        new_a, new_b = swap(a, b, ids[row])
        expected = np.subtract(own(new_a, annotations), own(new_b, annotations))
        np.testing.assert_allclose(column, expected, rtol=0, atol=1e-6)
    assert np.abs(found[:, 0]).max() > 0.01
    assert np.ptp(found[0]) > 0.01
    np.testing.assert_array_equal(found[:, 1], -found[:, 0])
    sides = group_ap(doubled, np.stack([np.tile([1, 0], 9), np.tile([0, 1], 9)]), annotations)
    np.testing.assert_allclose(sides.T, [own(a, annotations), own(b, annotations)], rtol=0, atol=1e-6)


def test_figures_and_their_difference():
    """Each run's own figures, and resamples under the same weights: of one run with itself all differences are 0."""
    rng = np.random.default_rng(5)
    annotations, a = annotated(rng, images=30)
    b = noisy(a, rng, 0.5)
    weights = image_weights(30, resamples=60)
    sides = [run_figures(runs, weights, annotations) for runs in ([a], [b], [a, b])]
    np.testing.assert_allclose(sides[0][0], own(a, annotations), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sides[2][0], (sides[0][0] + sides[1][0]) / 2)  # two seeds
    np.testing.assert_allclose(sides[2][1], (sides[0][1] + sides[1][1]) / 2)
    for value, low, high in difference(sides[0], sides[1]):
        assert low <= value <= high
        assert 0.005 < high - low < 0.6
    values = [interval.value for interval in difference(sides[0], sides[1])]
    np.testing.assert_allclose(values, np.subtract(own(a, annotations), own(b, annotations)), rtol=0, atol=1e-6)
    assert difference(sides[0], sides[0]) == [(0, 0, 0)] * 4
    below = (np.array([-0.8]), np.full((1, 9), -0.8))  # of a difference, not of an AP: it may be negative
    assert difference(below, (np.zeros(1), np.zeros((1, 9)))) == [(-0.8, -0.8, -0.8)]


def test_p_equals_all_exchanges():
    """Seven images: the 128 exchanges can be counted, by scoring each."""
    rng = np.random.default_rng(3)
    annotations, a = annotated(rng, images=7, classes=3)
    b = noisy(a, rng, 0.3)
    ids = np.sort(annotations.image_ids)
    all_of_them = []
    for row in product((False, True), repeat=7):
        new_a, new_b = swap(a, b, ids[np.array(row)])
        all_of_them.append(np.subtract(own(new_a, annotations), own(new_b, annotations)))
    exact = (np.abs(all_of_them) >= np.abs(all_of_them[0]) - 1e-6).mean(0)
    found = exchange_p([side_by_side(a, b, annotations)], annotations, permutations=2000, enough=None)
    assert [f.p for f in found] == pytest.approx(exact, abs=0.035)  # 3 sigma of 2,000 draws
    assert {f.drawn for f in found} == {2000}
    assert min(exact) < 0.7


def test_identical_runs_and_a_better_one():
    rng = np.random.default_rng(0)
    annotations, a = annotated(rng, images=60)
    same = exchange_p([side_by_side(a, a, annotations)], annotations, permutations=400)
    assert same == [(1, 100)] * 4  # drawing stopped
    worse = replace(a, scores=rng.permutation(a.scores), boxes=a.boxes + rng.normal(0, 12, (len(a.image), 1)))
    for sides, sign in (((a, worse), 1), ((worse, a), -1)):
        found = exchange_p([side_by_side(*sides, annotations)], annotations, permutations=400)
        assert found[0] == (1 / 401, 400)
        figures = [run_figures([side], image_weights(60, resamples=50), annotations) for side in sides]
        value, low, high = difference(*figures)[0]
        assert 0.1 < sign * value < 0.5
        assert min(sign * low, sign * high) > 0.05


def test_group_without_objects():
    annotations, a = annotated(np.random.default_rng(1), images=8)
    annotations = replace(annotations, frequency=np.array(list("ccccff")))
    found = exchange_p([side_by_side(a, a, annotations)], annotations, permutations=50)
    assert [(np.isnan(f.p), f.drawn) for f in found] == [(False, 50), (True, 0), (False, 50), (False, 50)]
    assert found[0].p == 1
    values, samples = run_figures([a], image_weights(8, resamples=5), annotations)
    assert np.isnan(values).tolist() == [False, True, False, False]
    assert np.isnan(samples).all(1).tolist() == [False, True, False, False]


def test_seeds_are_exchanged_together():
    """The difference of two pairs is their mean; unlike numbers of seeds take part equally often."""
    rng = np.random.default_rng(2)
    annotations, a = annotated(rng, images=12)
    b, c, d = (noisy(a, rng, 0.4) for _ in range(3))
    pairs = [side_by_side(a, b, annotations), side_by_side(c, d, annotations)]
    swapped = rng.random((5, 12)) < 0.5
    together = image_differences(pairs, swapped, annotations)
    alone = [image_differences([pair], swapped, annotations) for pair in pairs]
    np.testing.assert_allclose(together, (alone[0] + alone[1]) / 2)
    assert seed_pairs(3, 3) == [(0, 0), (1, 1), (2, 2)]
    assert seed_pairs(1, 3) == [(0, 0), (0, 1), (0, 2)]
    assert sorted(seed_pairs(2, 3)) == list(product(range(2), range(3)))
    assert len(set(seed_pairs(4, 6))) == 12


def test_strange_ids_are_refused():
    annotations, a = annotated(np.random.default_rng(1), images=8)
    with pytest.raises(DataError, match="image ids"):
        side_by_side(a, replace(a, image=a.image + 1000), annotations)


def test_p_is_even_under_the_null():
    """150 pairs of like runs (other noise on the same scores): p is uniform, to 3 sigma."""
    p = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        annotations, a = annotated(rng, images=20)
        doubled = side_by_side(noisy(a, rng, 0.5), noisy(a, rng, 0.5), annotations)
        p.append([f.p for f in exchange_p([doubled], annotations, permutations=60, seed=seed, enough=None)])
    for level in (0.1, 0.3, 0.5, 0.8):
        rate = (np.array(p)[:, :2] <= level).mean(0)  # AP, APr
        assert np.abs(rate - level).max() < 3 * (level * (1 - level) / 150) ** 0.5 + 1 / 61
