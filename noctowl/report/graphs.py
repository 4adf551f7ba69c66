"""Plots of a report as PNG bytes: told apart by marks, hatches and shades, so that they can be read in grey.

No pyplot: figures belong to nobody's global state.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from noctowl import fonts
from noctowl.eval.analysis import LENGTHS
from noctowl.plots import MARKERS
from noctowl.report.published import lookup
from noctowl.report.runs import Run, comparable, is_lvis
from noctowl.report.sections import SIZES, confusion, figure

SHADES = ("#0b2a4a", "#c8752d", "#5b9bd0", "#8a8f98", "#d9c36a", "#3f6f52")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
BELIEF = LinearSegmentedColormap.from_list("belief", ["#ffffff", "#9db8d6", "#0b2a4a"])
MOST_RUNS = 6  # in plots with one mark a run; tables have all
MOST_VALUES = 14  # rows and columns of a confusion


def tradeoff(runs: Sequence[Run]) -> bytes | None:
    """Fine (Hard N=5, or the first benchmark) against coarse figures, with published points where comparable."""
    case = next((c for c in (("hard", 5), *(runs[0].cases if runs else ())) if _both(runs, c)), None)
    if case is None:
        return None
    rare = all("lvis/ap_rare" in run.metrics for run in _both(runs, case))
    coarse_key, coarse_name = ("lvis/ap_rare", "APr") if rare else ("lvis/ap", "AP")
    canvas, (axes,) = _canvas(1, width=5.6, height=3.7)
    for i, run in enumerate(_both(runs, case)):
        x, y = figure(run, f"fgovd/{case[0]}/n{case[1]}/map"), figure(run, coarse_key)
        if x and y:
            _point(axes, x, y, i, run.label)
    if all(is_lvis(run) and comparable(run, case[0]) for run in _both(runs, case)) and rare:
        coarse = lookup("lvis_v1_val")
        for method, found in lookup("detection").items():
            x_row, y_row = found.get((*case, "map")), coarse.get(method, {}).get(("lvis", None, "ap_rare"))
            if x_row and y_row:
                axes.plot(x_row.value, y_row.value, "+", color="0.35", ms=7)
                axes.annotate(
                    method,
                    (x_row.value, y_row.value),
                    fontsize=6,
                    color="0.3",
                    xytext=(3, 2),
                    textcoords="offset points",
                )
    axes.set(xlabel=f"{case[0]} N={case[1]}, mAP (%)", ylabel=f"coarse {coarse_name} (%)")
    return _png(canvas, axes)


def _both(runs: Sequence[Run], case: tuple[str, int]) -> list[Run]:
    return [r for r in runs if f"fgovd/{case[0]}/n{case[1]}/map" in r.metrics and "lvis/ap" in r.metrics]


def _point(axes: Axes, x, y, i: int, label: str) -> None:
    bars: dict[str, Any] = {}
    for name, value in (("xerr", x), ("yerr", y)):
        if value.bounds:
            low, high = value.bounds
            bars[name] = [[100 * max(value.value - low, 0)], [100 * max(high - value.value, 0)]]
    mark, shade = MARKERS[i % len(MARKERS)], SHADES[i % len(SHADES)]
    axes.errorbar(
        100 * x.value,
        100 * y.value,
        fmt=mark,
        color=shade,
        mec="black",
        ms=7,
        elinewidth=0.8,
        label=_short(label),
        **bars,
    )


def n_curves(runs: Sequence[Run]) -> bytes | None:
    """mAP by number of negatives with intervals; None where every benchmark has one N only."""
    several = [
        b
        for b in dict.fromkeys(b for r in runs for b, _ in r.cases)
        if len({n for r in runs for c, n in r.cases if c == b}) > 1
    ]
    if not several:
        return None
    canvas, panels = _canvas(len(several))
    for axes, b in zip(panels, several):
        numbers: set[int] = set()
        for i, run in enumerate(runs[:MOST_RUNS]):
            own = [(n, figure(run, f"fgovd/{b}/n{n}/map")) for c, n in run.cases if c == b]
            points = [(n, f) for n, f in own if f is not None]
            numbers |= {n for n, _ in points}
            shade = SHADES[i % len(SHADES)]
            axes.plot(
                *zip(*[(n, 100 * f.value) for n, f in points]),
                marker=MARKERS[i],
                color=shade,
                ms=4,
                lw=1,
                label=_short(run.label),
            )
            bounded = [(n, f.bounds) for n, f in points if f.bounds]
            if bounded:
                axes.fill_between(
                    [n for n, _ in bounded],
                    [100 * b[0] for _, b in bounded],
                    [100 * b[1] for _, b in bounded],
                    color=shade,
                    alpha=0.15,
                    lw=0,
                )
        axes.set_title(b, fontsize=8)
        axes.set(xlabel="negatives N", ylabel="mAP (%)", ylim=(0, None), xticks=sorted(numbers))
    return _png(canvas, panels[0])


def bars(runs: Sequence[Run], kind: str) -> bytes | None:
    """Top-1 by caption length ("words") or object size ("size"), side by side for benchmarks at their largest N."""
    order = list(LENGTHS) if kind == "words" else list(SIZES)
    runs = [run for run in runs if run.evidence][:MOST_RUNS]
    cases = [(b, n) for b, n in _largest(runs) if any(_groups(run, b, n, kind) for run in runs)]
    order = [name for name in order if any(name in _groups(run, *case, kind) for run in runs for case in cases)]
    if not cases:
        return None
    canvas, (axes,) = _canvas(1, width=9.0, height=2.8)
    width, step = 0.8 / len(runs), len(order) + 1
    for i, run in enumerate(runs):
        found = [
            (c * step + j, _groups(run, *case, kind).get(name))
            for c, case in enumerate(cases)
            for j, name in enumerate(order)
        ]
        known = [(x + (i - (len(runs) - 1) / 2) * width, row) for x, row in found if row]
        axes.bar(
            [x for x, _ in known], [100 * row["top1"] for _, row in known], width, label=_short(run.label), **_fill(i)
        )
    axes.set(ylabel="top-1 (%)", ylim=(0, 112), xlim=(-1, len(cases) * step - 1))
    axes.set_xticks(
        [c * step + j for c in range(len(cases)) for j in range(len(order))],
        order * len(cases),
        rotation=90,
        fontsize=6,
    )
    for c, (b, n) in enumerate(cases):
        axes.text(c * step + (len(order) - 1) / 2, 110, f"{b} N={n}", ha="center", va="top", fontsize=7)
    return _png(canvas, axes)


def _fill(i: int) -> dict[str, Any]:
    return {"color": SHADES[i % len(SHADES)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white", "lw": 0.3}


def _largest(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """Each benchmark with its largest N."""
    names = dict.fromkeys(b for run in runs for b, _ in run.cases)
    return [(name, max(n for run in runs for b, n in run.cases if b == name)) for name in names]


def _groups(run: Run, b: str, n: int, kind: str) -> Mapping[str, dict]:
    tables = run.evidence.get(b, {}).get(f"n{n}", {})
    return tables.get("length", {}).get("bins", {}) if kind == "words" else tables.get("size", {})


def gains(runs: Sequence[Run]) -> bytes | None:
    """The model's top-1 with the best text-only control under it, by benchmark at its largest N."""
    runs = [run for run in runs if any(key.endswith("/visual_gain") for key in run.results.get("controls", {}))][
        :MOST_RUNS
    ]
    cases = [(b, n) for b, n in _largest(runs) if any(figure(r, f"fgovd/{b}/n{n}/visual_gain") for r in runs)]
    if not cases:
        return None
    canvas, (axes,) = _canvas(1, width=7.2, height=3.0)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        for j, (b, n) in enumerate(cases):
            gain, model = (figure(run, f"fgovd/{b}/n{n}/{key}") for key in ("visual_gain", "model/top1"))
            if gain is None or model is None:
                continue
            x, level = j + (i - (len(runs) - 1) / 2) * width, 100 * (model.value - gain.value)
            label = "_" if j else _short(run.label)
            axes.bar(x, 100 * model.value, width, label=label, **_fill(i))
            if model.bounds:
                axes.vlines(x, 100 * model.bounds[0], 100 * model.bounds[1], color="black", lw=0.8)
            for colour, thickness in (("black", 2.2), ("white", 0.9)):
                axes.hlines(level, x - width / 2, x + width / 2, color=colour, lw=thickness)
    axes.set(ylabel="top-1 (%)", xticks=range(len(cases)), xticklabels=[f"{b}\nN={n}" for b, n in cases], ylim=(0, 100))
    return _png(canvas, axes)


