"""Where a detector is right: ranks by number of negatives, caption, size, attribute, split and crowd.

Legend: A objects that take part, N negatives, C = 1 + N, V vocabularies, W words.

Every function takes one value for each object and gives a plain dict, ready for JSON; groups without objects are left
out. What is read off the annotations comes from `object_facts`, in the order of the ranks of `fgovd.score`.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from noctowl.data.records import Annotations
from noctowl.eval.ap import AREAS
from noctowl.eval.blind import words
from noctowl.eval.ranks import mean_rank, median_rank, object_ranks

LENGTHS = {"0-6": (0, 6), "7-10": (7, 10), "11-14": (11, 14), "15+": (15, 10**9)}  # words; bins of the FG-OVD paper
CROWD = 4  # objects of an image from which on they are one group
SHADES = frozenset({"light", "dark"})
VALUES = {  # attribute values of PACO, from which FG-OVD draws its negatives; the last ones are the miniature's
    "color": "black blue brown green grey gray orange pink purple red white yellow cyan lime",
    "material": "stone wood wooden rattan fabric crochet wool leather velvet metal paper plastic glass ceramic",
    "pattern": "plain striped dotted checkered woven studded perforated floral flowery logo text banded plaid",
    "transparency": "opaque translucent transparent",
}
TYPE_OF = {value: kind for kind, values in VALUES.items() for value in words(values)}
OTHER, MIXED = "other", "mixed"


def object_facts(annotations: Annotations, inside: Bool[ndarray, "A_all"], n: int) -> dict[str, Any]:
    """Of each object that takes part: words int [A], and labels: size, split, crowd and attribute, lists of A texts.

    attribute: the type that all of the first n negatives change, or "mixed".
    """
    vocab = annotations.object_vocab[inside]
    image = annotations.vocab_image[vocab]
    positive = annotations.vocab_columns[annotations.vocab_offsets[:-1]]
    count = np.array([len(words(annotations.captions[k])) for k in positive])  # [V]
    crowd = np.bincount(annotations.vocab_image[annotations.object_vocab], minlength=len(annotations.image_ids))
    used = {int(v): attribute_type(annotations, int(v), n) for v in np.unique(vocab)}
    return {
        "words": count[vocab],
        "size": [_size(area) for area in annotations.object_area[inside]],
        "split": [name.split("/")[0] if "/" in name else "?" for name in annotations.image_files.take(image)],
        "crowd": [str(c) if c < CROWD else f"{CROWD}+" for c in crowd[image].tolist()],
        "attribute": [used[int(v)] for v in vocab],
    }


def group_table(ranks: Int[ndarray, "A"], labels: Sequence[str], order: Sequence[str] = ()) -> dict[str, dict]:
    """{label: {"objects", "top1", "rank_mean", "rank_median"}}, labels in the given order, the rest sorted."""
    label = np.asarray(labels, dtype=object)
    names = [*order, *sorted(set(labels) - set(order))]
    return {name: _summary(ranks[label == name]) for name in names if (label == name).any()}


def by_negatives(ranks: Mapping[int, Int[ndarray, "A_n"]]) -> dict[str, dict]:
    """The same by N: {N: ranks} -> {"n5": {.., "chance": 1 / (1 + N)}}. Each N has its own objects."""
    return {f"n{n}": _summary(own) | {"chance": 1 / (1 + n)} for n, own in sorted(ranks.items()) if len(own)}


def by_length(ranks: Int[ndarray, "A"], counts: Int[ndarray, "A"]) -> dict[str, Any]:
    """{"bins": group table by words of the positive caption, "pearson": r of words and rank, "objects": A}."""
    labels = [next(name for name, (low, high) in LENGTHS.items() if low <= c <= high) for c in counts.tolist()]
    bins = group_table(ranks, labels, list(LENGTHS))
    return {"bins": bins, "pearson": pearson(counts, ranks), "objects": len(ranks)}


def pearson(x: Float[ndarray, "A"], y: Float[ndarray, "A"]) -> float | None:
    """Correlation coefficient; None where it does not exist: fewer than two objects, or a constant."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def analyse(ranks: Int[ndarray, "A"], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All tables of one benchmark and N: "length", "size", "split", "crowd", "attribute"."""
    orders = {"size": [area for area in AREAS if area != "all"], "attribute": list(VALUES)}
    tables: dict[str, Any] = {"length": by_length(ranks, facts["words"])}
    tables |= {key: group_table(ranks, facts[key], orders.get(key, ())) for key in ("size", "split", "crowd")}
    return tables | {"attribute": group_table(ranks, facts["attribute"], orders["attribute"])}


# Which word was changed, and which change was believed


