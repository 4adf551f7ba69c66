"""Sweeps: a failed job is recorded and the others go on, finished ones are not run again, folders are never shared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from noctowl import run
from noctowl.errors import DataError
from noctowl.export import read_head
from noctowl.jobs import main
from noctowl.launch import check_processes
from noctowl.module import NoctOWL
from noctowl.sweeps import Sweep
from noctowl.together import Together


@pytest.mark.parametrize("together", ["false", "true"])
def test_a_failed_job_is_recorded_and_tried_again(small, command, tmp_path, monkeypatch, together):
    """The second of three jobs raises what no one foresaw, or (together) an error of the project's own."""
    complete, error = run._complete, RuntimeError if together == "false" else DataError

    def fails(job, steps):
        if job.tree["loss"]["name"] == "triplet":
            raise error("out of luck")
        return complete(job, steps)

    monkeypatch.setattr(run, "_complete", fails)
    options = ["data.coarse_val_file=lvis/coarse_val.json", "test=false", f"together={together}"]
    called = command("train", *small, *options, f"output_dir={tmp_path}", "loss=bce,triplet,cross_entropy", "-m")
    assert called.code == 2
    assert "out of luck" in called.err
    folder = next((tmp_path / "default").glob("sweep-*"))
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["finished", "failed", "finished"]
    assert "out of luck" in jobs[1]["error"]
    assert len({job["folder"] for job in jobs}) == 3
    assert (folder / "tradeoff.png").stat().st_size > 5000
    for job in (jobs[0], jobs[2]):  # the choice, in the head's file and as a picture
        _, facts = read_head(Path(job["folder"]) / "checkpoints" / "best.safetensors")
        assert facts["rule"] == "tradeoff"
        assert {"map", "lvis_ap", "pretrained_map", "pretrained_lvis_ap"} <= set(facts)
        assert (Path(job["folder"]) / "plots" / "tradeoff.png").stat().st_size > 5000
    if together == "true":
        return
    monkeypatch.setattr(run, "_complete", complete)
    assert main("train", ["-m", f"resume_sweep={folder}"]) == 0
    again = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in again] == ["finished"] * 3
    assert [again[i]["folder"] for i in (0, 2)] == [jobs[i]["folder"] for i in (0, 2)]
    assert again[1]["folder"] != jobs[1]["folder"]
    assert main("train", ["-m", f"resume_sweep={folder}"]) == 0  # nothing is left to do
    assert json.loads((folder / "sweep.json").read_text())["jobs"] == again


@pytest.mark.resume
@pytest.mark.parametrize("together", ["false", "true"])
def test_a_sweep_that_is_stopped_goes_on(small, command, tmp_path, monkeypatch, caplog, together):
    """Stopped in the second epoch: a job by itself is continued in its folder, heads side by side are started again."""
    options = [*small, "test=false", "trainer.max_epochs=2", "seed=5"]
    wanted = [load_head(command("train", *options, f"loss={loss}").folder) for loss in ("bce", "triplet")]
    module, last = (Together, "bce") if together == "true" else (NoctOWL, "triplet")
    step = module.training_step

    def interrupted(self, batch, batch_idx):
        if self.current_epoch == 1 and (module is Together or self.loss["name"] == last):
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(module, "training_step", interrupted)
    called = command("train", *options, "loss=bce,triplet", f"together={together}", f"output_dir={tmp_path}", "-m")
    assert called.code == 130
    (folder,) = tmp_path.glob("default/sweep-*")
    assert f"continue with resume_sweep={folder}" in called.err
    before = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in before] == (["running"] * 2 if together == "true" else ["finished", "running"])
    monkeypatch.setattr(module, "training_step", step)
    with caplog.at_level("INFO", logger="noctowl"):
        assert main("train", ["-m", f"resume_sweep={folder}"]) == 0
    after = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in after] == ["finished"] * 2
    same = [old["folder"] == new["folder"] for old, new in zip(before, after)]
    assert same == ([False, False] if together == "true" else [True, True])
    how = "started again: no last.ckpt" if together == "true" else "continued"
    told = [message for message in caplog.messages if message.startswith("stopped: ")]
    assert [how in message for message in told] == [True] * sum(job["status"] == "running" for job in before)
    for job, head in zip(after, wanted):
        found = load_head(Path(job["folder"]))
        assert all(torch.equal(found[name], value) for name, value in head.items())


def load_head(folder: Path) -> dict[str, torch.Tensor]:
    return read_head(folder / "checkpoints" / "best.safetensors")[0]


def test_what_is_no_sweep_is_told(tmp_path, capsys):
    assert main("train", ["-m", f"resume_sweep={tmp_path}"]) == 2
    assert "sweep.json is missing or damaged" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text('{"jobs": [1]}')
    with pytest.raises(DataError, match="damaged"):
        Sweep.open(tmp_path)
    assert main("train", ["-m", f"resume_sweep={tmp_path}", "seed=3"]) == 2
    assert "leave out seed=3" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["launcher", "torchrun", "nodes"])
def test_several_devices_are_refused(tmp_path, capsys, monkeypatch, how):
    """Where a job cannot be started as a program of its own."""
    words = ["-m", "seed=1,2", "trainer=ddp", f"output_dir={tmp_path}"]
    nodes = ["trainer.num_nodes=2", "trainer.batch_size=8"]
    words += {"launcher": ["hydra/launcher=joblib"], "nodes": nodes, "torchrun": []}[how]
    if how == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert main("train", words) == 2
    assert "a sweep job with several devices" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folders_of_many_processes_that_start_at_once(tmp_path):
    """The clock stands still in all of them."""
    code = (
        "import sys, noctowl.runfolder as r\n"
        "class Clock:\n    @staticmethod\n    def now(*_):\n        import datetime as d\n"
        "        return d.datetime(2025, 1, 1)\n"
        "r.datetime = Clock\n"
        "for _ in range(20): print(r.create_run_folder(sys.argv[1], 'same'))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    folders = [line for process in started for line in process.communicate(timeout=120)[0].split()]
    assert len(folders) == len(set(folders)) == 80


def test_processes_and_devices_are_told_apart():
    from noctowl.errors import ConfigError

    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}
    check_processes(2, 2, torchrun)
    check_processes(2, 1, {})
    with pytest.raises(ConfigError, match=r"2 x 1 = 2, but 4 processes were started \(torchrun's WORLD_SIZE\)"):
        check_processes(2, 1, torchrun)
    slurm = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_NAME": "train"}
    with pytest.raises(ConfigError, match=r"2 x 1 = 2, but 3 processes were started \(SLURM_NTASKS\)"):
        check_processes(2, 1, slurm)
