"""Controls: by hand on a few captions, on the published files, and the model's controls on small arrays."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.optimize import minimize_scalar

from noctowl.data.fgovd import processable, read_fgovd
from noctowl.errors import DataError
from noctowl.eval import blind
from noctowl.eval.blind import TextSets, concatenate, placed, text_sets
from noctowl.eval.bootstrap import image_weights
from noctowl.eval.controls import (
    gain_table,
    head_prior,
    oracle_boxes,
    oracle_patches,
    oracle_ranks,
    ranks_at,
    report_controls,
    shuffled_rows,
    summarise,
    text_controls,
    visual_gain,
)
from noctowl.eval.predictions import Predictions

INF = np.inf


def sets_of(*vocabularies, images=None, objects=None) -> TextSets:
    texts = tuple(dict.fromkeys(text for texts in vocabularies for text in texts))
    width = max(map(len, vocabularies))
    columns = np.full((len(vocabularies), width), -1)
    for row, own in zip(columns, vocabularies):
        row[: len(own)] = [texts.index(text) for text in own]
    n = len(vocabularies)
    return TextSets(texts, columns, np.arange(n) if images is None else np.array(images), np.array(objects or [1] * n))


# Vocabularies as texts


def test_text_sets_of_a_file(fgovd, write_fgovd):
    """Red cup (2 objects; blue, green), wooden chair (1; plastic), cat (1; no negative)."""
    file = read_fgovd(write_fgovd(fgovd))
    every = text_sets(file)
    assert every.columns.tolist() == [[0, 1, 2], [3, 4, -1], [5, -1, -1]]
    assert [every.texts[k] for k in every.columns[1, :2]] == ["A wooden chair.", "A plastic chair."]
    assert every.images.tolist() == [0, 7, 0]
    assert every.objects.tolist() == [2, 1, 1]
    one = text_sets(file, 1)
    assert [[one.texts[k] for k in row] for row in one.columns] == [
        ["A red cup.", "A blue cup."],
        ["A wooden chair.", "A plastic chair."],
    ]
    assert one.chance == 0.5
    asked = text_sets(file, 2, np.array([False, True, True]))
    assert asked.columns.shape == (2, 2)
    assert asked.chance == pytest.approx(0.75)
    with pytest.raises(DataError, match=r"N = 3 negatives.*up to 2"):
        text_sets(file, 3)


def test_concatenate_merges_texts_and_pads():
    both = concatenate([sets_of(["a", "b"]), sets_of(["b", "c", "a"], images=[9], objects=[4])])
    assert both.texts == ("a", "b", "c")
    assert both.columns.tolist() == [[0, 1, -1], [1, 2, 0]]
    assert both.images.tolist() == [0, 9]
    assert both.objects.tolist() == [1, 4]


# What a score is worth


def test_ties_share_the_point():
    top1, rank = placed(np.array([[3.0, 1, 2], [1, 3, 2], [2, 2, 1], [1, 1, 1], [1, 2, 1], [5, -INF, -INF]]))
    assert top1.tolist() == [1, 0, 0.5, pytest.approx(1 / 3), 0, 1]
    assert rank.tolist() == [1, 3, 1.5, 2, 2.5, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_ties_are_what_a_lot_gives_on_average(values):
    scores = np.array(values, float)
    shaken = scores + np.random.default_rng(0).random((4000, len(scores))) * 0.5
    rank = 1 + (shaken[:, 1:] > shaken[:, :1]).sum(1)
    top1, expected = placed(scores[None])
    assert top1[0] == pytest.approx((rank == 1).mean(), abs=0.04)
    assert expected[0] == pytest.approx(rank.mean(), abs=0.12)


def test_summary_counts_objects():
    """The right vocabulary has three objects, the wrong one a single one: 3/4."""
    sets = sets_of(["a", "b"], ["c", "d"], images=[5, 9], objects=[3, 1])
    found = summarise(sets, {"x": np.array([[1.0, 0], [0, 1]])}, resamples=500)
    assert found["x.top1"] == 0.75
    assert found["x.rank_mean"] == 1.25
    assert (found["x.top1_low"], found["x.top1_high"]) == (0, 1)
    assert (found["images"], found["vocabularies"], found["objects"], found["chance"]) == (2, 2, 4, 0.5)


# Rankers


def test_ngrams():
    assert blind.ngrams("A red Cup.", 1) == ["a", "red", "cup"]
    assert blind.ngrams("red cup", 2) == ["red", "cup", "^ red", "red cup", "cup $"]
    assert blind.ngrams("red cup", 3)[5:] == ["^ red cup", "red cup $"]
    design, index = blind.ngram_design(["cup cup", "red"], order=1)
    assert design.toarray().tolist() == [[2, 0], [0, 1]]
    assert index == {"cup": 0, "red": 1}
    known, _ = blind.ngram_design(["red blue red"], order=1, index=index)
    assert known.toarray().tolist() == [[0, 2]]


def test_log_linear_fit_by_hand():
    """One feature of the positive against none, in all of n vocabularies: minimise n log(1 + exp(-w)) + l2 w²/2."""
    weights = blind.fit_log_linear(np.array([[1.0], [0.0]]), np.array([[0, 1]] * 7), l2=0.5)
    expected = minimize_scalar(lambda w: 7 * np.log1p(np.exp(-w)) + 0.25 * w * w).x
    assert weights == pytest.approx([expected], abs=1e-4)
    with_a_gap = blind.fit_log_linear(np.array([[1.0], [0.0]]), np.array([[0, 1, -1]] * 7), l2=0.5)
    assert with_a_gap == pytest.approx(weights)
    assert blind.fit_log_linear(np.ones((2, 3)), np.zeros((0, 2), int), l2=1.0).tolist() == [0, 0, 0]


@pytest.fixture(scope="module")
def skewed() -> TextSets:
    """120 things that are grey ones more often than not, against colours drawn evenly; no caption occurs twice."""
    rng = np.random.default_rng(0)
    colours = ["grey", "red", "blue", "green", "pink"]
    found = []
    for i in range(120):
        true = 0 if rng.random() < 0.8 else int(rng.integers(1, 5))
        others = rng.permutation([c for c in range(5) if c != true])[:3]
        found.append([f"a {colours[c]} thing{i}" for c in (true, *others)])
    return sets_of(*found)


def test_blind_ranker_learns_what_is_frequent(skewed):
    cross = blind.ngram_ranking(skewed)
    assert placed(cross.scores)[0].mean() > 0.7
    assert cross.trained_on == 96
    assert np.array_equal(cross.scores, blind.ngram_ranking(skewed).scores)
    train = TextSets(skewed.texts, skewed.columns[:60], skewed.images[:60], skewed.objects[:60])
    test = TextSets(skewed.texts, skewed.columns[60:], skewed.images[60:], skewed.objects[60:])
    given_train = blind.ngram_ranking(test, train)
    assert given_train.trained_on == 60
    assert placed(given_train.scores)[0].mean() > 0.7


def test_blind_ranker_on_embeddings(skewed):
    """A random projection of the words stands for a text tower."""
    counts, _ = blind.ngram_design(skewed.texts, order=1)
    embeddings = counts @ np.random.default_rng(1).normal(size=(counts.shape[1], 64))
    scores, trained_on = text_controls(skewed, embeddings=embeddings)
    assert set(trained_on) == {"blind", "blind_embeddings"}
    assert set(scores) - set(trained_on) == {"centroid", "centroid_tfidf", "centroid_embeddings"}
    assert placed(scores["blind_embeddings"])[0].mean() > 0.7
    again = blind.embedding_ranking(skewed, embeddings * 3.0)
    assert again.scores == pytest.approx(scores["blind_embeddings"], abs=1e-3)  # length says nothing
    both = blind.embedding_ranking(skewed, embeddings, skewed, embeddings)
    assert placed(both.scores)[0].mean() > 0.8
    with pytest.raises(DataError, match="1 embeddings of"):
        blind.embedding_ranking(skewed, embeddings[:1])


def test_folds_share_neither_image_nor_caption():
    rng = np.random.default_rng(3)
    texts = [[f"caption {k}" for k in rng.choice(400, 3, replace=False)] for _ in range(80)]
    sets = sets_of(*texts, images=rng.integers(40, size=80))
    tested = []
    for train, test in blind.grouped_folds(sets, folds=4, seed=1):
        assert not set(sets.images[train]) & set(sets.images[test])
        assert not set(sets.columns[train].ravel()) & set(sets.columns[test].ravel())
        tested += test.tolist()
    assert sorted(tested) == list(range(80))


def test_captions_in_the_middle_by_hand():
    """Negatives change one word of the positive each, so it has more in common with them than they have.

    Words and bigrams: red metal cup {red, metal, cup, ^red, red metal, metal cup, cup$} = 7, blue metal cup shares
    {metal, cup, metal cup, cup$} = 4 of 10, red wood cup {red, cup, ^red, cup$} = 4 of 10; these two {cup, cup$} 2/12.
    """
    sets = sets_of(["red metal cup", "blue metal cup", "red wood cup"], ["cup", "cat"], ["dog"])
    scores = blind.centroid_jaccard(sets)
    assert scores[0] == pytest.approx([0.4, (0.4 + 1 / 6) / 2, (0.4 + 1 / 6) / 2])
    assert scores[1].tolist() == [0, 0, -INF]
    assert scores[2].tolist() == [0, -INF, -INF]
    unit = np.eye(6)
    unit[1] = [1, 1, 0, 0, 0, 0]
    by_embedding = blind.centroid_embeddings(sets, unit)
    assert by_embedding[0] == pytest.approx([0.5**0.5 / 2, 0.5**0.5 / 2, 0])
    assert blind.centroid_tfidf(sets)[0].argmax() == 0


def test_tfidf_by_hand():
    """Three texts "a b", "a c", "a": idf of a = 1, of b, c = 1 + ln 3; only words and the edges count here."""
    sets = sets_of(["a b", "a c"])
    counts, index = blind.ngram_design(sets.texts)
    idf = {f: 1 + np.log(2 / counts[:, k].count_nonzero()) for f, k in index.items()}
    shared = sum(idf[f] ** 2 for f in ("a", "^ a"))
    length = sum(idf[f] ** 2 for f in ("a", "^ a", "b", "a b", "b $"))
    assert blind.centroid_tfidf(sets)[0] == pytest.approx([shared / length] * 2)


# Published files


@pytest.mark.golden
@pytest.mark.parametrize(
    ("stem", "n", "published"),
    [
        ("1_attributes", 5, {"blind": 0.60, "centroid": 0.83}),
        ("2_attributes", 5, {"blind": 0.81}),
        ("3_attributes", 5, {"blind": 0.87}),
        ("pattern", 2, {"blind": 0.82}),
        ("transparency", 2, {"blind": 0.90}),
    ],
)
def test_published_controls(shared, stem, n, published, capsys):
    """Trained on the three validation files; per object, under the token rule. Within the intervals, and close."""
    folder = shared / "data/fgovd"
    train = [folder / f"validation_sets/{name}.json" for name in ("3_attributes", "pattern", "transparency")]
    path = folder / f"benchmarks/{stem}.json"
    assert report_controls(path, n_negatives=n, train_captions=train, as_json=True) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name, value in published.items():
        assert found[f"{name}.top1"] == pytest.approx(value, abs=0.015)
        assert found[f"{name}.top1_low"] < value < found[f"{name}.top1_high"]
    assert found["blind.trained_on"] == 761 + 322 + 119
    assert found["blind_cv.top1"] > 3 * found["chance"] or n == 2


def test_how_blind_was_trained(fgovd, write_fgovd, capsys):
    """One name with captions and without; the row and the JSON say which it was."""
    path = write_fgovd(fgovd)
    wide = {"n_negatives": 1, "as_json": True, "console": Console(width=160)}
    assert report_controls(path, **wide) == 0
    shown = capsys.readouterr().out
    alone = json.loads(shown.splitlines()[-1])
    assert alone["blind.training"] == "cross-validation"
    assert "cross-validation (1 or more)" in shown
    assert {"blind.top1", "centroid.top1"} <= set(alone)
    assert not any(key.startswith("blind_cv") for key in alone)
    assert report_controls(path, train_captions=[path], **wide) == 0
    shown = capsys.readouterr().out
    given = json.loads(shown.splitlines()[-1])
    assert (given["blind.training"], given["blind.trained_on"]) == ("captions given", 3)
    assert (given["blind_cv.training"], given["blind_cv.top1"]) == ("cross-validation", alone["blind.top1"])
    assert "captions given (3)" in shown


def test_absent_files_are_named_with_what_is_there(fgovd, write_fgovd, tmp_path):
    path = write_fgovd(fgovd)
    with pytest.raises(DataError, match=rf"nope.json: file not found. --annotations takes .* FG-OVD .*: {path.name}\."):
        report_controls(path.parent / "nope.json", n_negatives=1)
    with pytest.raises(DataError, match=r"a folder, not a file. --train-captions takes"):
        report_controls(path, n_negatives=1, train_captions=[path.parent])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"in .*empty: none\."):
        report_controls(tmp_path / "empty" / "x.json", n_negatives=1)


# Oracle boxes


def test_oracle_boxes_by_hand(fgovd, write_fgovd):
    file = read_fgovd(write_fgovd(fgovd))
    kept = processable(file, np.zeros(len(file.captions)), 1)
    assert kept.tolist() == [True, True, False]
    right, detections, truth = oracle_boxes(file, np.array([[1.0, 0], [1, 0]]), kept)
    assert right.mean_ap() == pytest.approx(1)
    assert len(truth.label) == len(detections.label) == 3
    assert detections.scores == pytest.approx([1 / (1 + np.exp(-1))] * 3)
    half, detections, _ = oracle_boxes(file, np.array([[1.0, 0], [0, 1]]), kept)
    assert half.mean_ap() == pytest.approx(0.5)
    assert detections.label.tolist() == [0, 0, 40]
    forced = oracle_boxes(file, np.array([[1.0, 0], [1, 0]]), kept, scored=np.ones(4, bool))[0]
    assert forced.mean_ap() == pytest.approx(2 / 3)


def test_oracle_patches_and_ranks():
    patches = np.array([[0, 0, 10, 10], [0, 0, 20, 20], [50, 50, 60, 60.0]])
    objects = np.array([[0, 0, 19, 20], [0, 0, 9, 9], [52, 50, 60, 60], [90, 90, 99, 99.0]])
    assert oracle_patches(patches, objects).tolist() == [1, 0, 2, 0]
    assert ranks_at(np.array([[2.0, 1, 3], [1, 1, -INF], [5, 1, 1]])).tolist() == [2, 2, 1]


def test_oracle_ranks_read_the_best_fitting_stored_patch(fgovd, write_fgovd):
    """The best score lies on a wrong box; the patch at the cup knows its colour."""
    file = read_fgovd(write_fgovd(fgovd))
    cup = (0, 0, np.array([[10, 5, 30, 35], [0, 0, 9, 9.0]]), np.array([[2.0, 1, 0], [5, 9, 9]]))
    predictions = Predictions.from_parts([cup], n_negatives=[2])
    ranks = oracle_ranks(file, predictions, n=2, kept=np.array([True, False, False]))
    assert ranks.tolist() == [1, 1]
    both = oracle_ranks(file, predictions, n=1, kept=np.array([True, True, False]))
    assert both.tolist() == [1, 1, 2]  # the chair was not predicted


# Shuffled images and the head's prior


@given(st.integers(2, 40), st.integers(0, 99))
def test_shuffled_rows_leave_no_image_in_its_place(n, seed):
    rows = np.arange(n + 3) * 2 - 6  # the first three are unused
    moved = shuffled_rows(rows, seed=seed)
    assert sorted(moved) == sorted(rows)
    assert (moved[:3] == rows[:3]).all()
    assert (moved[3:] != rows[3:]).all()
    assert np.array_equal(moved, shuffled_rows(rows, seed=seed))


def test_one_image_cannot_be_shuffled():
    with pytest.raises(DataError, match="1 images"):
        shuffled_rows(np.array([-1, 4]))


def test_head_prior():
    sets = sets_of(["a", "b", "c"], ["b", "a"])
    scores = head_prior(sets, np.array([2.0, 0]), np.array([[3.0, 4], [5, 0], [0, 1]]))
    assert scores.tolist() == [[pytest.approx(0.6), 1, 0], [1, pytest.approx(0.6), -INF]]
    assert head_prior(sets, np.zeros(2), np.ones((3, 2)))[0].tolist() == [0, 0, 0]


# The gain


def test_visual_gain_by_hand():
    """The model is right on 3 of 4, the better control on 1.5: a gain of 0.375; each group has its own best."""
    model = np.array([1.0, 1, 1, 0])
    controls = {"blind": np.array([1, 0, 0, 0.5]), "centroid": np.array([0, 0, 0, 1.0])}
    options = {"images": np.arange(4), "weights": image_weights(4, resamples=400)}
    found = visual_gain(model=model, blind=controls, **options)
    assert found["control"] == "blind"
    assert (found["model"].value, found["blind"].value, found["gain"].value) == (0.75, 0.375, 0.375)
    assert found["gain"].low < 0.375 < found["gain"].high
    groups = {"first": np.arange(4) < 2, "last": np.arange(4) == 3, "none": np.zeros(4, bool)}
    table = gain_table(groups, model=model, blind=controls, **options)
    assert list(table) == ["first", "last"]
    assert (table["first"]["gain"].value, table["last"]["control"]) == (0.5, "centroid")
    assert table["last"]["gain"] == (-1, -1, -1)
    assert visual_gain(model=model[:0], blind={}, images=np.arange(0), weights=options["weights"]) is None
