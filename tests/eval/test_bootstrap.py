"""Intervals: by hand, against the scorer run again on copied images, and their coverage of a known truth."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noctowl.data.fgovd import read_fgovd
from noctowl.errors import DataError
from noctowl.eval.ap import Detections, Federated, GroundTruth, score_boxes
from noctowl.eval.bootstrap import (
    box_samples,
    centred,
    fgovd_intervals,
    image_weights,
    mean_interval,
    median_samples,
    percentile,
    rank_intervals,
)
from noctowl.eval.compare import compare, holm, sign_flip_p
from noctowl.eval.fgovd import collect
from noctowl.eval.matching import match_boxes
from noctowl.eval.ranks import object_ranks
from noctowl.text import clip_tokenizer, token_lengths

# Resamples


def test_weights_are_seeded_multiplicities():
    weights = image_weights(7, resamples=300, seed=5)
    assert weights.shape == (300, 7)
    assert (weights.sum(1) == 7).all()
    assert np.array_equal(weights, image_weights(7, resamples=300, seed=5))
    assert not np.array_equal(weights, image_weights(7, resamples=300, seed=6))
    assert weights.mean(0) == pytest.approx([1] * 7, abs=0.25)
    assert image_weights(1, resamples=2).tolist() == [[1], [1]]
    with pytest.raises(DataError, match="0 images"):
        image_weights(0)


def test_percentile_by_hand():
    assert percentile(3, np.arange(101.0)) == pytest.approx((3, 2.5, 97.5))
    assert percentile(3, np.array([1.0, np.nan, 2]), level=1.0) == (3, 1, 2)
    assert percentile(3, np.array([np.nan])) == (3, 3, 3)


def test_centred_by_hand():
    """Two resamples, 0.2 apart: sd 0.1414; NaN counts for nothing, what is beyond 0 or 1 is cut."""
    assert centred(0.3, np.array([0.4, 0.6, np.nan])) == pytest.approx((0.3, 0.3 - 1.959964 * 0.02**0.5, 0.5771808))
    assert centred(0.3, np.array([0.0, 1.0])) == (0.3, 0.0, 1.0)
    assert centred(-0.3, np.array([0.0, 2.0]), least=-1)[1] == -1
    assert centred(0.3, np.array([np.nan])) == (0.3, 0.3, 0.3)


def test_mean_by_hand():
    """Two images with 3 objects of value 1 and 1 object of value 0: drawn (2,0) -> 1, (1,1) -> 3/4, (0,2) -> 0."""
    weights = np.array([[2, 0], [1, 1], [0, 2]])
    found = mean_interval(np.array([1.0, 1, 1, 0]), np.array([0, 0, 0, 1]), weights, level=1.0)
    assert found == (0.75, 0, 1)
    assert mean_interval(np.zeros(0), np.zeros(0, int), weights) is None
    same = mean_interval(np.full(4, 2.0), np.array([0, 0, 1, 1]), weights)
    assert same == (2, 2, 2)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=9))
def test_median_equals_numpy_on_copies(objects):
    ranks, images = np.array(objects).T
    weights = image_weights(4, resamples=40, seed=1)
    plain, published = (median_samples(ranks, images, weights, published=p) for p in (False, True))
    for row, a, b in zip(weights, plain, published):
        copies = np.sort(np.repeat(ranks, row[images]))
        place = len(copies) // 2 + 1
        assert (a == np.median(copies)) if len(copies) else np.isnan(a)
        assert (b == copies[place]) if place < len(copies) else np.isnan(b)


def test_rank_intervals():
    weights = np.array([[1, 1], [2, 0], [0, 2]])
    found = rank_intervals(np.array([1, 1, 4]), np.array([0, 0, 1]), weights, level=1.0)
    assert found == {"rank_mean": (2, 1, 4), "rank_median": (1, 1, 4)}
    assert rank_intervals(np.zeros(0, int), np.zeros(0, int), weights) == {}
    assert "rank_median" not in rank_intervals(np.array([1]), np.array([0]), weights, published_median=True)


# Average precision against the scorer itself


def world(rng, *, images, classes, own_classes):
    """Objects and detections, some on objects, some beside; classes of one image each, or shared."""
    n = int(rng.integers(2 * images, 4 * images))
    image = rng.integers(images, size=n)
    label = image * classes + rng.integers(classes, size=n) if own_classes else rng.integers(classes, size=n)
    corner = rng.uniform(0, 150, (n, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(10, 120, (n, 2))], 1)
    truth = GroundTruth(image, label, boxes, (boxes[:, 2:] - boxes[:, :2]).prod(1))
    chosen = rng.integers(n, size=2 * n)
    found = boxes[chosen] + rng.normal(0, 6, (2 * n, 4))
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    wrong = rng.random(2 * n) < 0.3
    stray = image[chosen] * classes if own_classes else 0
    labels = np.where(wrong, stray + rng.integers(classes, size=2 * n), label[chosen])
    return Detections(image[chosen], labels, found, rng.permutation(2 * n) / n), truth


def copied(row, detections, truth, *, images, new_classes, federated=None):
    """The resample written out: image i once for each time it is drawn, under a new id; its classes too if asked."""
    most = int(row.max())
    span = 1_000_000

    def parts(source, names):
        blocks = []
        for copy in range(most):
            keep = row[np.searchsorted(images, source.image)] > copy
            arrays = {name: getattr(source, name)[keep] for name in names}
            arrays["image"] = arrays["image"] * most + copy  # copies stand beside each other
            arrays["label"] = arrays["label"] + span * copy * new_classes
            blocks.append(arrays)
        return {name: np.concatenate([block[name] for block in blocks]) for name in names}

    def pairs(rows):
        kept = [rows[row[np.searchsorted(images, rows[:, 0])] > copy] * [most, 1] + [copy, 0] for copy in range(most)]
        return np.concatenate(kept)

    rules = None if federated is None else Federated(*(pairs(rows) for rows in vars(federated).values()))
    det = Detections(**parts(detections, ("image", "label", "boxes", "scores")))
    return det, GroundTruth(**parts(truth, ("image", "label", "boxes", "area"))), rules


@pytest.mark.parametrize("seed", range(4))
def test_classes_of_one_image_equal_a_second_scoring(seed):
    """FG-OVD: a copy of an image brings copies of its classes. All figures of the summary, to rounding."""
    detections, truth = world(np.random.default_rng(seed), images=9, classes=3, own_classes=True)
    images, weights = np.arange(9), image_weights(9, resamples=12, seed=seed)
    scores = score_boxes(detections=detections, ground_truth=truth)
    samples = box_samples(scores, detections=detections, ground_truth=truth, images=images, weights=weights)
    assert set(samples) == set(scores.summary())
    assert len(samples) >= 10
    for b, row in enumerate(weights):
        det, gt, _ = copied(row, detections, truth, images=images, new_classes=True)
        again = score_boxes(detections=det, ground_truth=gt).summary()
        for name, drawn in samples.items():
            assert drawn[b] == pytest.approx(again.get(name, np.nan), abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lvis", [False, True])
def test_classes_of_many_images_equal_a_second_scoring(seed, lvis):
    """COCO and LVIS: a fixed list of classes, weighted curves; with the rules of LVIS in half of the cases."""
    rng = np.random.default_rng(seed)
    detections, truth = world(rng, images=8, classes=4, own_classes=False)
    federated, limits = None, {}
    if lvis:
        rows = np.stack(np.meshgrid(np.arange(8), np.arange(4)), -1).reshape(-1, 2)
        federated = Federated(rows[rng.random(32) < 0.4], rows[rng.random(32) < 0.3])
        limits = {"max_detections": (5,), "max_per_image": 5}
    options = {"detections": detections, "ground_truth": truth, "federated": federated}
    scores = score_boxes(**options, **limits)
    images, weights = np.arange(8), image_weights(8, resamples=12, seed=seed)
    groups = {"rare": [0], "common": [1, 2]}
    matched = (
        match_boxes(**options, max_detections=limits["max_detections"][0], max_per_image=5, images=images)
        if lvis
        else None
    )
    options.pop("federated")
    samples = box_samples(
        scores,
        **options,
        images=images,
        weights=weights,
        resampled="fixed",
        groups=groups,
        matched=matched,
    )
    assert {"map", "map_50", "map_75", "map_medium", "rare", "common"} <= set(samples)
    assert set(samples) == {name for name in scores.summary() if name.startswith("map")} | set(groups)
    for b, row in enumerate(weights):
        det, gt, rules = copied(row, detections, truth, images=images, new_classes=False, federated=federated)
        again = score_boxes(detections=det, ground_truth=gt, federated=rules, **limits)
        expected = {name: again.mean_ap(classes=members) for name, members in groups.items()} | again.summary()
        for name, drawn in samples.items():
            assert drawn[b] == pytest.approx(expected.get(name, np.nan), abs=1e-6, nan_ok=True), name
    once = box_samples(
        scores, **options, images=images, weights=np.ones((1, 8), int), resampled="fixed", matched=matched
    )
    plain = scores.summary()
    assert {n: v[0] for n, v in once.items()} == pytest.approx({n: plain[n] for n in once}, abs=1e-6)


def test_mixed_classes_weigh_what_they_should():
    """Class 0 in images 0 and 1, class 1 in image 1 alone; each found in one image of two, resp. found."""
    boxes = np.array([[0, 0, 10, 10.0]] * 3)
    truth = GroundTruth(np.array([0, 1, 1]), np.array([0, 0, 1]), boxes, np.full(3, 100.0))
    detections = Detections(np.array([0, 1]), np.array([0, 1]), boxes[:2], np.array([0.9, 0.8]))
    scores = score_boxes(detections=detections, ground_truth=truth)
    options = {"detections": detections, "ground_truth": truth, "images": np.arange(2)}
    weights = np.array([[1, 1], [2, 0], [0, 2]])
    half = 51 / 101  # recall 1/2 reaches 51 of 101 points
    fixed = box_samples(scores, **options, weights=weights, resampled="fixed")["map"]
    assert fixed == pytest.approx([(half + 1) / 2, 1, 0.5])
    with_image = box_samples(scores, **options, weights=weights)["map"]
    assert with_image == pytest.approx([(half + 1) / 2, 1, 2 / 3])


def test_nothing_and_one_image():
    empty = np.zeros(0, int)
    truth = GroundTruth(empty, empty, np.zeros((0, 4)), np.zeros(0))
    scores = score_boxes(detections=Detections.concatenate([]), ground_truth=truth)
    options = {"detections": Detections.concatenate([]), "ground_truth": truth}
    assert fgovd_intervals(scores, **options, ranks=empty, object_images=empty) == {}
    box = np.array([[0, 0, 10, 10.0]])
    truth = GroundTruth(np.array([3]), np.array([8]), box, np.array([100.0]))
    detections = Detections(np.array([3]), np.array([8]), box, np.array([0.1]))
    scores = score_boxes(detections=detections, ground_truth=truth)
    found = fgovd_intervals(
        scores,
        detections=detections,
        ground_truth=truth,
        ranks=np.array([2]),
        object_images=np.array([3]),
        resamples=20,
    )
    assert found["map"] == pytest.approx((1, 1, 1))
    assert found["rank_mean"] == (2, 2, 2)
    assert "map_large" not in found


@pytest.mark.golden
def test_intervals_cost_less_than_scoring(shared, metric_cost):
    """1,000 resamples of Easy, N = 5: at most twice the time of scoring (it is a tenth), and around the figures."""
    annotations = read_fgovd(shared / "data/fgovd/benchmarks/3_attributes.json")
    predictions = metric_cost.golden_predictions(shared / "golden/preds_3_attributes.npz")
    lengths = token_lengths(clip_tokenizer(), list(annotations.captions))
    start = time.perf_counter()
    case = collect(annotations, predictions, n=5, lengths=lengths)
    scores = score_boxes(detections=case.detections, ground_truth=case.objects)
    ranks = object_ranks(
        object_boxes=annotations.object_boxes[case.inside],
        object_group=np.searchsorted(np.flatnonzero(case.kept), annotations.object_vocab[case.inside]),
        boxes=case.found.boxes,
        offsets=case.found.offsets,
        logits=predictions.logits[case.found.rows, :6],
    )
    scoring = time.perf_counter() - start
    start = time.perf_counter()
    found = fgovd_intervals(
        scores,
        detections=case.detections,
        ground_truth=case.objects,
        ranks=ranks,
        object_images=annotations.vocab_image[annotations.object_vocab[case.inside]],
    )
    cost = time.perf_counter() - start
    print(f"scoring {scoring:.3f} s, intervals {cost:.3f} s, {found['map']}, {found['rank_mean']}")
    assert cost < 2 * scoring
    assert set(found) == set(scores.summary()) | {"rank_mean", "rank_median"}
    for name, value in scores.summary().items():
        assert found[name].value == value
        assert found[name].low <= value <= found[name].high
    assert 0 < found["map"].high - found["map"].low < 0.2


# Comparison


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1, 1]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_sign_flips_by_hand():
    """Three images, all better by one: 2 of the 8 sign patterns are as extreme."""
    assert sign_flip_p(np.ones(3), permutations=20_000) == pytest.approx(0.25, abs=0.01)
    assert sign_flip_p(np.array([0.1, 0.2, 0.3]), permutations=20_000) == pytest.approx(0.25, abs=0.01)
    assert sign_flip_p(np.zeros(3)) == 1
    assert sign_flip_p(np.ones(100)) == 1 / 10_001


def test_compare_by_hand():
    runs = {
        "new": np.array([1.0, 1, 1, np.nan]),
        "old": np.array([0.0, 1, 1, 1]),
        "seeds": np.array([[0.0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    rows = compare(runs, np.array([7, 9, 9, 9]), resamples=200)
    assert [(row["a"], row["b"]) for row in rows] == [("new", "old"), ("new", "seeds"), ("old", "seeds")]
    assert [row["difference"].value for row in rows] == pytest.approx([1 / 3, 1 / 3, 0])
    assert (rows[0]["mean_a"], rows[0]["mean_b"]) == pytest.approx((1, 2 / 3))
    assert (rows[0]["difference"].low, rows[0]["difference"].high) == (0, 1)
    assert all(row["p_holm"] == 1 for row in rows)  # two images prove nothing
    assert rows == compare(runs, np.array([7, 9, 9, 9]), resamples=200)


def test_compare_finds_what_is_there():
    rng = np.random.default_rng(0)
    base = rng.integers(1, 7, 300).astype(float)
    images = np.arange(300) // 2
    runs = {"base": base, "same": base[rng.permutation(300)], "better": base - 0.5 * (rng.random(300) < 0.5)}
    rows = {(row["a"], row["b"]): row for row in compare(runs, images, permutations=2000)}
    real, none = rows["base", "better"], rows["base", "same"]
    assert real["p"] == 1 / 2001
    assert real["p_holm"] == pytest.approx(3 / 2001)
    assert 0.15 < real["difference"].low < real["difference"].high < 0.35
    assert none["p"] > 0.05
    assert none["difference"].low < 0 < none["difference"].high


def test_p_is_even_under_the_null():
    """400 pairs of like runs: a twentieth are called different at .05 (3 sigma)."""
    rng = np.random.default_rng(1)
    p = np.array([sign_flip_p(rng.normal(size=25), permutations=400, seed=i) for i in range(400)])
    assert abs((p <= 0.05).mean() - 0.05) < 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.parametrize(
    ("runs", "message"), [({"a": np.ones(2)}, "two or more"), ({"a": np.ones(2), "b": np.ones(3)}, "'b': 3")]
)
def test_unlike_runs_are_refused(runs, message):
    with pytest.raises(DataError, match=message):
        compare(runs, np.array([1, 2]))
    with pytest.raises(DataError, match="no unit"):
        compare({"a": np.full(2, np.nan), "b": np.ones(2)}, np.array([1, 2]))


# Coverage


def simulated(rng, images):
    """Images differ in difficulty q ~ Beta(2, 2), whose mean is 1/2: one to three objects, each its own class, found
    and named with probability q. Truth: mAP and top-1 as ratios of expectations are E[n q] / E[n] = 1/2."""
    many = rng.integers(1, 4, images)
    image = np.repeat(np.arange(images), many)
    right = rng.random(len(image)) < np.repeat(rng.beta(2, 2, images), many)
    boxes = np.array([[0, 0, 50, 50.0]]) + 60 * np.arange(len(image))[:, None]
    label = np.arange(len(image))
    truth = GroundTruth(image, label, boxes, np.full(len(image), 2500.0))
    named = np.where(right, label, -1)
    return Detections(image, named, boxes, rng.random(len(image))), truth, np.where(right, 1, 2)


def coverage(repeats, images, resamples):
    rng = np.random.default_rng(2)
    inside = np.zeros((repeats, 2), bool)
    for r in range(repeats):
        detections, truth, ranks = simulated(rng, images)
        scores = score_boxes(detections=detections, ground_truth=truth)
        found = fgovd_intervals(
            scores,
            detections=detections,
            ground_truth=truth,
            ranks=ranks,
            object_images=truth.image,
            resamples=resamples,
            seed=r,
        )
        for j, (name, known) in enumerate((("map", 0.5), ("rank_mean", 1.5))):
            inside[r, j] = found[name].low <= known <= found[name].high
    return inside.mean(0)


def test_coverage_in_short():
    assert (coverage(40, 60, 200) > 0.8).all()


@pytest.mark.slow
def test_coverage_of_a_known_truth():
    """95 % within 3 sigma of 200 repeats."""
    share = coverage(200, 150, 1000)
    print(f"coverage of mAP {share[0]:.3f}, of the mean rank {share[1]:.3f}")
    assert (np.abs(share - 0.95) < 3 * (0.95 * 0.05 / 200) ** 0.5).all()
