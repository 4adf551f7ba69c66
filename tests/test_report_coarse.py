"""Coarse figures of several runs compared in their report: rows, seeds, and what is said where they cannot be."""

import csv
import json
import shutil

import numpy as np
import pytest
import yaml

from noctowl import cli
from noctowl.eval.ap import Detections
from noctowl.eval.compare import holm
from noctowl.eval.evidence import Asked
from noctowl.eval.lvis import read_lvis
from noctowl.eval.outcome import Outcome
from noctowl.eval.suite import score_all
from noctowl.report import build_report, load_runs
from noctowl.report.coarse_comparison import coarse_comparisons
from noctowl.runfolder import RESULTS_VERSION, write_json

FILE = "lvis/coarse_val.json"
NAMES = {"AP": "ap", "AP rare": "ap_rare", "AP common": "ap_common", "AP frequent": "ap_frequent"}


@pytest.fixture
def root(world, tmp_path):
    """The annotations of the rendered world alone, to be changed."""
    shutil.copytree(world / "annotations", tmp_path / "root" / "annotations")
    return tmp_path / "root"


@pytest.fixture
def make_run(root, tmp_path):
    """make_run("a", seed=0, wrong=.3): a finished run; a box on every object, so many of them of a wrong class."""

    def make(name, *, wrong, seed=0, **rules):
        file = read_lvis(root / "annotations" / FILE)
        rng = np.random.default_rng(seed)
        objects = file.objects
        n = len(objects.image)
        label = np.where(rng.random(n) < wrong, rng.permutation(objects.label), objects.label)
        found = Detections(objects.image, label, objects.boxes.astype(np.float32), rng.random(n).astype(np.float32))
        settings = {"file": file.path.name, "sha256": file.sha256, "protocol": "owl", "nms_iou": None, "top": 300}
        outcome = Outcome({}, found, {}, settings | rules)
        scored = score_all(
            {}, outcome, {"ground_truth": "unmasked"}, lengths={}, coarse=file, asked=Asked(intervals=50)
        )
        folder = tmp_path / "runs" / f"{name}-{seed}"
        outcome.save(folder / "predictions")
        data = {"name": "fgovd", "root": str(root), "images": None, "annotations": None, "coarse_file": FILE}
        config = {"name": name, "seed": seed, "data": data, "loss": {"name": "triplet", "wrong": wrong}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        results = {
            "version": RESULTS_VERSION,
            **{key: scored[key] for key in ("metrics", "intervals", "controls", "counts")},
            "settings": {"ground_truth": "unmasked", "data": data, "seed": seed, "coarse": scored["coarse"]},
            "provenance": {"annotations": {"lvis": {"file": file.path.name, "sha256": file.sha256}}},
        }
        write_json(folder / "results.json", results)
        return folder

    return make


def rows_of(table):
    return [dict(zip(table.columns, row)) for row in table.rows]


def test_three_runs(make_run, tmp_path):
    """Rows of every pair and figure, in all forms; figures are those that the runs have; Holm over this table."""
    folders = [make_run("good", wrong=0.0), make_run("same", wrong=0.0), make_run("bad", wrong=1.0)]
    runs = load_runs(folders)
    table, unable = coarse_comparisons(runs)
    assert unable == []
    rows = rows_of(table)
    assert [(row["a"], row["b"]) for row in rows[::4]] == [("good", "same"), ("good", "bad"), ("same", "bad")]
    assert [row["figure"] for row in rows] == list(NAMES) * 3
    metrics = {run.label: run.metrics for run in runs}
    for row in rows:
        a, b = (metrics[row[side]][f"lvis/{NAMES[row['figure']]}"] for side in "ab")
        assert (row["mean a"].value, row["mean b"].value) == pytest.approx((a, b), abs=1e-9)
        assert row["a − b"].value == pytest.approx(a - b, abs=1e-9)
        assert row["a − b"].bounds[0] <= a - b <= row["a − b"].bounds[1]
    assert [(row["a − b"].value, row["p"].value, row["permutations"]) for row in rows[:4]] == [(0, 1, 100)] * 4
    assert rows[4]["p"].value < 0.1
    assert rows[4]["permutations"] == 600  # 50 for each of 12 rows
    assert [row["p (Holm)"].value for row in rows] == pytest.approx(holm([row["p"].value for row in rows]))
    assert "600 at most" in table.note
    out = tmp_path / "out"
    assert cli.main(["report", *map(str, folders), "--out", str(out)]) == 0
    written = list(csv.DictReader((out / "report" / "comparison-coarse.csv").open()))
    assert [row["figure"] for row in written] == list(NAMES) * 3
    assert float(written[4]["a − b"]) == pytest.approx(rows[4]["a − b"].value, rel=1e-5)
    assert float(written[4]["a − b low"]) == pytest.approx(rows[4]["a − b"].bounds[0], rel=1e-5)
    assert (out / "report" / "comparison-coarse.tex").read_text().count("AP rare & ") == 3
    assert "Paired comparison, coarse" in (out / "report.md").read_text()
    assert 'id="comparison-coarse"' in (out / "report.html").read_text()


def test_seeds_are_averaged(make_run):
    folders = [make_run("x", wrong=0.3, seed=0), make_run("x", wrong=0.3, seed=1), make_run("y", wrong=0.9)]
    runs = load_runs(folders)
    rows = rows_of(coarse_comparisons(runs)[0])
    assert [(row["a"], row["b"]) for row in rows] == [("x (2 seeds)", "y, seed 0")] * 4
    for row in rows:
        seeds = [run.metrics[f"lvis/{NAMES[row['figure']]}"] for run in runs[:2]]
        assert row["mean a"].value == pytest.approx(np.mean(seeds), abs=1e-9)
    alone = rows_of(coarse_comparisons(runs[:2])[0])  # one configuration: its seeds with each other
    assert [(row["a"], row["b"]) for row in alone] == [("x, seed 0", "x, seed 1")] * 4
    assert coarse_comparisons(runs[:1]) == (None, [])


def test_more_than_four_configurations(make_run):
    table, _ = coarse_comparisons(load_runs([make_run(name, wrong=0.1 * i) for i, name in enumerate("abcde")]))
    assert [row[1:3] for row in table.rows[::4]] == [("a", name) for name in "bcde"]
    assert "with the first one only" in table.note


def test_unlike_rules_and_lacking_detections(make_run):
    folders = [make_run("a", wrong=0.5), make_run("b", wrong=0.5, nms_iou=0.5), make_run("c", wrong=0.1)]
    folders.append(make_run("d", wrong=0.1))
    (folders[3] / "predictions" / "coarse.npz").unlink()
    table, unable = coarse_comparisons(load_runs(folders))
    assert {row[1:3] for row in table.rows} == {("a", "c")}
    assert unable == [
        "coarse figures without their detections beside them are not compared: d",
        "coarse figures of other rules than a's are not compared: b (nms_iou)",
    ]


def test_file_that_has_gone_or_changed(make_run, root):
    runs = load_runs([make_run("a", wrong=0.5), make_run("b", wrong=0.1)])
    path = root / "annotations" / FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"info": "another version"}))
    assert coarse_comparisons(runs) == (
        None,
        [f"coarse figures are not compared: {path} is not the file that the runs were scored on"],
    )
    path.unlink()
    report = build_report(runs)
    assert not any(table.key.startswith("comparison") for table in report.tables())
    (said,) = [text for text in report.warnings if text.startswith("coarse figures are not compared: ")]
    assert "annotations are not where the runs had them" in said
    for run in runs:
        run.config["data"]["coarse_file"] = None
    assert "no configuration names a file" in coarse_comparisons(runs)[1][0]


def test_damaged_detections(make_run):
    runs = load_runs([make_run("a", wrong=0.5), make_run("b", wrong=0.1)])
    (runs[0].folder / "predictions" / "coarse.npz").write_bytes(b"PK")
    table, (said,) = coarse_comparisons(runs)
    assert table is None
    assert "coarse.npz: truncated" in said
