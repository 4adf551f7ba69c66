import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noctowl.errors import DataError
from noctowl.eval.predictions import Predictions, merge, select_rows


def example(seed=0, keys=((4, 10), (0, 20), (4, 30)), n_negatives=(0, 2), top=3, patches=12):
    rng = np.random.default_rng(seed)
    parts = []
    for image, category in keys:
        logits = rng.normal(size=(patches, 1 + max(n_negatives))).astype(np.float32)
        corner = rng.uniform(0, 50, (patches, 2))
        boxes = np.concatenate([corner, corner + 9], 1).astype(np.float32)
        rows = select_rows(logits, n_negatives, top)
        parts.append((image, category, boxes[rows], logits[rows]))
    return Predictions.from_parts(parts, n_negatives=n_negatives, top=top, settings={"model": "tiny", "pad": 0.0})


def assert_same(a, b):
    for name in ("image_ids", "category_ids", "row_offsets", "boxes", "logits"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert (a.n_negatives, a.top, a.settings) == (b.n_negatives, b.top, b.settings)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), patches=st.integers(1, 40), columns=st.integers(1, 5), tied=st.booleans())
def test_stored_rows_give_the_exact_top_lists(seed, patches, columns, tied):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(patches, columns)).astype(np.float32)
    logits = np.round(logits) if tied else logits
    boxes = np.repeat(np.arange(patches, dtype=np.float32)[:, None], 4, 1)  # the box names the patch
    wanted = (0, 2, 3)
    rows = select_rows(logits, wanted, 5)
    assert np.array_equal(rows, np.unique(rows))
    stored = Predictions.from_parts([(1, 2, boxes[rows], logits[rows])], n_negatives=wanted, top=5)
    union = set()
    for n in wanted:
        score = logits[:, : n + 1].max(1)
        best = sorted(range(patches), key=lambda p: (-score[p], p))[:5]
        found = stored.at(n)
        assert found.boxes[:, 0].tolist() == best
        np.testing.assert_array_equal(found.scores, score[best])
        np.testing.assert_array_equal(found.columns, logits[best, : n + 1].argmax(1))
        union |= set(best)
    assert rows.tolist() == sorted(union)


def test_selection_tells_saturated_scores_apart():
    logits = np.array([[40.0], [60.0], [50.0]])  # all sigmoids are 1.0 in float32
    assert select_rows(logits, [0], 1).tolist() == [1]
    with pytest.raises(DataError, match="NaN"):
        select_rows(np.array([[np.nan]]), [0])


def test_top_lists_of_chosen_vocabularies():
    predictions = example()
    everything, chosen = predictions.at(2), predictions.at(2, np.array([2, 0]), top=2)
    assert everything.offsets.tolist() == [0, 3, 6, 9]
    assert chosen.offsets.tolist() == [0, 2, 4]
    np.testing.assert_array_equal(chosen.scores, everything.scores[[6, 7, 0, 1]])
    np.testing.assert_array_equal(predictions.boxes[chosen.rows], chosen.boxes)


def test_short_vocabularies_and_wide_logits():
    parts = [(1, 1, np.zeros((1, 4)), np.zeros((1, 1))), (1, 2, np.zeros((1, 4)), np.zeros((1, 5)))]
    predictions = Predictions.from_parts(parts, n_negatives=[2])
    np.testing.assert_array_equal(predictions.logits, [[0, -np.inf, -np.inf], [0, 0, 0]])
    assert len(Predictions.from_parts([], n_negatives=[2]).at(2).scores) == 0


def test_more_than_was_stored_is_refused():
    with pytest.raises(DataError, match=r"N in \[0, 2\].*N = 5"):
        example().at(5)
    with pytest.raises(DataError, match="N = 1"):
        example().at(1)
    with pytest.raises(DataError, match="top 4"):
        example().at(2, top=4)


