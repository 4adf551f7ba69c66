"""What one training step sees.

Legend: B items, C columns of the longest vocabulary in the batch (column 0 is the positive), G objects of the item with
most, D class embedding width, S image side, P patches, Dv vision width. One item = one (image, positive caption).

Where a sample of the patches is stored (`noctowl.store.sample`) P is the number that was kept of the item with most,
and the others are padded: weight 0, and a box so far away that the assignment never chooses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FAR_AWAY = 1e3  # corners of padded boxes, in sides of the square: real ones lie in [-0.5, 1.5]


class Item(NamedTuple):
    """One vocabulary of one image; exactly one of `pixel_values` and (`tokens`, `patch_boxes`) is there."""

    key: tuple[int, int]  # image id, category id of the positive
    queries: Tensor  # [C, D] unit text embeddings
    gt_boxes: Tensor  # [G, 4] xyxy relative to the model's square
    pixel_values: Tensor | None  # [3, S, S]
    tokens: Tensor | None  # [P, Dv]
    patch_boxes: Tensor | None  # [P, 4] xyxy relative to the model's square
    patch_weights: Tensor | None = None  # [P] background patches that each stands for; None: all are there


@dataclass
class Batch:
    """Items padded to a common number of captions and of objects; the masks are True where something is.

    `pixel_values` **or** `tokens` with `patch_boxes`: images still to be encoded, or features that were stored.
    """

    keys: list[tuple[int, int]]
    queries: Tensor  # [B, C, D]
    query_mask: Tensor  # bool [B, C]
    gt_boxes: Tensor  # [B, G, 4]
    gt_mask: Tensor  # bool [B, G]
    pixel_values: Tensor | None = None  # [B, 3, S, S]
    tokens: Tensor | None = None  # [B, P, Dv]
    patch_boxes: Tensor | None = None  # [B, P, 4]
    patch_weights: Tensor | None = None  # [B, P]

    def __len__(self) -> int:
        return len(self.keys)

    def pin_memory(self) -> "Batch":
        """Page-locked copies, for the data loader."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.pin_memory())
        return self


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack tensors [n_i, d] to [B, max n, d], zeros behind each, with the mask [B, max n] of what is real."""
    longest = max(len(row) for row in rows)
    stacked = rows[0].new_zeros(len(rows), longest, rows[0].shape[-1])
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, row in enumerate(rows):
        stacked[b, : len(row)] = row
        mask[b, : len(row)] = True
    return stacked, mask


def pad_patches(items: Sequence[Item]) -> dict[str, Tensor]:
    """Samples of patches, padded."""
    tokens, real = pad([item.tokens for item in items if item.tokens is not None])
    boxes, _ = pad([item.patch_boxes for item in items if item.patch_boxes is not None])
    weights, _ = pad([item.patch_weights.unsqueeze(1) for item in items if item.patch_weights is not None])
    boxes[~real] = FAR_AWAY
    return {"tokens": tokens, "patch_boxes": boxes, "patch_weights": weights.squeeze(-1)}


def collate(items: Sequence[Item]) -> Batch:
    """Items of the data set -> one Batch."""
    queries, query_mask = pad([item.queries for item in items])
    gt_boxes, gt_mask = pad([item.gt_boxes for item in items])

    def stack(values: list[Tensor | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        return torch.stack(present) if present else None

    if items[0].patch_weights is not None:
        patches: dict[str, Tensor | None] = {**pad_patches(items)}
    else:
        patches = {
            "tokens": stack([item.tokens for item in items]),
            "patch_boxes": stack([item.patch_boxes for item in items]),
        }
    return Batch(
        keys=[item.key for item in items],
        queries=queries,
        query_mask=query_mask,
        gt_boxes=gt_boxes,
        gt_mask=gt_mask,
        pixel_values=stack([item.pixel_values for item in items]),
        **patches,
    )
