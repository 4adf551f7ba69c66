"""Every row of eval_golden.jsonl and every edge case: figures of the published evaluation."""

import json

import numpy as np
import pytest

from noctowl.data.fgovd import read_fgovd
from noctowl.eval.fgovd import score
from noctowl.eval.predictions import Predictions
from noctowl.text import clip_tokenizer, token_lengths

pytestmark = pytest.mark.golden
TOLERANCE = 3e-8
THRESHOLDS = {"0.6.0": "float64", "1.9.0": "float32"}
BENCHES = ("3_attributes", "transparency")


@pytest.fixture(scope="module")
def material(shared, metric_cost):
    tokenizer = clip_tokenizer()
    found = {}
    for bench in BENCHES:
        annotations = read_fgovd(shared / "data/fgovd/benchmarks" / f"{bench}.json")
        predictions = metric_cost.golden_predictions(shared / "golden" / f"preds_{bench}.npz")
        found[bench] = annotations, predictions, token_lengths(tokenizer, list(annotations.captions))
    return found


@pytest.fixture(scope="module")
def rows(shared):
    return [json.loads(line) for line in (shared / "golden/eval_golden.jsonl").read_text().splitlines()]


def figures_of(result, n):
    return {key.split("/")[1]: value for key, value in result["metrics"].items() if key.startswith(f"n{n}/")}


def assert_figures(figures, expected):
    names = [name for name in expected if name.startswith(("map", "mar")) and not name.endswith("per_class")]
    assert len(names) == 12
    for name in names:
        if expected[name] == -1:
            assert name not in figures
        else:
            assert figures[name] == pytest.approx(expected[name], abs=TOLERANCE), name


@pytest.mark.parametrize("number", range(17))
def test_row(number, rows, material):
    """noctowl_all was handed no predictions of the short vocabulary (transparency has one): it equals masked, drop."""
    assert len(rows) == 17
    row = rows[number]
    annotations, predictions, lengths = material[row["bench"]]
    n = row["N"]
    result = score(
        annotations,
        predictions,
        n_negatives=[n],
        lengths=lengths if row["token_filter"] else None,
        ground_truth="unmasked" if row["which"] == "noctowl" else "masked",
        recall_thresholds=THRESHOLDS[row["torchmetrics"]],
        published_median=True,
    )
    figures, counts, expected = figures_of(result, n), result["counts"][f"n{n}"], row["result"]
    assert counts["vocabularies"] == row["n_vocabularies"]
    assert counts["images"] == row["n_pred_images"]
    if row["which"] != "ranks":
        assert_figures(figures, expected)
        return
    assert figures["rank_mean"] == pytest.approx(expected["medium"], abs=1e-12)
    assert figures["rank_median"] == expected["median"]
    assert result["ranks"][f"n{n}"] == dict(expected["per_annotation"])
    assert counts["objects"] == expected["n"]


def test_many_n_in_one_call_and_forced_misses(material, shared):
    annotations, predictions, lengths = material["3_attributes"]
    together = score(annotations, predictions, n_negatives=range(11), lengths=lengths)
    subset = json.loads((shared / "golden/owl_subset.json").read_text())["benchmarks/3_attributes"]["owl_subset_by_N"]
    for n in range(11):
        counts, expected = together["counts"][f"n{n}"], subset[str(n)]
        assert counts["objects_forced_missed"] == expected["forced_fn_objects"]
        assert counts["objects_scored"] == expected["objects"] + expected["forced_fn_objects"]
        assert counts["objects"] + counts["objects_dropped_tokens"] + counts["objects_dropped_short"] == 1299
    alone = score(annotations, predictions, n_negatives=[7], lengths=lengths)
    assert figures_of(alone, 7) == figures_of(together, 7)


def test_edge_cases(shared, tmp_path):
    """Seven hand-made files. There a vocabulary without predictions is one that could not be processed."""
    cases = json.loads((shared / "golden/edge_cases.json").read_text())
    assert len(cases) == 7
    for name, case in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(case["gt"]))
        annotations = read_fgovd(path)
        predictions = predictions_of(case)
        predicted = {key[1] for key in predictions.keys()}  # noqa: SIM118
        over = [
            k not in predicted and k in set(annotations.positive_ids.tolist())
            for k in annotations.category_ids.tolist()
        ]
        lengths = np.where(over, 17, 5)
        for version, kind in THRESHOLDS.items():
            result = score(
                annotations,
                predictions,
                n_negatives=[case["n_neg"]],
                lengths=lengths,
                recall_thresholds=kind,
                published_median=True,
            )
            figures = figures_of(result, case["n_neg"])
            assert_figures(figures, case[f"torchmetrics_{version}"])
            ranks = case["ranks"]
            assert result["ranks"][f"n{case['n_neg']}"] == dict(zip(ranks["annotation_ids"], ranks["positions"])), name
            assert figures["rank_mean"] == ranks["medium"]
            assert figures.get("rank_median") == ranks.get("median")


def predictions_of(case) -> Predictions:
    image = {entry["file_name"]: entry["id"] for entry in case["gt"]["images"]}
    parts = []
    for entry in case["preds"]:
        logits = np.array(entry["total_scores"], np.float32)
        best = logits.argmax(1)
        for row, (label, value) in enumerate(zip(entry["labels"], entry["scores"])):
            column = entry["vocabulary"].index(label)  # in ties the file names the column that counts
            assert logits[row, column] == pytest.approx(value) == pytest.approx(logits[row, best[row]])
        parts.append((image[entry["image_filepath"]], entry["category_id"], np.array(entry["boxes"]), logits))
    return Predictions.from_parts(parts, n_negatives=[case["n_neg"]])
