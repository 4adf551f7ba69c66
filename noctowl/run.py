"""The two entry points on checked, plain configurations: `train(tree)` and `evaluate(tree)` -> results.

Configuration stops here: everything that is called takes plain arguments.
"""

import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import transformers
from rich.logging import RichHandler

from noctowl import compose, runfolder, training
from noctowl.assembly import (
    Preparation,
    Prepared,
    benchmark_suite,
    conventions_of,
    data_root,
    features_of,
    inherit,
    load_checkpoint,
    locate,
    make_images,
    pick_device,
    validation_figures,
    work_of,
)
from noctowl.callbacks import HeadEma, Selection
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_annotations, find_benchmarks, find_file
from noctowl.errors import DataError, NoctowlError
from noctowl.eval.lvis import read_lvis
from noctowl.eval.outcome import Outcome, load_lengths, save_lengths
from noctowl.eval.suite import Suite, score_all
from noctowl.export import export, load_head
from noctowl.features import TextBank
from noctowl.hashing import state_sha256
from noctowl.model import OwlDetector
from noctowl.module import NoctOWL
from noctowl.tables import print_results

Tree = dict[str, Any]
log = logging.getLogger("noctowl")
# Said by libraries of what is meant to be so.
QUIET = (
    "Experiment logs directory .* exists and is not empty",  # the run folder is new, metrics.csv is not there yet
    "Found .* module.s. in eval mode",  # everything but one layer is frozen
    ".*isinstance.treespec, LeafSpec.. is deprecated",
    "The number of training batches .* is smaller than the logging interval",
    "The '.*_dataloader' does not have many workers",
)


