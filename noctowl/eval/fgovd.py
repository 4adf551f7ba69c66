"""Scores predictions on an FG-OVD file: a pure function of annotations, predictions and named conventions.

Legend: V vocabularies, W of them processable, A objects, D detections, N negatives per vocabulary.

For each N (FG-OVD paper, evaluation protocol):
1. A vocabulary takes part if its positive and first N negatives fit the token limit (`lengths`) and it has N negatives.
2. Each of its patches is one detection, labelled with its best caption; the 100 best pass class-agnostic NMS inside the
   vocabulary. The detections of all vocabularies of an image are then one list.
3. COCO AP over the captions that are an object's positive, sizes by box area; and the rank of the positive caption.

Objects of vocabularies with too few negatives are left out. Those of vocabularies over the token limit are treated by a
convention, `ground_truth`:
- "unmasked": they stay as misses in images that have other detections, and vanish with images that have none. The
  published tables are of this kind;
- "masked": they are left out too. Fair to the detector, and higher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torchvision.ops import nms

from noctowl.data.fgovd import TOKEN_LIMIT, Short, processable
from noctowl.data.records import Annotations
from noctowl.errors import ConfigError, DataError
from noctowl.eval.ap import BoxScores, Detections, GroundTruth, Thresholds, score_boxes
from noctowl.eval.predictions import Predictions, TopDetections
from noctowl.eval.ranks import mean_rank, median_rank, object_ranks

Convention = Literal["unmasked", "masked"]


def score(
    annotations: Annotations,
    predictions: Predictions,
    *,
    n_negatives: Sequence[int],
    lengths: npt.ArrayLike | None,
    limit: int = TOKEN_LIMIT,
    ground_truth: Convention = "unmasked",
    short_vocabularies: Short = "drop",
    nms_iou: float = 0.5,
    top: int = 100,
    recall_thresholds: Thresholds = "float64",
    published_median: bool = False,
) -> dict[str, Any]:
    """-> {"metrics": {"n5/map": ..}, "counts": {"n5": {..}}, "ranks": {"n5": {annotation id: rank}}, "settings": {..},
    "cases": {"n5": `Scored`}}.

    lengths: tokens of each caption [K], start and end included; None switches the token rule off.
    short_vocabularies: those with fewer than N negatives are left out, or asked with what they have; in the latter an
        object that is not found has rank N + 1 all the same.
    nms_iou: a box that overlaps a better one by more than this is removed.
    metrics: map, map_50, map_75, map_{small,medium,large}, mar_{1,10,100}, mar_{small,medium,large}, rank_mean,
        rank_median. A figure without objects is absent.
    counts: `objects` and `vocabularies` that take part; `*_dropped_short`, `*_dropped_tokens` those that do not, by the
        first reason; `objects_scored` in AP, of which `objects_forced_missed` cannot be found; `detections` after NMS.

    Raises ConfigError for an unknown convention, DataError for predictions that lack a vocabulary or an N.
    """
    _check_choice("ground_truth", ground_truth, get_args(Convention))
    _check_choice("short_vocabularies", short_vocabularies, get_args(Short))
    _check_choice("recall_thresholds", recall_thresholds, get_args(Thresholds))
    metrics: dict[str, float] = {}
    counts: dict[str, dict[str, int]] = {}
    ranks: dict[str, dict[int, int]] = {}
    cases: dict[str, Scored] = {}
    for n in n_negatives:
        case = collect(
            annotations,
            predictions,
            n=n,
            lengths=lengths,
            limit=limit,
            ground_truth=ground_truth,
            short_vocabularies=short_vocabularies,
            nms_iou=nms_iou,
            top=top,
        )
        result = score_boxes(detections=case.detections, ground_truth=case.objects, thresholds=recall_thresholds)
        rank = object_ranks(**rank_inputs(annotations, predictions, case, n))
        figures: dict[str, float | None] = dict(result.summary())
        figures |= {"rank_mean": mean_rank(rank), "rank_median": median_rank(rank, published=published_median)}
        metrics |= {f"n{n}/{name}": value for name, value in figures.items() if value is not None}
        ranks[f"n{n}"] = dict(zip(annotations.object_ids[case.inside].tolist(), rank.tolist()))
        counts[f"n{n}"] = _counts(annotations, case, n, short_vocabularies)
        cases[f"n{n}"] = Scored(case, result, rank)
    settings = {
        "token_limit": None if lengths is None else limit,
        "ground_truth": ground_truth,
        "short_vocabularies": short_vocabularies,
        "nms_iou": nms_iou,
        "top": top,
        "recall_thresholds": recall_thresholds,
        "published_median": published_median,
    }
    return {"metrics": metrics, "counts": counts, "ranks": ranks, "settings": settings, "cases": cases}


@dataclass(frozen=True, eq=False)
class Case:
    """What is scored at one N."""

    kept: Bool[ndarray, "V"]  # vocabularies that take part
    found: TopDetections  # NMS survivors of the vocabularies that take part
    detections: Detections
    inside: Bool[ndarray, "A"]  # objects that take part
    scored: Bool[ndarray, "A"]  # objects that count in AP
    objects: GroundTruth  # these


@dataclass(frozen=True, eq=False)
class Scored:
    """A case, its AP of every class, and the rank of each object that takes part."""

    case: Case
    boxes: BoxScores
    ranks: Int[ndarray, "A_inside"]


def rank_inputs(annotations: Annotations, predictions: Predictions, case: Case, n: int) -> dict[str, Any]:
    """Keyword arguments of `ranks.object_ranks`: the objects that take part and their vocabularies' detections."""
    return {
        "object_boxes": annotations.object_boxes[case.inside],
        "object_group": np.searchsorted(np.flatnonzero(case.kept), annotations.object_vocab[case.inside]),
        "boxes": case.found.boxes,
        "offsets": case.found.offsets,
        "logits": predictions.logits[case.found.rows, : n + 1],
    }


