"""What the FG-OVD metric costs: CPU seconds of ours beside the published code, pycocotools and faster-coco-eval.

    python bench/metric_cost.py [--golden ../shared/golden] [--runs 5]
    python bench/metric_cost.py --quick     N = 5 only

Input: the seeded predictions for the real file 3_attributes (Easy), N = 5 and 10, with and without the token rule. All
scorers get the same detections and every mAP must equal ours. pycocotools and faster-coco-eval are handed only the
classes that have ground truth, which is to their advantage; torchmetrics gets every label, as its users give it.
One thread; a figure is the median of several runs, of one where a run takes longer than BRIEF seconds. "whole" is
everything from the stored logits to the figures (top 100, NMS, AP, ranks), "AP" only what the public scorers do too,
"ranks" top 100, NMS and ranks beside the published ranks, which must be the same object by object. "12 heads" are
twelve sets of predictions (epochs, members of a sweep) on annotations that are read once, beside twelve runs of the
published code. The published code's cost was measured once, on another machine, over NMS and AP. The last line is
JSON; nothing is asserted, `equal` and the ratios are there to be read.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import write_section

from noctowl.data.fgovd import read_fgovd
from noctowl.data.records import Annotations
from noctowl.eval.ap import Detections, GroundTruth, score_boxes
from noctowl.eval.fgovd import collect, score
from noctowl.eval.predictions import Predictions
from noctowl.eval.ranks import mean_rank, object_ranks
from noctowl.eval.reference import reference_scores
from noctowl.text import clip_tokenizer, token_lengths

BRIEF = 2.0  # seconds of a run up to which it is repeated
PUBLISHED_UNFILTERED = {5: 69.0}  # CPU seconds of the published code without the token rule; not among the golden rows
CASES = ((5, False), (10, False), (5, True), (10, True))  # N, token rule
HEADS = 12
OTHERS = ("published", "pycocotools", "faster_coco_eval", "torchmetrics")
GOALS = {"published": 100, "torchmetrics": 50, "memory_mb": 1000}


def golden_predictions(path: Path) -> Predictions:
    """The seeded scores as logits: a scorer only looks at their order. Columns that a vocabulary lacks are -inf."""
    with np.load(path, allow_pickle=False) as file:
        scores = file["scores_u16"].astype(np.float32) / 65536  # [V, rows, C]
        scores[np.arange(scores.shape[2]) > file["n_neg"][:, None, None] + np.zeros(scores.shape[1:], int)] = -np.inf
        boxes = file["boxes_i16"].reshape(-1, 4).astype(np.float32) / 32
        return Predictions(
            image_ids=file["image_id"].astype(np.int64),
            category_ids=file["category_id"].astype(np.int64),
            row_offsets=np.arange(len(scores) + 1, dtype=np.int64) * scores.shape[1],
            boxes=boxes,
            logits=scores.reshape(-1, scores.shape[2]),
            n_negatives=tuple(range(scores.shape[2])),
        )


def torchmetrics_map(det: Detections, gt: GroundTruth) -> float:
    """Current torchmetrics with the faster backend; float32 boxes and thresholds, its own."""
    from torchmetrics.detection import MeanAveragePrecision

    metric = MeanAveragePrecision(backend="faster_coco_eval")
    metric.warn_on_many_detections = False
    predicted, truth = [], []
    for image in np.unique(gt.image):
        d, g = det.image == image, gt.image == image
        predicted.append(
            {
                "boxes": torch.from_numpy(det.boxes[d]),
                "scores": torch.from_numpy(det.scores[d]),
                "labels": torch.from_numpy(det.label[d]),
            }
        )
        truth.append({"boxes": torch.from_numpy(gt.boxes[g]).float(), "labels": torch.from_numpy(gt.label[g])})
    metric.update(predicted, truth)
    return float(metric.compute()["map"])


def ranks(annotations: Annotations, predictions: Predictions, n: int, lengths: np.ndarray | None) -> dict[int, int]:
    """Rank of each object that takes part, by annotation id."""
    case = collect(annotations, predictions, n=n, lengths=lengths)
    inside = case.inside
    found = object_ranks(
        object_boxes=annotations.object_boxes[inside],
        object_group=np.searchsorted(np.flatnonzero(case.kept), annotations.object_vocab[inside]),
        boxes=case.found.boxes,
        offsets=case.found.offsets,
        logits=predictions.logits[case.found.rows, : n + 1],
    )
    return dict(zip(annotations.object_ids[inside].tolist(), found.tolist()))


def measure_ranks(golden: Path, runs: int) -> dict[str, Any]:
    """Ranks at N = 5 under the token rule, beside the published ones."""
    annotations, predictions, lengths = material(golden)
    rows = [json.loads(line) for line in (golden / "eval_golden.jsonl").read_text().splitlines()]
    published = next(r for r in rows if (r["which"], r["bench"], r["N"]) == ("ranks", "3_attributes", 5))
    seconds, found = cpu_seconds(lambda: ranks(annotations, predictions, 5, lengths), runs)
    same = found == dict(published["result"]["per_annotation"])
    same &= abs((mean_rank(list(found.values())) or 0.0) - published["result"]["medium"]) < 1e-12
    return {"ranks": seconds, "published": published["cpu_s"], "equal": same}


def measure_heads(golden: Path, runs: int) -> dict[str, Any]:
    """Twelve sets of predictions at N = 5 without the token rule; the first and the last are checked."""
    annotations, predictions, _ = material(golden)
    rng = np.random.default_rng(0)
    noise = (rng.normal(0, 0.05, predictions.logits.shape).astype(np.float32) for _ in range(HEADS))
    heads = [replace(predictions, logits=predictions.logits + each) for each in noise]

    def one_go() -> list[float]:
        return [score(annotations, head, n_negatives=[5], lengths=None)["metrics"]["n5/map"] for head in heads]

    seconds, figures = cpu_seconds(one_go, runs)
    same = len(set(figures)) == HEADS
    for index in (0, HEADS - 1):
        case = collect(annotations, heads[index], n=5, lengths=None)
        other = reference_scores(
            detections=case.detections, ground_truth=case.objects, backend="faster_coco_eval"
        ).mean_ap()
        same &= abs(figures[index] - other) < 1e-12
    return {"heads": seconds, "published": HEADS * PUBLISHED_UNFILTERED[5], "equal": bool(same)}


def material(golden: Path) -> tuple[Annotations, Predictions, np.ndarray]:
    """The real file, the seeded predictions and the captions' token counts."""
    annotations = read_fgovd(golden.parent / "data/fgovd/benchmarks/3_attributes.json")
    lengths = token_lengths(clip_tokenizer(), list(annotations.captions))
    return annotations, golden_predictions(golden / "preds_3_attributes.npz"), lengths


