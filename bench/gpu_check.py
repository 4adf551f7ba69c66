"""Does it work on the GPU, and how fast: tiny and one real architecture with random weights, in bf16, against the CPU.

    python bench/gpu_check.py [--architecture owlv2_b16] [--images 64]

Tokens and boxes of the GPU in bf16 have to be those of the CPU in fp32 within TOLERANCE; a head trained on the
same tokens has to reach the CPU's loss within LOSS_TOLERANCE. Prints images per second of feature building and steps
per second of the head. Exit code 1 where a comparison fails, 2 where there is no GPU: then nothing has been measured.
The last line is JSON.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

from noctowl.assembly import load_detector
from noctowl.compose import compose
from noctowl.losses import compute_losses
from noctowl.matcher import match
from noctowl.model import OwlDetector

TOLERANCE = {"tokens": 0.05, "boxes": 0.02}  # mean |GPU - CPU|, for tokens relative to mean |CPU|
LOSS_TOLERANCE = 0.05  # relative, after STEPS steps
STEPS = 50


def build(detector: OwlDetector, pixels: torch.Tensor, device: str) -> tuple[Any, float]:
    """Features on the CPU, and seconds."""
    detector.to(device)
    images = pixels.to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        detector.encode_images(images[:1])
        _wait(device)
        start = time.perf_counter()
        features = [detector.encode_images(part) for part in images.split(8)]
        _wait(device)
    seconds = time.perf_counter() - start
    return (
        torch.cat([f.tokens.float().cpu() for f in features]),
        torch.cat([f.boxes.float().cpu() for f in features]),
    ), seconds


def head_steps(detector: OwlDetector, tokens: torch.Tensor, boxes: torch.Tensor, device: str) -> tuple[float, float]:
    """Last loss of STEPS steps of the head, and seconds."""
    detector.reset_head()
    detector.to(device)
    detector.freeze()
    draw = torch.Generator().manual_seed(1)
    width = detector.model.config.projection_dim
    queries = F.normalize(torch.randn(len(tokens), 11, width, generator=draw), dim=-1).to(device)
    tokens, boxes = tokens.to(device), boxes.to(device)
    targets, mask = boxes[:, :1].clone(), torch.ones(len(boxes), 1, dtype=torch.bool, device=device)
    columns = torch.ones(queries.shape[:2], dtype=torch.bool, device=device)
    optimizer = torch.optim.AdamW(detector.head.dense0.parameters(), lr=1e-4)
    value = torch.zeros(())
    _wait(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        similarities = detector.head.lean_similarity(tokens, queries, query_epsilon=True)
        assignment = match(
            pred_boxes=boxes,
            similarities=similarities.detach(),
            gt_boxes=targets,
            gt_mask=mask,
            query_mask=columns,
        )
        value = compute_losses(
            similarities=similarities,
            positive=assignment.positive,
            query_mask=columns,
            kind="triplet",
            distill="none",
            student=None,
            teacher=None,
            class_weight=1.0,
            background_weight=1.0,
            distillation_weight=0.0,
            compat=True,
            margin=0.15,
            gamma=2.0,
        ).total
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    _wait(device)
    return float(value.detach()), time.perf_counter() - start


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def compare(name: str, n_images: int, device: str) -> dict[str, Any]:
    """One architecture on both devices; 4 images are compared, `n_images` timed."""
    words = [f"model={name}"] + ([f"model.source={name}"] if name == "tiny" else []) + ["model.weights=random"]
    detector = load_detector(compose("train", words)["model"])
    size = detector.image_size
    pixels = torch.randn(n_images, 3, size, size, generator=torch.Generator().manual_seed(0))
    (tokens, boxes), _ = build(detector, pixels[:4], "cpu")
    loss, cpu_seconds = head_steps(detector, tokens, boxes, "cpu")
    (fast_tokens, fast_boxes), seconds = build(detector, pixels, device)
    fast_loss, fast_seconds = head_steps(detector, tokens, boxes, device)
    errors = {
        "tokens": float((fast_tokens[:4] - tokens).abs().mean() / tokens.abs().mean()),
        "boxes": float((fast_boxes[:4] - boxes).abs().mean()),
    }
    bad = [key for key, value in errors.items() if not value <= TOLERANCE[key]]
    bad += ["loss"] if not abs(fast_loss - loss) <= LOSS_TOLERANCE * abs(loss) else []
    return {
        "architecture": name,
        "errors": errors,
        "loss": [loss, fast_loss],
        "failed": bad,
        "images_per_second": n_images / seconds,
        "steps_per_second": STEPS / fast_seconds,
        "steps_per_second_cpu": STEPS / cpu_seconds,
    }


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="owlv2_b16")
    parser.add_argument("--images", type=int, default=64)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured. Run this where torch.cuda.is_available() is true.", file=sys.stderr)
        print(json.dumps({"gpu": None, "measured": False}))
        return 2
    found = [compare(name, options.images, "cuda") for name in ("tiny", options.architecture)]
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "measured": True, "checks": found}))
    return 1 if any(check["failed"] for check in found) else 0


if __name__ == "__main__":
    sys.exit(main())
