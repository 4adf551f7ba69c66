"""Assignment: which patches answer for which object (NoctOWL paper, fine-grained branch; DETR's matching cost).

Legend: B images (one vocabulary each), P patches, C columns (column 0 is the positive), G objects of the vocabulary.

All objects of a vocabulary carry its positive caption, so the class part of the cost is the same for each of them:

  cost(p, g) = |box_p - box_g|_1 - softmax_c(s_p)[0] - GIoU(box_p, box_g)       boxes xyxy relative to the square

The softmax is over raw cosines (no temperature), as published. Each object gets one patch, no patch two. Positives are
the matched patches and every patch whose predicted box overlaps a matched *predicted* box by IoU > 0.85; all other
patches are background.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from noctowl.boxes import areas, generalized_iou, iou, valid_boxes
from noctowl.errors import DataError, ModelError

SPREAD_IOU = 0.85


@dataclass(frozen=True)
class Assignment:
    """Matched patch of each object and the patches that count as foreground."""

    matched_patch: Int64[Tensor, "B G"]  # -1 where the object is padding
    positive: Bool[Tensor, "B P"]


@torch.no_grad()
def match(
    *,
    pred_boxes: Float[Tensor, "B P 4"],
    similarities: Float[Tensor, "B P C"],
    gt_boxes: Float[Tensor, "B G 4"],
    gt_mask: Bool[Tensor, "B G"] | None = None,
    query_mask: Bool[Tensor, "B C"] | None = None,
    spread_iou: float = SPREAD_IOU,
) -> Assignment:
    """Assigns objects to patches. Computed in fp32, without gradients.

    Masks are False on padding: padded columns take no part in the softmax, padded objects match nothing.
    Predicted boxes without area are legal (their overlap is 0). Raises DataError for an object without area, inverted
    or not finite, and for more objects than patches; ModelError for predictions that are not finite.
    """
    pred_boxes, similarities, gt_boxes = pred_boxes.float(), similarities.float(), gt_boxes.float()
    if gt_mask is None:
        gt_mask = torch.ones(gt_boxes.shape[:2], dtype=torch.bool, device=gt_boxes.device)
    if query_mask is not None:
        similarities = similarities.masked_fill(~query_mask.unsqueeze(1), -torch.inf)
    gt_boxes = torch.where(gt_mask.unsqueeze(-1), gt_boxes, gt_boxes.new_tensor((0.0, 0.0, 1.0, 1.0)))
    probability = similarities.softmax(-1)[..., 0]  # [B, P]
    _check(pred_boxes, probability, gt_boxes, gt_mask)
    cost = torch.cdist(gt_boxes, pred_boxes, p=1)  # [B, G, P]
    cost = cost - probability.unsqueeze(1) - generalized_iou(gt_boxes, pred_boxes)
    matched = cost.argmin(-1).masked_fill(~gt_mask, -1)  # [B, G]; already the answer where G = 1
    if gt_boxes.shape[1] > 1:
        matched = _hungarian(cost, gt_mask, matched)
    return Assignment(matched_patch=matched, positive=_spread(pred_boxes, matched, spread_iou))


def _hungarian(cost: Tensor, gt_mask: Tensor, matched: Tensor) -> Tensor:
    """Cheapest one-to-one assignment for the images with several objects."""
    several = (gt_mask.sum(1) > 1).nonzero().flatten().tolist()
    for b in several:
        objects = gt_mask[b].nonzero().flatten()
        rows, columns = linear_sum_assignment(cost[b, objects].cpu().numpy())
        matched[b, objects[torch.from_numpy(rows).to(objects.device)]] = torch.from_numpy(columns).to(matched)
    return matched


def _spread(pred_boxes: Tensor, matched: Tensor, threshold: float) -> Tensor:
    """Matched patches and those whose box nearly equals a matched predicted box: [B, P]."""
    real = matched >= 0  # [B, G]
    patch = matched.clamp(min=0)
    seeds = pred_boxes.gather(1, patch.unsqueeze(-1).expand(-1, -1, 4))  # [B, G, 4]
    near = (iou(seeds, pred_boxes) > threshold) & real.unsqueeze(-1)  # [B, G, P]
    near |= torch.zeros_like(near).scatter_(2, patch.unsqueeze(-1), real.unsqueeze(-1))  # a seed without area
    return near.any(1)


def _check(pred_boxes: Tensor, probability: Tensor, gt_boxes: Tensor, gt_mask: Tensor) -> None:
    """One synchronisation for the common case; the search for the culprit only when there is one."""
    objects = valid_boxes(gt_boxes) & (areas(gt_boxes) > 0)  # [B, G]
    predicted = valid_boxes(pred_boxes) & probability.isfinite()  # [B, P]
    crowded = gt_mask.sum(1) > pred_boxes.shape[1]  # [B]
    if bool(objects.all() & predicted.all() & ~crowded.any()):
        return
    if not objects.all():
        b, g = (~objects).nonzero()[0].tolist()
        raise DataError(
            f"gt_boxes[{b}, {g}] = {gt_boxes[b, g].tolist()} (relative xyxy): finite corners with x1 < x2 and y1 < y2 "
            f"needed; drop or mend the object"
        )
    if not predicted.all():
        b, p = (~predicted).nonzero()[0].tolist()
        raise ModelError(
            f"patch {p} of image {b}: box {pred_boxes[b, p].tolist()}, positive's probability {probability[b, p]:.4g}; "
            f"finite numbers needed. The weights or the pixels hold NaN, or half precision overflowed: try fp32"
        )
    b = int(crowded.nonzero()[0])
    raise DataError(
        f"image {b} of the batch has {int(gt_mask[b].sum())} objects of one caption, more than the model's "
        f"{pred_boxes.shape[1]} patches; drop some"
    )
