"""W&B (offline) and TensorBoard: what a run and each job of a sweep leave there."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from noctowl import outputs, run
from noctowl.eval.predictions import Predictions
from noctowl.loggers import read_rows
from noctowl.pictures import SIDE
from noctowl.report.gallery import pictures
from noctowl.report.runs import load_runs
from tests.wandb_file import read_wandb


def of_wandb(folder: Path) -> dict:
    """The one W&B file of a run folder; W&B's own process completes it a moment after the run has ended."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    for _ in range(100):
        if (found := read_wandb(path))["exit"] is not None:
            break
        time.sleep(0.1)
    return found | {"media": sorted((path.parent / "files" / "media" / "images").rglob("*.*"))}


@pytest.mark.parametrize("together", ["true", "false"])
def test_each_job_of_a_sweep_has_its_own_run(small, command, tmp_path, monkeypatch, together):
    """Side by side and one after the other: own id, figures and pictures; the job that fails ends with exit code 1."""
    complete = run._complete

    def fails(job, steps):
        if job.tree["loss"]["name"] == "bce":
            raise RuntimeError("out of luck")
        return complete(job, steps)

    monkeypatch.setattr(run, "_complete", fails)
    monkeypatch.setattr(outputs, "PANELS", 8)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    options = ["data.coarse_val_file=lvis/coarse_val.json", "benchmark.intervals=0", f"together={together}"]
    called = command("train", *small, *options, "logger=wandb", f"output_dir={tmp_path}", "loss=bce,triplet", "-m")
    assert called.code == 2
    assert "RuntimeError: out of luck" in called.err
    sweep = next((tmp_path / "default").glob("sweep-*"))
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "finished"]
    assert 'raise RuntimeError("out of luck")' in jobs[0]["error"]
    folders = [Path(job["folder"]) for job in jobs]
    failed, finished = (of_wandb(folder) for folder in folders)
    assert [failed["exit"], finished["exit"]] == [1, 0]
    for folder, found in zip(folders, (failed, finished)):
        assert found["id"] == (folder / "wandb_id.txt").read_text().strip()
        assert (found["name"], found["group"]) == (f"default/{folder.name}", sweep.name)
        before, after = [row for row in read_rows(folder / "metrics.csv") if "val/map" in row]
        assert (before["epoch"], after["epoch"]) == ("-1", "0")
        for key in ("map", "lvis_ap"):
            assert [float(v) for v in found["history"][f"val/{key}"]] == [float(after[f"val/{key}"])]
            assert [float(v) for v in found["history"][f"pretrained/{key}"]] == [float(before[f"val/{key}"])]
    assert failed["id"] != finished["id"]
    assert failed["media"] == []
    results = json.loads((folders[1] / "results.json").read_text())["metrics"]
    assert {k: float(v[0]) for k, v in finished["history"].items() if k.startswith("test/")} == {
        f"test/{key}": pytest.approx(value) for key, value in results.items()
    }
    kinds = Counter(path.parent.name for path in finished["media"])
    assert kinds["images"] == 1  # the trade-off
    assert len(Predictions.load(folders[1] / "predictions" / "hard.npz")) > 8
    wanted, _ = pictures(load_runs([folders[1]])[0], count=2, drawn=4)
    assert kinds["predictions"] == len(wanted) == sum(kinds.values()) - 1 <= 8
    assert {path.suffix for path in finished["media"]} == {".jpg"}
    assert {Image.open(path).width for path in finished["media"] if path.parent.name == "predictions"} == {2 * SIDE + 8}
    for kind, number in Counter(picture.kind for picture in wanted).items():
        assert finished["history"][f"predictions/{kind}/count"] == [str(number)]
        captions = json.loads(finished["history"][f"predictions/{kind}/captions"][0])
        shown = [p for p in wanted if p.kind == kind]
        assert captions == [f"hard N=5: {p.truth} -> {p.predicted}{'' if p.correct else ' (wrong)'}" for p in shown]
    assert [sum(p.kind == kind for p in wanted) for kind in ("drawn", "worst")] == [4, 2]


def test_no_more_than_64_panels():
    """A half drawn, a quarter worst, a quarter best."""
    assert outputs.PANELS == 64


def test_tensorboard(small, command):
    """Figures of training, validation and test."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["benchmark.intervals=0", "trainer.log_every_n_steps=1", "trainer.max_epochs=2"]
    called = command("train", *small, "logger=tensorboard", *options)
    assert called.code == 0, called.err
    events = EventAccumulator(str(called.folder / "tensorboard"))
    events.Reload()
    rows = read_rows(called.folder / "metrics.csv")
    totals = [float(row["train/total_step"]) for row in rows if "train/total_step" in row]
    assert [event.value for event in events.Scalars("train/total_step")] == pytest.approx(totals, rel=1e-6)
    assert len(totals) == called.results["counts"]["steps"] > 1
    for key, value in called.results["metrics"].items():
        assert events.Scalars(f"test/{key}")[-1].value == pytest.approx(value, rel=1e-6)
