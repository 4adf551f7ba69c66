"""What the LVIS metric costs: CPU seconds of ours beside the original algorithm (package `lvis`).

    python bench/lvis_cost.py [--quick | --full]

Input: seeded detections on a made-up annotation file with LVIS v1's 1,203 classes and its proportions (a fifth of the
classes of an image judged, long-tailed frequencies), 300 detections an image. Both sides get arrays or dicts that are
ready in memory; time is from there to the nine figures, which must be equal to 1e-12. Process CPU time on one thread;
ours is the median of RUNS, the original, which takes minutes, is run once. The cost of intervals is told beside it.

--quick: 200 images. --full: ours alone at LVIS v1 val's size, 19,809 images, under a limit of memory. Default: 2,000
images. The section of RESULTS.md is written by the default run and by --full. The last line is JSON.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import copy
import json
import logging
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results import write_section

from noctowl.eval.ap import Detections
from noctowl.eval.evidence import COARSE_RESAMPLES, Asked, coarse_intervals
from noctowl.eval.lvis import LvisAnnotations, match_classes, read_lvis, score, score_classes

RUNS = 5
REPEATS = 3  # of intervals
RESAMPLES = (COARSE_RESAMPLES, 1000)  # of the intervals whose cost is told
CLASSES, DETECTIONS = 1203, 300
IMAGES = {"quick": 200, "default": 2000, "full": 19_809}
FIGURES = {"AP": "ap", "AP50": "ap_50", "AP75": "ap_75", "APs": "ap_small", "APm": "ap_medium", "APl": "ap_large"}
FIGURES |= {"APr": "ap_rare", "APc": "ap_common", "APf": "ap_frequent"}
GATE, GOAL, LIMIT_GB = 30, 50, 8


@contextlib.contextmanager
def old_numpy() -> Iterator[None]:
    """`np.float`, which the package still uses and NumPy dropped in 1.24."""
    setattr(np, "float", float)  # noqa: B010
    try:
        yield
    finally:
        delattr(np, "float")


def original(data: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, float]:
    """The original's figures under our names; what it calls -1 is absent. Changes both arguments."""
    from lvis import LVIS, LVISEval, LVISResults

    truth = LVIS.__new__(LVIS)  # its constructor reads a file
    truth.logger, truth.dataset = logging.getLogger("lvis"), data
    truth._create_index()
    with old_numpy():
        run = LVISEval(truth, LVISResults(truth, found), "bbox")
        run.run()
    return {ours: float(run.results[name]) for name, ours in FIGURES.items() if run.results[name] > -1}


def entries(detections: Detections) -> list[dict[str, Any]]:
    """Detections in LVIS's result format, boxes as the scorer sees them."""
    boxes = detections.boxes.astype(np.float64)
    boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    rows = zip(detections.image.tolist(), detections.label.tolist(), boxes.tolist(), detections.scores.tolist())
    return [{"image_id": i, "category_id": k, "bbox": b, "score": s} for i, k, b, s in rows]


def write_problem(path: Path, n_images: int, seed: int = 0) -> tuple[LvisAnnotations, Detections]:
    """An annotation file of LVIS v1 val's shape, and 300 detections an image of which a part overlap the objects."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(n_images * 3)[:n_images] + 1
    popularity = 1 / np.arange(1, CLASSES + 1) ** 0.9
    popularity /= popularity.sum()
    images, objects, parts = [], [], []
    for image in ids.tolist():
        present = np.unique(rng.choice(CLASSES, 4, p=popularity))
        label = np.repeat(present, rng.geometric(1 / 3.5, len(present)).clip(max=60))  # 12.3 objects an image in val
        side = np.exp(rng.uniform(np.log(8), np.log(250), (len(label), 2)))
        corner = rng.uniform(0, 400, (len(label), 2))
        boxes = np.concatenate([corner, corner + side], 1)
        absent = np.setdiff1d(rng.choice(CLASSES, 9), present)
        names = {"neg_category_ids": absent, "not_exhaustive_category_ids": present[rng.random(len(present)) < 0.2]}
        url = f"http://images.cocodataset.org/val2017/{image:012}.jpg"
        images.append({"id": image, "width": 640, "height": 640, "coco_url": url})
        images[-1] |= {key: (value + 1).tolist() for key, value in names.items()}
        for k, box, area in zip(
            label.tolist(), boxes.tolist(), (side.prod(1) * rng.uniform(0.4, 1, len(label))).tolist()
        ):
            bbox = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            objects.append(
                {"id": len(objects) + 1, "image_id": image, "category_id": k + 1, "bbox": bbox, "area": area}
            )
        source = rng.integers(0, len(label), DETECTIONS)
        near = rng.random(DETECTIONS) < 0.5
        noise = rng.normal(0, 1, (DETECTIONS, 4)) * np.tile(side[source], 2) * rng.choice([0.03, 0.3], (DETECTIONS, 1))
        found = boxes[source] + noise
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        judged = rng.choice(np.concatenate([present, absent]), DETECTIONS)
        other = np.where(rng.random(DETECTIONS) < 0.3, judged, rng.choice(CLASSES, DETECTIONS))
        scores = rng.normal(0, 1, DETECTIONS) + near
        parts.append(
            Detections(
                image=np.full(DETECTIONS, image),
                label=np.where(near, label[source], other) + 1,
                boxes=found.astype(np.float32),
                scores=scores.astype(np.float32),
            )
        )
    letters = np.array(["f", "c", "r"])[np.digitize(np.arange(CLASSES), [405, 866])]
    categories = [{"id": k + 1, "name": f"class {k}", "frequency": letters[k].item()} for k in range(CLASSES)]
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": categories}))
    return read_lvis(path), Detections.concatenate(parts)


def cpu_seconds(work: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Median process CPU time and the last result."""
    times, value = [], None
    for _ in range(runs):
        start = time.process_time()
        value = work()
        times.append(time.process_time() - start)
    return statistics.median(times), value


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def interval_costs(annotations: LvisAnnotations, detections: Detections, counts: Sequence[int]) -> dict[int, float]:
    """Seconds that intervals of all figures add to a scoring, by resamples: medians. What was matched is used again."""
    matched = match_classes(detections, annotations)
    scores = score_classes(matched)

    def cost(n: int) -> float:
        asked = Asked(coarse_intervals=n)
        return cpu_seconds(lambda: coarse_intervals(matched, scores, detections, annotations, asked), REPEATS)[0]

    return {n: cost(n) for n in counts}


