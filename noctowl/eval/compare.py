"""Paired comparison of runs that were scored on the same images.

Legend: A units (objects, or classes of FG-OVD for mAP), I images, B resamples, S seeds, M comparisons.

Runs differ less from each other than from themselves on other images: the difference is taken unit by unit, and images
are resampled or exchanged as wholes. The p-value is that of a permutation test: if two runs are alike, the sign of an
image's difference is a coin's.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from noctowl.errors import DataError
from noctowl.eval.bootstrap import image_weights, percentile, ratio_samples

BLOCK = 1000  # permutations worked on at a time
ENOUGH = 1000  # extreme ones after which p is known to 3 percent of itself


def compare(
    runs: Mapping[str, Float[ndarray, "A"] | Float[ndarray, "S A"]],
    images: Int[ndarray, "A"],
    *,
    resamples: int = 1000,
    permutations: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> list[dict[str, Any]]:
    """One row for each pair of runs: {"a", "b", "mean_a", "mean_b", "difference": a - b with interval, "p", "p_holm"}.

    runs: a value of each unit: AP of each class (its mean is mAP), rank, or 1 where the rank is 1. Of a configuration
        with several seeds [S, A]: their mean is compared, so that seeds are no part of the interval; give them as runs
        of their own to see how they scatter.
    images: image id of each unit. Units that are NaN in a run (no object of that size) are left out for all.
    Raises DataError for fewer than two runs, unequal lengths, or where nothing is left.
    """
    values = {name: np.atleast_2d(np.asarray(v, np.float64)).mean(0) for name, v in runs.items()}
    lengths = {name: len(v) for name, v in values.items()}
    if len(runs) < 2 or set(lengths.values()) != {len(images)}:
        raise DataError(
            f"runs hold {lengths} values for {len(images)} units; two or more runs with one value per unit are needed. "
            "Compare runs that were scored on the same objects: same file, N, token rule and convention."
        )
    valid = ~np.isnan(np.stack(list(values.values()))).any(0)
    if not valid.any():
        raise DataError("no unit has a value in every run; compare figures that all runs have.")
    names, column = np.unique(images[valid], return_inverse=True)
    weights = image_weights(len(names), resamples=resamples, seed=seed)
    number = np.bincount(column, minlength=len(names)).astype(np.float64)
    rows: list[dict[str, Any]] = []
    for a, b in combinations(values, 2):
        own, other = values[a][valid], values[b][valid]
        sums = np.bincount(column, own - other, minlength=len(names))  # [I]
        difference = percentile(float((own - other).mean()), ratio_samples(sums, number, weights), level)
        p = sign_flip_p(sums, permutations=permutations, seed=seed, enough=ENOUGH)
        row = {"a": a, "b": b, "mean_a": float(own.mean()), "mean_b": float(other.mean())}
        rows.append({**row, "difference": difference, "p": p})
    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = adjusted
    return rows


def sign_flip_p(
    sums: Float[ndarray, "I"], *, permutations: int = 10_000, seed: int = 0, enough: int | None = None
) -> float:
    """Two-sided p of sum = 0 under random signs of the images' sums; at least 1 / (permutations + 1).

    Drawing stops with the `enough`-th sum that is as extreme as the observed one (None: never): after l draws p is
    enough / l, a valid p-value too (Besag and Clifford, 1991). So permutations cost time only where they are needed.
    """
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    rng = np.random.default_rng(seed)
    total = sums.sum()
    observed = abs(total) * (1 - 1e-12) - 1e-12  # equal sums, rounded otherwise, are as extreme
    extreme = 0
    for first in range(0, permutations, BLOCK):
        count = min(BLOCK, permutations - first)
        drawn = np.frombuffer(rng.bytes(count * -(-len(sums) // 8)), np.uint8).reshape(count, -1)
        positive = np.unpackbits(drawn, axis=1, count=len(sums), bitorder="little")  # [count, I]
        found = np.abs(2 * (positive.astype(np.float64) @ sums) - total) >= observed
        if enough is not None and extreme + found.sum() >= enough:
            return enough / (first + 1 + int(np.flatnonzero(found)[enough - extreme - 1]))
        extreme += int(found.sum())
    return (1 + extreme) / (1 + permutations)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction for M comparisons (Holm, 1979): sorted p times M, M - 1, .., made monotone."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1)
    return adjusted.tolist()
