"""What a store's economies cost: the dtype in similarities, which is all that tokens are read for; a sample of the
patches in the gradient.

Legend: B images, P patches, C queries, Dv vision width, D class embedding width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noctowl.features import ImageSet, encode
from noctowl.head import cosine, unit
from noctowl.losses import background
from noctowl.matcher import match
from noctowl.model import OwlDetector
from noctowl.store.folder import FeatureStore
from noctowl.store.sample import Target, candidates

RANDOM_QUERIES = 256


@torch.no_grad()
def similarity_error(
    detector: OwlDetector,
    exact: Float[Tensor, "B P Dv"],
    stored: Float[Tensor, "B P Dv"],
    queries: Float[Tensor, "C D"] | None = None,
) -> dict[str, float]:
    """Largest error under the base model's class head, over all patches.

    Returns: "cosine": largest |cos(e, q) - cos(e', q)| over the queries given (default: 256 random directions);
    "bound": largest |e / |e| - e' / |e'||, which no query can exceed.
    """
    device = exact.device
    teacher = detector.teacher.weight.to(device), detector.teacher.bias.to(device)
    one, other = (torch.nn.functional.linear(tokens, *teacher) for tokens in (exact, stored))  # [B, P, D]
    if queries is None:
        queries = torch.randn(RANDOM_QUERIES, one.shape[-1], generator=torch.Generator().manual_seed(0))
    shared = queries.to(device).expand(len(one), -1, -1)  # [B, C, D]
    difference = cosine(one, shared) - cosine(other, shared)
    distance = torch.linalg.vector_norm(unit(one) - unit(other), dim=-1)
    return {"cosine": float(difference.abs().max()), "bound": float(distance.max())}


def measure(
    store: FeatureStore,
    detector: OwlDetector,
    images: ImageSet,
    rows: Sequence[int],
    *,
    batch_size: int,
    num_workers: int,
    device: torch.device,
    queries: Float[Tensor, "C D"] | None = None,
) -> dict[str, float]:
    """Stored features against anew computed ones on a sample of rows: `similarity_error`, and the largest difference
    of boxes. Raises DataError if one of the rows is not stored."""
    reader = store.reader(images, rows)
    worst = {"cosine": 0.0, "bound": 0.0, "boxes": 0.0}
    work: Any = {"batch_size": batch_size, "num_workers": num_workers, "device": device}
    for part, exact in encode(detector, images, rows, **work):
        stored = reader.read(part)
        error = similarity_error(detector, exact.tokens.float().cpu(), stored.tokens, queries)
        error["boxes"] = float((exact.boxes.float().cpu() - stored.boxes).abs().max())
        worst = {name: max(value, error[name]) for name, value in worst.items()}
    return {**worst, "images": len(rows)}


def background_error(
    *,
    tokens: Float[Tensor, "P Dv"],
    boxes: Float[Tensor, "P 4"],
    queries: Float[Tensor, "C D"],
    objects: Float[Tensor, "G 4"],
    weight: Float[Tensor, "D Dv"],
    bias: Float[Tensor, "D"],
    sizes: Sequence[int],
    gamma: float = 2.0,
    compat: bool = True,
) -> tuple[Float[Tensor, "D Dw"], int, dict[int, float]]:
    """What samples of background patches (`noctowl.store.sample`) do to the gradient of one item's background term.

    Returns: the term's gradient over all patches, summed, not averaged, [D, Dv + 1] with the bias last; how many
    patches can become foreground; by sample size k the expected squared error of that gradient. With g_i the gradients
    of the R patches that are drawn from, simple random sampling has the variance R^2 / k (1 - k / R) S^2, where
    S^2 = sum |g_i - mean g|^2 / (R - 1).
    """
    with torch.no_grad():
        embeddings = torch.nn.functional.linear(tokens, weight, bias)  # [P, D]
    embeddings.requires_grad_()
    similarities = cosine(embeddings, queries, query_epsilon=compat)  # [P, C]
    assignment = match(pred_boxes=boxes[None], similarities=similarities.detach()[None], gt_boxes=objects[None])
    behind = ~assignment.positive[0]
    term = background(similarities=similarities[behind], gamma=gamma, compat=compat) * behind.sum()
    (slope,) = torch.autograd.grad(term, embeddings)  # [P, D], 0 for foreground
    inputs = torch.cat([tokens, tokens.new_ones(len(tokens), 1)], -1)  # [P, Dv + 1]
    candidate = candidates(pred_boxes=boxes, targets=[Target(objects, len(queries))])
    rest, count = ~candidate, int((~candidate).sum())
    squares = (
        slope[rest].square().sum(-1) * inputs[rest].square().sum(-1)
    ).sum()  # sum |g_i|^2, g_i = slope_i input_i^T
    total = slope[rest].T @ inputs[rest]
    spread = float((squares - total.square().sum() / max(count, 1)) / max(count - 1, 1))
    errors = {k: count**2 / k * (1 - k / count) * spread if k < count else 0.0 for k in sizes}
    return slope.T @ inputs, int(candidate.sum()), errors
