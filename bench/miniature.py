"""The method's effects on the miniature: what fine-tuning gains, what it destroys, what distillation keeps.

    python bench/miniature.py            the sweep: 2 losses x 4 distillation weights x 3 seeds -> RESULTS.md, plot
    python bench/miniature.py --quick    one seed: pretrained, plain triplet, triplet + mse -> plot and pictures

Hyper-parameters are chosen on the validation files; the test files are read once per reported head, after the choice.
The rule: of the distillation weights that lose at most 0.05 coarse AP on validation the one with the best validation
mAP; if none does, the one that loses least. The last line is JSON.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import write_section
from rich import box
from rich.console import Console
from rich.table import Table

from noctowl.assembly import Preparation, locate
from noctowl.compose import Job, compose
from noctowl.data.fgovd import read_fgovd
from noctowl.data.files import find_benchmarks
from noctowl.eval import blind
from noctowl.eval.controls import summarise, text_controls
from noctowl.eval.predictions import Predictions
from noctowl.launch import speak
from noctowl.pictures import contact_sheet, panel, samples
from noctowl.plots import Point, tradeoff
from noctowl.pretrain.card import held_out_ids
from noctowl.run import evaluate, train_together
from noctowl.selection import pick
from noctowl.tables import WIDTH

FINE, COARSE, RARE = "fgovd/hard/n5/map", "lvis/ap", "lvis/ap_rare"
COLUMNS = {
    "Hard": FINE,
    "Medium": "fgovd/medium/n5/map",
    "Easy": "fgovd/easy/n5/map",
    "Trivial": "fgovd/trivial/n5/map",
    "coarse": COARSE,
    "frequent": "lvis/ap_frequent",
    "common": "lvis/ap_common",
    "rare": RARE,
}
ALLOWED_LOSS = 0.05
SHARES = ("top-1", "unseen")  # of Hard: rank 1, and rank 1 among combinations held out of all training
RANKERS = ("blind", "centroid")
SWEEP = [(loss, distill) for loss in ("triplet", "cross_entropy") for distill in ("none", "mse", "mse_x10", "mse_x100")]
Run = dict[str, Any]


def job(out: Path, *overrides: str, test: bool) -> Job:
    """A training run as a configuration."""
    words = [f"output_dir={out}", "trainer=cpu", "trainer.progress=false", "selection.rule=published"]
    words += [f"test={str(test).lower()}", *overrides]
    return compose("train", words), words


def tested(out: Path, preparation: Preparation, name: str, checkpoint: str | None) -> Run:
    """A head on the test files: a run's selected one, or (None) the pretrained one."""
    words = [f"output_dir={out}", "trainer=cpu", f"name={name}"]
    words += [f"checkpoint={checkpoint}"] if checkpoint else []
    return evaluate(compose("evaluate", words), overrides=words, preparation=preparation)


def validation(run: Run) -> tuple[float, float, float]:
    """Validation mAP and coarse AP of the selected epoch, and coarse AP before training."""
    history = {entry["epoch"]: entry for entry in run["counts"]["selection"]["history"]}
    best = history[run["counts"]["selection"]["epoch"]]
    return best["map"], best["lvis_ap"], history[-1]["lvis_ap"]


def choose(runs: dict[str, Run]) -> str:
    """The distillation that the validation files choose (rule: head of this file)."""
    names, figures = list(runs), [validation(run) for run in runs.values()]
    history = [{"epoch": -1, "lvis_ap": figures[0][2]}]
    history += [{"epoch": i, "map": fine, "lvis_ap": coarse} for i, (fine, coarse, _) in enumerate(figures)]
    index = pick(history, rule="tradeoff", max_coarse_loss=ALLOWED_LOSS)
    assert index is not None  # there are runs
    return names[index - 1]


