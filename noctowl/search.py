"""Search for settings that gain fine-grained mAP and keep coarse AP, with Optuna; both are maximised, on validation.

    python -m noctowl.search --study outputs/search.log --trials 20 \
        --space optimizer.lr=log:1e-5:1e-3 distill.weight=log:1:300 loss=choice:triplet,cross_entropy \
        -- model=tiny data=synthetic distill=mse trainer=cpu

The study is a journal file: several of these commands may work on it at once, and a stopped one is started again with
the same command. A trial that fails is recorded as failed. The last lines are the Pareto front. Test files
are never read.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noctowl.assembly import Preparation
from noctowl.compose import compose
from noctowl.errors import ConfigError, NoctowlError
from noctowl.run import train
from noctowl.selection import COARSE, FINE

Space = dict[str, tuple[str, tuple[Any, ...]]]  # kind, and its bounds or choices
KINDS = "log:LOW:HIGH, float:LOW:HIGH, int:LOW:HIGH or choice:A,B,…"


def parse_space(words: Sequence[str]) -> Space:
    """{"optimizer.lr": ("log", (1e-5, 1e-3)), …}. Raises ConfigError for what is none of KINDS."""
    space: Space = {}
    for word in words:
        key, _, what = word.partition("=")
        kind, _, rest = what.partition(":")
        try:
            if kind == "choice":
                bounds: tuple[Any, ...] = tuple(rest.split(","))
                good = all(bounds)
            else:
                low, high = (int(v) if kind == "int" else float(v) for v in rest.split(":"))
                bounds, good = (
                    (low, high),
                    kind in ("log", "float", "int") and low < high and (kind != "log" or low > 0),
                )
        except ValueError:
            good = False
        if not key or not good:
            raise ConfigError(f"--space {word!r}: allowed is KEY=KIND with {KINDS}, low below high")
        space[key] = (kind, bounds)
    return space


def suggest(trial: Any, space: Space) -> list[str]:
    """Overrides of a trial."""
    words = []
    for key, (kind, bounds) in space.items():
        if kind == "choice":
            value = trial.suggest_categorical(key, list(bounds))
        elif kind == "int":
            value = trial.suggest_int(key, *bounds)
        else:
            value = trial.suggest_float(key, *bounds, log=kind == "log")
        words.append(f"{key}={value}")
    return words


def search(study_file: Path, space: Space, fixed: Sequence[str], trials: int) -> Any:
    """Run trials on the study of a journal file, which is made if it is not there; returns the study.

    Raises ConfigError where Optuna is missing or the data has no coarse validation file.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError as error:
        raise ConfigError("noctowl.search needs Optuna: pip install 'noctowl[search]'") from error
    tree = compose("train", fixed)
    if tree["data"]["coarse_val_file"] is None or not tree["selection"]["every_n_epochs"]:
        raise ConfigError("noctowl.search needs data.coarse_val_file and selection.every_n_epochs > 0: two figures")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study_file.parent.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(study_file)))
    study = optuna.create_study(
        study_name="noctowl", storage=storage, directions=["maximize", "maximize"], load_if_exists=True
    )
    preparation = Preparation()

    def objective(trial: Any) -> tuple[float, float]:
        words = [*fixed, *suggest(trial, space), "test=false"]
        results = train(compose("train", words), overrides=words, preparation=preparation)
        chosen = results["counts"]["selection"]
        figures = next(entry for entry in chosen["history"] if entry["epoch"] == chosen["epoch"])
        trial.set_user_attr("folder", results["folder"])
        return figures[FINE], figures[COARSE]

    study.optimize(objective, n_trials=trials, catch=(NoctowlError, RuntimeError))
    return study


def main(argv: Sequence[str] | None = None) -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m noctowl.search", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--study", type=Path, required=True, help="journal file; continued if it is there")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--space", nargs="+", required=True, metavar="KEY=KIND", help=KINDS)
    parser.add_argument("overrides", nargs="*", help="after --: overrides of all trials, as for train.py")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        study = search(options.study, parse_space(options.space), options.overrides, options.trials)
    except NoctowlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for trial in study.best_trials:
        fine, coarse = trial.values
        words = " ".join(f"{key}={value}" for key, value in trial.params.items())
        print(f"mAP {fine:.4f}  coarse AP {coarse:.4f}  {words}  {trial.user_attrs['folder']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
