"""A whole evaluation: both ground-truth conventions, N that no vocabulary has, scores from saved predictions."""

import json

import numpy as np
import pytest
import torch

from noctowl.data.fgovd import read_fgovd
from noctowl.errors import DataError
from noctowl.eval import fgovd
from noctowl.eval.outcome import Outcome, load_lengths, save_lengths
from noctowl.eval.suite import Suite, default_negatives, score_all
from tests.eval.test_inference import WORK, make_suite

CONVENTIONS = {
    "ground_truth": "unmasked",
    "short_vocabularies": "drop",
    "nms_iou": 0.5,
    "top": 10,
    "published_median": False,
}


@pytest.fixture(scope="module")
def real(fresh_detector, coco_mini, tmp_path_factory) -> tuple[Suite, Outcome]:
    """Hard and transparency of the real images, predicted once at N = 1 and 2."""
    detector = fresh_detector()
    suite = make_suite(coco_mini, detector, ["hard", "transparency"], (1, 2))
    return suite, suite.predict(detector, tmp_path_factory.mktemp("exchange"), **WORK)


def test_negatives_of_the_published_tables():
    names = ("hard", "medium", "easy", "trivial", "color", "material", "pattern", "transparency")
    assert [default_negatives(name) for name in names] == [(5,)] * 4 + [(2,)] * 4


def test_figures_of_both_conventions(real):
    """The chosen convention stands first, the other under its name; both are the scorer's own figures."""
    suite, outcome = real
    scored = suite.score(outcome, CONVENTIONS)
    metrics = scored["metrics"]
    file = suite.benchmarks["hard"].annotations
    for convention, prefix in (("unmasked", ""), ("masked", "masked/")):
        options = {**CONVENTIONS, "ground_truth": convention}
        lengths = suite.lengths["hard"]
        alone = fgovd.score(file, outcome.predictions["hard"], n_negatives=[1, 2], lengths=lengths, **options)
        for n in (1, 2):
            assert metrics[f"fgovd/hard/n{n}/{prefix}map"] == alone["metrics"][f"n{n}/map"]
    mirrored = suite.score(outcome, {**CONVENTIONS, "ground_truth": "masked"})["metrics"]
    assert mirrored["fgovd/hard/n2/map"] == metrics["fgovd/hard/n2/masked/map"]
    assert mirrored["fgovd/hard/n2/unmasked/map"] == metrics["fgovd/hard/n2/map"]
    assert "fgovd/hard/n2/masked/rank_mean" not in metrics  # ranks do not hang on the convention
    assert {key.split("/")[2] for key in metrics} == {"n1", "n2"}


def test_counts_add_up(real):
    suite, outcome = real
    counts = suite.score(outcome, CONVENTIONS)["counts"]["fgovd/hard"]
    for n in ("n1", "n2"):
        found = counts[n]
        assert found["vocabularies"] + found["vocabularies_dropped_short"] + found["vocabularies_dropped_tokens"] == 47
        assert found["objects"] + found["objects_dropped_short"] + found["objects_dropped_tokens"] == 83
        assert found["masked"] == {"objects_scored": found["objects"], "objects_forced_missed": 0}
        forced = found["unmasked"]["objects_forced_missed"]
        assert found["unmasked"]["objects_scored"] == found["objects"] + forced
    assert counts["n2"]["vocabularies"] <= counts["n1"]["vocabularies"]


def test_saved_predictions_score_the_same(real, tmp_path):
    suite, outcome = real
    outcome.save(tmp_path)
    save_lengths(tmp_path, suite.lengths)
    again, lengths = Outcome.load(tmp_path), load_lengths(tmp_path)
    assert again.counters == outcome.counters
    for name, predictions in outcome.predictions.items():
        loaded = again.predictions[name]
        assert np.array_equal(loaded.logits, predictions.logits)
        assert np.array_equal(loaded.boxes, predictions.boxes)
        assert loaded.keys() == predictions.keys()
    files = {name: read_fgovd(b.annotations.path) for name, b in suite.benchmarks.items()}
    first = suite.score(outcome, CONVENTIONS)
    assert score_all(files, again, CONVENTIONS, lengths=lengths) == first
    only = score_all(files, again, CONVENTIONS, lengths=lengths, n_negatives=[1])["metrics"]
    assert only == {k: v for k, v in first["metrics"].items() if k.split("/")[2] == "n1"}


