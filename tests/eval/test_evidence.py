"""Intervals, controls and analyses beside the figures of a whole evaluation."""

import json

import numpy as np
import pytest

from noctowl.boxes import from_frame
from noctowl.eval import blind
from noctowl.eval.bootstrap import image_weights, mean_interval
from noctowl.eval.controls import shuffled_rows
from noctowl.eval.evidence import CHEAP, SHUFFLED, TEXT_ONLY, Asked
from noctowl.eval.suite import score_all
from noctowl.features import store
from tests.eval.test_inference import WORK, make_suite
from tests.eval.test_suite import CONVENTIONS

EVERYTHING = (*CHEAP, "shuffled")


@pytest.fixture(scope="module")
def real(fresh_detector, coco_mini, tmp_path_factory):
    """Hard and transparency of the real images with every control, N = 0, 1 and 2."""
    detector = fresh_detector()
    suite = make_suite(coco_mini, detector, ["hard", "transparency"], (0, 1, 2))
    suite.asked = Asked(controls=EVERYTHING, intervals=50)
    outcome = suite.predict(detector, tmp_path_factory.mktemp("exchange"), **WORK)
    return suite, detector, outcome, suite.score(outcome, CONVENTIONS, detector=detector)


def test_figures_are_those_of_an_evaluation_without_evidence(real):
    suite, _, outcome, scored = real
    plain = suite.score(outcome, CONVENTIONS)
    assert scored["metrics"] == plain["metrics"]
    assert scored["counts"] == plain["counts"]
    assert scored["ranks"] == plain["ranks"]
    assert "intervals" not in plain


def test_every_figure_has_an_interval_that_is_in_order(real):
    scored = real[-1]
    assert set(scored["metrics"]) <= set(scored["intervals"])
    assert set(scored["intervals"]) <= set(scored["metrics"]) | set(scored["controls"])
    assert all(low <= high for low, high in scored["intervals"].values())
    wide = scored["intervals"]["fgovd/hard/n2/oracle/rank_mean"]
    assert wide[0] < scored["controls"]["fgovd/hard/n2/oracle/rank_mean"] < wide[1]
    assert json.loads(json.dumps(scored["evidence"], allow_nan=False)) == scored["evidence"]


def test_every_control_is_there(real):
    controls = real[-1]["controls"]
    for name in EVERYTHING:
        assert 0 <= controls[f"fgovd/hard/n2/{name}/top1"] <= 1
        assert 1 <= controls[f"fgovd/hard/n2/{name}/rank_mean"] <= 3
    assert all(f"fgovd/hard/n2/{name}/oracle_map" in controls for name in TEXT_ONLY)
    assert controls["fgovd/hard/n2/chance/top1"] == pytest.approx(1 / 3)
    assert not any(key.startswith("fgovd/hard/n0/") for key in controls)  # one caption: nothing to choose


def test_the_gain_is_over_the_best_control(real):
    controls = real[-1]["controls"]
    base = "fgovd/hard/n2/"
    best = max(controls[f"{base}{name}/top1"] for name in TEXT_ONLY)
    assert controls[f"{base}visual_gain"] == pytest.approx(controls[f"{base}model/top1"] - best)
    ranks = list(real[-1]["ranks"]["hard"]["n2"].values())
    assert controls[f"{base}model/top1"] == pytest.approx(np.mean(np.array(ranks) == 1))
    table = real[-1]["evidence"]["hard"]["n2"]["gain"]
    assert sum(row["objects"] for kind, row in table.items() if kind != "all") == table["all"]["objects"] == len(ranks)


def test_units_give_the_figures_back(real):
    """Paired comparisons are over the very values that the figures are means of."""
    scored = real[-1]
    units = scored["evidence"]["hard"]["n2"]["units"]
    assert dict(zip(units["object"], units["rank"])) == scored["ranks"]["hard"]["n2"]
    assert np.mean(units["ap"]) == pytest.approx(scored["metrics"]["fgovd/hard/n2/map"], abs=1e-6)
    assert len(units["class"]) == len(units["class_image"])
    assert set(units["class_image"]) <= set(units["object_image"])


