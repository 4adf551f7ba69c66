"""What a run leaves behind: predictions, results.json, ranks.json and the table on the screen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noctowl import runfolder
from noctowl.assembly import conventions_of
from noctowl.eval.outcome import Outcome, save_lengths
from noctowl.eval.suite import Suite
from noctowl.features import TextBank
from noctowl.hashing import state_sha256
from noctowl.model import OwlDetector
from noctowl.tables import print_results

Tree = dict[str, Any]


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
        "settings": {
            **conventions_of(tree),
            "compat": tree["compat"],
            "seed": tree["seed"],
            "data": tree["data"],
            "coarse": scored.get("coarse") or None,  # protocol, prompts and file of the LVIS figures
        },
        "counts": {**scored["counts"], **facts, "forwards": dict(counters)},
        "provenance": provenance,
    }
    runfolder.write_json(folder / "results.json", results)
    runfolder.write_json(folder / "predictions" / "ranks.json", scored["ranks"])
    print_results(results)
    return results
