"""The permutation test: exact p-values of few images, and where drawing may stop."""

from itertools import product

import numpy as np
import pytest

from noctowl.eval.compare import sign_flip_p


@pytest.mark.parametrize("seed", range(3))
def test_equals_all_sign_patterns(seed):
    """Ten images: the 1,024 patterns can be counted."""
    sums = np.random.default_rng(seed).normal(0.5, 1, 10)
    patterns = np.array(list(product((-1, 1), repeat=10))) @ sums
    exact = (np.abs(patterns) >= abs(sums.sum()) - 1e-9).mean()
    assert sign_flip_p(sums, permutations=200_000, enough=10_000) == pytest.approx(exact, rel=0.04)


def test_stops_where_enough_are_extreme():
    """Every pattern of one image is as extreme as the observed one: p is 1 after any number of draws."""
    assert sign_flip_p(np.array([2.0]), enough=7) == 1
    assert sign_flip_p(np.ones(3), permutations=10**9, enough=500) == pytest.approx(0.25, rel=0.15)  # would take hours


def test_stopping_early_is_valid():
    """400 pairs of like runs, 40 extreme draws at most: a fifth have p up to .2 (3 sigma)."""
    rng = np.random.default_rng(2)
    p = np.array([sign_flip_p(rng.normal(size=25), permutations=2000, seed=i, enough=40) for i in range(400)])
    for level in (0.05, 0.2, 0.5):
        assert abs((p <= level).mean() - level) < 3 * (level * (1 - level) / 400) ** 0.5
