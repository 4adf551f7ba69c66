"""Plots of results: readable in grey and at small size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen: there may be no display

from noctowl import fonts

MARKERS = "osD^vP*X<>"


@dataclass(frozen=True)
class Point:
    """A head in the plane of fine-grained against coarse mAP, both in [0, 1]; several seeds give several values."""

    label: str
    fine: Sequence[float]
    coarse: Sequence[float]


def tradeoff(points: Sequence[Point], path: Path, *, x_label: str, y_label: str, start: str | None = None) -> Path:
    """Fine-grained against coarse figures; means as marks, seeds as dots, a dashed line from the point named `start`.

    Each point has a mark and a shade of its own, so that the plot is readable without colour.
    """
    figure, axes = plt.subplots(figsize=(6.4, 4.4), dpi=150)
    colours = plt.get_cmap("viridis")
    origin = next((p for p in points if p.label == start), None)
    for i, point in enumerate(points):
        colour = colours(0.9 * i / max(len(points) - 1, 1))
        x, y = _mean(point.fine), _mean(point.coarse)
        if origin is not None and point is not origin:
            axes.plot([_mean(origin.fine), x], [_mean(origin.coarse), y], "--", color="0.75", lw=0.8, zorder=1)
        axes.plot(point.fine, point.coarse, ".", color=colour, ms=4, alpha=0.6, zorder=2)
        label = fonts.drawable(point.label)
        axes.plot(x, y, MARKERS[i % len(MARKERS)], color=colour, mec="black", ms=9, label=label, zorder=3)
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(-0.02, None))
    axes.grid(color="0.9")
    axes.legend(fontsize=8, frameon=True, loc="best")
    fonts.set_fonts(figure)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def training_path(
    history: Sequence[Mapping[str, float]], best: int | None, path: Path, *, fine: str, coarse: str
) -> Path | None:
    """The way of a run in the plane of validation mAP and coarse AP, epoch by epoch, from the pretrained head (-1).

    The selected epoch `best` is ringed. None, and no file, where fewer than two epochs have both figures.
    """
    steps = [entry for entry in history if fine in entry and coarse in entry]
    if len(steps) < 2:
        return None
    figure, axes = plt.subplots(figsize=(6.4, 4.4), dpi=150)
    x, y = [entry[fine] for entry in steps], [entry[coarse] for entry in steps]
    axes.plot(x, y, "-", color="0.6", lw=1, zorder=1)
    axes.scatter(x, y, c=range(len(steps)), cmap="viridis", edgecolors="black", s=36, zorder=2)
    for entry, a, b in zip(steps, x, y):
        name = "pretrained" if entry["epoch"] == -1 else str(int(entry["epoch"]))
        axes.annotate(name, (a, b), xytext=(5, 4), textcoords="offset points", fontsize=7)
        if entry["epoch"] == best:
            axes.plot(a, b, "o", ms=13, mfc="none", mec="black", mew=1.5, zorder=3, label=f"selected: epoch {best}")
    axes.set(xlabel="validation mAP", ylabel="coarse validation AP")
    axes.grid(color="0.9")
    if best is not None:
        axes.legend(fontsize=8, loc="best")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
