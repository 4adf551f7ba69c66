"""Rankers that never see the image: how far does one get with the captions alone?

Legend: V vocabularies, C = 1 + N captions of one, M distinct texts, F features, D width of an embedding.

Positives are natural descriptions, negatives have a word drawn at random, so the captions themselves give some of the
answer away: by their word statistics (*blind*), or because the negatives all stem from the positive, which makes it the
one in their middle (*centroid*). A detector's figure means what it has beyond these.

Ties share the point: where k captions are best and the positive is one of them, top-1 counts 1/k, and the rank is the
mean of the places that they take. A constant score is at chance.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy import sparse
from scipy.optimize import minimize
from scipy.sparse.csgraph import connected_components

from noctowl.data.records import Annotations
from noctowl.errors import DataError

WORD = re.compile(r"[\w'-]+")
TIE = 1e-9
GIVEN, CROSS = "captions given", "cross-validation"  # how a ranker was trained
Design: TypeAlias = sparse.csr_matrix | np.ndarray  # [M, F]


@dataclass(frozen=True, eq=False)
class TextSets:
    """What a ranker without an image is given."""

    texts: tuple[str, ...]  # [M] distinct
    columns: Int[ndarray, "V C"]  # rows into texts, the positive first; -1 where a vocabulary has fewer
    images: Int[ndarray, "V"]  # image id
    objects: Int[ndarray, "V"]  # how many objects have this vocabulary

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def chance(self) -> float:
        """Top-1 of a constant score."""
        return float((1 / (self.columns >= 0).sum(1)).mean())


def text_sets(
    annotations: Annotations, n_negatives: int | None = None, kept: Bool[ndarray, "V"] | None = None
) -> TextSets:
    """The first 1 + N captions (all: None) of the vocabularies that are `kept` (None: those that have N negatives).

    Raises DataError where no vocabulary is left.
    """
    if kept is None:
        kept = annotations.n_negatives >= (n_negatives or 0)
    rows = np.flatnonzero(kept)
    if not len(rows):
        raise DataError(
            f"{annotations.path}: no vocabulary with N = {n_negatives} negatives that takes part; the file's have up "
            f"to {annotations.n_negatives.max(initial=0)}. Ask for fewer negatives, or lift the token rule."
        )
    most = int(annotations.n_negatives[rows].max())
    width = 1 + (most if n_negatives is None else min(most, n_negatives))
    categories = np.full((len(rows), width), -1, np.int64)
    for row, v in zip(categories, rows):
        own = annotations.vocabulary(int(v))[:width]
        row[: len(own)] = own
    used, inverse = np.unique(categories, return_inverse=True)
    place: dict[str, int] = {}
    number = np.array([-1 if k < 0 else place.setdefault(annotations.captions[k], len(place)) for k in used])
    return TextSets(
        texts=tuple(place),
        columns=number[inverse].reshape(categories.shape),
        images=annotations.image_ids[annotations.vocab_image[rows]],
        objects=np.bincount(annotations.object_vocab, minlength=len(annotations))[rows],
    )


def concatenate(parts: Sequence[TextSets]) -> TextSets:
    """Several files as one; texts are merged, short vocabularies padded. Images keep their ids."""
    place: dict[str, int] = {}
    width = max(part.columns.shape[1] for part in parts)
    blocks = []
    for part in parts:
        number = np.array([*(place.setdefault(text, len(place)) for text in part.texts), -1])
        padding = ((0, 0), (0, width - part.columns.shape[1]))
        blocks.append(np.pad(number[part.columns], padding, constant_values=-1))
    return TextSets(
        tuple(place),
        np.concatenate(blocks),
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.objects for part in parts]),
    )


# Features


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def ngrams(text: str, order: int) -> list[str]:
    """Words and their runs of up to `order`, marked at the ends: "red cup" -> red, cup, "^ red", "red cup", "cup $"."""
    own = words(text)
    marked = ["^", *own, "$"]
    return own + [" ".join(marked[i : i + k]) for k in range(2, order + 1) for i in range(len(marked) - k + 1)]


def ngram_design(
    texts: Sequence[str], *, order: int = 2, index: dict[str, int] | None = None
) -> tuple[sparse.csr_matrix, dict[str, int]]:
    """Counts [M, F] and the features' numbers; with a given `index`, features that it lacks are left out."""
    grows = index is None
    index = {} if index is None else index
    columns: list[int] = []
    ends = [0]
    for text in texts:
        found = ngrams(text, order)
        columns += (
            [index.setdefault(f, len(index)) for f in found] if grows else [index[f] for f in found if f in index]
        )
        ends.append(len(columns))
    counts = sparse.csr_matrix((np.ones(len(columns)), columns, ends), shape=(len(texts), len(index)))
    counts.sum_duplicates()
    return counts, index