def confusion_maps(run: Run, kinds: Sequence[str]) -> bytes | None:
    """Share of the times that a substitution was on offer and was believed; the most frequent values of each type."""
    tables = {kind: _matrix(run, kind) for kind in kinds}
    known = {kind: found for kind, found in tables.items() if found is not None}
    if not known:
        return None
    canvas, panels = _canvas(len(known), height=2.9)
    for axes, (kind, (values, shares)) in zip(panels, known.items()):
        image = axes.imshow(shares, cmap=BELIEF, vmin=0, aspect="auto")
        axes.set_title(kind, fontsize=8)
        names = [fonts.drawable(value) for value in values]
        axes.set_xticks(range(len(values)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(values)), names, fontsize=6)
        axes.grid(False)
        canvas.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)
    return _png(canvas, None)


def _matrix(run: Run, kind: str) -> tuple[list[str], list[list[float]]] | None:
    """Values and believed shares in percent; None where nothing was believed."""
    table = confusion(run, kind)
    offered: dict[str, int] = {}
    for true, row in table.items():
        for said, (asked, _) in row.items():
            offered[true] = offered.get(true, 0) + asked
            offered[said] = offered.get(said, 0) + asked
    values = sorted(sorted(offered, key=lambda v: (-offered[v], v))[:MOST_VALUES])
    if len(values) < 2 or not any(chosen for row in table.values() for _, chosen in row.values()):
        return None
    return values, [[_share(table.get(true, {}).get(said)) for said in values] for true in values]


