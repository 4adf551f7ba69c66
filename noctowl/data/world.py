"""The synthetic world: which scenes there are, what is said of them, and what is said of them wrongly.

A scene holds one to three things. A thing has a class, a colour, a pattern, a material and a transparency; its caption
is "A <transparency> <colour> <pattern> <material> <class>.", and transparency is left out where the thing is opaque,
unless the vocabulary is about transparency.

No caption prior. The captions of a vocabulary all differ from each other in the same slots, and in all of those slots;
values are drawn uniformly without replacement, the true ones too. The set is therefore exchangeable: swapping the
positive with a negative changes no probability, so every ranker that sees only text is at chance. (Negatives that
change one attribute each, now this and now that, would leave the positive in their middle.) The price: a vocabulary has
at most as many captions as its poorest slot has values (12 colours, 6 patterns, 6 materials, 3 transparencies).

Held out of all training: one colour for every class (`held_out`).
Image i of a split depends on (seed, split, i) and on nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, UInt8

from noctowl.data.render import CLASSES, COLOURS, MATERIALS, PATTERNS, SILHOUETTES, TRANSPARENCIES, Thing, render

FREQUENCY = ("f",) * 8 + ("c",) * 4 + ("r",) * 4  # of CLASSES, by how often pretraining shows them
VALUES: dict[str, tuple[str, ...]] = {  # slot -> its values, in the order in which captions name the slots
    "transparency": TRANSPARENCIES,
    "colour": tuple(COLOURS),
    "pattern": PATTERNS,
    "material": MATERIALS,
}
TRANSPARENCY_WEIGHTS = (0.6, 0.2, 0.2)
N_NEGATIVES = 10
HARD_SLOTS = ("colour", "pattern", "material")
# Benchmark file -> how many slots are substituted, or the one slot that is; 0 = captions of other things.
BENCHMARK_RULES: dict[str, int | str] = {
    "1_attributes": 1,
    "2_attributes": 2,
    "3_attributes": 3,
    "shuffle_negatives": 0,
    "color": "colour",
    "material": "material",
    "pattern": "pattern",
    "transparency": "transparency",
}


@dataclass(frozen=True)
class Split:
    """Where the scenes of a part of the world come from; `code` seeds it, `weights` are those of CLASSES."""

    name: str
    code: int
    folder: str
    weights: tuple[float, ...]
    shows_held_out: bool = False


_FINE = (1.0,) * 8 + (0.0,) * 8
PRETRAIN = Split("pretrain", 0, "", (1.0,) * 8 + (0.5,) * 4 + (0.12,) * 4)
TRAIN = Split("train", 1, "train2017", _FINE)
VAL = Split("val", 2, "val2017", _FINE)
TEST = Split("test", 3, "val2017", _FINE, shows_held_out=True)
COARSE_VAL = Split("coarse_val", 4, "val2017", (1.0,) * 16)
COARSE_TEST = Split("coarse_test", 5, "val2017", (1.0,) * 16, shows_held_out=True)


def held_out(cls: int, colour: int) -> bool:
    """True for the one colour of each class that no training shows (5 and 12 are coprime: colours take turns)."""
    return colour == (5 * cls + 2) % len(COLOURS)


def words() -> tuple[str, ...]:
    """Every word of captions and class names: what a tokenizer of this world has to know."""
    return (*CLASSES, *(value for values in VALUES.values() for value in values), "a")


def sample_thing(rng: np.random.Generator, split: Split) -> Thing:
    """A thing without a place; attributes are independent of each other, but for the held-out colour of its class."""
    weights = np.asarray(split.weights)
    cls = int(rng.choice(len(CLASSES), p=weights / weights.sum()))
    colour = int(rng.integers(len(COLOURS)))
    while not split.shows_held_out and held_out(cls, colour):
        colour = int(rng.integers(len(COLOURS)))
    return Thing(
        cls=cls,
        colour=colour,
        pattern=int(rng.integers(len(PATTERNS))),
        material=int(rng.integers(len(MATERIALS))),
        transparency=int(rng.choice(3, p=TRANSPARENCY_WEIGHTS)),
        flip=bool(rng.random() < 0.5),
    )


def _place(rng: np.random.Generator, thing: Thing, others: Sequence[Thing], size: int) -> Thing | None:
    """The thing at a free place, or None after 25 tries; boxes do not overlap."""
    aspect = SILHOUETTES[CLASSES[thing.cls]][0] * rng.uniform(0.9, 1.12)
    for _ in range(25):
        side = rng.uniform(30, 54)
        width, height = (round(min(max(side * shape, 18), 76) * size / 96) for shape in (aspect**0.5, aspect**-0.5))
        left, top = int(rng.integers(size - width + 1)), int(rng.integers(size - height + 1))
        clear = all(
            left >= x + w or x >= left + width or top >= y + h or y >= top + height
            for x, y, w, h in (o.box for o in others)
        )
        if clear:
            return replace(thing, box=(left, top, width, height))
    return None


def layout(rng: np.random.Generator, split: Split, size: int) -> list[Thing]:
    """One to three things at their places."""
    things: list[Thing] = []
    for _ in range(int(rng.integers(1, 4))):
        placed = _place(rng, sample_thing(rng, split), things, size)
        if placed is not None:
            things.append(placed)
    return things


Rendered = tuple[UInt8[np.ndarray, "S S 3"], list[Thing], Float[np.ndarray, "S S"]]  # pixels, things, coverage


def scene(split: Split, index: int, *, seed: int = 0, size: int = 96) -> Rendered:
    """Image `index` of a split: uint8 [S, S, 3], its things, and what they cover, float32 [S, S]."""
    rng = np.random.default_rng([seed, split.code, index])
    things = layout(rng, split, size)
    pixels, covered = render(things, size, rng)
    return pixels, things, covered


def caption(thing: Thing, *, name_opaque: bool = False, slots: Sequence[str] = tuple(VALUES)) -> str:
    """The sentence for a thing; `slots` restricts which attributes are named (in the fixed order of VALUES)."""
    named = [
        VALUES[slot][getattr(thing, slot)]
        for slot in VALUES
        if slot in slots and (slot != "transparency" or thing.transparency > 0 or name_opaque)
    ]
    return f"A {' '.join([*named, CLASSES[thing.cls]])}."


def substitutes(
    rng: np.random.Generator, thing: Thing, slots: Sequence[str], limit: int, *, shows_held_out: bool
) -> list[Thing]:
    """Up to `limit` things that differ from `thing`, and from each other, in all of `slots` and in nothing else."""
    columns = []
    for slot in slots:
        true = getattr(thing, slot)
        others = [
            value
            for value in range(len(VALUES[slot]))
            if value != true and (shows_held_out or slot != "colour" or not held_out(thing.cls, value))
        ]
        columns.append(rng.permutation(others)[:limit].tolist())
    return [replace(thing, **dict(zip(slots, values))) for values in zip(*columns)]


def choose_slots(
    rng: np.random.Generator, thing: Thing, rule: int | str, *, with_transparency: bool
) -> list[str] | None:
    """The slots that a vocabulary substitutes; None where the thing is to be left out.

    Opaque things are three times as frequent as the other kinds, so a vocabulary about transparency takes one in three
    of them: its three captions are then equally often the true one. `with_transparency` lets rule 1 choose that slot.
    """
    share = TRANSPARENCY_WEIGHTS[1] / TRANSPARENCY_WEIGHTS[thing.transparency]
    if rule == "transparency":
        return ["transparency"] if rng.random() < share else None
    if isinstance(rule, str):
        return [rule]
    if rule == 1 and with_transparency and rng.random() < 0.4 * share:
        return ["transparency"]
    return [str(slot) for slot in rng.choice(HARD_SLOTS, rule, replace=False)]


def _strangers(rng: np.random.Generator, split: Split, size: int) -> Iterator[str]:
    """Captions of things in scenes of the same split, drawn afresh, without end."""
    while True:
        yield from (caption(thing) for thing in layout(rng, split, size))


def vocabularies(
    split: Split, index: int, things: Sequence[Thing], rule: int | str, *, seed: int, size: int, train: bool
) -> list[tuple[list[Thing], list[str]]]:
    """The vocabularies of one image: (its objects, captions with the positive first).

    In a training set a caption that two things of the image share is left out (one object per caption); elsewhere such
    things share a vocabulary.
    """
    rng = np.random.default_rng([seed, split.code, index, list(BENCHMARK_RULES.values()).index(rule)])
    grouped: dict[str, list[Thing]] = {}
    for thing in things:
        grouped.setdefault(caption(thing), []).append(thing)
    result = []
    for text, members in grouped.items():
        if rule == 0:
            negatives: list[str] = []
            stream = _strangers(rng, split, size)
            while len(negatives) < N_NEGATIVES:
                other = next(stream)
                if other not in grouped and other not in negatives:
                    negatives.append(other)
            result.append((members, [text, *negatives]))
            continue
        slots = choose_slots(rng, members[0], rule, with_transparency=train)
        if slots is None or (train and len(members) > 1):
            continue
        swapped = substitutes(rng, members[0], slots, N_NEGATIVES, shows_held_out=split.shows_held_out)
        opaque = "transparency" in slots
        result.append((members, [caption(thing, name_opaque=opaque) for thing in (members[0], *swapped)]))
    return result
