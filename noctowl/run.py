"""The two entry points on checked, plain configurations: `train(tree)` and `evaluate(tree)` -> results.

Configuration stops here: everything that is called takes plain arguments.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger

from noctowl import compose, resume, runfolder, training
from noctowl.assembly import (
    Preparation,
    Prepared,
    conventions_of,
    inherit,
    validation_figures,
    work_of,
)
from noctowl.callbacks import HeadEma, Selection
from noctowl.checkpoint import SameEverywhere
from noctowl.errors import DataError
from noctowl.export import export, load_head
from noctowl.launch import check_processes
from noctowl.loggers import finish_wandb, make_loggers
from noctowl.module import NoctOWL
from noctowl.outputs import announce, finish, provenance_of, rescore, show_predictions, write_results
from noctowl.plots import training_path
from noctowl.selection import COARSE, FINE, usable_rule
from noctowl.sweeps import Sweep, brief, told
from noctowl.together import ForHead, SplitLogger, Together

Tree = dict[str, Any]
log = logging.getLogger("noctowl")


@dataclass
class Job:
    """A run that has begun: its folder, what it needs, what it trains."""

    tree: Tree
    folder: Path
    ready: Prepared
    module: NoctOWL
    selection: Selection
    ema: HeadEma | None
    loggers: list[Logger]

    @property
    def callbacks(self) -> list[pl.Callback]:
        """The average is updated before it is evaluated."""
        return [self.selection] if self.ema is None else [self.ema, self.selection]


def train(
    tree: Tree,
    *,
    overrides: Sequence[str] = (),
    preparation: Preparation | None = None,
    sweep: Sweep | None = None,
) -> Tree:
    """Train a head, evaluate the selected one, export it. Returns what results.json holds, and `folder`.

    `preparation` is handed on from run to run by a sweep, so that what is frozen is computed once; `sweep` is told of
    the beginning and the end.
    """
    stopped = resume.find(tree["resume"], overrides) if tree["resume"] is not None else None
    if stopped is not None:
        tree, overrides = stopped.tree, stopped.overrides
    check_processes(tree["trainer"]["devices"], tree["trainer"]["num_nodes"])
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    if stopped is not None:
        folder = stopped.folder
    else:
        folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    os.environ[runfolder.RUN_DIR_VARIABLE] = str(folder)
    loggers: list[Logger] = []
    try:
        with runfolder.beginning(folder, tree, overrides):
            if stopped is not None and runfolder.process_rank() == 0:
                resume.clear(folder)
            ready = (preparation or Preparation())(tree)
            log.info("training: %s vocabularies, %s", len(ready.data.dataset), ready.frozen.reason)
            if sweep is not None:
                sweep.mark(overrides, "running", folder=folder)
            kept = stopped.rows if stopped else None
            loggers += _loggers(tree, folder, kept=kept, sweep=sweep)
            job = _begin(tree, folder, ready, loggers)
        lightning = training.fit(
            job.module,
            ready.data,
            folder=folder,
            loggers=job.loggers,
            trainer=tree["trainer"],
            seed=tree["seed"],
            callbacks=[SameEverywhere(runfolder.fingerprint(tree)), *job.callbacks],
            checkpoint=stopped.checkpoint if stopped else None,
        )
        results = _complete(job, lightning.global_step)
        if sweep is not None:
            sweep.mark(overrides, "finished")
        return results
    except KeyboardInterrupt as error:
        error.args = (resume.advice(folder),)
        raise
    finally:
        os.environ.pop(runfolder.RUN_DIR_VARIABLE, None)
        finish_wandb(loggers, failed=sys.exc_info()[0] is not None)


def train_together(
    group: Sequence[compose.Job], *, preparation: Preparation, sweep: Sweep | None = None
) -> tuple[list[Tree], list[str]]:
    """Train the heads of several jobs on one reading of the data; each gets its own run folder and results.

    Returns the results of those that succeeded and the errors of those that did not.
    """
    first = group[0][0]
    pl.seed_everything(first["seed"], workers=True, verbose=False)
    ready = preparation(first)
    log.info(
        "training %s heads together: %s vocabularies, %s", len(group), len(ready.data.dataset), ready.frozen.reason
    )
    jobs: list[Job] = []
    loggers: list[list[Logger]] = []
    try:
        for tree, overrides in group:
            folder = runfolder.create_run_folder(tree["output_dir"], tree["name"])
            with runfolder.beginning(folder, tree, overrides):
                if sweep is not None:
                    sweep.mark(overrides, "running", folder=folder)
                loggers.append(_loggers(tree, folder, sweep=sweep))
                jobs.append(_begin(tree, folder, replace(ready, detector=ready.detector.fork()), loggers[-1]))
        module = Together([job.module for job in jobs], accumulate=training.accumulation(first["trainer"]))
        training.fit(
            module,
            ready.data,
            folder=jobs[0].folder,
            loggers=[SplitLogger(loggers)],
            trainer=first["trainer"],
            seed=first["seed"],
            callbacks=[ForHead(callback, i) for i, job in enumerate(jobs) for callback in job.callbacks],
        )
        errors: dict[int, Exception] = dict(module.failed)
        results = []
        for i, job in enumerate(jobs):
            if i not in errors:
                try:
                    results.append(_complete(job, module.updates))
                except Exception as error:  # whatever the reason, the other heads are trained and count
                    errors[i] = error
            finish_wandb(job.loggers, failed=i in errors)
            if sweep is not None:
                sweep.mark(group[i][1], "failed" if i in errors else "finished", error=told(errors.get(i)))
        return results, [f"{jobs[i].folder}: {brief(error)}" for i, error in sorted(errors.items())]
    finally:
        for own in loggers:  # nothing happens to those that have ended
            finish_wandb(own, failed=sys.exc_info()[0] is not None)


def _loggers(
    tree: Tree, folder: Path, *, kept: list[dict[str, str]] | None = None, sweep: Sweep | None = None
) -> list[Logger]:
    name, group = f"{tree['name']}/{folder.name}", sweep.folder.name if sweep else None
    return make_loggers(folder, tree["logger"], name=name, config=tree, kept=kept, group=group)


def _begin(tree: Tree, folder: Path, ready: Prepared, loggers: list[Logger]) -> Job:
    ema = HeadEma(tree["ema"]["decay"]) if tree["ema"]["decay"] is not None else None
    module = NoctOWL(
        detector=ready.detector,
        loss=tree["loss"],
        distill=tree["distill"],
        optimizer=tree["optimizer"],
        schedule=tree["schedule"],
        coarse_queries=ready.queries if tree["distill"]["name"] != "none" else None,
        compat=tree["compat"] != "clean",
    )
    return Job(tree, folder, ready, module, _selection(tree, ready, folder, ema, loggers), ema, loggers)


def _complete(job: Job, steps: int) -> Tree:
    """The selected head back in the detector, tested, exported."""
    tree, folder, ready, selection = job.tree, job.folder, job.ready, job.selection
    if not selection.path.is_file():
        raise DataError(
            f"{selection.path}: no epoch was kept, since none had a validation mAP above 0 (compat=published starts "
            "there). Use compat=training, or look at metrics.csv."
        )
    load_head(ready.detector.to(ready.device), selection.path)
    facts = {
        "training": ready.data.counts,
        "selection": selection.facts(),
        "steps": steps,
        "features": ready.frozen.reason,
        "coarse_names": {
            "source": tree["data"]["coarse_names"],
            "count": len(ready.names),
            "sha256": hashlib.sha256("\n".join(ready.names).encode()).hexdigest(),
        },
    }
    first = runfolder.process_rank() == 0
    results = _test(tree, ready, folder, facts, write=first)
    if first:
        plot = folder / "plots" / "tradeoff.png"
        drawn = training_path(selection.history, selection.best_epoch, plot, fine=FINE, coarse=COARSE)
        show_predictions(folder, job.loggers, drawn)
        export(ready.detector, folder / "export", provenance=results["provenance"])
        for logger in job.loggers[1:]:  # metrics.csv stays the record of the training; results.json has these
            logger.log_metrics({f"test/{k}": v for k, v in results["metrics"].items()}, step=steps)
            logger.finalize("success")
        announce(tree, folder)
    return {**results, "folder": str(folder)}


def _selection(tree: Tree, ready: Prepared, folder: Path, ema: HeadEma | None, loggers: list[Logger]) -> Selection:
    conventions = {**conventions_of(tree), "short_vocabularies": tree["data"]["short_vocabularies"]}
    exchange = folder / "predictions" / "validation"

    def evaluate_epoch() -> dict[str, float]:
        outcome = ready.validation.predict(
            ready.detector, exchange, stored=ready.frozen.stored, **work_of(tree, ready.device)
        )
        return validation_figures(ready.validation.score(outcome, conventions)["metrics"])

    return Selection(
        evaluate=evaluate_epoch,
        rule=usable_rule(
            tree["selection"]["rule"], compat=tree["compat"], has_coarse=tree["data"]["coarse_val_file"] is not None
        ),
        max_coarse_loss=tree["selection"]["max_coarse_loss"],
        path=folder / "checkpoints" / "best.safetensors",
        every_n_epochs=tree["selection"]["every_n_epochs"],
        before_training=tree["selection"]["before_training"],
        start=0.0 if tree["compat"] == "published" else -float("inf"),
        ema=ema,
        loggers=loggers,
    )


def _test(tree: Tree, ready: Prepared, folder: Path, facts: Tree, *, write: bool) -> Tree:
    """The benchmarks with the selected head, or results without metrics where test=false."""
    origin = provenance_of(tree, ready.detector, ready.test or ready.validation, ready.bank)
    if ready.test is None:
        nothing: Tree = {"metrics": {}, "counts": {}, "ranks": {}}
        return write_results(tree, folder, nothing, origin, facts, {}) if write else {**nothing, "provenance": origin}
    work = work_of(tree, ready.device)
    outcome = ready.test.predict(ready.detector, folder / "predictions", stored=ready.frozen.stored, **work)
    outcome.counters["encoded_before"] = ready.frozen.encoded
    return finish(tree, folder, ready.test, ready.detector, outcome, origin, facts, write=write)


def evaluate(tree: Tree, *, overrides: Sequence[str] = (), preparation: Preparation | None = None) -> Tree:
    """Evaluate a run, an export, a hub model or saved predictions. Returns what results.json holds, and `folder`.

    `preparation` is handed on by a sweep over heads of the same base: they share one pass over the images.
    """
    tree = inherit(tree, overrides)
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    first = runfolder.process_rank() == 0
    try:
        with runfolder.beginning(folder, tree, overrides):
            if tree["predictions"] is not None:
                return rescore(tree, folder)
            ready = (preparation or Preparation()).evaluation(tree)
        work = work_of(tree, ready.device)
        outcome = ready.suite.predict(ready.detector, folder / "predictions", stored=ready.frozen.stored, **work)
        outcome.counters["encoded_before"] = ready.frozen.encoded
        origin = provenance_of(tree, ready.detector, ready.suite, ready.bank)
        results = finish(tree, folder, ready.suite, ready.detector, outcome, origin, {}, write=first)
        if first:
            announce(tree, folder)
        return {**results, "folder": str(folder)}
    except KeyboardInterrupt as error:
        error.args = (f"{folder}; start the evaluation again",)
        raise