def cpu_seconds(work: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Median process CPU time and the last result."""
    times: list[float] = []
    value = None
    while len(times) < runs and (not times or times[-1] < BRIEF):
        start = time.process_time()
        value = work()
        times.append(time.process_time() - start)
    return statistics.median(times), value


def measure(golden: Path, runs: int, cases: Sequence[tuple[int, bool]]) -> Iterator[dict]:
    """One row per case. Ours come first, so that the peak of memory is ours."""
    annotations, predictions, lengths = material(golden)
    rows = [json.loads(line) for line in (golden / "eval_golden.jsonl").read_text().splitlines()]
    published = {
        (r["N"], True): r["cpu_s"]
        for r in rows
        if (r["which"], r["bench"], r["torchmetrics"], r["token_filter"]) == ("noctowl", "3_attributes", "0.6.0", True)
    } | {(n, False): seconds for n, seconds in PUBLISHED_UNFILTERED.items()}
    ours = []
    for n, rule in cases:
        tokens = lengths if rule else None
        case = collect(annotations, predictions, n=n, lengths=tokens)
        d, g = case.detections, case.objects
        whole, figure = cpu_seconds(
            lambda n=n, t=tokens: score(annotations, predictions, n_negatives=[n], lengths=t)["metrics"][f"n{n}/map"],
            runs,
        )
        alone, again = cpu_seconds(lambda d=d, g=g: score_boxes(detections=d, ground_truth=g).mean_ap(), runs)
        ours.append((n, rule, d, g, whole, alone, figure, figure == again))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for n, rule, d, g, whole, alone, figure, same in ours:
        row = {"n": n, "token_rule": rule, "map": figure, "whole": whole, "ap": alone, "memory_mb": peak}
        row["published"] = published.get((n, rule))
        for name in ("pycocotools", "faster_coco_eval"):
            row[name], other = cpu_seconds(
                lambda d=d, g=g, b=name: reference_scores(detections=d, ground_truth=g, backend=b).mean_ap(), runs
            )
            same &= abs(figure - other) < 1e-12
        row["torchmetrics"], other = cpu_seconds(lambda d=d, g=g: torchmetrics_map(d, g), runs)
        float32 = score_boxes(detections=d, ground_truth=g, thresholds="float32").mean_ap()
        yield row | {"equal": bool(same and abs(float32 - other) < 1e-6)}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU cost of the FG-OVD metric beside other implementations.")
    parser.add_argument("--golden", type=Path, default=Path(__file__).parents[2] / "shared" / "golden")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not (options.golden / "preds_3_attributes.npz").is_file():
        print(f"{options.golden} has no preds_3_attributes.npz; pass the golden folder with --golden.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = [
        "CPU seconds (times as much as ours: published and torchmetrics to whole, the others to AP)",
        "",
        "| N | token rule | mAP | whole | AP | " + " | ".join(OTHERS) + " | equal |",
        "|" + "---|" * (6 + len(OTHERS)),
    ]
    rows = []
    for row in measure(options.golden, options.runs, CASES[:1] if options.quick else CASES):
        rows.append(row)
        cells = []
        for name in OTHERS:
            base = row["whole" if name in ("published", "torchmetrics") else "ap"]
            cells.append("-" if row[name] is None else f"{row[name]:.2f} ({row[name] / base:.0f}x)")
        head = f"| {row['n']} | {'on' if row['token_rule'] else 'off'} | {row['map']:.6f} | {row['whole']:.3f} "
        lines.append(head + f"| {row['ap']:.3f} | " + " | ".join(cells) + f" | {row['equal']} |")
    first = rows[0]  # N = 5 without the token rule
    rank, heads = measure_ranks(options.golden, options.runs), measure_heads(options.golden, options.runs)
    lines += [
        "",
        f"- ranks, N = 5, token rule: {rank['ranks']:.3f} s, published {rank['published']:.2f} s "
        f"({rank['published'] / rank['ranks']:.0f}x), object by object equal: {rank['equal']}",
        f"- {HEADS} heads, N = 5: {heads['heads']:.2f} s, published {heads['published']:.0f} s "
        f"({heads['published'] / heads['heads']:.0f}x), equal: {heads['equal']}",
        f"- peak memory of ours, libraries included: {first['memory_mb']:.0f} MB",
    ]
    print("\n".join(lines))
    if not options.quick:
        write_section(
            "metric_cost", "## The metric\n\n`python bench/metric_cost.py`; 3_attributes.\n\n" + "\n".join(lines)
        )
    result = {
        "name": "metric_cost",
        "ratio": round(first["published"] / first["whole"], 1),
        "gate": GOALS["published"],
        "goal": GOALS["published"],
        "limit": None,
        "ratio_ranks": round(rank["published"] / rank["ranks"], 1),
        "ratio_12_heads": round(heads["published"] / heads["heads"], 1),
        "ratio_torchmetrics": round(first["torchmetrics"] / first["whole"], 1),
        "goal_torchmetrics": GOALS["torchmetrics"],
        "memory_mb": round(first["memory_mb"]),
        "goal_memory_mb": GOALS["memory_mb"],
        "equal": all(row["equal"] for row in (*rows, rank, heads)),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
