"""Continuing a run in its own folder: what must be the same, where it stopped, what of metrics.csv stays.

Continuing is not starting from a checkpoint: weights, optimiser, rates, averages, the best epoch so far and the place
in the order of the data are all those of the moment at which the run stopped.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from noctowl import runfolder
from noctowl.compose import compose, merged
from noctowl.errors import ConfigError, DataError
from noctowl.loggers import flat, read_rows

Tree = dict[str, Any]
# What may differ: where things are and how fast they are read, not what is computed.
FREE = (
    *("resume", "resume_sweep", "run_dir", "output_dir", "name", "together", "test", "report"),
    *("data.root", "data.images", "data.annotations", "features.mode", "features.root", "benchmark.", "logger."),
    *("trainer.max_epochs", "trainer.num_workers", "trainer.progress", "trainer.log_every_n_steps"),
)


@dataclass(frozen=True)
class Stopped:
    """A run to be continued: its folder, its configuration, its checkpoint, and the rows of metrics.csv before that."""

    folder: Path
    tree: Tree
    overrides: list[str]
    checkpoint: Path
    rows: list[dict[str, str]]


def find(folder: str | Path, overrides: Sequence[str]) -> Stopped:
    """The run in `folder`, with overrides of its own and those of the command line on top.

    Raises:
        DataError: no run folder, or no checkpoint to continue from.
        ConfigError: the configuration would not be the run's; names every key.
    """
    folder = Path(folder)
    old = runfolder.read_config(folder)
    given = [o for o in overrides if not o.lstrip("+").startswith("resume")]
    every = merged(runfolder.read_overrides(folder), given)
    tree = compose("train", every)
    _compare(old, tree, folder)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if not checkpoint.is_file():
        raise DataError(
            f"resume: {checkpoint} is missing: the run was stopped before its first epoch ended, or trained together "
            "with other heads of a sweep. Start it again."
        )
    stored = read_checkpoint(checkpoint)
    done, asked = stored["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"], tree["trainer"]["max_epochs"]
    if done > asked:
        raise ConfigError(
            f"resume: trainer.max_epochs is {asked}, but {folder} has trained {done} epochs; allowed: {done} (nothing "
            "is trained, results are written anew) or more. Nothing was touched."
        )
    tree = {**tree, "run_dir": str(folder)}
    return Stopped(folder, tree, every, checkpoint, _rows(folder / "metrics.csv", stored))


def advice(folder: Path) -> str:
    """What to do about a run that was interrupted."""
    if (folder / "checkpoints" / "last.ckpt").is_file():
        return f"{folder}; continue with resume={folder}"
    return f"{folder}; no epoch had ended, so there is nothing for resume={folder}: start the run again"


def clear(folder: Path) -> None:
    """Take away what a finished run wrote after training: it will be written anew."""
    (folder / "results.json").unlink(missing_ok=True)
    for name in ("export", "predictions"):
        shutil.rmtree(folder / name, ignore_errors=True)


def read_checkpoint(path: Path) -> Tree:
    """The checkpoint as plain data. Raises DataError if it is damaged or holds more than that."""
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a damaged archive
        raise DataError(f"{path}: not readable ({type(error).__name__}). Start the run again.") from error
    if not isinstance(stored, dict) or "loops" not in stored:
        raise DataError(f"{path} is no checkpoint of a run. Start the run again.")
    return stored


def _compare(old: Tree, new: Tree, folder: Path) -> None:
    before, now = flat(old), flat(new)
    differing = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and not _free(k)]
    lines = [f"  {key}: the run has {before.get(key)!r}, asked is {now.get(key)!r}" for key in differing]
    epochs, asked = old["trainer"]["max_epochs"], new["trainer"]["max_epochs"]
    if epochs != asked and new["schedule"]["name"] != "constant":
        lines.append(
            f"  trainer.max_epochs: the run has {epochs}, asked is {asked}; rates of schedule.name="
            f"{new['schedule']['name']} depend on it"
        )
    if lines:
        raise ConfigError(
            f"resume: {len(lines)} key(s) differ from {folder / 'config.yaml'}:\n" + "\n".join(lines) + "\nA run is "
            "continued as it was begun. Leave the keys out, or start a run of its own."
        )


def _free(key: str) -> bool:
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in FREE)


def _rows(path: Path, stored: Tree) -> list[dict[str, str]]:
    """Rows up to the checkpoint; later ones will be written again."""
    progress = stored["loops"]["fit_loop"]["epoch_progress"]["current"]
    complete, steps = progress["processed"], stored["global_step"]
    return [
        row
        for row in read_rows(path)
        if int(row.get("epoch", 0)) < complete or (int(row["epoch"]) == complete and int(row["step"]) < steps)
    ]
