"""What a run leaves behind: predictions, results.json, ranks.json and the table on the screen."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noctowl import runfolder
from noctowl.assembly import conventions_of
from noctowl.errors import NoctowlError
from noctowl.eval.outcome import Outcome, save_lengths
from noctowl.eval.suite import Suite
from noctowl.features import TextBank
from noctowl.hashing import state_sha256
from noctowl.model import OwlDetector
from noctowl.tables import print_results

Tree = dict[str, Any]
log = logging.getLogger("noctowl")


def provenance_of(tree: Tree, detector: OwlDetector, suite: Suite, bank: TextBank) -> Tree:
    """Versions, hashes and processor settings of a result."""
    return runfolder.provenance(
        base=detector.base_id,
        base_revision=detector.revision,
        base_sha256=detector.content_hash(),
        head_sha256=state_sha256(detector.trainable_state()),
        processor=suite.images.preprocessor.settings(),
        annotations={n: {"file": b.path.name, "sha256": b.sha256} for n, b in suite.annotations.items()},
        text={"policy": bank.policy, "captions_encoded": bank.forwards, "over_limit": bank.n_over},
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
