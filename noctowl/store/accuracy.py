"""What a store's dtype costs: the error of similarities, which is all that tokens are read for.

Legend: B images, P patches, C queries, Dv vision width, D class embedding width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noctowl.features import ImageSet, encode
from noctowl.head import cosine, unit
from noctowl.model import OwlDetector
from noctowl.store.folder import FeatureStore

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
