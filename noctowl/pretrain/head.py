"""Stage 2 of the miniature's pretraining: a new class head on frozen tokens, and how much it is told of attributes.

A head that learns class names alone ranks captions at chance, one that learns sentences with attributes has nothing
left to learn. Real detectors stand in between: captions of the web made them see some attributes, by the way. So the
head also tells each thing's own caption from captions of things of *other classes*, with a small weight. That weight is
the one knob of the miniature; `choose` takes the smallest that gives the wanted rank-1 accuracy on validation scenes.

Legend: I images, O objects, P patches, M (object, patch) pairs, K classes, Dv width of tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from noctowl.data.render import Thing
from noctowl.data.world import PRETRAIN, VAL, Split, caption, vocabularies
from noctowl.head import ClassHead, cosine, unit
from noctowl.pretrain import losses
from noctowl.pretrain.batch import NAMES, Scenes, central_patches, load_pictures
from noctowl.pretrain.model import Pretrainee


@dataclass(frozen=True)
class HeadSettings:
    """Recipe of stage 2. `weights` are tried in this order; a validation rank-1 (N = 5) of `wanted` ends the search."""

    images: int = 6000
    epochs: int = 4
    batch: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.02
    weights: tuple[float, ...] = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3)
    wanted: float = 0.27


@dataclass(frozen=True)
class Frozen:
    """Tokens of rendered images and what is in them (without the pixels)."""

    tokens: Float[Tensor, "I P Dv"]
    things: list[list[Thing]]  # of each image


@torch.no_grad()
def freeze(model: Pretrainee, split: Split, images: range, *, seed: int, chunk: int = 100) -> Frozen:
    """Runs the vision tower once over the images of a split."""
    tokens: list[Tensor] = []
    things: list[list[Thing]] = []
    for start in range(images.start, images.stop, chunk):
        part = range(start, min(start + chunk, images.stop))
        pictures = load_pictures(split, part, seed=seed, size=model.side)
        tokens.append(model.tokens(pictures.pixels)[0])
        things += pictures.things
    return Frozen(torch.cat(tokens), things)


def class_loss(
    module: nn.Module, tokens: Float[Tensor, "B P Dv"], names: Float[Tensor, "K D"], scenes: Scenes
) -> Float[Tensor, ""]:
    """What a class head learns of class names: cross-entropy on the things, focal loss against the background.

    Patches on the border of a thing are neither.
    """
    grid = round(tokens.shape[1] ** 0.5)
    rows, patches, weight = losses.pair_weights(central_patches(scenes.boxes, grid, 0.8))
    images, classes = scenes.image[rows], scenes.classes[rows]  # [M]
    head = ClassHead(module)
    similarity = cosine(head.embed(tokens), names)  # [B, P, K]
    named = losses.weighted_cross_entropy(similarity=similarity[images, patches], target=classes, weight=weight)
    target = torch.zeros_like(similarity)
    target[images, patches, classes] = 1
    valid = torch.ones(tokens.shape[:2], dtype=torch.bool)
    near, border = torch.nonzero(central_patches(scenes.boxes, grid, 1.15), as_tuple=True)
    valid[scenes.image[near], border] = False
    valid[images, patches] = True
    logits = head.logits(tokens, similarity)
    return 0.5 * named + 3 * losses.focal(logits=logits, target=target, valid=valid, count=len(rows))


def sentence_loss(
    module: Any, tokens: Float[Tensor, "B P Dv"], captions: Float[Tensor, "O D"], scenes: Scenes
) -> Float[Tensor, ""]:
    """Each thing's caption against those of things of other classes: attributes help, but are not needed."""
    grid = round(tokens.shape[1] ** 0.5)
    rows, patches, weight = losses.pair_weights(central_patches(scenes.boxes, grid, 0.8))
    embedded = unit(module.dense0(tokens[scenes.image[rows], patches]))  # [M, D]
    same = scenes.classes[rows][:, None] == scenes.classes[None]  # [M, O]
    return losses.caption_contrast(similarity=embedded @ captions.T, own=rows, ignored=same, weight=weight)


def train_head(model: Pretrainee, frozen: Frozen, *, weight: float, settings: HeadSettings, seed: int) -> Any:
    """A class head with a fresh dense0, trained on class names and, with `weight`, on captions."""
    head = copy.deepcopy(model.detector.class_head).requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        fresh = torch.randn(head.dense0.weight.shape, generator=generator)
        head.dense0.weight.copy_(fresh * head.dense0.in_features**-0.5)
        head.dense0.bias.zero_()
        names = model.encode_text(NAMES)
        captions = model.encode_text([caption(thing) for things in frozen.things for thing in things])
    first = np.cumsum([0, *map(len, frozen.things)])  # row of each image's first caption
    optimiser = torch.optim.AdamW(head.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    batches = len(frozen.things) // settings.batch
    for step in range(settings.epochs * batches):
        if step % batches == 0:
            order = torch.randperm(len(frozen.things), generator=generator)
        for group in optimiser.param_groups:
            group["lr"] = settings.lr * 0.5 * (1 + np.cos(np.pi * step / (settings.epochs * batches)))
        chosen = order[(step % batches) * settings.batch :][: settings.batch]
        scenes = Scenes.of_things([frozen.things[i] for i in chosen.tolist()], model.side)
        rows = np.concatenate([np.arange(first[i], first[i + 1]) for i in chosen.tolist()])
        tokens = frozen.tokens[chosen]
        loss = class_loss(head, tokens, names, scenes)
        if weight:
            loss = loss + weight * sentence_loss(head, tokens, captions[torch.from_numpy(rows)], scenes)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.requires_grad_(False)


@torch.no_grad()
def rank_one(model: Pretrainee, layer: Any, frozen: Frozen, split: Split, *, seed: int) -> float:
    """How often the true caption beats five hard negatives at the middle patch of the things (chance 1/6)."""
    options: dict[str, Any] = {"seed": seed, "size": model.side, "train": False}
    queries: list[Sequence[str]] = []
    tokens = []
    for index, things in enumerate(frozen.things):
        for members, texts in vocabularies(split, index, things, 1, **options):
            box = Scenes.of_things([members[:1]], model.side).boxes
            middle = int(central_patches(box, model.grid, 0.0)[0].float().argmax())
            queries.append(texts[:6])
            tokens.append(frozen.tokens[index, middle])
    captions = model.encode_text([text for texts in queries for text in texts]).view(len(queries), 6, -1)
    scores = torch.einsum("vcd,vd->vc", captions, unit(layer(torch.stack(tokens))))
    return float((scores.argmax(1) == 0).float().mean())


def choose(model: Pretrainee, *, seed: int, settings: HeadSettings) -> tuple[nn.Module, list[tuple[float, float]]]:
    """The head of the first weight whose validation rank-1 reaches `wanted` (else the last), and what was tried."""
    train = freeze(model, PRETRAIN, range(settings.images), seed=seed)
    validation = freeze(model, VAL, range(250), seed=0)
    tried: list[tuple[float, float]] = []
    for weight in settings.weights:
        head = train_head(model, train, weight=weight, settings=settings, seed=seed)
        tried.append((weight, rank_one(model, head.dense0, validation, VAL, seed=0)))
        print(f"sentence weight {weight}: validation rank-1 {tried[-1][1]:.3f}", flush=True)
        if tried[-1][1] >= settings.wanted:
            break
    return head, tried