def collect(
    annotations: Annotations,
    predictions: Predictions,
    *,
    n: int,
    lengths: npt.ArrayLike | None,
    limit: int = TOKEN_LIMIT,
    ground_truth: Convention = "unmasked",
    short_vocabularies: Short = "drop",
    nms_iou: float = 0.5,
    top: int = 100,
) -> Case:
    """Steps 1 and 2 and the ground truth of step 3 for one N; arguments and errors as in `score`."""
    tokens = np.zeros(len(annotations.category_ids), int) if lengths is None else lengths
    kept = processable(annotations, tokens, n, limit, short_vocabularies)  # [V]
    row = _rows_of(annotations, predictions)
    _require(annotations, predictions, kept & (row < 0), n)
    vocab = np.flatnonzero(kept)  # [W]
    found = _suppress(predictions.at(n, row[vocab], top=top), nms_iou)
    det_vocab = np.repeat(vocab, np.diff(found.offsets))  # [D]
    column = annotations.vocab_columns[annotations.vocab_offsets[det_vocab] + found.columns]
    inside = kept[annotations.object_vocab]  # [A]
    object_image = annotations.vocab_image[annotations.object_vocab]
    scored = inside
    if ground_truth == "unmasked":
        lacking = (annotations.n_negatives < n) & (short_vocabularies == "drop")  # [V]
        scored = np.isin(object_image, annotations.vocab_image[det_vocab]) & ~lacking[annotations.object_vocab]
    return Case(
        kept=kept,
        found=found,
        detections=Detections(
            image=annotations.vocab_image[det_vocab],
            label=annotations.category_ids[column],
            boxes=found.boxes,
            scores=found.scores,
        ),
        inside=inside,
        scored=scored,
        objects=GroundTruth(
            image=object_image[scored],
            label=annotations.positive_ids[annotations.object_vocab[scored]],
            boxes=annotations.object_boxes[scored],
            area=annotations.object_area[scored],
        ),
    )


def _suppress(found: TopDetections, threshold: float) -> TopDetections:
    """Class-agnostic NMS inside each vocabulary; order by score is kept."""
    boxes, scores = torch.from_numpy(found.boxes), torch.from_numpy(found.scores)
    edges = found.offsets.tolist()
    survivors = [nms(boxes[a:b], scores[a:b], threshold) + a for a, b in pairwise(edges)]
    keep = torch.cat(survivors).numpy() if survivors else np.zeros(0, np.int64)
    return TopDetections(
        offsets=np.cumsum([0, *map(len, survivors)], dtype=np.int64),
        scores=found.scores[keep],
        columns=found.columns[keep],
        boxes=found.boxes[keep],
        rows=found.rows[keep],
    )


def _rows_of(annotations: Annotations, predictions: Predictions) -> Int[ndarray, "V"]:
    """The predictions' row of each annotated vocabulary, -1 where absent. Predictions of unknown ones are an error."""
    place = {key: v for v, key in enumerate(predictions.keys())}
    image = annotations.image_ids[annotations.vocab_image].tolist()
    keys = list(zip(image, annotations.positive_ids.tolist()))
    strange = [key for key in place if key not in set(keys)] if len(place.keys() - set(keys)) else []
    if strange:
        raise DataError(
            f"{len(strange)} of {len(place)} predicted vocabularies (image, category) are not in {annotations.path}: "
            f"{_some(strange)}. The predictions are of another annotation file; score them on their own."
        )
    return np.array([place.get(key, -1) for key in keys], dtype=np.int64)


def _require(annotations: Annotations, predictions: Predictions, missing: Bool[ndarray, "V"], n: int) -> None:
    if not missing.any():
        return
    image = annotations.image_ids[annotations.vocab_image[missing]].tolist()
    keys = list(zip(image, annotations.positive_ids[missing].tolist()))
    raise DataError(
        f"N = {n}: predictions cover {len(predictions)} of {len(annotations)} vocabularies of {annotations.path}; "
        f"{len(keys)} that take part are missing (image, category): {_some(keys)}. Predict the whole file, with the "
        "same token rule; parts of several processes must be merged first."
    )


def _counts(annotations: Annotations, case: Case, n: int, short: Short) -> dict[str, int]:
    too_few = (annotations.n_negatives < n) & (short == "drop")
    reasons = {"": case.kept, "_dropped_short": too_few, "_dropped_tokens": ~case.kept & ~too_few}
    counts = {"images": len(np.unique(annotations.vocab_image[case.kept]))}
    for what, where in (("vocabularies", slice(None)), ("objects", annotations.object_vocab)):
        counts |= {f"{what}{reason}": int(mask[where].sum()) for reason, mask in reasons.items()}
    return counts | {
        "objects_scored": int(case.scored.sum()),
        "objects_forced_missed": int((case.scored & ~case.inside).sum()),
        "detections": len(case.found.scores),
    }


def _some(keys: list[tuple[int, int]]) -> str:
    return ", ".join(map(str, keys[:5])) + (", ..." if len(keys) > 5 else "")


def _check_choice(name: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise ConfigError(f"{name}: found {found!r}, allowed are {', '.join(allowed)}.")
