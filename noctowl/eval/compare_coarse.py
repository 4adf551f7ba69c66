"""Paired comparison of coarse figures: AP of the classes of an LVIS-format file, and of its frequency groups.

Legend: I images, B resamples or permutations, F figures, S seeds, P pairs of runs.

A class spans images, so its AP is no sum over them and no sign can be flipped. Exchanged are the images themselves: if
two runs are alike, which of them gave the detections of an image is a coin's, and AP is read again after each draw. For
this both runs stand side by side in one problem of 2 I images, image i once with a's detections and once with b's, with
its objects and federated lists both times. They are matched once; a draw is a choice of one image of each two, that is
a weight of 1 or 0, and what is not chosen makes the other run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from math import lcm
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from noctowl.data.records import Strings
from noctowl.eval.ap import Detections, GroundTruth, score_matched
from noctowl.eval.bootstrap import Interval, centred
from noctowl.eval.evidence import coarse_samples
from noctowl.eval.lvis import MAX_DETECTIONS, LvisAnnotations, figures, frequency_groups, match_classes
from noctowl.eval.matching import Matched, thresholds_of
from noctowl.eval.weighted import weighted_ap

FIGURES = ("ap", "ap_rare", "ap_common", "ap_frequent")
BLOCK = 100  # permutations worked on at a time
ENOUGH = 100  # extreme ones after which p is known to a tenth of itself
SAME = 1e-6  # AP is in float32: differences this close are ties, and as extreme


class Exchanged(NamedTuple):
    """What the permutation test of one figure gave."""

    p: float  # two-sided; NaN where the figure does not exist
    drawn: int  # permutations


def side_by_side(a: Detections, b: Detections, annotations: LvisAnnotations) -> Matched:
    """The doubled problem: images [2 I] are a's and b's by turns, in the order of the file's sorted ids.

    Raises DataError for detections of images or classes that the file does not have.
    """
    doubled = replace(
        annotations,
        image_ids=np.stack([2 * annotations.image_ids, 2 * annotations.image_ids + 1], 1).ravel(),
        image_files=Strings(chain.from_iterable((name, name) for name in annotations.image_files)),
        image_sizes=np.repeat(annotations.image_sizes, 2, axis=0),
        objects=_twice(annotations.objects),
        federated=type(annotations.federated)(*(_twice_rows(r) for r in vars(annotations.federated).values())),
    )
    sides = [replace(side, image=2 * side.image + place) for place, side in enumerate((a, b))]
    return all_sizes(match_classes(Detections.concatenate(sides), doubled))


def all_sizes(matched: Matched) -> Matched:
    """Without the figures of small, medium and large objects, which would double the cost of the others; and without
    detections that no figure is left for."""
    settings = np.uint64((1 << len(thresholds_of(matched.thresholds)[0])) - 1)
    first = np.arange(len(matched.wanted))[:, None] == 0  # [A, 1]
    only = replace(
        matched,
        hit=matched.hit & settings,
        lost=matched.lost & settings,
        false=matched.false & first,
        wanted=matched.wanted & first,
    )
    return only.take(np.flatnonzero(((only.hit | only.lost) > 0) | only.false[0]))


def group_ap(matched: Matched, weights: Int[ndarray, "B I"], annotations: LvisAnnotations) -> Float[ndarray, "F B"]:
    """FIGURES under every row of weights: means over the classes that have objects there; NaN where none has."""
    ap = weighted_ap(matched, weights)[0]  # [K, B]
    members = [np.ones(len(ap), bool)]
    members += [np.isin(matched.classes, ids) for ids in frequency_groups(annotations).values()]
    inside = np.stack(members).astype(np.float64)  # [F, K]
    number = inside @ ~np.isnan(ap)
    return np.divide(inside @ np.nan_to_num(ap), number, out=np.full(number.shape, np.nan), where=number > 0)


def run_figures(
    runs: Iterable[Detections], weights: Int[ndarray, "B I"], annotations: LvisAnnotations
) -> tuple[Float[ndarray, "F"], Float[ndarray, "F B"]]:
    """FIGURES of one configuration, whose seeds these are: mean over them, as is and in every resample; NaN for a group
    without objects. Columns of the weights are the file's sorted ids."""
    values, samples = [], []
    for run in runs:
        matched = all_sizes(match_classes(run, annotations))
        scores = score_matched(matched, max_detections=(MAX_DETECTIONS,))
        found = figures(scores, annotations)
        values.append([found.get(name, np.nan) for name in FIGURES])
        drawn = coarse_samples(matched, scores, run, annotations, weights)
        samples.append([drawn[name] for name in FIGURES])
    return np.mean(values, 0), np.mean(samples, 0)


