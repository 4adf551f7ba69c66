"""Controls: what a detector's figure is worth beyond its text, its boxes and its habits.

Legend: V vocabularies that take part, C = 1 + N captions, A their objects (in file order of the annotations), I images,
P patches, D width of an embedding, B resamples.

text only         rankers of `blind.py`: n-grams and caption embeddings, and the caption in the middle of the others
oracle boxes      all true boxes are given, the label is the ranker's (text) or read at the best-fitting patch (model)
shuffled images   the model is asked about another image: what is left comes from the captions
head prior        bias · caption: what the head prefers without a pixel
visual gain       the model's top-1 minus the best blind control's, on the same objects

Everything is per object, as the mean rank is: a vocabulary counts once for each of its objects.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from rich.console import Console
from rich.table import Table

from noctowl.data.fgovd import TOKEN_LIMIT, Short, processable, read_fgovd
from noctowl.data.records import Annotations
from noctowl.errors import DataError
from noctowl.eval import blind
from noctowl.eval.ap import BoxScores, Detections, GroundTruth, score_boxes
from noctowl.eval.blind import TextSets
from noctowl.eval.bootstrap import Interval, image_weights, mean_interval
from noctowl.eval.predictions import Predictions
from noctowl.tables import STYLE

Scores = Float[ndarray, "V C"]


# Text only


def text_controls(
    sets: TextSets,
    train: TextSets | None = None,
    *,
    embeddings: Float[ndarray, "M D"] | None = None,
    train_embeddings: Float[ndarray, "M' D"] | None = None,
    folds: int = 5,
    seed: int = 0,
) -> tuple[dict[str, Scores], dict[str, int]]:
    """Scores of every ranker that never sees a pixel, and the vocabularies that the trained ones learnt from.

    blind: n-grams, trained on `train`, or by cross-validation without it; blind_cv: by cross-validation beside `train`;
    blind_embeddings: the same on the captions' embeddings (rows of `sets.texts`); centroid, centroid_tfidf and
    centroid_embeddings: nearest to the vocabulary's other captions by Jaccard, tf-idf and embedding similarity.
    """
    rankings = {"blind": blind.ngram_ranking(sets, train, folds=folds, seed=seed)}
    if train is not None:
        rankings["blind_cv"] = blind.ngram_ranking(sets, folds=folds, seed=seed)
    if embeddings is not None:
        rankings["blind_embeddings"] = blind.embedding_ranking(
            sets, embeddings, train, train_embeddings, folds=folds, seed=seed
        )
    scores = {name: ranking.scores for name, ranking in rankings.items()}
    scores |= {"centroid": blind.centroid_jaccard(sets), "centroid_tfidf": blind.centroid_tfidf(sets)}
    if embeddings is not None:
        scores["centroid_embeddings"] = blind.centroid_embeddings(sets, embeddings)
    return scores, {name: ranking.trained_on for name, ranking in rankings.items()}


def per_object(sets: TextSets, values: Float[ndarray, "V"]) -> Float[ndarray, "A"]:
    """A value of each vocabulary, once for each of its objects: in line with the objects that take part."""
    return np.repeat(values, sets.objects)


def summarise(
    sets: TextSets, scores: Mapping[str, Scores], *, resamples: int = 1000, seed: int = 0
) -> dict[str, float | int]:
    """Flat: chance, images, vocabularies, objects; of each ranker `.top1` and `.rank_mean`, with `_low` and `_high`.

    Top-1 from 0 to 1, rank from 1 to 1 + N, 95 % intervals over images.
    """
    names, image = np.unique(sets.images, return_inverse=True)
    rows, weights = np.repeat(image, sets.objects), image_weights(len(names), resamples=resamples, seed=seed)
    found: dict[str, float | int] = {
        "chance": float(per_object(sets, 1 / (sets.columns >= 0).sum(1)).mean()),
        "images": len(names),
        "vocabularies": len(sets),
        "objects": int(sets.objects.sum()),
    }
    for name, table in scores.items():
        for figure, values in zip(("top1", "rank_mean"), blind.placed(table)):
            interval = mean_interval(per_object(sets, values), rows, weights)
            assert interval is not None  # a vocabulary has an object at least
            key = f"{name}.{figure}"
            found |= {key: interval.value, f"{key}_low": interval.low, f"{key}_high": interval.high}
    return found


def oracle_boxes(
    annotations: Annotations,
    scores: Scores,
    kept: Bool[ndarray, "V_all"],
    *,
    scored: Bool[ndarray, "A_all"] | None = None,
    seed: int = 0,
) -> tuple[BoxScores, Detections, GroundTruth]:
    """AP of a ranker that is given every true box of the vocabularies `kept` (rows of `scores`) and names it.

    One detection for each object, with the probability of its best caption; ties are broken by seeded lot. `scored`:
    the objects that count (`fgovd.Case.scored`, which has forced misses); None for those of `kept`.
    """
    shaken = scores + np.random.default_rng(seed).random(scores.shape) * blind.TIE  # [V, C]
    column = shaken.argmax(1)
    top = scores.max(1, keepdims=True)
    confidence = 1 / np.exp(scores - top).sum(1)
    rows = np.flatnonzero(kept)
    label = annotations.category_ids[annotations.vocab_columns[annotations.vocab_offsets[rows] + column]]
    inside = kept[annotations.object_vocab]
    place = np.searchsorted(rows, annotations.object_vocab[inside])  # [A] row of each object's vocabulary
    image = annotations.vocab_image[annotations.object_vocab]
    counts = inside if scored is None else scored
    detections = Detections(image[inside], label[place], annotations.object_boxes[inside], confidence[place])
    truth = GroundTruth(
        image[counts],
        annotations.positive_ids[annotations.object_vocab[counts]],
        annotations.object_boxes[counts],
        annotations.object_area[counts],
    )
    return score_boxes(detections=detections, ground_truth=truth), detections, truth


def report_controls(
    path: Path,
    *,
    n_negatives: int,
    train_captions: Sequence[Path] = (),
    token_limit: int | None = TOKEN_LIMIT,
    short_vocabularies: Short = "drop",
    resamples: int = 1000,
    seed: int = 0,
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """`noctowl controls`: the text-only rankers on one annotation file; a table, and one line of JSON at the end.

    token_limit: vocabularies whose positive and first N negatives fit, as the detector is asked; None for all.
    Raises DataError for absent and damaged files, and where no vocabulary is left.
    """
    _present(path, "--annotations")
    for captions in train_captions:
        _present(captions, "--train-captions")
    annotations = read_fgovd(path)
    lengths = np.zeros(len(annotations.captions), np.int64)
    if token_limit is not None:
        from noctowl.text import clip_tokenizer, token_lengths  # torch and transformers: only where they are needed

        lengths = token_lengths(clip_tokenizer(), list(annotations.captions))
    kept = processable(annotations, lengths, n_negatives, token_limit or TOKEN_LIMIT, short_vocabularies)
    sets = blind.text_sets(annotations, n_negatives, kept)
    train = blind.concatenate([blind.text_sets(read_fgovd(p)) for p in train_captions]) if train_captions else None
    scores, trained_on = text_controls(sets, train, seed=seed)
    figures: dict[str, Any] = {"benchmark": annotations.name, "n_negatives": n_negatives, "token_limit": token_limit}
    figures |= summarise(sets, scores, resamples=resamples, seed=seed)
    for name, table in scores.items():
        figures[f"{name}.oracle_map"] = oracle_boxes(annotations, table, kept, seed=seed)[0].mean_ap()
    for name, count in trained_on.items():
        how = blind.CROSS if train is None or name == "blind_cv" else blind.GIVEN
        figures |= {f"{name}.training": how, f"{name}.trained_on": count}
    _print(figures, list(scores), console or Console())
    if as_json:
        print(json.dumps(figures))
    return 0


def _present(path: Path, option: str) -> None:
    """Raises DataError, with the files that are there instead."""
    if path.is_file():
        return
    what, folder = ("a folder, not a file", path) if path.is_dir() else ("file not found", path.parent)
    beside = ", ".join(sorted(file.name for file in folder.glob("*.json"))[:8]) or "none"
    raise DataError(
        f"{path}: {what}. {option} takes an annotation file in the FG-OVD format (.json, as in benchmarks/ and "
        f"validation_sets/); .json files in {folder}: {beside}."
    )


def _print(figures: Mapping[str, Any], names: Sequence[str], console: Console) -> None:
    title = (
        f"{figures['benchmark']}, N = {figures['n_negatives']}: text only, chance {100 * figures['chance']:.1f} %\n"
        f"{figures['objects']} objects, {figures['vocabularies']} vocabularies, {figures['images']} images"
    )
    table = Table(title=title, **STYLE)
    for head in ("ranker", "top-1 %", "95 %", "mean rank", "oracle mAP", "trained on"):
        table.add_column(head, justify="left" if head == "ranker" else "right")
    for name in names:
        top, low, high = (100 * figures[f"{name}.top1{end}"] for end in ("", "_low", "_high"))
        rank, oracle = figures[f"{name}.rank_mean"], 100 * figures[f"{name}.oracle_map"]
        trained = blind.training(figures.get(f"{name}.training"), figures.get(f"{name}.trained_on")) or "–"
        table.add_row(name, f"{top:.1f}", f"{low:.1f}–{high:.1f}", f"{rank:.2f}", f"{oracle:.1f}", trained)
    console.print(table)


# The model without its eyes, or without its boxes


def shuffled_rows(rows: Int[ndarray, "I"], *, seed: int = 0) -> Int[ndarray, "I"]:
    """Rows of the image set with every image exchanged for another one; negative rows (unused) stay.

    A derangement: one random cycle through all used images, so that none is asked about itself.
    Raises DataError for a single image, which has no other.
    """
    used = np.flatnonzero(rows >= 0)
    if len(np.unique(rows[used])) < len(used) or len(used) == 1:
        raise DataError(f"{len(used)} images, {len(np.unique(rows[used]))} of them distinct: two or more are needed.")
    cycle = np.random.default_rng(seed).permutation(used)
    shuffled = rows.copy()
    shuffled[cycle] = rows[np.roll(cycle, 1)]
    return shuffled


def oracle_patches(patch_boxes: Float[ndarray, "P 4"], object_boxes: Float[ndarray, "A 4"]) -> Int[ndarray, "A"]:
    """The patch whose box has the highest IoU with each object (xyxy, one frame); the first of several, or of none."""
    own, patches = np.asarray(object_boxes, np.float64)[:, None], np.asarray(patch_boxes, np.float64)[None]
    low, high = np.maximum(own[..., :2], patches[..., :2]), np.minimum(own[..., 2:], patches[..., 2:])
    shared = np.clip(high - low, 0, None).prod(-1)  # [A, P]
    whole = (own[..., 2:] - own[..., :2]).prod(-1) + (patches[..., 2:] - patches[..., :2]).prod(-1) - shared
    return np.divide(shared, whole, out=np.zeros_like(shared), where=shared > 0).argmax(1)


def ranks_at(logits: Float[ndarray, "A C"]) -> Int[ndarray, "A"]:
    """Rank of column 0 in each row; ties count against it, as in `ranks.py`."""
    return (logits >= logits[:, :1]).sum(1)


def oracle_ranks(
    annotations: Annotations, predictions: Predictions, *, n: int, kept: Bool[ndarray, "V_all"]
) -> Int[ndarray, "A"]:
    """Ranks at the stored patch that fits each object best: recognition without localisation.

    Predictions hold the best patches by score and the best-fitting one of each object. An object without a stored
    patch has rank 1 + N.
    """
    place = {key: v for v, key in enumerate(predictions.keys())}
    found = []
    for v in np.flatnonzero(kept):
        objects = annotations.objects(int(v))
        key = (int(annotations.image_ids[annotations.vocab_image[v]]), int(annotations.positive_ids[v]))
        own = place.get(key)
        rows = slice(0, 0) if own is None else slice(*predictions.row_offsets[own : own + 2])
        if rows.start == rows.stop:
            found.append(np.full(objects.stop - objects.start, n + 1, np.int64))
            continue
        best = oracle_patches(predictions.boxes[rows], annotations.object_boxes[objects])
        found.append(ranks_at(predictions.logits[rows][best, : n + 1]))
    return np.concatenate([np.zeros(0, np.int64), *found])


def head_prior(sets: TextSets, bias: Float[ndarray, "D"], embeddings: Float[ndarray, "M D"]) -> Float[ndarray, "V C"]:
    """cos(bias, caption): the score of a patch that says nothing, as W x + b is b there. Rows as in `sets.texts`.

    The per-patch shift and scale of the logits change no order inside a vocabulary and are left out.
    """
    queries = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    score = queries @ (bias / max(float(np.linalg.norm(bias)), 1e-12))  # [M]
    return np.where(sets.columns >= 0, score[sets.columns], -np.inf)


# The gain


def visual_gain(
    *,
    model: Float[ndarray, "A"],
    blind: Mapping[str, Float[ndarray, "A"]],
    images: Int[ndarray, "A"],
    weights: Int[ndarray, "B I"],
) -> dict[str, Any] | None:
    """{"control": the best blind one, "model", "blind", "gain": intervals, "objects"}; None where there is nothing.

    model: 1 where the object's rank is 1; blind: top-1 of the same objects by each control; images: columns of the
    weights. Choosing the best on the same objects favours the control by a little: the gain is on the safe side.
    """
    if not len(model) or not blind:
        return None
    best = max(blind, key=lambda name: float(blind[name].mean()))
    figures: dict[str, Interval | None] = {
        "model": mean_interval(model, images, weights),
        "blind": mean_interval(blind[best], images, weights),
        "gain": mean_interval(model - blind[best], images, weights),
    }
    return {"control": best, **figures, "objects": len(model)}


def gain_table(
    groups: Mapping[str, Bool[ndarray, "A"]],
    *,
    model: Float[ndarray, "A"],
    blind: Mapping[str, Float[ndarray, "A"]],
    images: Int[ndarray, "A"],
    weights: Int[ndarray, "B I"],
) -> dict[str, dict[str, Any]]:
    """`visual_gain` of each group of objects, each with its own best control; empty groups are left out."""
    found = {}
    for name, members in groups.items():
        row = visual_gain(
            model=model[members],
            blind={key: values[members] for key, values in blind.items()},
            images=images[members],
            weights=weights,
        )
        if row is not None:
            found[name] = row
    return found