def test_file_round_trip(tmp_path):
    predictions = example()
    path = predictions.save(tmp_path / "deep" / "hard.npz")
    assert_same(Predictions.load(path), predictions)
    assert [entry.name for entry in path.parent.iterdir()] == ["hard.npz"]


@pytest.mark.faults
def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = example().save(tmp_path / "hard.npz")

    def fail(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(KeyboardInterrupt):
        example(seed=1).save(path)
    assert_same(Predictions.load(path), example())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.faults
@pytest.mark.parametrize("part", [0, 10, 200, -30])
def test_truncated_file(tmp_path, part):
    path = example().save(tmp_path / "hard.npz")
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(DataError, match=r"hard\.npz: truncated"):
        Predictions.load(path)


@pytest.mark.faults
def test_foreign_files(tmp_path):
    path = tmp_path / "hard.npz"
    with pytest.raises(DataError, match="no such predictions"):
        Predictions.load(path)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(DataError, match=r"found format None.*arrays \[\]"):
        Predictions.load(path)
    np.savez(path, head=np.array([{"pickle": 1}], dtype=object))
    with pytest.raises(DataError, match="truncated, or no predictions file"):
        Predictions.load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="truncated, or no predictions file"):
        Predictions.load(path)


@pytest.mark.faults
def test_other_version_and_damaged_arrays(tmp_path):
    path = example().save(tmp_path / "hard.npz")
    with np.load(path) as file:
        arrays = dict(file)
    head = json.loads(arrays["head"].tobytes())
    text = json.dumps(head | {"version": 99}).encode()
    np.savez(path, **arrays | {"head": np.frombuffer(text, np.uint8)})
    with pytest.raises(DataError, match=r"version 99.*of version 1"):
        Predictions.load(path)
    np.savez(path, **arrays | {"logits": arrays["logits"][:-1]})
    with pytest.raises(DataError, match=r"hard\.npz: predictions are damaged: logits are not"):
        Predictions.load(path)
    np.savez(path, **arrays | {"boxes": arrays["boxes"].astype(np.float64)})
    with pytest.raises(DataError, match="boxes is float64"):
        Predictions.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_ids": np.array([4, 4, 4]), "category_ids": np.array([1, 2, 1])}, "occurs twice"),
        ({"row_offsets": np.array([0, 5, 3, 9])}, "do not cut the rows"),
        ({"n_negatives": (9,)}, "largest N"),
        ({"n_negatives": ()}, "out of range"),
    ],
)
def test_inconsistent_arrays(change, words):
    with pytest.raises(DataError, match=words):
        replace(example(), **change)


def test_damaged_numbers():
    good = example()
    for name, value, words in (
        ("boxes", np.inf, "boxes are not finite"),
        ("boxes", 999, "inverted"),
        ("logits", np.nan, "NaN"),
        ("logits", -np.inf, "positive"),
    ):
        array = getattr(good, name).copy()
        array[0, 0] = value
        with pytest.raises(DataError, match=words):
            replace(good, **{name: array})


def test_merge_removes_duplicates_and_sorts_by_key():
    whole = example()
    singles = [example(keys=((4, 10),)), whole]
    merged = merge(singles)
    assert merged.keys() == [(0, 20), (4, 10), (4, 30)]
    assert_same(merged, merge([merged, whole]))
    np.testing.assert_array_equal(merged.at(2).scores[:3], whole.at(2).scores[3:6])
    assert merged.settings == whole.settings


def test_merge_refuses_what_does_not_belong_together():
    whole = example()
    with pytest.raises(DataError, match=r"differ in vocabulary \(image 4, category 10\)"):
        merge([whole, example(seed=5, keys=((4, 10),))])
    with pytest.raises(DataError, match="settings"):
        merge([whole, replace(whole, settings={"model": "other"})])
    with pytest.raises(DataError, match="n_negatives"):
        merge([whole, example(n_negatives=(0, 3))])
    with pytest.raises(DataError, match="no predictions to merge"):
        merge([])
