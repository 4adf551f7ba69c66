"""Batches for pretraining the miniature: freshly rendered scenes, their targets and their sentences.

Legend: B images, O objects of all of them, P patches, K classes, S slots (VALUES), H negatives of a sentence,
T sentences = O (1 + H); those of object o start at row o (1 + H), the first of them is true.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from noctowl.data.render import CLASSES, Thing
from noctowl.data.world import VALUES, Split, caption, scene, substitutes
from noctowl.text import class_prompt

SLOTS = tuple(VALUES)
WORDS = tuple(word for values in VALUES.values() for word in values)
NAMES = tuple(class_prompt(name) for name in CLASSES)
WORD_SPANS = tuple(  # rows of WORDS that belong to each slot
    (sum(map(len, list(VALUES.values())[:k])), sum(map(len, list(VALUES.values())[: k + 1])))
    for k in range(len(VALUES))
)


@dataclass(frozen=True)
class Scenes:
    """What is in a batch of images."""

    things: list[Thing]  # O
    image: Int[Tensor, "O"]  # which image an object is in
    boxes: Float[Tensor, "O 4"]  # xyxy, relative to the image
    classes: Int[Tensor, "O"]
    attributes: Int[Tensor, "O S"]

    @classmethod
    def of_things(cls, things: Sequence[Sequence[Thing]], size: int) -> "Scenes":
        """From the things of each image; `size` in pixels."""
        flat = [thing for members in things for thing in members]
        boxes = torch.tensor([thing.box for thing in flat], dtype=torch.float32) / size  # xywh
        return cls(
            things=flat,
            image=torch.tensor([b for b, members in enumerate(things) for _ in members]),
            boxes=torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1),
            classes=torch.tensor([thing.cls for thing in flat]),
            attributes=torch.tensor([[getattr(thing, slot) for slot in SLOTS] for thing in flat]),
        )


class Pictures(NamedTuple):
    """Rendered images."""

    pixels: Float[Tensor, "B 3 S S"]  # normalised as the image processor does it
    covered: Float[Tensor, "B S S"]  # how much things cover each pixel
    things: list[list[Thing]]  # of each image


@dataclass(frozen=True)
class Sentences:
    """True and false sentences about the objects."""

    texts: list[str]  # T
    true: Bool[Tensor, "O T"]  # sentence t holds for object o (also when it was written for another)


def normalise(pixels: np.ndarray) -> Float[Tensor, "B 3 S S"]:
    """uint8 [B, S, S, 3] -> what the image processor gives for square images of the model's size."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(OPENAI_CLIP_MEAN).view(3, 1, 1)) / torch.tensor(OPENAI_CLIP_STD).view(3, 1, 1)


def load_pictures(split: Split, indices: Sequence[int], *, seed: int, size: int) -> Pictures:
    """Renders the images `indices` of a split."""
    pixels, things, covered = zip(*(scene(split, index, seed=seed, size=size) for index in indices))
    return Pictures(normalise(np.stack(pixels)), torch.from_numpy(np.stack(covered)), list(things))


def write_sentences(rng: np.random.Generator, things: Sequence[Thing], n_negatives: int) -> Sentences:
    """For each thing a true sentence naming all or some attributes, and `n_negatives` with one of them changed.

    Opaque is named in 30 % of the cases; an attribute that is not named may be anything.
    """
    texts, classes, stated = [], [], []
    for thing in things:
        named = [slot for slot in SLOTS if rng.random() < 0.5] if rng.random() < 0.4 else list(SLOTS)
        if thing.transparency == 0 and "transparency" in named and rng.random() < 0.7:
            named.remove("transparency")
        named = named or [str(rng.choice(SLOTS[1:]))]
        changed = rng.choice(named, n_negatives)
        for version in (thing, *(substitutes(rng, thing, [slot], 1, shows_held_out=False)[0] for slot in changed)):
            texts.append(caption(version, name_opaque=True, slots=named))
            classes.append(version.cls)
            stated.append([getattr(version, slot) if slot in named else -1 for slot in SLOTS])
    said = torch.tensor(stated)  # [T, S]
    attributes = torch.tensor([[getattr(thing, slot) for slot in SLOTS] for thing in things])  # [O, S]
    agrees = ((said[None] == -1) | (said[None] == attributes[:, None])).all(-1)  # [O, T]
    own_class = torch.tensor([thing.cls for thing in things])[:, None] == torch.tensor(classes)[None]
    return Sentences(texts=texts, true=agrees & own_class)


def patch_centres(grid: int) -> Float[Tensor, "P 2"]:
    """Centres (x, y) of a grid × grid patches, relative to the image, row by row."""
    line = (torch.arange(grid) + 0.5) / grid
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.reshape(-1), y.reshape(-1)], dim=1)


def central_patches(boxes: Float[Tensor, "O 4"], grid: int, share: float) -> Bool[Tensor, "O P"]:
    """Patches whose centre lies in the middle `share` of the box's width and height, but at least one patch."""
    centre, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2 * share
    distance = (patch_centres(grid)[None] - centre[:, None]).abs()  # [O, P, 2]
    return (distance < half.clamp(min=0.5 / grid)[:, None]).all(-1)
