"""What comparing the coarse AP of two runs costs: permutations as weights of one problem, beside scoring each anew.

    python bench/comparison_cost.py [--quick | --full]

Input: the problem of lvis_cost.py, and a second run on it with noise on the scores. A permutation exchanges the runs'
detections in half of the images. Anew: both exchanged runs go through our scorer, PLAIN times. Ours: both are matched
side by side once, then PERMUTATIONS are read off; the matching counts, spread over the LEAST that a report draws. The
differences of all four figures must be equal to 1e-6. Process CPU time on one thread.

--quick: 200 images. --full: ours alone at LVIS v1 val's size, 19,809 images. Default: 2,000 images. The section of
RESULTS.md is written by the default run and by --full. The last line is JSON.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lvis_cost import IMAGES, cpu_seconds, peak_gb, write_problem
from results import write_section

from noctowl.eval.ap import Detections
from noctowl.eval.compare_coarse import FIGURES, exchange_p, image_differences, side_by_side
from noctowl.eval.lvis import LvisAnnotations, score
from noctowl.report.coarse_comparison import PERMUTATIONS as LEAST

PERMUTATIONS, PLAIN = 100, 3
NOISE = 0.3  # of the scores of the second run


def exchanged(a: Detections, b: Detections, ids: np.ndarray) -> tuple[Detections, Detections]:
    """Both runs after the detections of some images have changed sides."""

    def mixed(own: Detections, other: Detections) -> Detections:
        parts = ((own, ~np.isin(own.image, ids)), (other, np.isin(other.image, ids)))
        return Detections.concatenate([Detections(*(v[rows] for v in vars(run).values())) for run, rows in parts])

    return mixed(a, b), mixed(b, a)


def anew(a: Detections, b: Detections, annotations: LvisAnnotations) -> list[float]:
    """Differences of the figures, by two scorings."""
    own, other = (score(run, annotations) for run in (a, b))
    return [own[name] - other[name] for name in FIGURES]


def measure(path: Path, n_images: int, *, plain: bool) -> dict[str, Any]:
    annotations, a = write_problem(path, n_images)
    rng = np.random.default_rng(1)
    b = replace(a, scores=(a.scores + rng.normal(0, NOISE, len(a.scores))).astype(np.float32))
    matching, doubled = cpu_seconds(lambda: side_by_side(a, b, annotations), 1)
    reading, _ = cpu_seconds(
        lambda: exchange_p([doubled], annotations, permutations=PERMUTATIONS, enough=None), 1 if not plain else 3
    )
    ours = matching / LEAST + reading / PERMUTATIONS
    row = {"images": n_images, "matching": matching, "reading": reading, "ours": ours, "memory_gb": peak_gb()}
    if not plain:
        return row
    ids, swapped = np.sort(annotations.image_ids), rng.random((PLAIN, n_images)) < 0.5
    seconds, found = [], []
    for chosen in swapped:
        runs = exchanged(a, b, ids[chosen])
        cost, differences = cpu_seconds(lambda runs=runs: anew(*runs, annotations), 1)
        seconds.append(cost)
        found.append(differences)
    expected = image_differences([doubled], swapped, annotations).T
    equal = bool(np.abs(expected - np.array(found)).max() < 1e-6)
    return row | {"anew": float(np.median(seconds)), "ratio": float(np.median(seconds)) / ours, "equal": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU cost of comparing the coarse AP of two runs.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="200 images instead of 2,000; RESULTS.md is left as it is")
    size.add_argument("--full", action="store_true", help="ours alone, 19,809 images and twice 5.9 million detections")
    options = parser.parse_args()
    kind = "quick" if options.quick else "full" if options.full else "default"
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder) / "lvis.json", IMAGES[kind], plain=not options.full)
    if options.full:
        text = (
            "## Comparing coarse AP, full size\n\n`python bench/comparison_cost.py --full`: two runs "
            f"on {row['images']:,} images as in LVIS v1 val:\n{row['matching']:.1f} CPU seconds of one "
            f"thread to match both, {row['reading']:.1f} s for {PERMUTATIONS} permutations; "
            f"{row['memory_gb']:.1f} GB at the peak."
        )
        result = {"name": "comparison_full"}
    else:
        text = (
            "## Comparing coarse AP\n\n`python bench/comparison_cost.py`: CPU seconds of one thread for one "
            f"permutation of two runs,\nour matching spread over {LEAST} of them; anew: both exchanged runs through "
            "our scorer.\n\n"
            "| images | ours | anew | ratio | equal to 1e-6 |\n|---|---|---|---|---|\n"
            f"| {row['images']:,} | {row['ours']:.4f} | {row['anew']:.3f} | {row['ratio']:.0f}x | "
            f"{'yes' if row['equal'] else 'NO'} |"
        )
        result = {"name": "comparison_cost", "ratio": round(row["ratio"], 1), "equal": row["equal"]}
    print(text)
    if not options.quick:
        write_section(result["name"], text)
    print(json.dumps(result | {"images": row["images"], "memory_gb": round(row["memory_gb"], 2)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
