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
import tempfile
from pathlib import Path
from typing import Any

import torch
from results import write_section

EPOCHS, GATE, GOAL, CHECKED = 20, 15, 20, 2  # CHECKED: steps after which the weights are compared


def components(world: common.World, dataset: Any, repeats: int) -> dict[str, float]:
    """Seconds per item of the two towers and of a head step."""
    items = list(range(world.batch_size))
    batch = world.live_batch(items)
    columns = torch.cat([torch.from_numpy(world.file.vocabulary(v)).long() for v in items])
    ids, mask = world.text.input_ids[columns], world.text.attention_mask[columns]
    assert batch.pixel_values is not None
    pixels = batch.pixel_values
    backbone, _ = common.cpu_seconds(lambda: world.detector.encode_images(pixels), repeats)
    text, _ = common.cpu_seconds(lambda: world.detector.encode_text(ids, mask), repeats)
    module = world.module()
    optimizer = common.optimizer_of(module)
    read = common.read_batch(dataset)
    head, _ = common.cpu_seconds(lambda: common.resume(module, optimizer, [items], read), max(repeats, 7))
    return {name: value / len(items) for name, value in (("backbone", backbone), ("text", text), ("head", head))}


def measure(
    detector: common.OwlDetector, *, n_images: int, n_coarse: int, batch_size: int, live_epochs: int, repeats: int
) -> dict:
    """Both ways, the counters of the towers and the limit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.json"
        world = common.World(detector, file, n_images=n_images, n_coarse=n_coarse, batch_size=batch_size)
    counted = common.Counted(detector)
    epochs = world.schedule(EPOCHS)
    checked = [batch for epoch in epochs for batch in epoch][:CHECKED]
    live_weights = common.steps(world.module(), checked, world.live_batch)
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
    difference = float((common.steps(world.module(), checked, read) - live_weights).abs().max())
    parts = components(world, dataset, repeats)
    r = world.n_items / world.n_images
    b, t, h = parts["backbone"], parts["text"], parts["head"]
    live *= EPOCHS / live_epochs
    return {
        "ratio": live / (once + head),
        "limit": EPOCHS * (b + t) / (b / r + t),
        "expected": EPOCHS * (b + t + h) / (b / r + t + EPOCHS * h),
        "live": live,
        "once": once,
        "epochs": head,
        "items": world.n_items,
        "images": world.n_images,
        "patches": detector.num_patches,
        "live_forwards": [EPOCHS * world.n_items, EPOCHS * world.n_items * 11],
        "stored_forwards": list(stored_forwards),
        "difference": difference,
        "equal": difference <= 1e-6,
        **parts,
    }


def show(name: str, row: dict[str, Any]) -> list[str]:
    """Lines of the table."""
    ms = {key: 1000 * row[key] for key in ("backbone", "text", "head")}
    return [
        f"| {name}, {row['patches']} patches, {row['images']} images, {row['items']} items | {ms['backbone']:.1f} | "
        f"{ms['text']:.1f} | {ms['head']:.2f} | {row['live']:.1f} | {row['once']:.1f} + {row['epochs']:.1f} | "
        f"{row['ratio']:.1f}x | {row['limit']:.1f}x | {100 * row['ratio'] / row['limit']:.0f} % | {row['difference']:.0e} |"
    ]


HEAD = [
    "| model | backbone, ms an item | text | head step | live, s | stored: once + 20 epochs, s | ratio | limit | share "
    "| weights differ by |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true", help="ViT-B/16 too")
    parser.add_argument("--side", type=int, default=384, help="image side of --real, 192 to 384 pixels")
    options = parser.parse_args()
    common.start()
    n_images = 26 if options.quick else 104
    rows = {
        "tiny": measure(
            common.make_detector(), n_images=n_images, n_coarse=60, batch_size=16, live_epochs=EPOCHS, repeats=9
        )
    }
    if options.real:
        rows[f"B/16 at {options.side} px"] = measure(
            common.make_detector(options.side),
            n_images=13 if options.quick else 23,
            n_coarse=1203,
            batch_size=8,
            live_epochs=1,
            repeats=1 if options.quick else 3,
        )
    lines = HEAD + [line for name, row in rows.items() for line in show(name, row)]
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
