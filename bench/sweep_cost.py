"""What a sweep of twelve runs costs: each live and alone, beside all of them on features computed once.

    python bench/sweep_cost.py [--side 384]  ViT-B/16 with random weights
    python bench/sweep_cost.py --quick       the same at 192 pixels, fewer images

Three class losses x two distillations x two rates, twenty epochs each. The stored way encodes every image and caption
once and trains the twelve heads one after another on that; the live way is `training_cost.py`'s, for each run anew.
Live epochs cost the same whatever the head, so one epoch of each of LIVE runs is timed and their mean counts for all.
Every run is checked: a step, live and stored. The limit is that of a head step that costs nothing.
"""

import common  # isort: skip: sets the number of threads
import argparse
import itertools
import statistics
from typing import Any

from results import write_section
from training_cost import EPOCHS, TOLERANCE

GATE, GOAL = 60, 120
RUNS = list(itertools.product(("triplet", "cross_entropy", "bce"), ("none", "mse"), (3e-5, 3e-6)))  # loss, distill, lr
MISSED = (
    "The heads' steps are what remains; the two matrix products W x and dL/dW, without which no exact step can do, are "
    "60 % of them at 144 patches and 85 % at 3,600."
)
LIVE = (1, 6)  # indices of the runs whose live epoch is timed


def measure(side: int, n_images: int, n_live: int, repeats: int) -> dict[str, Any]:
    """Both ways, with the counters of the towers."""
    detector = common.make_detector(side)
    world = common.World(detector, n_images=n_images, n_coarse=1203, batch_size=8)
    counted = common.Counted(detector)
    epochs = world.schedule(EPOCHS)
    first = world.live_batch(epochs[0][0])  # the towers' work of the checked step, shared by the twelve
    counted.take()
    live = []
    for index in LIVE[:n_live]:
        module = world.module(*RUNS[index])
        optimizer = common.optimizer_of(module)
        live.append(
            common.cpu_seconds(lambda m=module, o=optimizer: common.resume(m, o, epochs[0], world.live_batch))[0]
        )
    forwards = counted.take()
    assert forwards == (n_live * world.n_items, n_live * world.n_items * 11), forwards
    once, dataset = common.cpu_seconds(lambda: world.dataset(stored=True))
    read = common.read_batch(dataset)
    heads = []
    for run in RUNS:
        module = world.module(*run)
        optimizer = common.optimizer_of(module)
        heads.append(
            sum(common.cpu_seconds(lambda e=e, m=module, o=optimizer: common.resume(m, o, e, read))[0] for e in epochs)
        )
    stored = counted.take()
    assert stored == (world.n_images, world.n_items * 11), stored
    difference = 0.0
    for run in RUNS:
        ours = common.steps(world.module(*run), [epochs[0][0]], read)
        theirs = common.steps(world.module(*run), [epochs[0][0]], lambda _: first)
        difference = max(difference, common.difference(ours, theirs))
    parts = common.components(world, dataset, repeats)
    total = len(RUNS) * EPOCHS * statistics.mean(live)
    return {
        "ratio": total / (once + sum(heads)),
        **common.expected(parts, EPOCHS, len(RUNS), world.n_items / world.n_images),
        "live": total,
        "once": once,
        "heads": sum(heads),
        "patches": detector.num_patches,
        "images": world.n_images,
        "items": world.n_items,
        "live_forwards": [len(RUNS) * EPOCHS * world.n_items * k for k in (1, 11)],
        "stored_forwards": list(stored),
        "difference": difference,
        **parts,
    }


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", type=int, default=384, help="image side in pixels")
    options = parser.parse_args()
    common.start()
    row = measure(192, 7, 1, 1) if options.quick else measure(options.side, 23, len(LIVE), 3)
    share = row["ratio"] / row["limit"]
    lines = [
        "| model | 12 live runs, s | features once, s | 12 heads, s | ratio | limit | share | steps differ by |",
        "|---|---|---|---|---|---|---|---|",
        f"| B/16, {row['patches']} patches, {row['images']} images, {row['items']} items | {row['live']:.0f} | "
        f"{row['once']:.1f} | {row['heads']:.1f} | {row['ratio']:.0f}x | {row['limit']:.0f}x | {100 * share:.0f} % | "
        f"{row['difference']:.0e} |",
    ]
    print("\n".join(lines))
    result = {
        "name": "sweep_cost",
        "ratio": round(row["ratio"], 1),
        "gate": GATE,
        "goal": GOAL,
        "limit": round(row["limit"], 1),
        "equal": row["difference"] <= TOLERANCE,
        "share_of_limit": round(share, 2),
        "runs": len(RUNS),
        "measured": row,
    }
    if not options.quick:
        text = "\n".join(lines)
        write_section(
            "sweep_cost",
            f"## A sweep of twelve runs\n\n`python bench/sweep_cost.py --side {options.side}`; 20 epochs each, CPU "
            f"time of one thread. Gate {GATE}x, goal {GOAL}x.\nLive figures are one epoch of two of the runs, times "
            f"240. {MISSED}\n\n{text}",
        )
    return common.finish(result)


if __name__ == "__main__":
    raise SystemExit(main())
