"""What attention costs: the vision tower of ViT-B/16 with sdpa (the default) and with eager attention.

    python bench/attention_cost.py [--side 768]
    python bench/attention_cost.py --quick         384 pixels

Random weights, one image, one thread, forwards of both alternating; medians of CPU time. `equal`: tokens agree to 1e-4
of their largest (the two sum in another order). The limit is what the tower would gain if attention cost nothing, which
is measured by a tower whose attention returns its values.
"""

import common  # isort: skip: sets the number of threads
import argparse
import statistics
from typing import Any

import torch
from results import write_section
from transformers import AttentionInterface

GATE, GOAL = 1.5, 2.6


def free(
    module: Any, query: Any, key: Any, value: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention that costs nothing: the values as they are, [B, heads, P, d] -> [B, P, heads, d]."""
    return value.transpose(1, 2).contiguous(), None


def measure(side: int, repeats: int) -> dict[str, Any]:
    """Seconds of an image by kind of attention."""
    AttentionInterface.register("free", free)
    detectors = {kind: common.make_detector(side, attention=kind) for kind in ("sdpa", "eager", "free")}
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {kind: [] for kind in detectors}
    tokens = {}
    for _ in range(repeats):
        for kind, detector in detectors.items():
            seconds, features = common.cpu_seconds(lambda d=detector: d.encode_images(pixels))
            times[kind].append(seconds)
            tokens[kind] = features.tokens
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    difference = float((tokens["sdpa"] - tokens["eager"]).abs().max() / tokens["eager"].abs().max())
    return {**medians, "difference": difference, "patches": detectors["sdpa"].num_patches}


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", type=int, default=None, help="image side in pixels")
    options = parser.parse_args()
    common.start()
    side = options.side or (384 if options.quick else 768)
    row = measure(side, 3)
    ratio, limit = row["eager"] / row["sdpa"], row["eager"] / row["free"]
    lines = [
        "| model | sdpa, s an image | eager | no attention | ratio | limit | tokens differ by |",
        "|---|---|---|---|---|---|---|",
        f"| B/16 at {side} px, {row['patches']} patches | {row['sdpa']:.2f} | {row['eager']:.2f} | {row['free']:.2f} | "
        f"{ratio:.2f}x | {limit:.2f}x | {row['difference']:.0e} |",
    ]
    print("\n".join(lines))
    if not options.quick:
        text = "\n".join(lines)
        write_section(
            "attention_cost",
            f"## Attention\n\n`python bench/attention_cost.py`; vision tower, CPU time of one thread.\n\n{text}",
        )
    return common.finish(
        {
            "name": "attention_cost",
            "ratio": round(ratio, 2),
            "gate": GATE,
            "goal": GOAL,
            "limit": round(limit, 2),
            "equal": row["difference"] <= 1e-4,
            "side": side,
            "measured": row,
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
