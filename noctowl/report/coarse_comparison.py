"""Paired comparisons of the coarse figures of a report's runs, on the detections that each run saved."""

import logging
from collections.abc import Sequence
from itertools import combinations
from math import isnan
from typing import Any

from noctowl.assembly import data_root
from noctowl.data.files import find_annotations, find_file
from noctowl.errors import NoctowlError
from noctowl.eval import compare_coarse
from noctowl.eval.ap import Detections
from noctowl.eval.bootstrap import image_weights
from noctowl.eval.compare import holm
from noctowl.eval.evidence import COARSE_RESAMPLES
from noctowl.eval.lvis import LvisAnnotations, read_lvis
from noctowl.eval.outcome import COARSE_FILE, load_coarse
from noctowl.report.comparison import EVERY_PAIR, configurations
from noctowl.report.runs import Run
from noctowl.report.table import Cell, Figure, Table

log = logging.getLogger("noctowl")
PERMUTATIONS = 400  # at least; each reads all curves again
PER_ROW = 50  # of the table, so that the smallest p that can be had becomes .02 at most by Holm's correction
RULES = ("file", "sha256", "protocol", "prompts_sha256", "nms_iou", "top")  # what makes coarse figures comparable


def coarse_comparisons(runs: Sequence[Run], tail: str = "") -> tuple[Table | None, list[str]]:
    """One row for each pair and figure, and what could not be compared; `runs` are of one signature.

    A table and a family of Holm's correction of its own: permutations are dearer here than for FG-OVD's figures.
    """
    scored = [run for run in runs if "lvis/ap" in run.metrics]
    kept, unable = _alike(scored)
    groups = configurations(kept)
    if len(groups) < 2:  # one configuration: how its seeds differ from each other
        groups = {run.label: [run] for run in kept}
    if len(groups) < 2:
        return None, unable
    groups = {name: sorted(own, key=lambda run: str(run.config.get("seed"))) for name, own in groups.items()}
    try:
        annotations, why = _annotations(kept)
        if annotations is None:
            return None, [*unable, f"coarse figures are not compared: {why}"]
        rows = _rows(groups, annotations)
    except NoctowlError as error:
        return None, [*unable, f"coarse figures are not compared: {error}"]
    cells: list[tuple[Cell, ...]] = []
    for row, adjusted in zip(rows, holm([row["p"].p for row in rows])):
        d = row["difference"]
        means = [Figure(row[side], None, 100) for side in ("mean a", "mean b")]
        p = [Figure(value, None, 1, 4) for value in (row["p"].p, adjusted)]
        difference = Figure(d.value, (d.low, d.high), 100, 2)
        cells.append((row["figure"], row["a"], row["b"], *means, difference, *p, row["p"].drawn))
    columns = ("figure", "a", "b", "mean a", "mean b", "a − b", "p", "p (Holm)", "permutations")
    rules = kept[0].results["settings"]["coarse"]
    note = (
        f"On the same {len(annotations.image_ids)} images of {rules['file']}, protocol {rules['protocol']}; percent. "
        f"Interval: {COARSE_RESAMPLES} bootstrap resamples of the images, as for the figures themselves. p: "
        "each image's detections stay with their run or change it, and AP is read again; so often as the row says, "
        f"{_limit(len(rows))} at most, fewer where {compare_coarse.ENOUGH} draws were as extreme. Holm's correction "
        "over this table. Several seeds of a configuration are averaged first, and exchanged together."
    )
    if len(groups) > EVERY_PAIR:
        note += f" With more than {EVERY_PAIR} configurations each is compared with the first one only."
    return Table(f"comparison-coarse{tail}", "Paired comparison, coarse", columns, tuple(cells), note), unable


def _rows(groups: dict[str, list[Run]], annotations: LvisAnnotations) -> list[dict[str, Any]]:
    """Detections are read again for each pair, as those of all runs together may not fit in memory."""
    weights = image_weights(len(annotations.image_ids), resamples=COARSE_RESAMPLES)
    figures = {k: compare_coarse.run_figures(map(_detections, g), weights, annotations) for k, g in groups.items()}
    pairs = [(a, b) for a, b in combinations(groups, 2) if len(groups) <= EVERY_PAIR or a == next(iter(groups))]
    names = [f for f, value in enumerate(next(iter(figures.values()))[0]) if not isnan(value)]
    permutations = _limit(len(pairs) * len(names))
    rows = []
    for a, b in pairs:
        log.info("comparing coarse figures of %s and %s: up to %d permutations", a, b, permutations)
        sides = [
            compare_coarse.side_by_side(_detections(groups[a][i]), _detections(groups[b][j]), annotations)
            for i, j in compare_coarse.seed_pairs(len(groups[a]), len(groups[b]))
        ]
        found = compare_coarse.exchange_p(sides, annotations, permutations=permutations)
        differences = compare_coarse.difference(figures[a], figures[b])
        for f in names:
            row = {"figure": compare_coarse.FIGURES[f].replace("ap", "AP", 1).replace("_", " "), "a": a, "b": b}
            means = {"mean a": float(figures[a][0][f]), "mean b": float(figures[b][0][f])}
            rows.append(row | means | {"difference": differences[f], "p": found[f]})
    return rows


def _limit(rows: int) -> int:
    """Permutations of each pair at most."""
    return max(PERMUTATIONS, PER_ROW * rows)


def _alike(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs with detections beside their results that were made by the rules of the first of them; and the others."""
    kept: list[Run] = []
    lacking, unlike = [], []
    for run in runs:
        if not (run.folder / "predictions" / COARSE_FILE).is_file():
            lacking.append(run.label)
        elif kept and _rules(run) != _rules(kept[0]):
            differ = [key for key, own in _rules(run).items() if own != _rules(kept[0])[key]]
            unlike.append(f"{run.label} ({', '.join(differ)})")
        else:
            kept.append(run)
    said = []
    if lacking and len(runs) > 1:
        said.append(f"coarse figures without their detections beside them are not compared: {', '.join(lacking)}")
    if unlike:
        said.append(f"coarse figures of other rules than {kept[0].label}'s are not compared: {', '.join(unlike)}")
    return kept, said


def _rules(run: Run) -> dict[str, Any]:
    settings = run.results["settings"].get("coarse") or {}
    return {key: settings.get(key) for key in RULES}


def _annotations(runs: Sequence[Run]) -> tuple[LvisAnnotations | None, str]:
    """The file that the runs were scored on, looked for where they had it; None and why it is not there."""
    seen: set[Any] = set()
    why = "no configuration names a file (data.coarse_file)"
    for run in runs:
        data = run.config.get("data", {})
        try:
            if not data.get("coarse_file"):
                continue
            path = find_file(find_annotations(data_root(data), data.get("annotations")), data["coarse_file"])
            if path in seen:
                continue
            seen.add(path)
            found = read_lvis(path)
        except NoctowlError as error:
            why = f"annotations are not where the runs had them ({error})"
            continue
        if found.sha256 == _rules(run)["sha256"]:
            return found, ""
        why = f"{path} is not the file that the runs were scored on"
    return None, why


def _detections(run: Run) -> Detections:
    return load_coarse(run.folder / "predictions")[0]
