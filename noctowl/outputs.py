"""What a run leaves behind: predictions, results.json, ranks.json and the table on the screen."""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import Logger

from noctowl import runfolder
from noctowl.assembly import asked_of, conventions_of, data_root
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_annotations, find_benchmarks, find_file
from noctowl.errors import DataError, NoctowlError
from noctowl.eval.evidence import SHUFFLED
from noctowl.eval.lvis import read_lvis
from noctowl.eval.outcome import Outcome, load_lengths, save_lengths
from noctowl.eval.suite import Suite, score_all
from noctowl.features import TextBank
from noctowl.hashing import state_sha256
from noctowl.loggers import has_wandb, log_pictures
from noctowl.model import OwlDetector
from noctowl.tables import print_results

Tree = dict[str, Any]
log = logging.getLogger("noctowl")
PANELS = 64  # pictures of one run in W&B at most


def provenance_of(tree: Tree, detector: OwlDetector, suite: Suite, bank: TextBank) -> Tree:
    """Versions, hashes and processor settings of a result."""
    return runfolder.provenance(
        base=detector.base_id,
        base_revision=detector.revision,
        base_sha256=detector.content_hash(),
        head_sha256=state_sha256(detector.trainable_state()),
        processor=suite.images.preprocessor.settings(),
        annotations={n: {"file": b.path.name, "sha256": b.sha256} for n, b in suite.annotations.items()},
        text={
            "policy": bank.policy,
            "captions_encoded": bank.forwards,
            "captions_read": bank.hits,
            "over_limit": bank.n_over,
        },
    )


def finish(
    tree: Tree,
    folder: Path,
    suite: Suite,
    detector: OwlDetector,
    outcome: Outcome,
    provenance: Tree,
    facts: Tree,
    *,
    write: bool,
) -> Tree:
    """Save predictions and score them, with controls and intervals. Only the first process writes."""
    if not write:
        return suite.score(outcome, conventions_of(tree))
    scored = suite.score(outcome, conventions_of(tree), detector=detector)
    outcome.save(folder / "predictions")
    save_lengths(folder / "predictions", suite.lengths)
    return write_results(tree, folder, scored, provenance, facts, outcome.counters)


def announce(tree: Tree, folder: Path) -> None:
    """Report of a finished run, if `report` says so, and where its results are. A failed report costs no result."""
    if tree["report"]:
        from noctowl.report import write_report  # plots and pictures: only where they are made

        try:
            log.info("report: %s", write_report([folder]))
        except (NoctowlError, OSError) as error:
            log.warning("no report was written (%s). `noctowl report %s` tries again.", error, folder)
    print(f"results: {folder / 'results.json'}")


def show_predictions(folder: Path, loggers: Sequence[Logger], plot: Path | None) -> None:
    """Trade-off plot and prediction panels of a finished run as images in W&B, where the run has it.

    Panels: truth left, prediction right; a half of PANELS drawn at random (the same vocabularies in every run on the
    same file, so that runs can be compared), a quarter worst, a quarter best. A failure costs no result.
    """
    if not has_wandb(loggers):
        return
    from noctowl.report.gallery import pictures  # as above: only where pictures are made
    from noctowl.report.runs import load_runs

    if plot is not None:
        log_pictures(loggers, "tradeoff", [Image.open(plot).convert("RGB")], ["path of the run; validation figures"])
    try:
        found, reason = pictures(load_runs([folder])[0], count=PANELS // 4, drawn=PANELS // 2)
    except (NoctowlError, OSError) as error:
        found, reason = [], str(error)
    if reason:
        log.info("no prediction panels in W&B: %s", reason)
    for kind in dict.fromkeys(picture.kind for picture in found):
        chosen = [picture for picture in found if picture.kind == kind]
        captions = [f"{p.benchmark}: {p.truth} -> {p.predicted}{'' if p.correct else ' (wrong)'}" for p in chosen]
        log_pictures(loggers, f"predictions/{kind}", [Image.open(io.BytesIO(p.jpeg)) for p in chosen], captions)


def write_results(
    tree: Tree, folder: Path, scored: Tree, provenance: Tree, facts: Tree, counters: Mapping[str, int]
) -> Tree:
    """results.json, ranks.json and the table on the screen."""
    results = {
        "version": runfolder.RESULTS_VERSION,
        "metrics": scored["metrics"],
        "intervals": scored.get("intervals", {}),
        "controls": scored.get("controls", {}),
        "settings": {
            "what": what(tree),
            **conventions_of(tree),
            "compat": tree["compat"],
            "seed": tree["seed"],
            "data": tree["data"],
            "coarse": scored.get("coarse") or None,  # protocol, prompts and file of the LVIS figures
            "resamples": tree["benchmark"]["intervals"],
        },
        "counts": {**scored["counts"], **facts, "forwards": dict(counters)},
        "provenance": provenance,
    }
    runfolder.write_json(folder / "results.json", results)
    runfolder.write_json(folder / "predictions" / "ranks.json", scored["ranks"])
    if scored.get("evidence"):
        runfolder.write_json(folder / "predictions" / "evidence.json", scored["evidence"], indent=None)
    print_results(results)
    return results


def rescore(tree: Tree, folder: Path) -> Tree:
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
        outcome.predictions = {k: p for k, p in outcome.predictions.items() if k.removesuffix(SHUFFLED) in asked}
    names = [name for name in outcome.predictions if not name.endswith(SHUFFLED)]
    files = {n: read_fgovd(p) for n, p in (find_benchmarks(annotations, names).items() if names else ())}
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
        asked=asked_of(tree, annotations),
    )
    results = write_results(tree, folder, scored, runfolder.provenance(predictions=str(source)), {}, outcome.counters)
    announce(tree, folder)
    return {**results, "folder": str(folder)}


def what(tree: Tree) -> str:
    """Which head on which data, in a line: tables of a sweep are to be told apart."""
    data = tree["data"]
    place = "data=synthetic" if data["name"] == "synthetic" else f"data={data['name']} ({data['root']})"
    if "loss" in tree:
        weight = f" x{tree['distill']['weight']:g}" if tree["distill"]["name"] != "none" else ""
        head = f"loss={tree['loss']['name']} distill={tree['distill']['name']}{weight} seed={tree['seed']}"
    else:
        source = tree["checkpoint"] or tree["predictions"]
        head = f"head of {Path(source).name}" if source else "as pretrained"
    return f"model={tree['model']['name']} {head}, {place}"
