"""What twenty epochs cost: features computed in every step, as a plain loop has it, beside features computed once.

    python bench/training_cost.py            the miniature, both ways run whole
    python bench/training_cost.py --real     ViT-B/16 with random weights at --side pixels; of the live way one epoch
    python bench/training_cost.py --quick    fewer images

Both ways train the same head on the same batches with the same step (noctowl.module); only the live one runs the towers
in it, over the batch's images and captions. It holds its pixels in memory and encodes the coarse names once: in its
favour. Items and images stand as in FG-OVD's training set, 18,041 to 15,366; no two items share a caption.

With b, t, h seconds of backbone, text tower and head per item and r = items per image, twenty epochs cost
  live 20 (b + t + h)        stored b / r + t + 20 h
The limit is this ratio for h = 0: 20 (b + t) / (b / r + t). CPU time of one thread, medians; the last line is JSON.
"""

import common  # isort: skip: sets the number of threads
import argparse
from typing import Any

from results import write_section

EPOCHS, GATE, GOAL = 20, 15, 20
CHECKED, TOLERANCE = 2, 1e-5  # steps whose changes of the weights are compared, as a share of the largest


def measure(world: common.World, *, live_epochs: int, repeats: int) -> dict[str, Any]:
    """Both ways, the counters of the towers and the limit."""
    detector = world.detector
    counted = common.Counted(detector)
    epochs = world.schedule(EPOCHS)
    checked = [batch for epoch in epochs for batch in epoch][:CHECKED]
    live_change = common.steps(world.module(), checked, world.live_batch)
    counted.take()
    module = world.module()
    live_optimizer = common.optimizer_of(module)
    live = sum(
        common.cpu_seconds(lambda e=e: common.resume(module, live_optimizer, e, world.live_batch))[0]
        for e in epochs[:live_epochs]
    )
    forwards = counted.take()
    assert forwards == (live_epochs * world.n_items, live_epochs * world.n_items * 11), forwards
    once, dataset = common.cpu_seconds(lambda: world.dataset(stored=True))
    module = world.module()
    read = common.read_batch(dataset)
    optimizer = common.optimizer_of(module)
    head = sum(common.cpu_seconds(lambda e=e: common.resume(module, optimizer, e, read))[0] for e in epochs)
    stored_forwards = counted.take()
    assert stored_forwards == (world.n_images, world.n_items * 11), stored_forwards
    difference = common.difference(common.steps(world.module(), checked, read), live_change)
    parts = common.components(world, dataset, repeats)
    live *= EPOCHS / live_epochs
    return {
        "ratio": live / (once + head),
        **common.expected(parts, EPOCHS, per_image=world.n_items / world.n_images),
        "live": live,
        "once": once,
        "epochs": head,
        "items": world.n_items,
        "images": world.n_images,
        "patches": detector.num_patches,
        "live_forwards": [EPOCHS * world.n_items, EPOCHS * world.n_items * 11],
        "stored_forwards": list(stored_forwards),
        "difference": difference,
        "equal": difference <= TOLERANCE,
        **parts,
    }


def show(name: str, row: dict[str, Any]) -> str:
    """A line of the table."""
    parts = " | ".join(f"{1000 * row[key]:.2f}" for key in ("backbone", "text", "head"))
    return (
        f"| {name}, {row['patches']} patches, {row['images']} images, {row['items']} items | {parts} | "
        f"{row['live']:.1f} | {row['once']:.1f} + {row['epochs']:.1f} | {row['ratio']:.1f}x | {row['limit']:.1f}x "
        f"| {100 * row['ratio'] / row['limit']:.0f} % | {row['difference']:.0e} |"
    )


HEAD = [
    "| model | backbone, ms an item | text | head step | live, s | stored: once + 20 epochs, s | ratio | limit | share "
    "| steps differ by |",
    "|---|---|---|---|---|---|---|---|---|---|",
]
PROJECTED = (
    "From one image forward ({backbone:.1f} s), the captions of an item ({text:.2f} s) and a head step ({head:.3f} s "
    "an item) at 960 px: {expected:.1f}x of at most {limit:.1f}x, {share:.0f} %; a sweep of twelve runs {sweep:.0f}x "
    "of {sweep_limit:.0f}x."
)


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true", help="ViT-B/16 too")
    parser.add_argument("--side", type=int, default=384, help="image side of --real, 192 to 384 pixels")
    options = parser.parse_args()
    common.start()
    n_images = 26 if options.quick else 104
    world = common.World(common.make_detector(), n_images=n_images, n_coarse=60, batch_size=16)
    rows = {"tiny": measure(world, live_epochs=EPOCHS, repeats=9)}
    if options.real:
        n_images = 7 if options.quick else 23
        world = common.World(common.make_detector(options.side), n_images=n_images, n_coarse=1203, batch_size=8)
        rows[f"B/16 at {options.side} px"] = measure(world, live_epochs=1, repeats=1 if options.quick else 3)
    lines = HEAD + [show(name, row) for name, row in rows.items()]
    projected: dict[str, float] = {}
    if options.real and not options.quick:
        parts = common.full_size()
        projected, sweep = parts | common.expected(parts, EPOCHS), common.expected(parts, EPOCHS, runs=12)
        projected |= {"sweep": sweep["expected"], "sweep_limit": sweep["limit"]}
        lines += ["", PROJECTED.format(**projected, share=100 * projected["expected"] / projected["limit"])]
    print("\n".join(lines))
    *_, chosen = rows.values()
    result = {
        "name": "training_cost",
        "ratio": round(chosen["ratio"], 1),
        "gate": GATE,
        "goal": GOAL,
        "limit": round(chosen["limit"], 1),
        "equal": all(row["equal"] for row in rows.values()),
        "share_of_limit": round(chosen["ratio"] / chosen["limit"], 2),
        "models": rows,
        "at_960_px": projected,
    }
    if options.real and not options.quick:
        text = "\n".join(lines)
        write_section(
            "training_cost",
            f"## Twenty epochs of training\n\n`python bench/training_cost.py --real`; CPU time of one thread. Gate "
            f"{GATE}x, goal {GOAL}x.\nThe live figure of B/16 is one epoch times 20.\n\n{text}",
        )
    return common.finish(result)


if __name__ == "__main__":
    raise SystemExit(main())
