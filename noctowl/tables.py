"""Results as a table on the screen."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from noctowl.data.files import BENCHMARKS

ABSENT = "–"


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """FG-OVD by benchmark and N, then the coarse figures; mAP and AP in percent."""
    console = console or Console()
    metrics, counts = results["metrics"], results["counts"]
    rows = sorted({tuple(key.split("/")[1:3]) for key in metrics if key.startswith("fgovd/")}, key=_order)
    other = "masked" if results["settings"]["ground_truth"] == "unmasked" else "unmasked"
    table = Table(title=f"FG-OVD, ground truth {results['settings']['ground_truth']}", title_justify="left")
    columns = ("benchmark", "N", "mAP", "mAP50", "small", "medium", "large", f"mAP {other}", "rank mean", "median")
    for column in (*columns, "objects", "dropped"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for name, n in rows:
        base = f"fgovd/{name}/{n}"
        figures = [
            _percent(metrics.get(f"{base}/map{suffix}")) for suffix in ("", "_50", "_small", "_medium", "_large")
        ]
        ranks = [_plain(metrics.get(f"{base}/rank_{which}")) for which in ("mean", "median")]
        count = counts[f"fgovd/{name}"][n]
        dropped = count["objects_dropped_short"] + count["objects_dropped_tokens"]
        masked = _percent(metrics.get(f"{base}/{other}/map"))
        table.add_row(name, n[1:], *figures, masked, *ranks, str(count["objects"]), str(dropped))
    console.print(table)
    coarse = {key.split("/")[1]: value for key, value in metrics.items() if key.startswith("lvis/")}
    if coarse:
        table = Table(title="coarse classes (LVIS format)", title_justify="left")
        for name in coarse:
            table.add_column(name.replace("ap", "AP", 1).replace("_", " "), justify="right")
        table.add_row(*(_percent(value) for value in coarse.values()))
        console.print(table)


def _order(row: tuple[str, ...]) -> tuple[int, int]:
    names = list(BENCHMARKS)
    return (names.index(row[0]) if row[0] in names else len(names), int(row[1][1:]))


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"