def test_controls_by_hand(real):
    """Blind top-1 and its interval, from the rankers and the bootstrap directly."""
    suite, _, _, scored = real
    file = suite.benchmarks["hard"].annotations
    inside = np.isin(file.object_ids, list(scored["ranks"]["hard"]["n2"]))
    kept = np.zeros(len(file), bool)
    kept[file.object_vocab[inside]] = True
    sets = blind.text_sets(file, 2, kept)
    values = np.repeat(blind.placed(blind.ngram_ranking(sets).scores)[0], sets.objects)
    images, column = np.unique(file.vocab_image[file.object_vocab[inside]], return_inverse=True)
    expected = mean_interval(values, column, image_weights(len(images), resamples=50, seed=0))
    assert scored["controls"]["fgovd/hard/n2/blind/top1"] == pytest.approx(expected.value)
    assert scored["intervals"]["fgovd/hard/n2/blind/top1"] == pytest.approx([expected.low, expected.high])


@pytest.mark.parametrize("control", ["oracle", "shuffled"])
def test_ranks_at_the_best_patch(real, control):
    """Over all patches of the right image, or of the one it was exchanged for, in the annotated image's frame."""
    suite, detector, _, scored = real
    bench, bank = suite.benchmarks["hard"], suite.bank
    file = bench.annotations
    features = store(detector, suite.images, **WORK)
    rows = bench.image_rows if control == "oracle" else shuffled_rows(bench.image_rows)
    ranks = []
    for a in np.flatnonzero(np.isin(file.object_ids, list(scored["ranks"]["hard"]["n2"]))):
        v = int(file.object_vocab[a])
        image = int(file.vocab_image[v])
        boxes = from_frame(features.boxes[rows[image]], *file.image_sizes[image].tolist(), detector.frame).numpy()
        low, high = (
            np.maximum(boxes[:, :2], file.object_boxes[a, :2]),
            np.minimum(boxes[:, 2:], file.object_boxes[a, 2:]),
        )
        inter = np.clip(high - low, 0, None).prod(1)
        overlap = inter / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + file.object_area[a] - inter)
        queries = bank.embeddings[bank.rows(file.captions.take(file.vocabulary(v)[:3]))]
        tokens = features.tokens[rows[image]][None]
        logits = detector.score(tokens, queries[None]).logits[0, overlap.argmax()].detach().numpy()
        ranks.append((logits >= logits[0]).sum())
    assert scored["controls"][f"fgovd/hard/n2/{control}/rank_mean"] == pytest.approx(np.mean(ranks))


def test_saved_predictions_give_the_controls_that_need_no_model(real, tmp_path):
    suite, _, outcome, scored = real
    outcome.save(tmp_path)
    again = type(outcome).load(tmp_path)
    assert f"hard{SHUFFLED}" in again.predictions
    files = {name: b.annotations for name, b in suite.benchmarks.items()}
    found = score_all(files, again, CONVENTIONS, lengths=suite.lengths, asked=suite.asked)
    for name in ("blind", "centroid", "oracle", "shuffled"):
        key = f"fgovd/transparency/n2/{name}/top1"
        assert found["controls"][key] == scored["controls"][key]
    assert "fgovd/hard/n2/head_prior/top1" not in found["controls"]


def test_one_image_and_no_image(fresh_detector, write_fgovd, fgovd, tmp_path):
    """One image: intervals are points, nothing is shuffled. No vocabulary within the limit: figures are absent."""
    from PIL import Image

    detector = fresh_detector()
    fgovd["annotations"] = [a for a in fgovd["annotations"] if a["image_id"] == 7]
    fgovd["images"] = [i for i in fgovd["images"] if i["id"] == 7]
    write_fgovd(fgovd)
    picture = tmp_path / "images" / "train2017" / "000000000007.jpg"
    picture.parent.mkdir(parents=True)
    Image.new("RGB", (64, 64), "red").save(picture)
    suite = make_suite(tmp_path, detector, ["hard"], (1,))
    suite.asked = Asked(controls=EVERYTHING, intervals=20)
    outcome = suite.predict(detector, tmp_path / "exchange", **WORK)
    scored = suite.score(outcome, CONVENTIONS, detector=detector)
    value = scored["metrics"]["fgovd/hard/n1/map"]
    assert scored["intervals"]["fgovd/hard/n1/map"] == [value, value]
    assert scored["controls"]["fgovd/hard/n1/blind/top1"] == 0.5  # nothing to learn from
    assert "fgovd/hard/n1/shuffled/top1" not in scored["controls"]
    lengths = {"hard": np.full(len(suite.benchmarks["hard"].annotations.captions), 99)}
    files = {"hard": suite.benchmarks["hard"].annotations}
    empty = score_all(files, outcome, CONVENTIONS, lengths=lengths, asked=suite.asked)
    assert empty["metrics"] == {} == empty["intervals"] == empty["controls"]