def main(entry: str, argv: Sequence[str] | None = None) -> int:
    """Command line of train.py and evaluate.py. Returns the exit code: 0, or 2 where the user has something to mend."""
    handler = RichHandler(show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    for noisy in ("pytorch_lightning", "lightning", "httpx", "accelerate", "hydra"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for message in QUIET:
        warnings.filterwarnings("ignore", message=message)
    failed: list[str] = []
    preparation = Preparation()

    def task(tree: Tree, overrides: list[str]) -> None:
        try:
            if entry == "train":
                train(tree, overrides=overrides, preparation=preparation)
            else:
                evaluate(tree, overrides=overrides)
        except NoctowlError as error:  # the other jobs of a sweep go on
            failed.append(str(error))
            print(f"error: {error}", file=sys.stderr)

    try:
        compose.dispatch(entry, sys.argv[1:] if argv is None else argv, task)
    except NoctowlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 2 if failed else 0


def train(tree: Tree, *, overrides: Sequence[str] = (), preparation: Preparation | None = None) -> Tree:
    """Train a head, evaluate the selected one, export it. Returns what results.json holds, and `folder`.

    `preparation` is handed on from run to run by a sweep, so that what is frozen is computed once.
    """
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    os.environ[runfolder.RUN_DIR_VARIABLE] = str(folder)
    try:
        return _train(tree, folder, list(overrides), preparation or Preparation())
    finally:
        os.environ.pop(runfolder.RUN_DIR_VARIABLE, None)
        training.finish_wandb()


def _train(tree: Tree, folder: Path, overrides: list[str], preparation: Preparation) -> Tree:
    first = runfolder.process_rank() == 0
    if first:
        runfolder.write_settings(folder, tree, overrides)
    ready = preparation(tree)
    detector = ready.detector
    log.info("training: %s vocabularies, %s", len(ready.data.dataset), ready.frozen.reason)
    ema = HeadEma(tree["ema"]["decay"]) if tree["ema"]["decay"] is not None else None
    selection = _selection(tree, ready, folder, ema)
    module = NoctOWL(
        detector=detector,
        loss=tree["loss"],
        distill=tree["distill"],
        optimizer=tree["optimizer"],
        schedule=tree["schedule"],
        coarse_queries=ready.queries if tree["distill"]["name"] != "none" else None,
        compat=tree["compat"] != "clean",
    )
    loggers = training.make_loggers(folder, tree["logger"], name=f"{tree['name']}/{folder.name}", config=tree)
    lightning = training.fit(
        module,
        ready.data,
        folder=folder,
        loggers=loggers,
        trainer=tree["trainer"],
        seed=tree["seed"],
        selection=selection,
        ema=ema,
    )
    if not selection.path.is_file():
        raise DataError(
            f"{selection.path}: no epoch was kept, since none had a validation mAP above 0 (compat=published starts "
            "there). Use compat=training, or look at metrics.csv."
        )
    load_head(detector.to(ready.device), selection.path)
    names = "\n".join(ready.names)
    facts = {
        "training": ready.data.counts,
        "selection": {"epoch": selection.best_epoch, "metric": selection.metric, "history": selection.history},
        "steps": lightning.global_step,
        "features": ready.frozen.reason,
        "coarse_names": {
            "source": tree["data"]["coarse_names"],
            "count": len(ready.names),
            "sha256": hashlib.sha256(names.encode()).hexdigest(),
        },
    }
    results = _test(tree, ready, folder, facts, write=first)
    if first:
        export(detector, folder / "export", provenance=results["provenance"])
        for logger in loggers[1:]:  # metrics.csv stays the record of the training; results.json has these
            logger.log_metrics({f"test/{k}": v for k, v in results["metrics"].items()}, step=lightning.global_step)
            logger.finalize("success")
        print(f"results: {folder / 'results.json'}")
    return {**results, "folder": str(folder)}


def _selection(tree: Tree, ready: Prepared, folder: Path, ema: HeadEma | None) -> Selection:
    conventions = {**conventions_of(tree), "short_vocabularies": tree["data"]["short_vocabularies"]}
    exchange = folder / "predictions" / "validation"

    def evaluate_epoch() -> dict[str, float]:
        outcome = ready.validation.predict(
            ready.detector, exchange, stored=ready.frozen.stored, **work_of(tree, ready.device)
        )
        return validation_figures(ready.validation.score(outcome, conventions)["metrics"])

    return Selection(
        evaluate=evaluate_epoch,
        metric="map",
        path=folder / "checkpoints" / "best.safetensors",
        every_n_epochs=tree["selection"]["every_n_epochs"],
        before_training=tree["selection"]["before_training"],
        start=0.0 if tree["compat"] == "published" else -float("inf"),
        ema=ema,
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
    return finish(tree, folder, ready.test, outcome, origin, facts, write=write)


def evaluate(tree: Tree, *, overrides: Sequence[str] = ()) -> Tree:
    """Evaluate a run, an export, a hub model or saved predictions. Returns what results.json holds, and `folder`."""
    tree = inherit(tree, overrides)
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    first = runfolder.process_rank() == 0
    if first:
        runfolder.write_settings(folder, tree, list(overrides))
    if tree["predictions"] is not None:
        return _rescore(tree, folder)
    place = locate(tree["data"])
    device = pick_device(tree["trainer"]["accelerator"])
    detector = load_checkpoint(tree["checkpoint"], tree["model"]).to(device)
    bank = TextBank(detector, policy=tree["data"]["token_policy"], device=device)
    images = make_images(detector, place["images"], tree["model"]["pad_value"])
    suite = benchmark_suite(tree, detector, place, bank, images)
    frozen = features_of(tree, detector, images, device) if tree["features"]["mode"] == "disk" else None
    stored = frozen.stored if frozen else None  # one pass needs no store, unless later ones are to share it
    outcome = suite.predict(detector, folder / "predictions", stored=stored, **work_of(tree, device))
    results = finish(tree, folder, suite, outcome, provenance_of(tree, detector, suite, bank), {}, write=first)
    if first:
        print(f"results: {folder / 'results.json'}")
    return {**results, "folder": str(folder)}


def _rescore(tree: Tree, folder: Path) -> Tree:
    """Saved predictions through the scorer: annotations are needed, neither model nor images."""
    annotations = find_annotations(data_root(tree["data"]), tree["data"]["annotations"])
    source = Path(tree["predictions"])
    source = source / "predictions" if (source / "predictions").is_dir() else source
    outcome = Outcome.load(source)
    asked = tree["benchmark"]["names"]
    if asked is not None:
        missing = [name for name in asked if name not in outcome.predictions]
        if missing:
            raise DataError(f"{source} holds {sorted(outcome.predictions)}, not {missing} (benchmark.names)")
        outcome.predictions = {name: outcome.predictions[name] for name in asked}
    files = {n: read_fgovd(p) for n, p in find_benchmarks(annotations, list(outcome.predictions)).items()}
    found = load_lengths(source)
    coarse = tree["data"]["coarse_file"] and read_lvis(find_file(annotations, tree["data"]["coarse_file"]))
    n_negatives = tree["benchmark"]["n_negatives"]
    scored = score_all(
        files,
        outcome,
        conventions_of(tree),
        lengths={name: found.get(name) for name in files},
        coarse=coarse or None,
        n_negatives=n_negatives,
    )
    results = write_results(tree, folder, scored, runfolder.provenance(predictions=str(source)), {}, outcome.counters)
    print(f"results: {folder / 'results.json'}")
    return {**results, "folder": str(folder)}


def provenance_of(tree: Tree, detector: OwlDetector, suite: Suite, bank: TextBank) -> Tree:
    """Versions, hashes and processor settings of a result."""
    return runfolder.provenance(
        base=detector.base_id,
        base_revision=detector.revision,
        base_sha256=detector.content_hash(),
        head_sha256=state_sha256(detector.trainable_state()),
        processor=suite.images.preprocessor.settings(),
        annotations={
            n: {"file": b.annotations.path.name, "sha256": b.annotations.sha256} for n, b in suite.benchmarks.items()
        },
        text={"policy": bank.policy, "captions_encoded": bank.forwards, "over_limit": bank.n_over},
    )


def finish(
    tree: Tree, folder: Path, suite: Suite, outcome: Outcome, provenance: Tree, facts: Tree, *, write: bool
) -> Tree:
    """Save predictions and score them. Only the first process writes."""
    scored = suite.score(outcome, conventions_of(tree))
    if not write:
        return scored
    outcome.save(folder / "predictions")
    save_lengths(folder / "predictions", suite.lengths)
    return write_results(tree, folder, scored, provenance, facts, outcome.counters)


def write_results(
    tree: Tree, folder: Path, scored: Tree, provenance: Tree, facts: Tree, counters: Mapping[str, int]
) -> Tree:
    """results.json, ranks.json and the table on the screen."""
    results = {
        "version": runfolder.RESULTS_VERSION,
        "metrics": scored["metrics"],
        "settings": {**conventions_of(tree), "compat": tree["compat"], "seed": tree["seed"], "data": tree["data"]},
        "counts": {**scored["counts"], **facts, "forwards": dict(counters)},
        "provenance": provenance,
    }
    runfolder.write_json(folder / "results.json", results)
    runfolder.write_json(folder / "predictions" / "ranks.json", scored["ranks"])
    print_results(results)
    return results
