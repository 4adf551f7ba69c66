"""What stands beside the figures of an evaluation: intervals, controls, analyses, and the units of paired comparisons.

Legend: A objects that take part, K captions of the file, M distinct texts, D width of an embedding, B resamples.

All of it is read off what has been scored (`fgovd.Scored`): nothing is matched or predicted a second time, but for the
control "shuffled", which needs scores of its own. Flat keys are those of the metrics: "<control>/top1", "map", ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from noctowl.data.records import Annotations
from noctowl.eval import analysis, blind, controls, lvis
from noctowl.eval.ap import BoxScores, Detections
from noctowl.eval.blind import TextSets
from noctowl.eval.bootstrap import (
    Interval,
    box_samples,
    centred,
    fgovd_intervals,
    image_weights,
    mean_interval,
    percentile,
)
from noctowl.eval.fgovd import Scored, rank_inputs
from noctowl.eval.matching import Matched
from noctowl.eval.predictions import Predictions

TEXT_ONLY = ("blind", "blind_embeddings", "centroid", "centroid_embeddings")  # what a gain is over: the best of these
CHEAP = (*TEXT_ONLY, "head_prior", "oracle")  # "auto"; "shuffled" scores every vocabulary on a second image
SHUFFLED = ".shuffled"  # ending of the name under which predictions on another image stand
COARSE_RESAMPLES = 100  # tell a standard deviation to 7 %; the cost is in proportion


@dataclass(frozen=True, eq=False)
class Asked:
    """What is wanted; `intervals` and `coarse_intervals` are numbers of resamples, 0 for none.

    coarse_intervals: None for 100. train: captions that the blind rankers learn from; None: cross-validation inside the
    benchmark.
    """

    controls: tuple[str, ...] = CHEAP
    intervals: int = 1000
    coarse_intervals: int | None = None
    train: TextSets | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Language:
    """The detector's side of the text: embeddings [M, D] of texts, and the head's bias [D]."""

    embed: Callable[[Sequence[str]], Float[ndarray, "M D"]]
    bias: Float[ndarray, "D"]


@dataclass
class Evidence:
    """Flat, JSON-able; keys without the "fgovd/<benchmark>/n<N>/" that `Collector` puts in front."""

    intervals: dict[str, list[float]] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, figure: Interval | None, *, bounds: bool) -> None:
        """A control's figure, with its bounds where they were asked for; an absent one stays absent."""
        if figure is not None:
            self.controls[key] = figure.value
            if bounds:
                self.intervals[key] = [figure.low, figure.high]


@dataclass
class Collector:
    """Gathers the evidence of all benchmarks while these are scored.

    first: the convention whose figures stand at "fgovd/<name>/n<N>/<figure>". shuffled: predictions on other images by
    benchmark. See `gather` for the rest.
    """

    asked: Asked
    first: str
    published_median: bool = False
    language: Language | None = None
    shuffled: Mapping[str, Predictions] = field(default_factory=dict)
    cache: dict[Any, Any] | None = None
    found: Evidence = field(default_factory=Evidence)

    def add(
        self,
        name: str,
        annotations: Annotations,
        predictions: Predictions,
        cases: Mapping[str, Scored],
        convention: str,
    ) -> None:
        """What one benchmark's cases ("n5": ..) give under one convention; intervals of AP only for the second."""
        for n, scored in cases.items():
            base = f"fgovd/{name}/{n}/"
            if self.asked.intervals:
                drawn = map_intervals(annotations, scored, asked=self.asked, published_median=self.published_median)
                if convention != self.first:
                    drawn = {f"{convention}/{k}": v for k, v in drawn.items() if k.startswith(("map", "mar"))}
                self.found.intervals |= {base + key: bounds for key, bounds in drawn.items()}
            if convention == self.first:
                more = gather(
                    annotations,
                    predictions,
                    scored,
                    n=int(n[1:]),
                    asked=self.asked,
                    language=self.language,
                    shuffled=self.shuffled.get(name),
                    cache=self.cache,
                )
                self.found.intervals |= {base + key: bounds for key, bounds in more.intervals.items()}
                self.found.controls |= {base + key: value for key, value in more.controls.items()}
                self.found.tables.setdefault(name, {})[n] = more.tables

    def add_coarse(
        self, matched: Matched, scores: BoxScores, detections: Detections, annotations: lvis.LvisAnnotations
    ) -> int:
        """Intervals of the coarse figures; the resamples that were drawn."""
        found, resamples = coarse_intervals(matched, scores, detections, annotations, self.asked)
        self.found.intervals |= {f"lvis/{key}": bounds for key, bounds in found.items()}
        return resamples

    def result(self) -> dict[str, Any]:
        """What `score_all` gives beside the metrics."""
        return {"intervals": self.found.intervals, "controls": self.found.controls, "evidence": self.found.tables}