def difference(
    a: tuple[Float[ndarray, "F"], Float[ndarray, "F B"]], b: tuple[Float[ndarray, "F"], Float[ndarray, "F B"]]
) -> list[Interval]:
    """a - b of two configurations' `run_figures` under the same weights, with intervals as coarse figures have them."""
    return [centred(value, drawn, least=-1) for value, drawn in zip((a[0] - b[0]).tolist(), a[1] - b[1])]


def exchange_p(
    pairs: Sequence[Matched],
    annotations: LvisAnnotations,
    *,
    permutations: int,
    seed: int = 0,
    enough: int | None = ENOUGH,
) -> list[Exchanged]:
    """Two-sided p of each figure's difference under random exchanges of the images' detections; at least
    1 / (permutations + 1).

    pairs: `side_by_side` of each pair of seeds; all of them are exchanged together, as an image is one for all, and
        the difference is the mean over them.
    enough: drawing stops where each figure has had so many differences as extreme as the observed one, and p is read
        at the draw of the last of them (see `compare.sign_flip_p`); None: never.
    """
    rng = np.random.default_rng(seed)
    n_image = len(annotations.image_ids)
    observed = np.abs(image_differences(pairs, np.zeros((1, n_image), bool), annotations)[:, 0]) - SAME  # [F]
    exists = np.flatnonzero(~np.isnan(observed))
    extreme = np.zeros((len(FIGURES), 0), bool)
    while extreme.shape[1] < permutations:
        swapped = rng.integers(2, size=(min(BLOCK, permutations - extreme.shape[1]), n_image), dtype=np.uint8) > 0
        found = np.abs(image_differences(pairs, swapped, annotations)) >= observed[:, None]
        extreme = np.concatenate([extreme, found], 1)
        if enough is not None and (extreme[exists].sum(1) >= enough).all():
            break
    results = [Exchanged(float("nan"), 0)] * len(FIGURES)
    for f in exists:
        at = np.flatnonzero(extreme[f])
        if enough is not None and len(at) >= enough:
            results[f] = Exchanged(enough / (int(at[enough - 1]) + 1), int(at[enough - 1]) + 1)
        else:
            results[f] = Exchanged((1 + len(at)) / (1 + extreme.shape[1]), extreme.shape[1])
    return results


def seed_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of runs of two configurations with a and b seeds, in which each run of a configuration occurs as often."""
    count = lcm(a, b)
    return list(zip(islice(cycle(range(a)), count), islice(cycle(range(b)), count)))


def image_differences(
    pairs: Sequence[Matched], swapped: Bool[ndarray, "B I"], annotations: LvisAnnotations
) -> Float[ndarray, "F B"]:
    """a - b of FIGURES after the exchange of some images, `exchange_p`'s pairs: mean over them."""
    own = np.stack([~swapped, swapped], -1).reshape(len(swapped), -1)  # [B, 2 I]
    weights = np.concatenate([own, ~own]).astype(np.uint8)
    ap = np.mean([group_ap(pair, weights, annotations) for pair in pairs], 0)  # [F, 2 B]
    return ap[:, : len(swapped)] - ap[:, len(swapped) :]


def _twice(objects: GroundTruth) -> GroundTruth:
    """Every object in both copies of its image."""
    again = objects.take(np.tile(np.arange(len(objects.image)), 2))
    return replace(again, image=2 * again.image + np.repeat([0, 1], len(objects.image)))


def _twice_rows(rows: Int[ndarray, "J 2"]) -> Int[ndarray, "2J 2"]:
    """(image, class) in both copies of the image."""
    return np.concatenate([rows * [2, 1], rows * [2, 1] + [1, 0]])
