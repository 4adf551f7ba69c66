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
    benchmark_suite,
    conventions_of,
    inherit,
    load_checkpoint,
    load_detector,
    locate,
    pick_device,
    validation_figures,
    validation_suite,
    work_of,
)
from noctowl.callbacks import HeadEma, Selection
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_benchmarks, find_file
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

    def task(tree: Tree, overrides: list[str]) -> None:
        try:
            {"train": train, "evaluate": evaluate}[entry](tree, overrides=overrides)
        except NoctowlError as error:  # the other jobs of a sweep go on
            failed.append(str(error))
            print(f"error: {error}", file=sys.stderr)

    try:
        compose.dispatch(entry, sys.argv[1:] if argv is None else argv, task)
    except NoctowlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 2 if failed else 0


def train(tree: Tree, *, overrides: Sequence[str] = ()) -> Tree:
    """Train a head, evaluate the selected one, export it. Returns what results.json holds, and `folder`."""
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    os.environ[runfolder.RUN_DIR_VARIABLE] = str(folder)
    try:
        return _train(tree, folder, list(overrides))
    finally:
        os.environ.pop(runfolder.RUN_DIR_VARIABLE, None)


def _train(tree: Tree, folder: Path, overrides: list[str]) -> Tree:
    first = runfolder.process_rank() == 0
    if first:
        runfolder.write_settings(folder, tree, overrides)
    detector, device = load_detector(tree["model"]), pick_device(tree["trainer"]["accelerator"])
    detector.to(device)
    place = locate(tree["data"])
    bank = TextBank(detector, policy=tree["data"]["token_policy"], device=device)
    work = {
        "batch_size": tree["benchmark"]["batch_size"],
        "num_workers": tree["trainer"]["num_workers"],
        "device": device,
    }
    images = training.make_images(detector, place["images"], tree["model"]["pad_value"])
    data = training.training_data(
        find_file(place["annotations"], tree["data"]["train_file"]),
        detector=detector,
        images=images,
        bank=bank,
        n_negatives=tree["data"]["n_negatives"],
        short_vocabularies=tree["data"]["short_vocabularies"],
    )
    names = training.coarse_names(tree["data"]["coarse_names"], place["annotations"])
    queries = training.coarse_queries(bank, names) if tree["distill"]["name"] != "none" else None
    validation = validation_suite(tree, detector, place, bank)
    test = benchmark_suite(tree, detector, place, bank)
    data.dataset.embeddings = bank.embeddings
    data.dataset.stored, reason = training.stored_features(tree["features"]["mode"], detector, images, **work)
    log.info("training: %s vocabularies, %s images; %s", len(data.dataset), len(images), reason)
    stored = None
    if data.dataset.stored is not None:
        stored, _ = training.stored_features("auto", detector, validation.images, **work)
    conventions = {**conventions_of(tree), "short_vocabularies": tree["data"]["short_vocabularies"]}

    def evaluate_epoch() -> dict[str, float]:
        outcome = validation.predict(detector, folder / "predictions" / "validation", stored=stored, **work)
        return validation_figures(validation.score(outcome, conventions)["metrics"])

    ema = HeadEma(tree["ema"]["decay"]) if tree["ema"]["decay"] is not None else None
    best = folder / "checkpoints" / "best.safetensors"
    selection = Selection(
        evaluate=evaluate_epoch,
        metric="map",
        path=best,
        every_n_epochs=tree["selection"]["every_n_epochs"],
        start=0.0 if tree["compat"] == "published" else -float("inf"),
        ema=ema,
    )
    module = NoctOWL(
        detector=detector,
        loss=tree["loss"],
        distill=tree["distill"],
        optimizer=tree["optimizer"],
        schedule=tree["schedule"],
        coarse_queries=queries,
        compat=tree["compat"] != "clean",
    )
    loggers = training.make_loggers(folder, tree["logger"], name=f"{tree['name']}/{folder.name}", config=tree)
    lightning = training.fit(
        module,
        data,
        folder=folder,
        loggers=loggers,
        trainer=tree["trainer"],
        seed=tree["seed"],
        selection=selection,
        ema=ema,
    )
    if not best.is_file():
        raise DataError(
            f"{best}: no epoch was kept, since none had a validation mAP above 0 (compat=published starts there). "
            "Use compat=training, or look at metrics.csv."
        )
    load_head(detector.to(device), best)
    facts = {
        "training": data.counts,
        "selection": {"epoch": selection.best_epoch, "metric": selection.metric, "history": selection.history},
        "steps": lightning.global_step,
        "features": reason,
        "coarse_names": {
            "source": tree["data"]["coarse_names"],
            "count": len(names),
            "sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        },
    }
    outcome = test.predict(detector, folder / "predictions", **work)
    results = finish(tree, folder, test, outcome, provenance_of(tree, detector, test, bank), facts, write=first)
    if first:
        export(detector, folder / "export", provenance=results["provenance"])
        for logger in loggers[1:]:  # metrics.csv stays the record of the training; results.json has these
            logger.log_metrics({f"test/{k}": v for k, v in results["metrics"].items()}, step=lightning.global_step)
            logger.finalize("success")
        print(f"results: {folder / 'results.json'}")
    return {**results, "folder": str(folder)}


def evaluate(tree: Tree, *, overrides: Sequence[str] = ()) -> Tree:
    """Evaluate a run, an export, a hub model or saved predictions. Returns what results.json holds, and `folder`."""
    tree = inherit(tree, overrides)
    pl.seed_everything(tree["seed"], workers=True, verbose=False)
    folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
    first = runfolder.process_rank() == 0
    if first:
        runfolder.write_settings(folder, tree, list(overrides))
    place = locate(tree["data"])
    if tree["predictions"] is not None:
        return _rescore(tree, folder, place)
    device = pick_device(tree["trainer"]["accelerator"])
    detector = load_checkpoint(tree["checkpoint"], tree["model"]).to(device)
    bank = TextBank(detector, policy=tree["data"]["token_policy"], device=device)
    suite = benchmark_suite(tree, detector, place, bank)
    outcome = suite.predict(detector, folder / "predictions", **work_of(tree, device))
    results = finish(tree, folder, suite, outcome, provenance_of(tree, detector, suite, bank), {}, write=first)
    if first:
        print(f"results: {folder / 'results.json'}")
    return {**results, "folder": str(folder)}


def _rescore(tree: Tree, folder: Path, place: Mapping[str, Path]) -> Tree:
    """Saved predictions through the scorer, no model needed."""
    source = Path(tree["predictions"])
    source = source / "predictions" if (source / "predictions").is_dir() else source
    outcome = Outcome.load(source)
    asked = tree["benchmark"]["names"]
    if asked is not None:
        missing = [name for name in asked if name not in outcome.predictions]
        if missing:
            raise DataError(f"{source} holds {sorted(outcome.predictions)}, not {missing} (benchmark.names)")
        outcome.predictions = {name: outcome.predictions[name] for name in asked}
    files = {n: read_fgovd(p) for n, p in find_benchmarks(place["annotations"], list(outcome.predictions)).items()}
    found = load_lengths(source)
    coarse = tree["data"]["coarse_file"] and read_lvis(find_file(place["annotations"], tree["data"]["coarse_file"]))
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
