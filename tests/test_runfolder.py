"""The folder of a run: made once, never shared, files whole or not at all."""

import json

import pytest
import yaml

from noctowl import runfolder
from noctowl.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK", runfolder.RUN_DIR_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def test_folders_are_never_shared(tmp_path):
    folders = {runfolder.create_run_folder(tmp_path, "name") for _ in range(50)}
    assert len(folders) == 50
    assert all(folder.parent == tmp_path / "name" and folder.is_dir() for folder in folders)


def test_an_explicit_folder_is_new_or_empty(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert runfolder.create_run_folder(tmp_path, "name", str(empty)) == empty
    assert runfolder.create_run_folder(tmp_path, "name", str(tmp_path / "a" / "b")).is_dir()
    (empty / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"empty exists and is not empty.*Nothing was written"):
        runfolder.create_run_folder(tmp_path, "name", str(empty))
    with pytest.raises(ConfigError, match=r"exists and is not empty"):
        runfolder.create_run_folder(tmp_path, "name", str(empty / "file"))
    assert (empty / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"^output_dir: .*file/name.* cannot be made \(Not a directory.*Set output_dir"
    ):
        runfolder.create_run_folder(tmp_path / "file", "name")
    with pytest.raises(ConfigError, match=r"^run_dir: .*file/run cannot be made \(Not a directory.*Set run_dir"):
        runfolder.create_run_folder(tmp_path, "name", str(tmp_path / "file" / "run"))

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(runfolder.Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"output_dir: .*\(Permission denied"):
        runfolder.create_run_folder(tmp_path, "name")


def test_other_processes_take_the_first_ones_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match=r"run_dir: several processes were started by a launcher"):
        runfolder.create_run_folder(tmp_path, "name")
    monkeypatch.setenv(runfolder.RUN_DIR_VARIABLE, str(tmp_path / "first"))
    assert runfolder.create_run_folder(tmp_path, "name") == tmp_path / "first"
    assert runfolder.create_run_folder(tmp_path, "name", str(tmp_path / "given")) == tmp_path / "given"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), ({"RANK": "3", "LOCAL_RANK": "1"}, 3), ({"LOCAL_RANK": "2"}, 2)]
)
def test_rank(monkeypatch, variables, rank):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runfolder.process_rank() == rank


@pytest.mark.faults
def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    runfolder.write_json(path, {"a": 1})
    with pytest.raises(TypeError), runfolder.atomic(path) as file:  # noqa: PT012
        file.write(b'{"a": 2, "b": ')
        file.write("text")  # fails half-way
    with pytest.raises(ValueError):
        runfolder.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_settings_can_be_read_again(tmp_path):
    overrides = ["seed=3", "data.root=daten/größe"]
    tree = {"data": {"root": "daten/größe"}, "seed": 3, "ema": {"decay": None}}
    runfolder.write_settings(tmp_path, tree, overrides)
    assert runfolder.read_config(tmp_path) == tree
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text(encoding="utf-8")) == [
        "seed=3",
        "data.root=daten/größe",
    ]
    environment = (tmp_path / "env.txt").read_text().splitlines()
    assert environment[0].startswith("python 3.")
    assert any(line.startswith("torch==") for line in environment)


@pytest.mark.faults
def test_foreign_and_damaged_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"not a run folder: config.yaml is missing"):
        runfolder.read_config(tmp_path)
    (tmp_path / "config.yaml").write_text("- a\n- b\n")
    with pytest.raises(DataError, match=r"a mapping of settings is needed, found list"):
        runfolder.read_config(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1\nb: }")
    with pytest.raises(DataError, match=r"config.yaml"):
        runfolder.read_config(tmp_path)
    results = tmp_path / "results.json"
    with pytest.raises(DataError, match=r"results.json is missing"):
        runfolder.read_results(results)
    for content, words in (
        ('{"version": 1', "not readable as JSON"),
        ("[]", "version 'list'"),
        ('{"version": 99}', "99"),
    ):
        results.write_text(content)
        with pytest.raises(DataError, match=words):
            runfolder.read_results(results)
    results.write_text('{"version": 1, "metrics": {}}')
    assert runfolder.read_results(results)["metrics"] == {}


def test_why_wandb_is_offline():
    """Told so, no key, or a host that does not answer: never a wait of minutes, never a silent loss."""
    from noctowl.loggers import _why_offline

    assert _why_offline({}) == "no WANDB_API_KEY"
    assert _why_offline({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}) == "WANDB_MODE=offline"
    closed = _why_offline({"WANDB_API_KEY": "k", "WANDB_BASE_URL": "http://127.0.0.1:9"})
    assert str(closed).startswith("127.0.0.1 does not answer")