# The log-linear ranker


def fit_log_linear(design: Design, columns: Int[ndarray, "V C"], *, l2: float) -> Float[ndarray, "F"]:
    """Weights w of p(positive) = softmax over a vocabulary of x·w, by maximum likelihood with the prior l2 |w|² / 2.

    The objective is convex and the start is zero: the same input gives the same weights. No vocabulary: zeros.
    """
    present = columns >= 0
    start = np.zeros(design.shape[1])

    def loss(w: ndarray) -> tuple[float, ndarray]:
        score = np.where(present, (design @ w)[columns], -np.inf)  # [V, C]
        top = score.max(1, keepdims=True)
        error = np.exp(score - top)
        total = error.sum(1, keepdims=True)
        value = float((np.log(total) + top - score[:, :1]).sum())
        error /= total
        error[:, 0] -= 1
        pull = np.bincount(columns[present], error[present], minlength=design.shape[0])  # [M]
        return value + l2 / 2 * float(w @ w), design.T @ pull + l2 * w

    if not len(columns):
        return start
    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 300}).x


class Ranking(NamedTuple):
    """Scores of a ranker, and the smallest number of vocabularies that any of its weights was fitted on."""

    scores: Float[ndarray, "V C"]  # -inf for absent captions
    trained_on: int


def ngram_ranking(
    sets: TextSets, train: TextSets | None = None, *, order: int = 2, l2: float = 0.1, folds: int = 5, seed: int = 0
) -> Ranking:
    """The blind ranker on words and n-grams, trained on `train` or else by grouped cross-validation.

    `l2` is one prior for all benchmarks: from .1 to 1 the figures move by a point or two.
    """
    if train is None:
        return _cross_fitted(sets, ngram_design(sets.texts, order=order)[0], l2, folds, seed)
    design, index = ngram_design(train.texts, order=order)
    own, _ = ngram_design(sets.texts, order=order, index=index)
    return Ranking(_scores(own, fit_log_linear(design, train.columns, l2=l2), sets.columns), len(train))


def embedding_ranking(
    sets: TextSets,
    embeddings: Float[ndarray, "M D"],
    train: TextSets | None = None,
    train_embeddings: Float[ndarray, "M' D"] | None = None,
    *,
    l2: float = 10.0,
    folds: int = 5,
    seed: int = 0,
) -> Ranking:
    """The blind ranker on the detector's own caption embeddings, one row for each of `texts`; lengths do not matter.

    Each component is divided by its deviation, as embeddings of one language model share a large common part.
    Raises DataError where rows and texts do not agree in number.
    """
    pairs = [(sets, embeddings)]
    if train is not None and train_embeddings is not None:
        pairs.append((train, train_embeddings))
    for texts, rows in pairs:
        if len(rows) != len(texts.texts):
            raise DataError(f"{len(rows)} embeddings of {len(texts.texts)} texts; one row per distinct text is needed.")
    units = [_unit(rows) for _, rows in pairs]
    mean, deviation = units[-1].mean(0), units[-1].std(0) + 1e-12
    designs = [(rows - mean) / deviation for rows in units]
    if len(pairs) == 1:
        return _cross_fitted(sets, designs[0], l2, folds, seed)
    return Ranking(
        _scores(designs[0], fit_log_linear(designs[1], pairs[1][0].columns, l2=l2), sets.columns), len(pairs[1][0])
    )


def training(how: str | None, least: int | None) -> str | None:
    """How a ranker was trained, to be shown beside its figures: "cross-validation (96 or more)"; None: it was not."""
    if how is None or least is None:
        return None
    return f"{how} ({least}{' or more' if how == CROSS else ''})"