def substitutions(positive: str, negative: str) -> list[tuple[str, str]]:
    """What the negative says instead: [(true, said)], by a word-level difference.

    A shade belongs to its colour: "light grey" for "light pink" are these, not "grey" and "pink". Attributes that stand
    side by side are told apart where their types agree one by one: "grey wooden" for "dark red metal" are two.
    """
    return list(_substitutions(positive, negative))


@lru_cache(maxsize=200_000)  # the same pairs are asked for at every N and for every table
def _substitutions(positive: str, negative: str) -> tuple[tuple[str, str], ...]:
    a, b = words(positive), words(negative)
    found: list[tuple[str, str]] = []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        while a0 and b0 and a[a0 - 1] in SHADES and a[a0 - 1] == b[b0 - 1]:
            a0, b0 = a0 - 1, b0 - 1
        if (
            kind != "replace" or a[a0:a1][-1] in SHADES or b[b0:b1][-1] in SHADES
        ):  # "light grey" for "grey", or shade alone
            a1, b1 = min(a1 + 1, len(a)), min(b1 + 1, len(b))
        true, said = _values(a[a0:a1]), _values(b[b0:b1])
        kinds = [value_type(value) for value in true]
        if OTHER not in kinds and kinds == [value_type(value) for value in said]:
            found += [pair for pair in zip(true, said) if pair[0] != pair[1]]
        else:
            found.append((" ".join(a[a0:a1]), " ".join(b[b0:b1])))
    return tuple(found)


def _values(own: Sequence[str]) -> list[str]:
    """Words as values: each alone, but for a shade, which goes with the word after it."""
    found: list[str] = []
    for i, word in enumerate(own):
        if i and own[i - 1] in SHADES:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def value_type(text: str) -> str:
    """Attribute type of a value such as "light grey": by its last word; "other" where that is in no list."""
    return TYPE_OF.get(text.split()[-1], OTHER) if text else OTHER


def attribute_type(annotations: Annotations, v: int, n: int) -> str:
    """The one type that the first n negatives of a vocabulary change; "mixed" for several, "other" for none."""
    own = annotations.vocabulary(v)[: n + 1]
    texts = annotations.captions.take(own)
    kinds = {value_type(true) for text in texts[1:] for true, _ in substitutions(texts[0], text)}
    return kinds.pop() if len(kinds) == 1 else MIXED if kinds else OTHER


def chosen_columns(
    *,
    object_boxes: Float[ndarray, "A 4"],
    object_group: Int[ndarray, "A"],
    boxes: Float[ndarray, "D 4"],
    offsets: Int[ndarray, "G+1"],
    logits: Float[ndarray, "D C"],
) -> Int[ndarray, "A"]:
    """The caption that each object is given where its rank is read; 0 is the right one, -1: not found, or all equal.

    Arguments as of `ranks.object_ranks`: a column is the best if it has the lowest rank when it is put in front.
    """
    columns = np.arange(logits.shape[1])
    ranks = np.stack(
        [
            object_ranks(
                object_boxes=object_boxes,
                object_group=object_group,
                boxes=boxes,
                offsets=offsets,
                logits=logits[:, [c, *columns[columns != c]]],
            )
            for c in columns
        ]
    )  # [C, A]
    return np.where(ranks.min(0) < len(columns), ranks.argmin(0), -1)


def confusions(
    annotations: Annotations, vocab: Int[ndarray, "A"], chosen: Int[ndarray, "A"], n: int
) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """{type: {true value: {said value: {"asked", "chosen"}}}}: how often a substitution was on offer, and believed.

    vocab: vocabulary of each object; chosen: see `chosen_columns`. Objects that were not found are left out.
    """
    tables: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    changes: dict[int, list[list[tuple[str, str]]]] = {}
    for v, column in zip(vocab.tolist(), chosen.tolist()):
        if column < 0:
            continue
        if v not in changes:
            texts = annotations.captions.take(annotations.vocabulary(v)[: n + 1])
            changes[v] = [substitutions(texts[0], text) for text in texts[1:]]
        for negative, pairs in enumerate(changes[v], 1):
            for true, said in pairs:
                cell = tables.setdefault(value_type(true), {}).setdefault(true, {})
                entry = cell.setdefault(said, {"asked": 0, "chosen": 0})
                entry["asked"] += 1
                entry["chosen"] += negative == column
    return tables


def _summary(ranks: Int[ndarray, "A"]) -> dict[str, Any]:
    return {
        "objects": len(ranks),
        "top1": float((ranks == 1).mean()),
        "rank_mean": mean_rank(ranks),
        "rank_median": median_rank(ranks),
    }


def _size(area: float) -> str:
    return next(name for name, (low, high) in AREAS.items() if name != "all" and low <= area <= high)
