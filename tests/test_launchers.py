"""Jobs of a sweep in other processes: Hydra's joblib and submitit launchers, and jobs with two processes each."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from noctowl.sweeps import Sweep, part

LAUNCHERS = {"joblib": "hydra_plugins.hydra_joblib_launcher", "submitit_local": "hydra_plugins.hydra_submitit_launcher"}


def record(folder: Path) -> tuple[Path, list[dict]]:
    (sweep,) = folder.glob("default/sweep-*")
    assert not list(sweep.glob("job*.json"))
    return sweep, json.loads((sweep / "sweep.json").read_text())["jobs"]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_of_a_launcher(small, command, tmp_path, launcher):
    """A job that fails is recorded, the other is as it would be alone; only the failed one is run again."""
    if find_spec("hydra_plugins") is None or find_spec(LAUNCHERS[launcher]) is None:
        pytest.skip(f"the extra `{launcher.removesuffix('_local')}` is not installed")
    options = [*small, "benchmark.intervals=0", "seed=3"]
    files = "data.val_file=validation_sets/1_attributes.json,nowhere.json"
    called = command("train", *options, files, f"output_dir={tmp_path}", "-m", f"hydra/launcher={launcher}")
    assert called.code == 2
    assert "nowhere.json" in called.err
    sweep, jobs = record(tmp_path)
    assert [job["status"] for job in jobs] == ["finished", "failed"]
    assert "nowhere.json" in jobs[1]["error"]
    assert (sweep / "multirun.yaml").is_file()  # Hydra's own files are in the same folder
    folder = Path(jobs[0]["folder"])
    assert sorted(p.parent for p in tmp_path.glob("default/*/config.yaml")) == [folder]
    alone = command("train", *options).folder
    heads = [load_file(run / "checkpoints" / "best.safetensors") for run in (folder, alone)]
    for name, value in heads[1].items():
        torch.testing.assert_close(heads[0][name], value, rtol=0, atol=1e-6)
    results = [json.loads((run / "results.json").read_text())["metrics"] for run in (folder, alone)]
    assert results[0] == pytest.approx(results[1], abs=1e-6)
    again = command("train", "-m", f"resume_sweep={sweep}")
    assert again.code == 2
    assert Sweep.open(sweep).jobs == jobs


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.timeout(280)
def test_jobs_with_two_processes(small, command, tmp_path):
    """Each job is a single run of two processes: two folders, no sweep within the sweep, heads as of single runs."""
    options = [*small, "benchmark.intervals=0", "trainer.batch_size=4", "trainer.effective_batch_size=8"]
    several = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_workers=0"]
    called = command("train", *options, *several, f"output_dir={tmp_path}", "seed=3,4", "-m")
    assert called.code == 0, called.err
    _, jobs = record(tmp_path)
    assert [job["status"] for job in jobs] == ["finished", "finished"]
    assert len(list(tmp_path.glob("default/*"))) == 3
    for seed, job in zip((3, 4), jobs):
        folder = Path(job["folder"])
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["seed"], config["trainer"]["devices"]) == (seed, 2)
        alone = command("train", *options, f"seed={seed}").folder
        heads = [load_file(run / "checkpoints" / "best.safetensors") for run in (folder, alone)]
        for name, value in heads[1].items():
            torch.testing.assert_close(heads[0][name], value, rtol=0, atol=1e-5)


def test_the_record_of_jobs_that_are_spread(tmp_path):
    """Each process writes its own part, whichever comes first; whoever opens the sweep sees all of them."""
    sweep = Sweep.begin(tmp_path, [["seed=1"], ["seed=1"], ["seed=3"]])
    parts = [Sweep.open(sweep.folder, number) for number in range(3)]
    parts[1].mark(["seed=1"], "running", folder=tmp_path / "b")
    parts[0].mark(["seed=1"], "running", folder=tmp_path / "a")
    parts[1].mark(["seed=1"], "failed", error="out of luck")
    found = Sweep.open(sweep.folder)
    assert [job["status"] for job in found.jobs] == ["running", "failed", "pending"]
    assert [job["folder"] for job in found.jobs] == [str(tmp_path / "a"), str(tmp_path / "b"), None]
    assert found.pending() == [(["seed=1"], tmp_path / "a"), (["seed=1"], None), (["seed=3"], None)]
    found.save()
    assert not part(sweep.folder, 0).exists()
    assert Sweep.open(sweep.folder).jobs == found.jobs