def map_intervals(
    annotations: Annotations, scored: Scored, *, asked: Asked, published_median: bool
) -> dict[str, list[float]]:
    """[low, high] of every figure of one benchmark and N, 95 %, over images."""
    case = scored.case
    found = fgovd_intervals(
        scored.boxes,
        detections=case.detections,
        ground_truth=case.objects,
        ranks=scored.ranks,
        object_images=annotations.vocab_image[annotations.object_vocab[case.inside]],
        resamples=asked.intervals,
        seed=asked.seed,
        published_median=published_median,
    )
    return {name: [interval.low, interval.high] for name, interval in found.items()}


def coarse_intervals(
    matched: Matched, scores: BoxScores, detections: Detections, annotations: lvis.LvisAnnotations, asked: Asked
) -> tuple[dict[str, list[float]], int]:
    """[low, high] of every coarse figure, sizes and frequency groups included, and the resamples that were drawn.

    `matched` and `scores` are what `lvis.match_classes` and `lvis.score_classes` gave. Classes span images, so that
    curves are read again: the cost is in proportion to the resamples.
    """
    resamples = COARSE_RESAMPLES if asked.coarse_intervals is None else asked.coarse_intervals
    if not resamples or not len(annotations.image_ids):
        return {}, 0
    weights = image_weights(len(matched.images), resamples=resamples, seed=asked.seed)
    samples = coarse_samples(matched, scores, detections, annotations, weights)
    values = lvis.figures(scores, annotations)
    found = {}
    for key in (k for k in samples if k in values):
        interval = centred(values[key], samples[key])
        found[key] = [interval.low, interval.high]
    return found, resamples


def coarse_samples(
    matched: Matched,
    scores: BoxScores,
    detections: Detections,
    annotations: lvis.LvisAnnotations,
    weights: Int[ndarray, "B I"],
) -> dict[str, Float[ndarray, "B"]]:
    """Coarse figures in every resample, under the names of `lvis.figures`; arguments as of `coarse_intervals`."""
    samples = box_samples(
        scores,
        detections=detections,
        ground_truth=annotations.objects,
        images=matched.images,
        weights=weights,
        resampled="fixed",
        groups={f"map_{group}": members for group, members in lvis.frequency_groups(annotations).items()},
        matched=matched,
        widened=True,
    )
    return {name.replace("map", "ap", 1): drawn for name, drawn in samples.items()}


def gather(
    annotations: Annotations,
    predictions: Predictions,
    scored: Scored,
    *,
    n: int,
    asked: Asked,
    language: Language | None = None,
    shuffled: Predictions | None = None,
    cache: dict[Any, Any] | None = None,
) -> Evidence:
    """Controls, analyses and units of one benchmark and N.

    language: needed by blind_embeddings, centroid_embeddings and head_prior, which are absent without it.
    shuffled: predictions on other images. cache: text-only scores are kept there, as they are the same for all heads.
    """
    found = Evidence()
    case, ranks = scored.case, scored.ranks
    if not case.inside.any():
        return found
    images, column = np.unique(annotations.vocab_image[annotations.object_vocab[case.inside]], return_inverse=True)
    weights = image_weights(len(images), resamples=max(asked.intervals, 1), seed=asked.seed)
    facts = analysis.object_facts(annotations, case.inside, n)
    found.tables = analysis.analyse(ranks, facts) | {"units": _units(annotations, scored)}
    if n == 0:
        return found
    chosen = analysis.chosen_columns(**rank_inputs(annotations, predictions, case, n))
    found.tables["confusions"] = analysis.confusions(annotations, annotations.object_vocab[case.inside], chosen, n)
    bounds = asked.intervals > 0
    for name, object_ranks in _model_ranks(annotations, predictions, shuffled, scored, n, asked).items():
        found.add(f"{name}/top1", mean_interval(object_ranks == 1, column, weights), bounds=bounds)
        found.add(f"{name}/rank_mean", mean_interval(object_ranks, column, weights), bounds=bounds)
    sets = blind.text_sets(annotations, n, case.kept)
    top1: dict[str, ndarray] = {}
    rankings, found.tables["trained_on"] = _text_scores(sets, asked, language, cache, (annotations.sha256, n))
    found.tables["training"] = blind.CROSS if asked.train is None else blind.GIVEN
    if language is not None and "head_prior" in asked.controls:
        rankings["head_prior"] = controls.head_prior(sets, language.bias, language.embed(sets.texts))
    for name, table in rankings.items():
        own, rank = (controls.per_object(sets, values) for values in blind.placed(table))
        found.add(f"{name}/top1", mean_interval(own, column, weights), bounds=bounds)
        found.add(f"{name}/rank_mean", mean_interval(rank, column, weights), bounds=bounds)
        if name in TEXT_ONLY:
            top1[name] = own
            found.add(f"{name}/oracle_map", _oracle_map(annotations, scored, table, asked), bounds=bounds)
    _gains(found, facts, (ranks == 1).astype(float), top1, column, weights, bounds)
    found.controls["chance/top1"] = float(controls.per_object(sets, 1 / (sets.columns >= 0).sum(1)).mean())
    return found


