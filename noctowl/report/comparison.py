"""Paired comparisons of the runs of a report, on the units that each run saved beside its predictions."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from noctowl.eval.compare import compare, holm
from noctowl.report.runs import Run
from noctowl.report.sections import cases_of
from noctowl.report.table import Cell, Figure, Table

EVERY_PAIR = 4  # configurations up to which all pairs are compared; beyond, each with the first
PERMUTATIONS = 5_000  # at least
PER_ROW = 100  # of the table, so that the smallest p that can be had passes Holm's correction: it becomes .01 at most


def configurations(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed only are one configuration, under its name and number of seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    found: dict[str, list[Run]] = {}
    for members in groups.values():
        seeds = {run.config.get("seed") for run in members}
        if len(members) > 1 and len(seeds) == len(members):
            name = members[0].label.split(", seed")[0].split(" #")[0]
            found[_free(f"{name} ({len(members)} seeds)", found)] = members
        else:
            for run in members:  # the same seed twice is no second seed
                found[run.label] = [run]
    return found


def comparisons(runs: Sequence[Run], tail: str = "") -> tuple[Table | None, list[str]]:
    """One row for each pair, benchmark, N and figure; and what could not be compared. `runs` are of one signature.

    The p-values are corrected over the whole table (Holm).
    """
    groups = configurations(runs)
    if len(groups) < 2:  # one configuration: how its seeds differ from each other
        groups = {run.label: [run] for run in runs}
    if len(groups) < 2:
        return None, []
    cases: list[tuple[dict, dict[str, ndarray], ndarray]] = []  # what is compared, values by run [S, A], images [A]
    unable: list[str] = []
    for b, n in cases_of(runs):
        for name, unit, value in (("mAP", "class", "ap"), ("top-1", "object", "rank")):
            usable = {}
            for label, members in groups.items():
                units = [run.evidence.get(b, {}).get(f"n{n}", {}).get("units") for run in members]
                if all(units):
                    usable[label] = units
            if len(usable) < 2:
                continue
            first = next(iter(usable.values()))[0]
            alike = {k: u for k, u in usable.items() if all(own[unit] == first[unit] for own in u)}
            if len(alike) < len(usable):
                others = ", ".join(sorted(usable.keys() - alike.keys()))
                unable.append(f"{b} N={n}, {name}: {others} was scored on other objects and is not compared")
            values = {k: np.stack([_values(own, value) for own in u]) for k, u in alike.items()}
            if len(values) >= 2 and first[unit]:
                what = {"benchmark": b, "n": n, "figure": name, "units": len(first[unit])}
                cases.append((what, values, np.asarray(first[f"{unit}_image"])))
    permutations = max(PERMUTATIONS, PER_ROW * sum(_count(values) for _, values, _ in cases))
    rows = [what | row for what, values, images in cases for row in _pairs(values, images, permutations)]
    if not rows:
        return None, list(dict.fromkeys(unable))
    cells: list[tuple[Cell, ...]] = []
    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        d = row["difference"]
        means = [Figure(row[f"mean_{side}"], None, 100) for side in "ab"]
        p = [Figure(value, None, 1, 4) for value in (row["p"], adjusted)]
        difference = Figure(d.value, (d.low, d.high), 100, 2)
        cells.append(
            (row["benchmark"], row["n"], row["figure"], row["a"], row["b"], *means, difference, *p, row["units"])
        )
    columns = ("benchmark", "N", "figure", "a", "b", "mean a", "mean b", "a − b", "p", "p (Holm)", "units")
    note = (
        "On the same images, unit by unit (captions for mAP, objects for top-1); percent. Interval: bootstrap over "
        f"images; p: sign flips per image, up to {permutations} permutations; Holm's correction over the whole table. "
        "Several seeds of a configuration are averaged first, so that their scatter is no part of the interval."
    )
    if len(groups) > EVERY_PAIR:
        note += f" With more than {EVERY_PAIR} configurations each is compared with the first one only."
    return Table(f"comparison{tail}", "Paired comparison", columns, tuple(cells), note), list(dict.fromkeys(unable))


def _count(values: dict[str, ndarray]) -> int:
    """Rows that `_pairs` gives."""
    return len(values) * (len(values) - 1) // 2 if len(values) <= EVERY_PAIR else len(values) - 1


def _pairs(values: dict[str, ndarray], images: ndarray, permutations: int) -> list[dict]:
    if len(values) <= EVERY_PAIR:
        return compare(values, images, permutations=permutations)
    first, *others = values
    return [
        row
        for other in others
        for row in compare({first: values[first], other: values[other]}, images, permutations=permutations)
    ]


def _values(units: dict, value: str) -> ndarray:
    found = np.asarray(units[value], np.float64)
    return (found == 1).astype(np.float64) if value == "rank" else found


def _free(name: str, taken: dict) -> str:
    number = 1
    while (numbered := name if number == 1 else f"{name} #{number}") in taken:
        number += 1
    return numbered
