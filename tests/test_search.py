"""The driver of Optuna: its space, three tiny trials, a study that is continued."""

import pytest

from noctowl.errors import ConfigError
from noctowl.search import main, parse_space


def test_the_space():
    space = parse_space(["optimizer.lr=log:1e-5:1e-3", "distill.weight=float:0.5:3", "seed=int:1:9", "loss=choice:a,b"])
    assert space["optimizer.lr"] == ("log", (1e-5, 1e-3))
    assert space["seed"] == ("int", (1, 9))
    assert space["loss"] == ("choice", ("a", "b"))
    for wrong in ("lr", "lr=log:0:1", "lr=float:2:1", "lr=int:a:b", "lr=choice:", "lr=gauss:0:1"):
        with pytest.raises(ConfigError, match="allowed is KEY=KIND"):
            parse_space([wrong])


def test_three_trials(small, tmp_path, capsys):
    optuna = pytest.importorskip("optuna", reason="the extra `search` is not installed")
    fixed = [*small, "trainer=cpu", "trainer.progress=false", f"output_dir={tmp_path}", "report=false"]
    words = [
        "--study",
        str(tmp_path / "study.log"),
        "--space",
        "optimizer.lr=log:1e-4:1e-2",
        "distill.weight=int:1:100",
    ]
    assert main([*words, "--trials", "1", "--", *fixed]) == 2  # no coarse file
    assert "data.coarse_val_file" in capsys.readouterr().err
    fixed.append("data.coarse_val_file=lvis/coarse_val.json")
    for trials in (2, 1):
        assert main([*words, "--trials", str(trials), "--", *fixed]) == 0
    assert "optimizer.lr=" in capsys.readouterr().out
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.load_study(study_name="noctowl", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 3
    assert all(len(trial.values) == 2 and all(0 <= v <= 1 for v in trial.values) for trial in study.trials)
