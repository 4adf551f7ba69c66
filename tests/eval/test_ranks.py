import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noctowl.eval.ranks import mean_rank, median_rank, object_ranks


def overlap(a, b):
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inter = max(w, 0) * max(h, 0)
    return inter / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 5), n=st.integers(0, 4))
def test_equals_the_definition(seed, groups, n):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 6, groups)
    offsets = np.cumsum([0, *sizes])
    corner = rng.integers(0, 6, (offsets[-1], 2)) * 4.0
    boxes = np.concatenate([corner, corner + rng.integers(2, 5, (offsets[-1], 2)) * 4], 1)
    logits = rng.integers(0, 4, (offsets[-1], 1 + n)).astype(np.float32)
    logits[:, 1:][rng.random((offsets[-1], n)) < 0.2] = -np.inf
    group = np.sort(rng.integers(0, groups, 7))
    corner = rng.integers(0, 6, (7, 2)) * 4.0
    objects = np.concatenate([corner, corner + rng.integers(2, 5, (7, 2)) * 4], 1)
    expected = []
    for g, target in zip(group, objects):
        rank = n + 1
        for d in range(offsets[g], offsets[g + 1]):
            if overlap(target, boxes[d]) > 0.5:
                rank = sum(value >= logits[d, 0] for value in logits[d])
                break
        expected.append(rank)
    found = object_ranks(object_boxes=objects, object_group=group, boxes=boxes, offsets=offsets, logits=logits)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("ranks", "mean", "median", "published"),
    [
        ([], None, None, None),
        ([4], 4.0, 4.0, None),
        ([1, 2], 1.5, 1.5, None),
        ([3, 1, 2], 2.0, 2.0, 3.0),
        ([1, 1, 2, 5], 2.25, 1.5, 5.0),
        ([1, 1, 1, 2, 6], 2.2, 1.0, 2.0),
    ],
)
def test_mean_and_both_medians(ranks, mean, median, published):
    assert mean_rank(ranks) == mean
    assert median_rank(ranks) == median
    assert median_rank(ranks, published=True) == published
