"""Losses of the miniature's pretraining.

Legend: M (object, patch) pairs, O objects, B images, P patches, K classes, T texts.
Every object counts the same, however many patches it has: `weight` [M] is 1 / (patches of its object) / O, sum 1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

TEMPERATURE = 1 / 16  # of every contrast here


def weighted_cross_entropy(
    *, similarity: Float[Tensor, "M K"], target: Int[Tensor, "M"], weight: Float[Tensor, "M"]
) -> Float[Tensor, ""]:
    """sum_m w_m CE(s_m / TEMPERATURE, target_m)."""
    return (F.cross_entropy(similarity / TEMPERATURE, target, reduction="none") * weight).sum()


def caption_contrast(
    *,
    similarity: Float[Tensor, "M T"],
    own: Int[Tensor, "M"],
    ignored: Bool[Tensor, "M T"],
    weight: Float[Tensor, "M"],
) -> Float[Tensor, ""]:
    """Cross-entropy of the object's own sentence against the others; `ignored` ones (true as well) take no part."""
    ignored = ignored.scatter(1, own[:, None], False)
    return weighted_cross_entropy(similarity=similarity.masked_fill(ignored, -1e3), target=own, weight=weight)


def focal(
    *, logits: Float[Tensor, "B P K"], target: Float[Tensor, "B P K"], valid: Bool[Tensor, "B P"], count: int
) -> Float[Tensor, ""]:
    """Focal loss (alpha .3, gamma 2) over the valid patches, divided by `count`."""
    p = logits.sigmoid()
    right = p * target + (1 - p) * (1 - target)
    alpha = 0.3 * target + 0.7 * (1 - target)
    loss = alpha * (1 - right) ** 2 * F.binary_cross_entropy_with_logits(logits, target, reduction="none")  # [B, P, K]
    return (loss * valid[..., None]).sum() / count


def box_regression(
    *, boxes: Float[Tensor, "M 4"], target: Float[Tensor, "M 4"], weight: Float[Tensor, "M"]
) -> Float[Tensor, ""]:
    """sum_m w_m (2 L1 + 1 - GIoU); xyxy, relative."""
    distance = 2 * (boxes - target).abs().sum(-1) + generalized_box_iou_loss(boxes, target, reduction="none")
    return (distance * weight).sum()


def occupancy(*, logits: Float[Tensor, "B P N"], covered: Float[Tensor, "B S S"]) -> Float[Tensor, ""]:
    """BCE of the silhouette inside each patch, at two pixels a value (N = (patch / 2)²), from the first layer's tokens.

    Without it the class loss does not take off: a patch has to know its outline before classes can be put together.
    """
    b, p, n = logits.shape
    grid, cell = round(p**0.5), round(n**0.5)
    coarse = F.avg_pool2d(covered[:, None], 2).view(b, grid, cell, grid, cell)
    target = coarse.permute(0, 1, 3, 2, 4).reshape(b, p, n)
    return F.binary_cross_entropy_with_logits(logits, target)


def objectness(*, logits: Float[Tensor, "B P"], inside: Bool[Tensor, "B P"]) -> Float[Tensor, ""]:
    """BCE: is the patch in the middle of a thing?"""
    return F.binary_cross_entropy_with_logits(logits, inside.float())


def pair_weights(inside: Bool[Tensor, "O P"]) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M"]]:
    """The (object, patch) pairs of a mask and the weight of each."""
    rows, patches = torch.nonzero(inside, as_tuple=True)
    return rows, patches, (1 / inside.sum(1).float())[rows] / len(inside)