def top1(run: Run) -> dict[str, float]:
    """Share of Hard objects whose true caption is ranked first: of all, and of combinations that no training showed."""
    ranks = json.loads((Path(run["folder"]) / "predictions" / "ranks.json").read_text())["hard"]["n5"]
    unseen = held_out_ids(find_benchmarks(locate(compose("evaluate", [])["data"])["annotations"], ["hard"])["hard"])
    return {
        "top-1": statistics.mean(rank == 1 for rank in ranks.values()),
        "unseen": statistics.mean(rank == 1 for number, rank in ranks.items() if int(number) in unseen),
    }


def figures(runs: list[Run]) -> dict[str, str]:
    """The row of a table."""
    row = {name: cell([run["metrics"][key] for run in runs]) for name, key in COLUMNS.items()}
    shares = [top1(run) for run in runs]
    return {**row, **{name: cell([share[name] for share in shares]) for name in SHARES}}


def table(rows: dict[str, list[Run]]) -> Table:
    """Means over seeds, with the spread where there are several."""
    result = Table(title="the miniature, test images; mAP and AP in percent", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("head", no_wrap=True)
    for column in (*COLUMNS, *SHARES):
        result.add_column(column, justify="right", no_wrap=True)
    for name, runs in rows.items():
        result.add_row(name, *figures(runs).values())
    return result


def cell(values: Sequence[float]) -> str:
    """Mean, with the standard deviation over seeds where there are several; percent."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ±{100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def markdown(rows: dict[str, list[Run]]) -> str:
    """The same table for RESULTS.md."""
    names = (*COLUMNS, *SHARES)
    lines = ["| head | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {name} | " + " | ".join(figures(runs).values()) + " |" for name, runs in rows.items()]
    return "\n".join(lines)


def ranges(run: Run) -> str:
    """95 % intervals over the test images of Hard, coarse and rare, percent."""
    found = {name: run["intervals"][COLUMNS[name]] for name in ("Hard", "coarse", "rare")}
    return ", ".join(f"{name} {100 * low:.1f}–{100 * high:.1f}" for name, (low, high) in found.items())


def controls() -> dict[str, str]:
    """Top-1 of rankers that never see an image, on the synthetic test files: what chance looks like."""
    data = compose("evaluate", [])["data"]
    annotations = locate(data)["annotations"]
    training = blind.text_sets(read_fgovd(annotations / data["train_file"]))
    found = {}
    for name, path in find_benchmarks(annotations, ["hard", "medium", "easy", "trivial"]).items():
        sets = blind.text_sets(read_fgovd(path), 5)
        figures = summarise(sets, text_controls(sets, training)[0])
        top = (
            f"{k} {figures[k + '.top1']:.3f} ({figures[k + '.top1_low']:.3f}–{figures[k + '.top1_high']:.3f})"
            for k in RANKERS
        )
        found[name] = f"{', '.join(top)}; chance {figures['chance']:.3f}"
    return found


def plot(rows: dict[str, list[Run]], path: Path) -> Path:
    """Hard mAP against coarse AP."""
    points = [
        Point(name, [r["metrics"][FINE] for r in runs], [r["metrics"][COARSE] for r in runs])
        for name, runs in rows.items()
    ]
    return tradeoff(points, path, x_label="FG-OVD Hard, N = 5, mAP", y_label="coarse classes, AP", start="pretrained")


def pictures(run: Run, path: Path, count: int = 6) -> Path:
    """Random test vocabularies of Hard: ground truth left, prediction right."""
    place = locate(compose("evaluate", [])["data"])
    file = read_fgovd(find_benchmarks(place["annotations"], ["hard"])["hard"])
    predictions = Predictions.load(Path(run["folder"]) / "predictions" / "hard.npz")
    drawn = samples(file, predictions, n_negatives=5, count=count, seed=0)
    contact_sheet([panel(sample, place["images"]) for sample in drawn]).save(path)
    return path


def quick(out: Path) -> dict[str, Any]:
    """Three heads, a plot, pictures."""
    console, names = screen(), ("none", "mse", "mse_x10", "mse_x100")
    jobs = [job(out, f"name={name}", f"distill={name}", test=False) for name in names]
    runs, failed = train_together(jobs, preparation=Preparation())
    if failed:
        raise SystemExit("\n".join(failed))
    trained = dict(zip(names, runs))
    chosen = choose({name: run for name, run in trained.items() if name != "none"})
    heads = {"pretrained": None, "plain triplet": trained["none"], f"triplet + {chosen}": trained[chosen]}
    shared = Preparation()
    rows = {
        name: [tested(out, shared, f"test-{i}", run and run["folder"])] for i, (name, run) in enumerate(heads.items())
    }
    console.print(table(rows))
    for name, (run,) in rows.items():
        console.print(f"95 % over images, {name}: {ranges(run)}")
    console.print(f"distillation weight chosen on validation: {chosen}")
    for name, control in controls().items():
        console.print(f"text only, {name}: {control}")
    last = list(rows.values())[-1][0]
    console.print(f"plot: {plot(rows, out / 'tradeoff.png')}\npictures: {pictures(last, out / 'pictures.png')}")
    keys = {"hard": FINE, "coarse": COARSE, "rare": RARE}
    short = dict(zip(("pretrained", "plain", "distilled"), rows.values()))
    return {name: {k: of[0]["metrics"][key] for k, key in keys.items()} for name, of in short.items()}


def full(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The sweep, RESULTS.md and docs/miniature.png."""
    preparation = Preparation()
    rows: dict[str, list[Run]] = {f"{loss.replace('_', '-')}, {distill}": [] for loss, distill in SWEEP}
    for seed in seeds:
        jobs = [job(out, f"name={a}-{b}", f"loss={a}", f"distill={b}", f"seed={seed}", test=True) for a, b in SWEEP]
        runs, failed = train_together(jobs, preparation=preparation)
        if failed:
            raise SystemExit("\n".join(failed))
        for row, run in zip(rows.values(), runs):
            row.append(run)
    rows = {"pretrained": [tested(out, Preparation(), "pretrained", None)], **rows}
    screen().print(table(rows))
    publish(rows, seeds)
    return {name: figures(of) for name, of in rows.items()}


def publish(rows: dict[str, list[Run]], seeds: Sequence[int]) -> None:
    """The section of RESULTS.md, and docs/miniature.png."""
    picture = plot(rows, Path(__file__).parents[1] / "docs" / "miniature.png")
    lines = [f"- {name}: {control}" for name, control in controls().items()]
    write_section(
        "miniature",
        "## The miniature\n\n`python bench/miniature.py`: test images, N = 5, mean and standard deviation over "
        f"{len(seeds)} training seeds; mAP and AP in percent. Coarse AP with NMS at IoU 0.5.\nOf the Hard objects, "
        "top-1: share whose true caption ranks first; unseen: the same where no training showed class and colour "
        "together.\n"
        "The recipe was chosen on the validation files; each head read the test files once.\n\n"
        + markdown(rows)
        + "\n\nAnother draw of test images (95 % intervals over images, first seed):\n\n"
        + "\n".join(f"- {name}: {ranges(runs[0])}" for name, runs in rows.items())
        + "\n\nRankers that never see an image (top-1 on the same files, 95 % intervals):\n\n"
        + "\n".join(lines)
        + f"\n\n![trade-off](../docs/{picture.name})",
    )


def screen() -> Console:
    """As wide as the table, also where the output is a file."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH + 40)  # the sweep's cells hold spreads
    return console


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None, help="run folders go below it")
    options = parser.parse_args()
    speak()
    out = options.out or Path("outputs") / ("quickstart" if options.quick else "miniature") / time.strftime(
        "%Y%m%d-%H%M%S"
    )
    print(json.dumps(quick(out) if options.quick else full(out, options.seeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