def grouped_folds(sets: TextSets, folds: int = 5, seed: int = 0) -> Iterator[tuple[ndarray, ndarray]]:
    """(train rows, test rows) of each fold, so that no image and no caption is on both sides.

    Vocabularies that share their image or their positive stay together. Of those left for training, the ones that share
    any caption with the test fold are dropped: in benchmarks whose negatives are other objects' captions, that can be
    all of them.
    """
    n = len(sets)
    image = np.unique(sets.images, return_inverse=True)[1]
    links = np.concatenate([n + image, n + image.max() + 1 + sets.columns[:, 0]])
    size = int(links.max()) + 1
    graph = sparse.coo_matrix((np.ones(2 * n), (np.tile(np.arange(n), 2), links)), shape=(size, size))
    group = connected_components(graph, directed=False)[1][:n]
    names, group, counts = np.unique(group, return_inverse=True, return_counts=True)
    fold, load = np.zeros(len(names), np.int64), np.zeros(folds, np.int64)
    order = np.random.default_rng(seed).permutation(len(names))
    for g in order[np.argsort(-counts[order], kind="stable")]:  # large groups first, each to the emptiest fold
        fold[g] = load.argmin()
        load[fold[g]] += counts[g]
    for k in range(folds):
        test = np.flatnonzero(fold[group] == k)
        seen = np.unique(sets.columns[test])
        clean = ~np.isin(sets.columns, seen[seen >= 0]).any(1)
        if len(test):
            yield np.flatnonzero((fold[group] != k) & clean), test


def _cross_fitted(sets: TextSets, design: Design, l2: float, folds: int, seed: int) -> Ranking:
    scores = np.full(sets.columns.shape, -np.inf)
    least = len(sets)
    for train, test in grouped_folds(sets, folds, seed):
        weights = fit_log_linear(design, sets.columns[train], l2=l2)
        scores[test] = _scores(design, weights, sets.columns[test])
        least = min(least, len(train))
    return Ranking(scores, least)


def _scores(design: Design, weights: Float[ndarray, "F"], columns: Int[ndarray, "V C"]) -> Float[ndarray, "V C"]:
    return np.where(columns >= 0, (design @ weights)[columns], -np.inf)


# The caption in the middle


def centroid_jaccard(sets: TextSets) -> Float[ndarray, "V C"]:
    """Mean Jaccard similarity of a caption's words and bigrams to those of each other caption of its vocabulary."""
    design, _ = ngram_design(sets.texts)
    design.data[:] = 1
    size = np.asarray(design.sum(1)).ravel()

    def similarity(a: ndarray, b: ndarray) -> ndarray:
        shared = np.asarray(design[a].multiply(design[b]).sum(1)).ravel()
        return shared / np.maximum(size[a] + size[b] - shared, 1)

    return _centroid(sets.columns, similarity)


def centroid_tfidf(sets: TextSets) -> Float[ndarray, "V C"]:
    """The same by the cosine of tf-idf weighted words and bigrams; document frequencies over the texts."""
    design, _ = ngram_design(sets.texts)
    frequency = np.bincount(design.indices, minlength=design.shape[1])
    weighted = design @ sparse.diags(1 + np.log(len(sets.texts) / np.maximum(frequency, 1)))
    length = np.sqrt(np.asarray(weighted.multiply(weighted).sum(1)).ravel())
    unit = sparse.csr_matrix(sparse.diags(1 / np.maximum(length, 1e-12)) @ weighted)
    return _centroid(sets.columns, lambda a, b: np.asarray(unit[a].multiply(unit[b]).sum(1)).ravel())


def centroid_embeddings(sets: TextSets, embeddings: Float[ndarray, "M D"]) -> Float[ndarray, "V C"]:
    """The same by the cosine of the captions' embeddings."""
    unit = _unit(embeddings)
    return _centroid(sets.columns, lambda a, b: (unit[a] * unit[b]).sum(1))


def _centroid(columns: Int[ndarray, "V C"], similarity) -> Float[ndarray, "V C"]:
    """Mean similarity of each caption to the others that are present; a lone caption scores 0."""
    present = columns >= 0
    total = np.zeros(columns.shape)
    for i, j in combinations(range(columns.shape[1]), 2):
        v = np.flatnonzero(present[:, i] & present[:, j])
        value = similarity(columns[v, i], columns[v, j])
        total[v, i] += value
        total[v, j] += value
    return np.where(present, total / np.maximum(present.sum(1, keepdims=True) - 1, 1), -np.inf)


def _unit(rows: Float[ndarray, "M D"]) -> Float[ndarray, "M D"]:
    rows = np.asarray(rows, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


# What a score is worth


def placed(scores: Float[ndarray, "V C"]) -> tuple[Float[ndarray, "V"], Float[ndarray, "V"]]:
    """Top-1 and rank of the positive (column 0), ties shared; see the head of this file."""
    positive = scores[:, :1]
    above = (scores > positive + TIE).sum(1)
    tied = (np.abs(scores - positive) <= TIE).sum(1)  # the positive among them; -inf is never close
    return np.where(above == 0, 1 / tied, 0.0), 1 + above + (tied - 1) / 2
