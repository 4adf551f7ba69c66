"""Losses of NoctOWL: class terms on foreground patches, background, coarse distillation; their weighted sum.

Legend: B images, P patches, C columns of a vocabulary (column 0 is the positive), n foreground patches of the batch,
K coarse class names. s are cosine similarities of the student, t of the teacher.

Conventions: all is computed in fp32. `mask` is False where a ragged vocabulary is padded; padded columns count nowhere.
Without foreground patches a term is 0 with a gradient of 0, never NaN. Means are over the foreground patches of the
batch, each patch weighing the same whatever the size of its vocabulary.

`compat` switches the oddities of the published implementation on as a block (default: on, it is the published recipe):
  - class and background terms take a = |s|, so a similarity of -0.5 counts like one of +0.5
    (off: a = s; background max(s, 0), BCE (1 + s) / 2, a cosine's map to a probability);
  - the triplet's mean is over all C columns although column 0 is 0 by construction, so it divides by n C
    (off: over the C - 1 negatives);
  - distillation "ce" takes the teacher's raw cosines as if they were probabilities, so it can be negative
    (off: cross-entropy between the softmaxes of t / temperature and s / temperature).
The published query epsilon sits where the cosine is made: `noctowl.head.cosine`.

|s| >= 1: rounding can give 1 + 1e-6 (bf16: 1 + 4e-3). Probabilities are clamped to [EPS, 1 - EPS] before a logarithm,
so -ln(1 - a) is at most 13.8 and its gradient there 0. Beyond 1.01 it is no cosine: `compute_losses` raises.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from noctowl.boxes import generalized_iou
from noctowl.errors import ModelError

ClassLoss = Literal["triplet", "cross_entropy", "bce"]
Distillation = Literal["none", "mse", "ce"]
EPS = 1e-6
COSINE_LIMIT = 1.01


@dataclass(frozen=True)
class LossTerms:
    """The three terms, unweighted, and the weights of their sum."""

    class_: Float[Tensor, ""]
    background: Float[Tensor, ""]
    distillation: Float[Tensor, ""]
    class_weight: float = 1.0
    background_weight: float = 1.0
    distillation_weight: float = 1.0

    @property
    def total(self) -> Float[Tensor, ""]:
        """What is minimised."""
        return (
            self.class_weight * self.class_
            + self.background_weight * self.background
            + self.distillation_weight * self.distillation
        )

    def as_dict(self) -> dict[str, Tensor]:
        """Detached values by name, for logging."""
        terms = {"class": self.class_, "background": self.background, "distillation": self.distillation}
        return {name: value.detach() for name, value in {**terms, "total": self.total}.items()}


# Class terms: s of the foreground patches, [n, C]


def triplet(
    *, similarities: Float[Tensor, "n C"], mask: Bool[Tensor, "n C"] | None = None, margin: float, compat: bool
) -> Float[Tensor, ""]:
    """mean_n mean_c max(0, margin + a_c - a_0) (NoctOWL paper, triplet loss)."""
    a, mask = _prepare(similarities, mask)
    a = a.abs() if compat else a
    hinge = F.relu(margin + a[:, 1:] - a[:, :1]) * mask[:, 1:]  # [n, C-1]
    counted = (mask if compat else mask[:, 1:]).sum(1).clamp(min=1)  # [n]
    return (hinge.sum(1) / (counted * len(counted))).sum()


def cross_entropy(
    *, similarities: Float[Tensor, "n C"], mask: Bool[Tensor, "n C"] | None = None, temperature: float, compat: bool
) -> Float[Tensor, ""]:
    """mean_n -log softmax(a / temperature)[0] (InfoNCE with the caption's own negatives)."""
    a, mask = _prepare(similarities, mask)
    a = a.abs() if compat else a
    logits = (a * (1 / temperature)).masked_fill(~mask, -torch.inf)  # [n, C]
    column0 = torch.zeros_like(logits[:, 0], dtype=torch.long)
    return F.cross_entropy(logits, column0, reduction="sum") / max(len(logits), 1)


def bce(
    *, similarities: Float[Tensor, "n C"], mask: Bool[Tensor, "n C"] | None = None, gamma: float, compat: bool
) -> Float[Tensor, ""]:
    """mean_n sum_c (1 - e^-l)^gamma l with l = BCE(p_c, 1 if c = 0 else 0): focal binary cross-entropy."""
    s, mask = _prepare(similarities, mask)
    p = (s.abs() if compat else (1 + s) / 2).clamp(EPS, 1 - EPS)  # [n, C]
    target = F.one_hot(torch.zeros_like(p[:, 0], dtype=torch.long), p.shape[1]).to(p)
    return _mean_rows((_focal(p, target, gamma) * mask).sum(1))


# Background: s of the background patches, [m, C]


def background(
    *,
    similarities: Float[Tensor, "m C"],
    mask: Bool[Tensor, "m C"] | None = None,
    weights: Float[Tensor, "m"] | None = None,
    gamma: float,
    compat: bool,
) -> Float[Tensor, ""]:
    """mean_m sum_c -a^gamma ln(1 - a): focal loss with target 0 for every caption.

    `weights`: how many background patches each row stands for (`noctowl.store.sample`); their sum is the number of all.
    """
    s, mask = _prepare(similarities, mask)
    a = (s.abs() if compat else s.clamp(min=0)).clamp(max=1 - EPS)  # [m, C]
    rows = (_focal(a, torch.zeros_like(a), gamma) * mask).sum(1)  # [m]
    if weights is None:
        return _mean_rows(rows)
    return (rows * weights).sum() / weights.sum().clamp(min=1)


# Coarse distillation: s and t of the foreground patches for K class names, [n, K]


def distill_mse(*, student: Float[Tensor, "n K"], teacher: Float[Tensor, "n K"]) -> Float[Tensor, ""]:
    """mean over n K of (s - t)^2 (NoctOWL paper, self-distillation)."""
    return _mean_rows((student.float() - teacher.float()).square().mean(1))


def distill_ce(
    *, student: Float[Tensor, "n K"], teacher: Float[Tensor, "n K"], temperature: float, compat: bool
) -> Float[Tensor, ""]:
    """mean_n -sum_k target_k log softmax(student)_k; with compat the target is t itself and there is no temperature."""
    student, teacher = student.float(), teacher.float()
    if compat:
        target = teacher
    else:
        student, target = student / temperature, (teacher / temperature).softmax(1)
    return F.cross_entropy(student, target, reduction="sum") / max(len(student), 1)


def compute_losses(
    *,
    similarities: Float[Tensor, "B P C"],
    positive: Bool[Tensor, "B P"],
    query_mask: Bool[Tensor, "B C"] | None = None,
    patch_weights: Float[Tensor, "B P"] | None = None,
    kind: str = "triplet",
    margin: float = 0.15,
    temperature: float = 0.07,
    gamma: float = 2.0,
    distill: str = "none",
    student: Float[Tensor, "n K"] | None = None,
    teacher: Float[Tensor, "n K"] | None = None,
    distill_temperature: float = 0.07,
    class_weight: float = 1.0,
    background_weight: float = 1.0,
    distillation_weight: float = 1.0,
    compat: bool = True,
) -> LossTerms:
    """All terms of one batch.

    `positive` is the assignment's foreground. `student` and `teacher` are the coarse similarities of the foreground
    rows, tokens[positive], only: no other row enters the loss, so scoring all patches would give the same gradient.
    `patch_weights` where P is a sample of the patches: each counts so often in the background term, 0 is padding.

    Raises ModelError for similarities that are NaN or no cosines; ValueError for unknown kinds, coarse similarities
    that are absent or belong to other rows.
    """
    similarities = similarities.float()
    _check_cosines("similarities", similarities)
    rows = None if query_mask is None else query_mask.unsqueeze(1).expand(similarities.shape)  # [B, P, C]
    foreground, front = similarities[positive], None if rows is None else rows[positive]  # [n, C]
    rest = ~positive if patch_weights is None else ~positive & (patch_weights > 0)  # [B, P]
    behind, back = similarities[rest], None if rows is None else rows[rest]  # [m, C]
    if kind == "triplet":
        class_ = triplet(similarities=foreground, mask=front, margin=margin, compat=compat)
    elif kind == "cross_entropy":
        class_ = cross_entropy(similarities=foreground, mask=front, temperature=temperature, compat=compat)
    elif kind == "bce":
        class_ = bce(similarities=foreground, mask=front, gamma=gamma, compat=compat)
    else:
        raise ValueError(f"class loss {kind!r} is unknown; allowed: {', '.join(get_args(ClassLoss))}")
    coarse = similarities.new_zeros(())
    if distill != "none":
        if student is None or teacher is None or not len(student) == len(teacher) == len(foreground):
            found = [None if x is None else tuple(x.shape) for x in (student, teacher)]
            raise ValueError(f"distill={distill}: coarse similarities {found} for {len(foreground)} foreground rows")
        _check_cosines("coarse similarities of the student", student)
        _check_cosines("coarse similarities of the teacher", teacher)
        if distill == "mse":
            coarse = distill_mse(student=student, teacher=teacher)
        elif distill == "ce":
            coarse = distill_ce(student=student, teacher=teacher, temperature=distill_temperature, compat=compat)
        else:
            raise ValueError(f"distillation {distill!r} is unknown; allowed: {', '.join(get_args(Distillation))}")
    return LossTerms(
        class_=class_,
        background=background(
            similarities=behind,
            mask=back,
            weights=None if patch_weights is None else patch_weights[rest],
            gamma=gamma,
            compat=compat,
        ),
        distillation=coarse,
        class_weight=class_weight,
        background_weight=background_weight,
        distillation_weight=distillation_weight,
    )


@torch.no_grad()
def box_distances(
    *, pred_boxes: Float[Tensor, "B P 4"], gt_boxes: Float[Tensor, "B G 4"], matched_patch: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Watched, never trained: mean L1 (summed over the four sides) and mean 1 - GIoU of the matched pairs."""
    image, object_ = (matched_patch >= 0).nonzero(as_tuple=True)
    predicted, true = (
        pred_boxes[image, matched_patch[image, object_]].float(),
        gt_boxes[image, object_].float(),
    )  # [k, 4]
    giou = generalized_iou(predicted.unsqueeze(1), true.unsqueeze(1)).flatten()
    return _mean_rows((predicted - true).abs().sum(1)), _mean_rows(1 - giou)


def _prepare(similarities: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return similarities.float(), torch.ones_like(similarities, dtype=torch.bool) if mask is None else mask


def _focal(p: Tensor, target: Tensor, gamma: float) -> Tensor:
    """(1 - e^-l)^gamma l, l = BCE(p, target), each element; 1 - e^-l is the probability given to the wrong answer."""
    with torch.autocast(p.device.type, enabled=False):  # BCE is refused under autocast, even for fp32 input
        bce_ = F.binary_cross_entropy(p, target, reduction="none")
    return (1 - torch.exp(-bce_)) ** gamma * bce_


def _mean_rows(values: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Mean, and 0 that keeps the graph for no rows."""
    return values.mean() if len(values) else values.sum()


def _check_cosines(name: str, values: Tensor) -> None:
    largest = values.detach().abs().amax() if values.numel() else values.new_zeros(())
    if not bool(largest <= COSINE_LIMIT):  # also for NaN
        raise ModelError(
            f"{name}: largest magnitude {float(largest)}, cosines within [-1, 1] needed. NaN or inf: the weights or "
            f"the rate diverged; larger numbers: logits were passed for similarities"
        )
