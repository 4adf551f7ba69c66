"""A sample of an image's background patches for training: every patch that can become foreground, and k of the others.

Legend: P patches, G objects of a vocabulary, C its columns, M patches that are kept.

Which patches the assignment (`noctowl.matcher`) can choose follows from the boxes alone, whatever the head learns: the
cost of patch p and object g is geometry(p, g) - softmax_c(s_p)[0], and for C cosines in [-1, 1] that softmax has the
range

  r(C) = e / (e + (C - 1) / e) - 1 / (1 + (C - 1) e^2)        0.412 for C = 11, more for fewer columns.

With G objects that each take a patch, an object never pays more than its G-th cheapest patch costs: were that so, one
of these G would be free and cheaper. So the patches with geometry <= G-th smallest geometry + r(C) hold every
assignment; those whose box overlaps such a patch's by IoU > 0.85 can follow as its neighbours. All of them are kept.

Of the R others k are drawn, each subset with the same probability, so each has the inclusion probability k / R. They
weigh R / k in the mean over background patches: for weights that do not depend on the draw the background term and its
gradient have the full ones as their expectation (Horvitz-Thompson). The mean divides by the sum of the weights, which
is the number of all background patches whatever was drawn (k R / k = R, and none of the R can be foreground), so it is
no ratio of two random sums. k >= R keeps all.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from noctowl.boxes import generalized_iou, iou
from noctowl.hashing import tensor_bytes
from noctowl.matcher import SPREAD_IOU

SLACK = 0.01  # of the cost, for rounding and for the published query epsilon (cosines move by up to 3e-5)
IOU_SLACK = 1e-4  # of the neighbours' overlap: the device that trains rounds unlike the one that built
VERSION = 2  # raise it whenever candidates or draws come out differently


class Target(NamedTuple):
    """What decides about the candidates of one vocabulary."""

    boxes: Float[Tensor, "G 4"]  # xyxy relative to the model's square
    columns: int


def settings(background: int, seed: int) -> dict[str, Any]:
    """What a sample depends on besides the image and its targets; part of the store's key."""
    return {
        "background": background,
        "seed": seed,
        "spread_iou": SPREAD_IOU,
        "slack": [SLACK, IOU_SLACK],
        "version": VERSION,
    }


def target_digest(targets: Sequence[Target]) -> str:
    """Of the objects and columns of an image's vocabularies; part of the identity of its entry."""
    digest = hashlib.sha256()
    for boxes, columns in targets:
        digest.update(f"{columns} {len(boxes)}\0".encode())
        digest.update(tensor_bytes(boxes.float()))
    return digest.hexdigest()[:32]


def class_range(columns: int) -> float:
    """r(C): largest minus smallest probability of column 0 in a softmax over C cosines."""
    highest = math.e / (math.e + (columns - 1) / math.e)
    return highest - 1 / (1 + (columns - 1) * math.e**2)


@torch.no_grad()
def candidates(*, pred_boxes: Float[Tensor, "P 4"], targets: Sequence[Target]) -> Bool[Tensor, "P"]:
    """Patches that can become foreground for one of the targets under some head."""
    pred_boxes = pred_boxes.float()
    chosen = torch.zeros(len(pred_boxes), dtype=torch.bool, device=pred_boxes.device)
    for boxes, columns in targets:
        objects = boxes.to(pred_boxes)
        geometry = torch.cdist(objects, pred_boxes, p=1) - generalized_iou(objects, pred_boxes)  # [G, P]
        nth = geometry.kthvalue(min(len(objects), len(pred_boxes)), dim=1, keepdim=True).values  # [G, 1]
        chosen |= (geometry <= nth + class_range(columns) + SLACK).any(0)
    near = iou(pred_boxes[chosen], pred_boxes) > SPREAD_IOU - IOU_SLACK  # [n, P]
    return chosen | near.any(0)


def draw(
    candidate: Bool[Tensor, "P"], *, background: int, seed: int, name: str
) -> tuple[Int64[Tensor, "M"], Float[Tensor, "M"]]:
    """Patches to keep, ascending, and their weights. The draw depends on the seed and the entry's name alone."""
    kept = candidate.cpu().numpy().copy()
    others = np.flatnonzero(~kept)
    weights = np.ones(len(kept), np.float32)
    if background < len(others):
        entropy = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        drawn = np.random.default_rng([seed, entropy]).choice(others, background, replace=False, shuffle=False)
        kept[drawn] = True
        weights[drawn] = len(others) / background
    else:
        kept[:] = True
    rows = np.flatnonzero(kept)
    return torch.from_numpy(rows), torch.from_numpy(weights[rows])


def thin(
    packed: Mapping[str, Tensor], targets: Sequence[Target], *, background: int, seed: int, name: str
) -> dict[str, Tensor]:
    """The kept patches of one image's tensors [P, ...], with "weights" [M]."""
    candidate = candidates(pred_boxes=packed["boxes"], targets=targets)
    rows, weights = draw(candidate, background=background, seed=seed, name=name)
    return {**{key: value[rows] for key, value in packed.items()}, "weights": weights}
