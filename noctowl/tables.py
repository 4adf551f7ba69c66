"""Results as tables on the screen; never narrower than they need, also where the output is a file."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from noctowl.data.files import BENCHMARKS

ABSENT = "–"
WIDTH = 100
LVIS_COLUMNS = {"ap": "AP", "ap_50": "AP50", "ap_75": "AP75", "ap_small": "APs", "ap_medium": "APm", "ap_large": "APl"}
LVIS_COLUMNS |= {"ap_rare": "APr", "ap_common": "APc", "ap_frequent": "APf"}
STYLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """FG-OVD by benchmark and N, then the coarse figures; mAP and AP in percent.

    obj: objects that the mAP of this table is over, forced: those of them that no detection can hit (a caption over the
    token limit), out: objects of the file that are in neither (short vocabularies, images without any detection).
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    metrics, truth = results["metrics"], results["settings"]["ground_truth"]
    rows = sorted({tuple(key.split("/")[1:3]) for key in metrics if key.startswith("fgovd/")}, key=_order)
    other = "masked" if truth == "unmasked" else "unmasked"
    table = Table(
        title=f"{results['settings'].get('what', '')}\nFG-OVD, ground truth {truth}; mAP in percent",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("benchmark", no_wrap=True)
    for column in ("N", "mAP", "50", "75", "S", "M", "L", other, "rank", "med", "obj", "forced", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, n in rows:
        base = f"fgovd/{name}/{n}"
        suffixes = ("", "_50", "_75", "_small", "_medium", "_large")
        figures = [_percent(metrics.get(f"{base}/map{suffix}")) for suffix in suffixes]
        ranks = [_plain(metrics.get(f"{base}/rank_{which}")) for which in ("mean", "median")]
        count = results["counts"][f"fgovd/{name}"][n]
        objects = count["objects"] + count["objects_dropped_short"] + count["objects_dropped_tokens"]
        scored, forced = (count[truth][key] for key in ("objects_scored", "objects_forced_missed"))
        masked = _percent(metrics.get(f"{base}/{other}/map"))
        table.add_row(name, n[1:], *figures, masked, *ranks, str(scored), str(forced), str(objects - scored))
    if rows:
        console.print(table)
    coarse = {key.split("/")[1]: value for key, value in metrics.items() if key.startswith("lvis/")}
    if coarse:
        table = Table(
            title=f"LVIS, protocol {results['settings']['coarse']['protocol']}; AP in percent",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for name in coarse:
            table.add_column(LVIS_COLUMNS[name], justify="right")
        table.add_row(*(_percent(value) for value in coarse.values()))
        console.print(table)


def _order(row: tuple[str, ...]) -> tuple[int, int]:
    names = list(BENCHMARKS)
    return (names.index(row[0]) if row[0] in names else len(names), int(row[1][1:]))


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"
