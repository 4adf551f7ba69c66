"""The commands from end to end: real images, every loss, the run folder, evaluation of what a run left."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from noctowl.eval.predictions import Predictions
from noctowl.model import TRAINABLE
from noctowl.module import PREFIX

BENCHMARKS = {"hard": 5, "medium": 5, "easy": 5, "trivial": 5, "pattern": 2, "transparency": 2}
FILES = ("config.yaml", "overrides.yaml", "env.txt", "metrics.csv", "results.json", "checkpoints/best.safetensors")
FIGURES = r"(map|map_50|map_75|map_small|map_medium|map_large|mar_\w+|rank_mean|rank_median)"
KEY = re.compile(rf"fgovd/({'|'.join(BENCHMARKS)})/n\d+/((masked/)?{FIGURES})")


@pytest.fixture(scope="module")
def real(coco_mini, command):
    """Two epochs of the miniature on real photographs, as the README has it for a user's own COCO folder."""
    called = command(
        "train",
        "model=tiny",
        "model.source=tiny",
        "model.weights=random",
        "data=fgovd",
        f"data.root={coco_mini}",
        "data.train_file=benchmarks/1_attributes.json",
        "data.val_file=benchmarks/1_attributes.json",
        "trainer.max_epochs=2",
        "trainer.log_every_n_steps=1",
    )
    assert called.code == 0, called.err
    return called


