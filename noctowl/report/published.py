"""Published figures: noctowl/published.csv, long format, each with its source and date; errata are in `note`."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Row:
    """One published figure, in percent as printed. `n_neg` None where there are no negatives (LVIS)."""

    method: str
    backbone: str
    protocol: str  # detection | ground_truth_box (classification of given boxes) | lvis_v1_val
    benchmark: str
    n_neg: int | None
    metric: str
    value: float
    source: str
    date: str  # year and month of the source; where it prints none, `note` says whose date this is
    source_kind: str  # primary: the method's own paper or a benchmark's; secondary: quoted by others
    note: str


@cache
def published() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    with files("noctowl").joinpath("published.csv").open(encoding="utf-8") as file:
        return tuple(
            Row(**{**row, "n_neg": int(row["n_neg"]) if row["n_neg"] else None, "value": float(row["value"])})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        )


def lookup(protocol: str) -> dict[str, dict[tuple[str, int | None, str], Row]]:
    """method -> (benchmark, N, metric) -> row, of one protocol."""
    found: dict[str, dict[tuple[str, int | None, str], Row]] = {}
    for row in published():
        if row.protocol == protocol:
            found.setdefault(row.method, {})[row.benchmark, row.n_neg, row.metric] = row
    return found