def compare(path: Path, n_images: int) -> dict[str, Any]:
    """Ours and the original on the same problem."""
    annotations, detections = write_problem(path, n_images)
    ours, figures = cpu_seconds(lambda: score(detections, annotations), RUNS)
    intervals = interval_costs(annotations, detections, RESAMPLES)
    memory = peak_gb()
    data, found = json.loads(path.read_text()), entries(detections)
    theirs, expected = cpu_seconds(lambda: original(data, copy.copy(found)), 1)
    equal = figures.keys() == expected.keys() and all(abs(figures[k] - expected[k]) < 1e-12 for k in figures)
    row = {"images": n_images, "detections": len(detections.image), "ours": ours, "original": theirs}
    row |= {"ratio": theirs / ours, "equal": equal, "memory_gb": memory, "figures": figures}
    return row | {"intervals": intervals}


def full(path: Path) -> dict[str, Any]:
    """Ours alone at full size; the memory is the whole process's, the made-up problem included."""
    annotations, detections = write_problem(path, IMAGES["full"])
    ours, figures = cpu_seconds(lambda: score(detections, annotations), 1)
    more = interval_costs(annotations, detections, [COARSE_RESAMPLES])[COARSE_RESAMPLES]
    row = {"images": IMAGES["full"], "detections": len(detections.image), "ours": ours, "memory_gb": peak_gb()}
    return row | {"figures": figures, "intervals": more}


def compared(path: Path, n_images: int) -> tuple[str, dict[str, Any]]:
    """Section and JSON line of the comparison."""
    row = compare(path, n_images)
    head = (
        "| images | detections | ours | original | ratio | equal to 1e-12 | peak, ours |\n|---|---|---|---|---|---|---|"
    )
    text = (
        "## LVIS metric\n\n`python bench/lvis_cost.py`: detections in memory to the nine figures, CPU seconds of one "
        f"thread.\nGate {GATE}x, goal {GOAL}x. The original: package `lvis`, run once; ours: median of {RUNS}.\n"
        f"\n{head}\n| {row['images']:,} | {row['detections']:,} | {row['ours']:.2f} | {row['original']:.1f} | "
        f"{row['ratio']:.0f}x | {'yes' if row['equal'] else 'NO'} | {row['memory_gb']:.1f} GB |\n\n"
        + "\n".join(
            f"Intervals of all figures, {n:,} resamples: {cost:.2f} s more, {cost / row['ours']:.1f}x the scoring."
            for n, cost in row["intervals"].items()
        )
    )
    result = {"name": "lvis_cost", "ratio": round(row["ratio"], 1), "gate": GATE, "goal": GOAL, "equal": row["equal"]}
    result |= {f"intervals_{n}": round(cost / row["ours"], 1) for n, cost in row["intervals"].items()}
    return text, result | {"images": row["images"], "memory_gb": round(row["memory_gb"], 2)}


def whole(path: Path) -> tuple[str, dict[str, Any]]:
    """Section and JSON line of the full size."""
    row = full(path)
    text = (
        f"## LVIS metric, full size\n\n`python bench/lvis_cost.py --full`: {row['images']:,} images as in LVIS v1 val, "
        f"{row['detections']:,} detections:\n{row['ours']:.1f} CPU seconds of one thread, {row['intervals']:.1f} s "
        f"more for intervals from {COARSE_RESAMPLES} resamples,\n{row['memory_gb']:.1f} GB at the peak, "
        f"the made-up problem included (limit {LIMIT_GB} GB)."
    )
    result = {"name": "lvis_full", "cpu_seconds": round(row["ours"], 1), "memory_gb": round(row["memory_gb"], 2)}
    return text, result | {"limit_gb": LIMIT_GB, "within": row["memory_gb"] < LIMIT_GB}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU cost of the LVIS metric beside the original algorithm.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="200 images instead of 2,000; RESULTS.md is left as it is")
    size.add_argument("--full", action="store_true", help="ours alone, 19,809 images and 5.9 million detections")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lvis.json"
        text, result = whole(path) if options.full else compared(path, IMAGES["quick" if options.quick else "default"])
    print(text)
    if not options.quick:
        write_section(result["name"], text)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