def test_the_run_folder_holds_what_it_should(real):
    folder = real.folder
    assert not [name for name in FILES if not (folder / name).is_file()]
    assert {p.stem for p in (folder / "predictions").glob("*.npz")} == {*BENCHMARKS, "token_lengths"}
    exported = {p.name for p in (folder / "export").iterdir()}
    assert exported >= {"model.safetensors", "config.json", "tokenizer.json", "README.md", "provenance.json"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    assert "trainer.max_epochs=2" in yaml.safe_load((folder / "overrides.yaml").read_text())
    assert not list(folder.rglob("*.part"))


def test_results_are_flat_and_complete(real):
    results = real.results
    assert list(results) == ["version", "metrics", "intervals", "controls", "settings", "counts", "provenance"]
    assert set(results["metrics"]) == {key for key in results["intervals"] if key in results["metrics"]}
    assert "fgovd/hard/n5/head_prior/top1" in results["controls"]
    metrics = results["metrics"]
    assert not [key for key in metrics if not KEY.fullmatch(key)]
    for name, n in BENCHMARKS.items():
        for figure in ("map", "map_50", "map_75", "masked/map", "rank_mean", "rank_median"):
            assert f"fgovd/{name}/n{n}/{figure}" in metrics
        assert 1 <= metrics[f"fgovd/{name}/n{n}/rank_mean"] <= n + 1
    assert all(0 <= v <= 1 for k, v in metrics.items() if "/map" in k or "/mar" in k)
    assert "fgovd/transparency/n2/map_large" not in metrics  # it has no object of that size
    counts = results["counts"]
    assert counts["fgovd/hard"]["n5"]["objects"] + counts["fgovd/hard"]["n5"]["objects_dropped_tokens"] == 83
    trained = counts["training"]["vocabularies_trained"]
    settings = yaml.safe_load((real.folder / "config.yaml").read_text())["trainer"]
    batches = -(-trained // settings["batch_size"])
    assert counts["steps"] == 2 * -(-batches * settings["batch_size"] // settings["effective_batch_size"])
    assert counts["coarse_names"]["count"] == 1203
    origin = results["provenance"]
    assert origin["base"] == "tiny (random weights, seed 123)"
    assert origin["processor"]["pad_value"] == 0.0
    assert set(origin["annotations"]) == set(BENCHMARKS)
    assert origin["versions"]["torch"] == torch.__version__.split("+")[0]


def test_each_image_is_encoded_once(real):
    """Training, validation and six benchmarks share one pass of the vision tower."""
    folder = real.folder
    seen = {int(i) for name in BENCHMARKS for i in Predictions.load(folder / "predictions" / f"{name}.npz").image_ids}
    forwards = real.results["counts"]["forwards"]
    assert forwards["encoded_before"] + forwards["image_forwards"] == len(seen) == forwards["images"]


def test_metrics_csv_tells_the_training(real):
    with (real.folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for term in ("class", "background", "distillation", "total"):
        values = [float(row[f"train/{term}_step"]) for row in rows if row.get(f"train/{term}_step")]
        assert len(values) >= 2
        assert np.isfinite(values).all()
    for key in ("train/grad_norm", "train/lr", "train/data_wait_step", "val/map"):
        assert [row[key] for row in rows if row.get(key)], key
    rates = [float(row["train/lr"]) for row in rows if row.get("train/lr")]
    assert rates == pytest.approx([1e-3] * len(rates), rel=1e-6)


def test_the_last_checkpoint_is_small_and_plain(real):
    stored = torch.load(real.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {PREFIX + name for name in TRAINABLE}
    assert stored["noctowl"]["base_sha256"] == real.results["provenance"]["base_sha256"]
    selection = next(v for k, v in stored["callbacks"].items() if k.startswith("Selection"))
    assert [entry["epoch"] for entry in selection["history"]][-2:] == [0, 1]


def test_the_head_moved(real):
    exported = load_file(real.folder / "export" / "model.safetensors")
    best = load_file(real.folder / "checkpoints" / "best.safetensors")
    assert set(best) == set(TRAINABLE)
    assert all(torch.equal(exported[name], value) for name, value in best.items())


@pytest.mark.export
@pytest.mark.parametrize("source", ["checkpoint", "export", "predictions"])
def test_a_run_evaluates_to_its_own_figures(real, command, source):
    """From the run, from its export, from its saved predictions: metrics as in training."""
    what = {"checkpoint": "checkpoint={}", "export": "checkpoint={}/export", "predictions": "predictions={}"}[source]
    called = command("evaluate", what.format(real.folder))
    assert called.code == 0, called.err
    found, wanted = called.results["metrics"], real.results["metrics"]
    assert found == pytest.approx(wanted, abs=1e-6)
    assert found.keys() == wanted.keys()
    if source == "predictions":
        assert found == wanted
        return
    forwards = called.results["counts"]["forwards"]
    assert forwards["image_forwards"] + forwards["encoded_before"] == real.results["counts"]["forwards"]["images"]
    for name in BENCHMARKS:
        first, second = (Predictions.load(f / "predictions" / f"{name}.npz") for f in (real.folder, called.folder))
        assert first.keys() == second.keys()
        np.testing.assert_allclose(second.logits, first.logits, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(second.boxes, first.boxes, rtol=0, atol=1e-4)


def test_saved_predictions_of_some_benchmarks_and_another_convention(real, command):
    options = ["benchmark.names=[hard]", "benchmark.ground_truth=masked"]
    metrics = command("evaluate", f"predictions={real.folder}/predictions", *options).results["metrics"]
    assert {key.split("/")[1] for key in metrics} == {"hard"}
    assert metrics["fgovd/hard/n5/map"] == real.results["metrics"]["fgovd/hard/n5/masked/map"]


def test_a_key_of_the_command_line_goes_on_top_of_the_runs_own(real, command):
    """data.token_policy=truncate: the run's data otherwise, and no vocabulary is left out."""
    called = command("evaluate", f"checkpoint={real.folder}", "data.token_policy=truncate", "benchmark.names=[hard]")
    assert called.code == 0, called.err
    assert called.results["counts"]["fgovd/hard"]["n5"]["objects_dropped_tokens"] == 0
    assert called.results["counts"]["fgovd/hard"]["n5"]["objects"] == 83
    assert called.results["settings"]["data"]["name"] == "fgovd"


# Seconds each, on the rendered world


@pytest.mark.parametrize(
    ("loss", "distill", "compat"),
    [
        ("triplet", "none", "training"),
        ("triplet", "mse", "clean"),
        ("cross_entropy", "mse", "published"),
        ("cross_entropy", "ce", "clean"),
        ("bce", "ce", "training"),
    ],
)
def test_every_loss_runs(small, command, loss, distill, compat):
    options = [f"loss={loss}", f"distill={distill}", f"compat={compat}", "selection.every_n_epochs=0", "test=false"]
    called = command("train", *small, *options, "trainer.log_every_n_steps=1")
    assert called.code == 0, called.err
    with (called.folder / "metrics.csv").open() as file:
        totals = [float(row["train/total_step"]) for row in csv.DictReader(file) if row.get("train/total_step")]
    assert np.isfinite(totals).all()
    assert called.results["counts"]["selection"]["epoch"] == 0


def test_the_same_seed_gives_the_same_head(small, command):
    heads = [
        load_file(command("train", *small, f"seed={seed}", "test=false").folder / "checkpoints" / "best.safetensors")
        for seed in (5, 5, 6)
    ]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in TRAINABLE)
    assert not torch.equal(heads[0][TRAINABLE[0]], heads[2][TRAINABLE[0]])


def test_jobs_of_a_sweep_train_as_they_would_alone(small, command, tmp_path):
    """They share what is frozen, not the head; each has its own folder."""
    swept = command("train", *small, f"output_dir={tmp_path}", "loss=bce,triplet", "seed=5", "test=false", "-m")
    assert swept.code == 0, swept.err
    found = {}
    for folder in (tmp_path / "default").glob("*-*/checkpoints"):
        settings = yaml.safe_load((folder.parent / "config.yaml").read_text())
        found[settings["loss"]["name"]] = load_file(folder / "best.safetensors")
    assert set(found) == {"bce", "triplet"}
    for loss, head in found.items():
        alone = command("train", *small, f"loss={loss}", "seed=5", "test=false").folder
        wanted = load_file(alone / "checkpoints" / "best.safetensors")
        assert all(torch.equal(head[name], wanted[name]) for name in TRAINABLE)


def test_nothing_is_kept_where_the_published_rule_keeps_nothing(small, command, monkeypatch):
    monkeypatch.setattr("noctowl.run.validation_figures", lambda metrics: {"map": 0.0})
    called = command("train", *small, "compat=published")
    assert called.code == 2
    assert "no epoch was kept" in called.err
    assert "compat=training" in called.err


def test_four_images_are_learnt(small, command, tmp_path, world):
    """Overfitting: four images, no background term's trade-off; the triplet loss falls from its margin to near 0."""
    source = json.loads((world / "annotations" / "training_sets" / "1_attributes.json").read_text())
    ids = {image["id"] for image in source["images"][:4]}
    few = {**source, "annotations": [a for a in source["annotations"] if a["image_id"] in ids]}
    few["images"] = [image for image in source["images"] if image["id"] in ids]
    file = tmp_path / "four.json"
    file.write_text(json.dumps(few))
    options = [f"data.train_file={file}", "trainer.max_epochs=60", "distill=none", "selection.every_n_epochs=0"]
    options += ["optimizer.lr=3e-3", "test=false", "trainer.log_every_n_steps=1"]
    options += ["trainer.batch_size=8", "trainer.effective_batch_size=8"]
    called = command("train", *small, *options)
    assert called.code == 0, called.err
    with (called.folder / "metrics.csv").open() as file:
        losses = [float(row["train/class_epoch"]) for row in csv.DictReader(file) if row.get("train/class_epoch")]
    assert losses[0] > 0.1
    assert losses[-1] < 0.03


def test_weights_and_biases_offline(small, command, monkeypatch):
    """A file to upload later; continuing the run keeps its id."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    called = command("train", *small, "logger=wandb", "test=false")
    assert called.code == 0, called.err
    runs = list((called.folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    for _ in range(100):  # W&B's own process writes it a moment after the run has ended
        if runs[0].stat().st_size > 1000:
            break
        time.sleep(0.1)
    assert runs[0].stat().st_size > 1000
    known = (called.folder / "wandb_id.txt").read_text().strip()
    assert runs[0].name == f"run-{known}.wandb"
    assert command("train", f"resume={called.folder}", "trainer.max_epochs=2").code == 0
    runs = list((called.folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {run.name for run in runs} == {f"run-{known}.wandb"}
    assert (called.folder / "wandb_id.txt").read_text().strip() == known


def test_an_average_is_exported(small, command):
    called = command("train", *small, "ema.decay=0.5", "test=false")
    assert called.code == 0, called.err
    best = load_file(called.folder / "checkpoints" / "best.safetensors")
    last = torch.load(called.folder / "checkpoints" / "last.ckpt", weights_only=True)
    average = next(v for k, v in last["callbacks"].items() if k.startswith("HeadEma"))
    assert torch.equal(best[TRAINABLE[0]], average["weight"])
    assert not torch.equal(best[TRAINABLE[0]], last["state_dict"][PREFIX + TRAINABLE[0]])


def test_a_filled_folder_is_refused(small, command, tmp_path):
    (tmp_path / "mine").write_text("mine")
    called = command("train", *small, f"run_dir={tmp_path}")
    assert called.code == 2
    assert "exists and is not empty" in called.err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("entry", ["train", "evaluate"])
def test_a_start_that_fails_leaves_no_folder(command, tmp_path, entry):
    """What is wrong with the data is found before anything but the settings is written."""
    wrong = [f"output_dir={tmp_path / 'out'}", "data=fgovd", f"data.root={tmp_path / 'nowhere'}"]
    called = command(entry, *wrong)
    assert called.code == 2
    assert "nowhere" in called.err
    assert [path for path in tmp_path.rglob("*") if path.name not in ("out", "default", "evaluate")] == []
    called = command(entry, *wrong, f"run_dir={tmp_path / 'mine'}")
    assert called.code == 2
    assert not (tmp_path / "mine").exists()


@pytest.mark.ddp
@pytest.mark.timeout(240)
def test_two_processes(small, tmp_path):
    """Two processes, gloo, no search for unused parameters: one folder, each image seen by one of them."""
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_workers=0", "trainer.batch_size=4"]
    options += ["trainer.effective_batch_size=8", "trainer.progress=false", f"run_dir={tmp_path / 'run'}"]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(root / "train.py"), *small, *options]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == f"results: {tmp_path / 'run' / 'results.json'}"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    images = {int(i) for i in Predictions.load(tmp_path / "run" / "predictions" / "hard.npz").image_ids}
    assert results["counts"]["forwards"]["images"] == len(images)
    share = -(-results["counts"]["training"]["vocabularies_trained"] // 2)  # of each process
    assert results["counts"]["steps"] == -(-share // 4)
    assert not list((tmp_path / "run" / "predictions").glob("part*"))
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
