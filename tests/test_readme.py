"""The README is true: every command in it is executed, on data small enough for a test."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from noctowl import cli
from noctowl.jobs import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["data.n_train=40", "data.n_val=12", "data.n_test=12", "trainer.num_workers=0", "trainer.progress=false"]


def commands() -> list[str]:
    """Every line of every bash block, comments taken off."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def kind(command: str) -> str:
    """How a command is executed here."""
    if command.startswith(("make ", ". ")):
        return "make"
    if command.startswith("pip install"):
        return "pip"
    if re.search(r"model=owl", command):
        return "hub"
    return "run"


RUN = [c for c in commands() if kind(c) == "run"]
HUB = [c for c in commands() if kind(c) == "hub"]
MAKE = [c for c in commands() if kind(c) == "make"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache for the synthetic world, and a finished run."""
    base = tmp_path_factory.mktemp("readme")
    os.environ["NOCTOWL_CACHE"] = str(base / "cache")
    run = base / "a-run"
    assert main("train", [*SMALL, "trainer=cpu", f"run_dir={run}", "trainer.max_epochs=1"]) == 0
    yield {"base": base, "run": run}
    del os.environ["NOCTOWL_CACHE"]


def arguments(command: str, world: dict[str, Path], data: Path | None) -> list[str]:
    text = command.replace("<run>", str(world["run"]))
    if data is not None:
        text = text.replace("/data/fgovd", str(data))
    return shlex.split(text)


def test_every_kind_of_command_is_there():
    assert len(RUN) >= 8
    assert len(HUB) >= 2
    assert {"make quickstart", "make setup"} <= set(MAKE)


@pytest.mark.parametrize("command", RUN)
def test_command(command, world, request, tmp_path, monkeypatch, capsys):
    data = request.getfixturevalue("coco_mini") if "/data/fgovd" in command else None
    words = arguments(command, world, data)
    program, rest = words[0], words[1:]
    if program == "noctowl":
        monkeypatch.chdir(tmp_path)
        if rest[0] == "features" and rest[1] != "build":  # they follow the build in the README; here each stands alone
            build = next(c for c in RUN if c.startswith("noctowl features build"))
            data = request.getfixturevalue("coco_mini")
            assert cli.main(arguments(build, world, data)[1:]) == 0
        assert cli.main(rest) == 0
        return
    assert program == "python"
    entry = Path(rest[0]).stem
    small = SMALL if data is None and not any("predictions=" in w for w in rest) else SMALL[3:]
    if any(w.startswith(("checkpoint=", "predictions=")) for w in rest):
        small = SMALL[3:]  # the run's own data
    assert main(entry, [*rest[1:], *small, "trainer=cpu", f"output_dir={tmp_path}"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("results: ")]
    results = Path(printed[-1].removeprefix("results: "))
    metrics = json.loads(results.read_text())["metrics"]
    assert any(key.startswith("fgovd/hard/n") and key.endswith("/map") for key in metrics)


@pytest.mark.parametrize("command", HUB)
def test_command_that_needs_the_hub_says_so(command, world, coco_mini, tmp_path, monkeypatch, capsys):
    """No test may reach the network: everything up to the model's weights is executed, and the message is right."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    words = arguments(command, world, coco_mini)
    assert main(Path(words[1]).stem, [*words[2:], f"output_dir={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert "google/owl" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command):
    if command.startswith(". "):
        assert command == ". .venv/bin/activate"
        return
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.M)


def test_scripts_start_from_anywhere(tmp_path):
    """train.py and evaluate.py are programs: exit code 2 and no traceback for a mistake, help for --help."""
    for entry in ("train", "evaluate"):
        script = str(ROOT / f"{entry}.py")
        wrong = subprocess.run([sys.executable, script, "modle=tiny"], cwd=tmp_path, capture_output=True, text=True)
        assert wrong.returncode == 2
        assert "did you mean 'model'?" in wrong.stderr
        assert "Traceback" not in wrong.stderr
    assert not list(tmp_path.iterdir())


def test_the_console_script_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "noctowl", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("noctowl ")


def test_usage_message_in_the_readme_is_the_real_one(capsys):
    block = re.search(r"\$ python train\.py (.*)\n(error: .*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert block
    assert main("train", shlex.split(block[1])) == 2
    said = capsys.readouterr().err
    for line in block[2].strip().splitlines():
        for part in line.split("…"):
            assert part.strip() in said


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_quickstart_from_nothing(tmp_path):
    """`make quickstart` in a fresh copy with its own environment."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "outputs", ".*cache", "shared"))
    done = subprocess.run(["make", "quickstart"], cwd=copy, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(last) >= {"pretrained", "plain", "distilled"}