def test_parts_of_two_processes_are_one(real):
    """Vocabularies split over two parts, one of them in both, score as the whole does."""
    suite, outcome = real
    from noctowl.eval.predictions import Predictions

    def part(rows: list[int]) -> Outcome:
        predictions = {}
        for name, whole in outcome.predictions.items():
            chosen = [v for v in range(len(whole)) if v % 3 in rows]
            cut = [slice(*whole.row_offsets[v : v + 2]) for v in chosen]
            predictions[name] = Predictions.from_parts(
                [(*whole.keys()[v], whole.boxes[s], whole.logits[s]) for v, s in zip(chosen, cut)],
                n_negatives=whole.n_negatives,
                top=whole.top,
                settings=whole.settings,
            )
        return Outcome(predictions, None, {"image_forwards": 2, "vocabularies": 3})

    merged = Outcome.merge([part([0, 1]), part([1, 2])])
    assert merged.counters == {"image_forwards": 4, "vocabularies": 6}
    assert suite.score(merged, CONVENTIONS)["metrics"] == suite.score(outcome, CONVENTIONS)["metrics"]


def test_predictions_of_another_file_are_refused(real):
    suite, outcome = real
    files = {"hard": suite.benchmarks["transparency"].annotations}
    only = Outcome({"hard": outcome.predictions["hard"]}, None, {})
    with pytest.raises(DataError, match=r"hard: the predictions were made for another version of .*transparency.json"):
        score_all(files, only, CONVENTIONS, lengths={"hard": None})


def test_more_negatives_than_any_vocabulary_has(fresh_detector, coco_mini):
    """An N that a file cannot serve is left out; where none is left it is an error."""
    with pytest.raises(DataError, match=r"transparency.json: N = 7 negatives asked, no vocabulary has more than 2"):
        make_suite(coco_mini, fresh_detector(), ["transparency"], (7,))
    suite = make_suite(coco_mini, fresh_detector(), ["hard", "transparency"], (2, 7))
    assert suite.benchmarks["hard"].n_negatives == (2, 7)
    assert suite.benchmarks["transparency"].n_negatives == (2,)


def test_short_vocabularies_can_be_kept(fresh_detector, coco_mini, tmp_path):
    """Asked with N = 7, vocabularies of two negatives are asked with what they have."""
    detector = fresh_detector()
    suite = make_suite(coco_mini, detector, ["transparency"], (2, 7), short_vocabularies="keep")
    outcome = suite.predict(detector, tmp_path, **WORK)
    metrics = suite.score(outcome, {**CONVENTIONS, "short_vocabularies": "keep"})["metrics"]
    for figure in ("map", "map_50", "map_75"):
        assert metrics[f"fgovd/transparency/n7/{figure}"] == metrics[f"fgovd/transparency/n2/{figure}"]


def test_absent_figures_are_absent(real):
    """No figure is -1 or NaN, and a size without objects has no figure."""
    suite, outcome = real
    metrics = suite.score(outcome, CONVENTIONS)["metrics"]
    assert all(0 <= value <= 1 for key, value in metrics.items() if "/map" in key)
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    area = suite.benchmarks["transparency"].annotations.object_area
    for bin_, exists in (("small", (area < 32**2).any()), ("large", (area > 96**2).any())):
        if not exists:
            assert f"fgovd/transparency/n2/map_{bin_}" not in metrics


@pytest.mark.faults
def test_a_folder_without_predictions(tmp_path):
    with pytest.raises(DataError, match=r"holds no predictions"):
        Outcome.load(tmp_path)


def test_bf16_towers_are_near(fresh_detector, world, tmp_path):
    detector = fresh_detector()
    suite = make_suite(world, detector, ["hard"], (1,), short_vocabularies="keep")
    exact = suite.predict(detector, tmp_path, **WORK).predictions["hard"]
    mixed = suite.predict(detector, tmp_path, autocast=torch.bfloat16, **WORK).predictions["hard"]
    assert np.isfinite(mixed.logits[:, 0]).all()
    scores = [np.array([p.at(1, np.array([v])).scores[0] for v in range(len(p))]) for p in (exact, mixed)]
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=0.1)
    assert (scores[0] != scores[1]).any()
