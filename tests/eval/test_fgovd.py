"""The FG-OVD scorer on small hand-made files; the published figures are in test_golden.py."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noctowl.data.fgovd import read_fgovd
from noctowl.errors import ConfigError, DataError
from noctowl.eval.fgovd import _suppress, score
from noctowl.eval.predictions import Predictions, TopDetections

ONE = pytest.approx(1.0, abs=1e-12)


@pytest.fixture
def cups(fgovd, write_fgovd):
    """Image 0: A = red cup (2 small objects, negatives blue, green), C = cat (1 object, no negatives).
    Image 7: B = wooden chair (1 medium object, one negative)."""
    return read_fgovd(write_fgovd(fgovd, "pattern"))


A = (0, 0, [[10, 5, 30, 35], [50.5, 0, 60.5, 10]], [[2.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
B = (7, 30, [[0, 0, 64, 64]], [[0.1, 0.5]])
C = (0, 50, [[1, 2, 4, 6]], [[0.3]])


def predictions(*parts, n_negatives=(0, 1, 2)):
    rows = [(i, k, np.array(boxes, np.float32), np.array(logits, np.float32)) for i, k, boxes, logits in parts]
    return Predictions.from_parts(rows, n_negatives=n_negatives)


def test_figures_by_hand(cups):
    """N = 1: A is right, B takes the wrong caption, C has no negative."""
    result = score(cups, predictions(A, B, C), n_negatives=[1], lengths=None)
    metrics = result["metrics"]
    assert metrics["n1/map"] == metrics["n1/map_50"] == metrics["n1/map_75"] == pytest.approx(0.5)
    assert metrics["n1/map_small"] == ONE
    assert metrics["n1/map_medium"] == 0.0
    assert "n1/map_large" not in metrics
    assert metrics["n1/mar_1"] == pytest.approx(0.25)  # one of the two cups, no chair
    assert metrics["n1/mar_100"] == pytest.approx(0.5)
    assert metrics["n1/rank_mean"] == pytest.approx(4 / 3)
    assert metrics["n1/rank_median"] == 1.0
    assert result["ranks"]["n1"] == {0: 1, 9: 1, 3: 2}
    assert result["counts"]["n1"] == {
        "images": 2,
        "vocabularies": 2,
        "vocabularies_dropped_short": 1,
        "vocabularies_dropped_tokens": 0,
        "objects": 3,
        "objects_dropped_short": 1,
        "objects_dropped_tokens": 0,
        "objects_scored": 3,
        "objects_forced_missed": 0,
        "detections": 3,
    }
    assert result["settings"]["ground_truth"] == "unmasked"
    assert result["settings"]["token_limit"] is None


def test_each_n_has_its_own_set(cups):
    result = score(cups, predictions(A, B, C), n_negatives=[0, 2], lengths=None)
    assert [result["counts"][key]["vocabularies"] for key in ("n0", "n2")] == [3, 1]
    assert result["metrics"]["n0/map"] == ONE
    assert result["metrics"]["n2/map"] == ONE
    assert result["ranks"]["n2"] == {0: 1, 9: 1}


def test_short_vocabularies_kept(cups):
    result = score(cups, predictions(A, B, C), n_negatives=[2], lengths=None, short_vocabularies="keep")
    assert result["counts"]["n2"]["vocabularies"] == 3
    assert result["counts"]["n2"]["objects_dropped_short"] == 0
    assert result["metrics"]["n2/map"] == pytest.approx(2 / 3)
    assert result["ranks"]["n2"] == {0: 1, 9: 1, 3: 2, 4: 1}
    missed = (0, 50, [[80, 20, 90, 30]], [[0.3]])
    ranks = score(cups, predictions(A, B, missed), n_negatives=[2], lengths=None, short_vocabularies="keep")["ranks"]
    assert ranks["n2"][4] == 3


def test_both_conventions_of_the_token_rule(cups):
    """C's caption is too long: a miss in image 0, which has other detections. B's would go with its image."""
    lengths = np.where(cups.category_ids == 50, 17, 16)
    unmasked = score(cups, predictions(A, B), n_negatives=[0], lengths=lengths)
    masked = score(cups, predictions(A, B), n_negatives=[0], lengths=lengths, ground_truth="masked")
    assert unmasked["metrics"]["n0/map"] == pytest.approx(2 / 3)
    assert masked["metrics"]["n0/map"] == ONE
    assert (unmasked["counts"]["n0"]["objects_scored"], masked["counts"]["n0"]["objects_scored"]) == (4, 3)
    assert unmasked["counts"]["n0"]["objects_forced_missed"] == 1
    assert masked["counts"]["n0"]["objects_forced_missed"] == 0
    assert unmasked["counts"]["n0"]["objects_dropped_tokens"] == 1
    assert unmasked["ranks"] == masked["ranks"] == {"n0": {0: 1, 9: 1, 3: 1}}
    without_b = np.where(cups.category_ids == 40, 17, 16)  # B's negative
    result = score(cups, predictions(A), n_negatives=[1], lengths=without_b)
    assert result["counts"]["n1"]["objects_scored"] == 2
    assert result["metrics"]["n1/map"] == ONE


def test_limit_is_an_argument(cups):
    lengths = np.full(len(cups.category_ids), 20)
    assert score(cups, predictions(), n_negatives=[0], lengths=lengths)["counts"]["n0"]["vocabularies"] == 0
    assert score(cups, predictions(A, B, C), n_negatives=[0], lengths=lengths, limit=20)["metrics"]["n0/map"] == ONE


def test_nothing_left_gives_no_figures(cups):
    result = score(cups, predictions(), n_negatives=[2], lengths=np.full(len(cups.category_ids), 17))
    assert result["metrics"] == {}
    assert result["counts"]["n2"]["vocabularies_dropped_tokens"] == 1
    assert result["counts"]["n2"]["vocabularies_dropped_short"] == 2


def test_a_better_box_with_the_wrong_caption_suppresses(cups):
    wrong = (7, 30, [[0, 0, 64, 63], [0, 0, 64, 64], [30, 30, 40, 40]], [[0.1, 0.9], [0.8, 0.2], [0.7, 0.2]])
    strict = score(cups, predictions(A, wrong), n_negatives=[1], lengths=None)
    assert strict["metrics"]["n1/map"] == pytest.approx(0.5)
    assert strict["counts"]["n1"]["detections"] == 4
    assert strict["ranks"]["n1"][3] == 2
    off = score(cups, predictions(A, wrong), n_negatives=[1], lengths=None, nms_iou=1.0)
    assert off["metrics"]["n1/map"] == ONE
    assert off["counts"]["n1"]["detections"] == 5


def test_top_cuts_before_nms(cups):
    result = score(cups, predictions(A, B), n_negatives=[1], lengths=None, top=1)
    assert result["counts"]["n1"]["detections"] == 2
    assert result["metrics"]["n1/mar_100"] == pytest.approx(0.25)


def test_published_median(cups):
    options = {"n_negatives": [2], "lengths": None}
    assert score(cups, predictions(A), **options)["metrics"]["n2/rank_median"] == 1.0
    assert "n2/rank_median" not in score(cups, predictions(A), published_median=True, **options)["metrics"]


def test_predictions_that_do_not_fit(cups):
    with pytest.raises(DataError, match=r"cover 1 of 3.*1 that take part are missing.*\(7, 30\)"):
        score(cups, predictions(A), n_negatives=[1], lengths=None)
    strange = (7, 31, [[0, 0, 1, 1]], [[0.0, 0.0]])
    with pytest.raises(DataError, match=r"1 of 3 predicted vocabularies.*\(7, 31\)"):
        score(cups, predictions(A, B, strange), n_negatives=[1], lengths=None)
    with pytest.raises(DataError, match="N = 2"):
        score(cups, predictions(A, B, n_negatives=[1]), n_negatives=[2], lengths=None)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"ground_truth": "fixed"}, "unmasked, masked"),
        ({"short_vocabularies": "pad"}, "drop, keep"),
        ({"recall_thresholds": "float16"}, "float64, float32"),
    ],
)
def test_unknown_conventions(cups, option, words):
    with pytest.raises(ConfigError, match=words):
        score(cups, predictions(A, B, C), n_negatives=[1], lengths=None, **option)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_nms_equals_the_definition(seed, sizes):
    """Best first, a box goes if an earlier survivor of its vocabulary overlaps it by more than half; half stays."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    offsets = np.cumsum([0, *sizes])
    corner = rng.integers(0, 4, (n, 2)) * 2.0
    boxes = np.concatenate([corner, corner + rng.integers(1, 4, (n, 2)) * 2], 1).astype(np.float32)
    scores = np.concatenate([np.sort(rng.permutation(50)[:s])[::-1] for s in sizes]).astype(np.float32)
    expected = []
    for first, last in pairwise(offsets):
        kept = []
        for d in range(first, last):
            if all(_overlap(boxes[d], boxes[k]) <= 0.5 for k in kept):
                kept.append(d)
        expected.append(kept)
    everything = TopDetections(offsets, scores, np.zeros(n, int), boxes, np.arange(n))
    found = _suppress(everything, 0.5)
    assert found.rows.tolist() == [d for kept in expected for d in kept]
    assert np.diff(found.offsets).tolist() == [len(kept) for kept in expected]


def _overlap(a, b):
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inter = max(w, 0) * max(h, 0)
    return inter / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter)
