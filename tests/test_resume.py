"""Interrupted and continued runs: 2 + 2 epochs are 4, stops by signal lose nothing, other settings are refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from noctowl import runfolder
from noctowl.data.datamodule import DataModule
from noctowl.errors import DataError
from noctowl.export import read_head
from noctowl.loggers import read_rows
from noctowl.resume import read_checkpoint

pytestmark = pytest.mark.resume
ROOT = Path(__file__).parents[1]
STEPWISE = ["trainer.batch_size=4", "trainer.effective_batch_size=8", "trainer.log_every_n_steps=1", "test=false"]
TIMES = ("train/data_wait_step", "train/data_wait_epoch")


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without what depends on the clock, and without rows that hold nothing else."""
    kept = [{k: v for k, v in row.items() if k not in TIMES} for row in read_rows(folder / "metrics.csv")]
    return [row for row in kept if set(row) - {"epoch", "step"}]


def state(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def callback(stored: dict, name: str) -> dict:
    return next(v for k, v in stored["callbacks"].items() if k.startswith(name))


def assert_equal_runs(found: Path, wanted: Path) -> None:
    """Weights, optimiser, average, choice, the selected head and metrics.csv, bit by bit."""
    one, other = state(found), state(wanted)
    for name, value in other["state_dict"].items():
        assert torch.equal(one["state_dict"][name], value)
    assert one["global_step"] == other["global_step"]
    for key, value in other["optimizer_states"][0]["state"].items():
        for name, tensor in value.items():
            assert torch.equal(one["optimizer_states"][0]["state"][key][name], tensor)
    assert callback(one, "Selection") == callback(other, "Selection")
    for name, value in callback(other, "HeadEma").items():
        assert torch.equal(callback(one, "HeadEma")[name], value)
    heads = [read_head(folder / "checkpoints" / "best.safetensors") for folder in (found, wanted)]
    assert heads[0][1] == heads[1][1]
    assert all(torch.equal(heads[0][0][name], value) for name, value in heads[1][0].items())
    assert rows(found) == rows(wanted)


@pytest.fixture(scope="module")
def settings(small):
    return [*small, *STEPWISE, "ema.decay=0.9", "optimizer.lr=3e-3"]


@pytest.fixture(scope="module")
def four(settings, command):
    """Four epochs at one go."""
    called = command("train", *settings, "trainer.max_epochs=4")
    assert called.code == 0, called.err
    return called.folder


def test_two_and_two_are_four(settings, four, command, monkeypatch):
    first = command("train", *settings, "trainer.max_epochs=2").folder
    half = rows(first)
    assert half == rows(four)[: len(half)]
    seen = []
    monkeypatch.setattr(DataModule, "order", lambda self, make=DataModule.order: seen.append(make(self)) or seen[-1])
    called = command("train", f"resume={first}", "trainer.max_epochs=4", "trainer.progress=false")
    assert called.code == 0, called.err
    assert called.folder == first
    assert_equal_runs(first, four)
    assert (seen[-1]._started, seen[-1].epoch) == ((2, 0), 3)
    assert yaml.safe_load((first / "config.yaml").read_text())["trainer"]["max_epochs"] == 4
    assert state(first)["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 3


def test_a_finished_run_continues_to_nothing(settings, four, command):
    """Killed after training: the epochs are not trained again."""
    before = state(four)
    called = command("train", f"resume={four}", "trainer.progress=false")
    assert called.code == 0, called.err
    assert all(torch.equal(v, state(four)["state_dict"][k]) for k, v in before["state_dict"].items())


def test_fewer_epochs_than_trained_are_refused(settings, four, command):
    before = {p: p.read_bytes() for p in four.rglob("*") if p.is_file()}
    called = command("train", f"resume={four}", "trainer.max_epochs=2")
    assert called.code == 2
    assert "has trained 4 epochs; allowed: 4" in called.err
    assert before == {p: p.read_bytes() for p in four.rglob("*") if p.is_file()}


def test_runs_are_not_continued_as_a_sweep(settings, four, command):
    before = {p: p.read_bytes() for p in four.rglob("*") if p.is_file()}
    called = command("train", "-m", f"resume={four},{four}", "trainer.max_epochs=5")
    assert called.code == 2
    assert "resume continues one run" in called.err
    assert before == {p: p.read_bytes() for p in four.rglob("*") if p.is_file()}


@pytest.mark.parametrize("key", ["resume", "resume_sweep", "run_dir", "data.root"])
def test_an_empty_path_is_no_path(command, key):
    called = command("train", f"{key}=")
    assert called.code == 2
    assert f"{key} (command line): found ''" in called.err


def test_starting_from_a_head_is_another_thing(settings, four, command):
    """A new run on the continued run's data starts at step 0 with the pretrained head."""
    called = command("train", *settings, "trainer.max_epochs=1")
    assert state(called.folder)["global_step"] < state(four)["global_step"]


def test_other_settings_are_refused(settings, four, command):
    before = (four / "config.yaml").read_bytes(), (four / "metrics.csv").read_bytes()
    called = command("train", f"resume={four}", "optimizer.lr=1e-4", "loss.margin=0.3", "seed=9")
    assert called.code == 2
    lines = called.err.splitlines()
    assert "3 key(s) differ" in lines[0]
    for key in ("optimizer.lr: the run has 0.003, asked is 0.0001", "loss.margin: the run has 0.15", "seed: the run"):
        assert key in called.err
    assert before == ((four / "config.yaml").read_bytes(), (four / "metrics.csv").read_bytes())


def test_a_cosine_is_not_stretched(settings, command):
    folder = command("train", *settings, "schedule.name=cosine").folder
    called = command("train", f"resume={folder}", "trainer.max_epochs=3")
    assert called.code == 2
    assert "rates of schedule.name=cosine depend on it" in called.err


@pytest.mark.faults
def test_what_cannot_be_continued_is_told(command, tmp_path, four):
    called = command("train", f"resume={tmp_path}")
    assert called.code == 2
    assert "is not a run folder: config.yaml is missing" in called.err
    for name in ("config.yaml", "overrides.yaml"):
        (tmp_path / name).write_bytes((four / name).read_bytes())
    assert "last.ckpt is missing" in command("train", f"resume={tmp_path}").err
    damaged = tmp_path / "checkpoints" / "last.ckpt"
    damaged.parent.mkdir()
    whole = (four / "checkpoints" / "last.ckpt").read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\x80\x04K\x01."):
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"last.ckpt"):
            read_checkpoint(damaged)
    assert command("train", f"resume={tmp_path}").code == 2


def launch(*overrides: str, prelude: str = "") -> subprocess.Popen:
    code = f"{prelude}\nimport sys\nfrom noctowl.jobs import main\nsys.exit(main('train', sys.argv[1:]))"
    words = [sys.executable, "-c", code, *overrides, "trainer=cpu", "trainer.progress=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# Sends itself a signal in the middle of an epoch: no clock decides.
SIGNAL = """
import os, signal
from noctowl.module import NoctOWL
step, count = NoctOWL.training_step, [0]
def patched(self, batch, batch_idx):
    count[0] += 1
    if count[0] == {at}:
        os.kill(os.getpid(), signal.{name})
    return step(self, batch, batch_idx)
NoctOWL.training_step = patched
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_by_sigterm(settings, four, command, tmp_path, workers):
    """Exit code 143 after the step in which the signal came; continued at the very next batch of that epoch."""
    folder = tmp_path / "run"
    words = [*settings, "trainer.max_epochs=4", f"run_dir={folder}", f"trainer.num_workers={workers}"]
    words += ["features=live"] if workers else []
    batches = -(-len_of(four) // 4)
    at = batches + 2 - batches % 2  # the middle of the second epoch's first window
    process = launch(*words, prelude=SIGNAL.format(at=at, name="SIGTERM"))
    _, err = process.communicate(timeout=150)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert not (folder / "results.json").exists()
    stopped = state(folder)
    per_epoch = -(-batches // 2)
    assert per_epoch < stopped["global_step"] < 2 * per_epoch
    called = command("train", f"resume={folder}", "trainer.progress=false")
    assert called.code == 0, called.err
    found, wanted = rows(folder), rows(four)
    step = {"train/total_step", "train/lr", "train/grad_norm", "train/class_step", "train/positives_step"}
    assert [{k: v for k, v in row.items() if k in step} for row in found] == [
        {k: v for k, v in row.items() if k in step} for row in wanted
    ]
    one, other = state(folder), state(four)
    for name, value in other["state_dict"].items():
        torch.testing.assert_close(one["state_dict"][name], value, rtol=0, atol=1e-6 if workers else 0)
    if not workers:
        assert callback(one, "Selection") == callback(other, "Selection")


def len_of(folder: Path) -> int:
    return runfolder.read_results(folder / "results.json")["counts"]["training"]["vocabularies_trained"]


@pytest.mark.timeout(200)
def test_killed(settings, four, command, tmp_path):
    """SIGKILL: on from the last finished epoch; the rows that were written since are written again, once."""
    folder = tmp_path / "run"
    batches = -(-len_of(four) // 4)
    process = launch(
        *settings,
        "trainer.max_epochs=4",
        f"run_dir={folder}",
        prelude=SIGNAL.format(at=2 * batches + 3, name="SIGKILL"),
    )
    process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL
    assert len(rows(folder)) > 0
    called = command("train", f"resume={folder}", "trainer.progress=false")
    assert called.code == 0, called.err
    assert_equal_runs(folder, four)