def _share(cell: tuple[int, int] | None) -> float:
    return float("nan") if cell is None or not cell[0] else 100 * cell[1] / cell[0]


def _short(label: str) -> str:
    return fonts.drawable(label if len(label) <= 34 else label[:33] + "…")


def _canvas(count: int, *, width: float = 9.0, height: float = 2.1) -> tuple[Canvas, list[Axes]]:
    columns = min(count, 4)
    lines = -(-count // columns)
    canvas = Canvas(figsize=(width if count == 1 or columns == 4 else 2.3 * columns, height * lines), dpi=100)
    panels = [canvas.add_subplot(lines, columns, i + 1) for i in range(count)]
    for axes in panels:
        axes.grid(color="0.9", lw=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=7)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_fontsize(8)
    return canvas, panels


def _png(canvas: Canvas, legend: Axes | None) -> bytes:
    count = 0 if legend is None else len(legend.get_legend_handles_labels()[1])
    if legend is not None and count:
        alone = len(canvas.axes) == 1  # above the plot, where it covers nothing; of many, in the first
        above: dict[str, Any] = {
            "loc": "lower left",
            "bbox_to_anchor": (0, 1.01),
            "ncols": min(count, 3),
            "borderaxespad": 0,
        }
        legend.legend(fontsize=6, framealpha=0.7, **(above if alone else {}))
    fonts.set_fonts(canvas)
    canvas.tight_layout()
    file = io.BytesIO()
    canvas.savefig(file, format="png")
    return file.getvalue()