def _units(annotations: Annotations, scored: Scored) -> dict[str, list]:
    """What paired comparisons are made of: the rank of each object and the AP of each class, with their image ids."""
    case = scored.case
    image = annotations.vocab_image[annotations.object_vocab[case.inside]]
    label, first = np.unique(case.objects.label, return_index=True)
    assert np.array_equal(label, scored.boxes.classes)
    return {
        "object": annotations.object_ids[case.inside].tolist(),
        "object_image": annotations.image_ids[image].tolist(),
        "rank": scored.ranks.tolist(),
        "class": label.tolist(),
        "class_image": annotations.image_ids[case.objects.image[first]].tolist(),
        "ap": np.round(scored.boxes.ap[0].mean(0), 6).tolist(),
    }


def _model_ranks(
    annotations: Annotations,
    predictions: Predictions,
    shuffled: Predictions | None,
    scored: Scored,
    n: int,
    asked: Asked,
) -> dict[str, Int[ndarray, "A"]]:
    """Ranks at the patch that fits the true box best: of the right image, and of another one."""
    sources = {"oracle": predictions, "shuffled": shuffled}
    return {
        name: controls.oracle_ranks(annotations, source, n=n, kept=scored.case.kept)
        for name, source in sources.items()
        if source is not None and name in asked.controls
    }


def _text_scores(
    sets: TextSets, asked: Asked, language: Language | None, cache: dict[Any, Any] | None, key: tuple[str, int]
) -> tuple[dict[str, Float[ndarray, "V C"]], dict[str, int]]:
    """Scores of the text-only rankers that are asked for, and the vocabularies that the trained ones learnt from."""
    if cache is not None and key in cache:
        scores, trained = cache[key]
        return dict(scores), dict(trained)
    scores, trained = {}, {}
    if "blind" in asked.controls:
        scores["blind"], trained["blind"] = blind.ngram_ranking(sets, asked.train, seed=asked.seed)
    if "centroid" in asked.controls:
        scores["centroid"] = blind.centroid_jaccard(sets)
    wanted = {"blind_embeddings", "centroid_embeddings"} & set(asked.controls)
    if language is not None and wanted:
        embeddings = language.embed(sets.texts)
        if "blind_embeddings" in wanted:
            train, own = _encoded(asked.train, language)
            ranking = blind.embedding_ranking(sets, embeddings, train, own, seed=asked.seed)
            scores["blind_embeddings"], trained["blind_embeddings"] = ranking
        if "centroid_embeddings" in wanted:
            scores["centroid_embeddings"] = blind.centroid_embeddings(sets, embeddings)
    if cache is not None:
        cache[key] = scores, trained
    return dict(scores), dict(trained)


def _encoded(train: TextSets | None, language: Language) -> tuple[TextSets | None, Float[ndarray, "M D"] | None]:
    """Training captions with their embeddings, without vocabularies that hold a caption which was not encoded."""
    if train is None:
        return None, None
    embeddings = language.embed(train.texts)
    lacking = ~(embeddings != 0).any(1)  # [M] over the token limit
    keep = ~(lacking[train.columns] & (train.columns >= 0)).any(1)  # [V]
    return TextSets(train.texts, train.columns[keep], train.images[keep], train.objects[keep]), embeddings


def _oracle_map(
    annotations: Annotations, scored: Scored, table: Float[ndarray, "V C"], asked: Asked
) -> Interval | None:
    """mAP of a ranker that is given all true boxes, on the objects that the model's mAP is over."""
    result, detections, truth = controls.oracle_boxes(
        annotations, table, scored.case.kept, scored=scored.case.scored, seed=asked.seed
    )
    value = result.mean_ap()
    if value is None:
        return None
    images = np.unique(truth.image)
    weights = image_weights(len(images), resamples=max(asked.intervals, 1), seed=asked.seed)
    inside = np.isin(detections.image, images)
    detections = Detections(*(getattr(detections, name)[inside] for name in ("image", "label", "boxes", "scores")))
    samples = box_samples(result, detections=detections, ground_truth=truth, images=images, weights=weights)
    return percentile(value, samples["map"])


def _gains(
    found: Evidence,
    facts: dict[str, Any],
    model: Float[ndarray, "A"],
    top1: dict[str, Float[ndarray, "A"]],
    column: Int[ndarray, "A"],
    weights: Int[ndarray, "B I"],
    bounds: bool,
) -> None:
    """visual_gain of all objects and of each attribute type, each over its own best control."""
    attribute = np.asarray(facts["attribute"], dtype=object)
    groups = {"": np.ones(len(attribute), bool)} | {f"/{kind}": attribute == kind for kind in sorted(set(attribute))}
    rows = controls.gain_table(groups, model=model, blind=top1, images=column, weights=weights)
    for name, row in rows.items():
        found.add(f"visual_gain{name}", row["gain"], bounds=bounds)
    found.tables["gain"] = {
        name.lstrip("/") or "all": {key: list(v) if isinstance(v, tuple) else v for key, v in row.items()}
        for name, row in rows.items()
    }
    found.add("model/top1", mean_interval(model, column, weights), bounds=bounds)
