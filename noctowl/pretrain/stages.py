"""Makes the tiny detector from nothing: `python -m noctowl.pretrain --out checkpoints/tiny --seed 0`, about 30 minutes.

Two stages, both on the synthetic world (noctowl/data/world.py), whose held-out combinations they never see.
1. Everything trains. A projection that is thrown away afterwards learns sentences against sentences with one attribute
   changed, attribute words and class names; so the tokens know the attributes. The class head (dense0) learns class
   names only. Boxes, objectness and, on the first layer, silhouettes are learnt beside it.
2. The tokens are frozen and the class head starts anew (noctowl/pretrain/head.py): class names, and captions with a
   small weight that decides how much the head knows of attributes; it is on the card (noctowl/pretrain/card.py).

Legend: O objects, P patches, M (object, patch) pairs, S slots.
"""

import argparse
import copy
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noctowl.boxes import iou
from noctowl.data.synthetic import SyntheticSettings, synthetic_root
from noctowl.data.world import COARSE_VAL, PRETRAIN, VAL
from noctowl.errors import DataError, NoctowlError
from noctowl.head import unit
from noctowl.pretrain import losses
from noctowl.pretrain.batch import (
    NAMES,
    WORD_SPANS,
    WORDS,
    Pictures,
    Scenes,
    central_patches,
    load_pictures,
    write_sentences,
)
from noctowl.pretrain.card import measure, save_detector, write_card, write_provenance
from noctowl.pretrain.head import HeadSettings, choose, class_loss, freeze, rank_one
from noctowl.pretrain.model import Pretrainee, build, load_stage, save_stage


@dataclass(frozen=True)
class PretrainSettings:
    """The recipe of stage 1; the defaults are those of the shipped checkpoint."""

    seed: int = 0
    steps: int = 5600
    batch: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.02
    warmup: int = 100
    sentence_negatives: int = 3
    attribute_weight: float = 0.5
    sentence_weight: float = 0.5
    projection_class_weight: float = 1.0
    head_weight: float = 1.5
    occupancy_weight: float = 2.0
    objectness_weight: float = 0.2


def step_losses(
    model: Pretrainee, pictures: Pictures, rng: np.random.Generator, settings: PretrainSettings
) -> dict[str, Tensor]:
    """The weighted terms of one batch; their sum is what trains."""
    scenes = Scenes.of_things(pictures.things, model.side)
    sentences = write_sentences(rng, scenes.things, settings.sentence_negatives)
    texts = model.encode_text([*NAMES, *WORDS, *sentences.texts])
    names, words, captions = texts.split([len(NAMES), len(WORDS), len(sentences.texts)])
    tokens, first_layer = model.tokens(pictures.pixels)
    inside = central_patches(scenes.boxes, model.grid, 0.8)  # [O, P]
    rows, patches, weight = losses.pair_weights(inside)
    images = scenes.image[rows]
    projected = unit(model.projection(tokens[images, patches]))  # [M, D]
    by_class = losses.weighted_cross_entropy(similarity=projected @ names.T, target=scenes.classes[rows], weight=weight)
    by_word = [
        losses.weighted_cross_entropy(
            similarity=projected @ words[start:stop].T, target=scenes.attributes[rows, slot], weight=weight
        )
        for slot, (start, stop) in enumerate(WORD_SPANS)
    ]
    by_sentence = losses.caption_contrast(
        similarity=projected @ captions.T,
        own=rows * (1 + settings.sentence_negatives),
        ignored=sentences.true[rows],
        weight=weight,
    )
    touched = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    touched[images, patches] = True
    objectness = model.detector.objectness_head(tokens.detach())[..., 0]  # [B, P]
    boxes = model.boxes(tokens)[images, patches]
    silhouettes = model.silhouette(first_layer)
    return {
        "classes": settings.projection_class_weight * by_class,
        "words": settings.attribute_weight * torch.stack(by_word).mean(),
        "sentences": settings.sentence_weight * by_sentence,
        "head": settings.head_weight * class_loss(model.detector.class_head, tokens, names, scenes),
        "boxes": losses.box_regression(boxes=boxes, target=scenes.boxes[rows], weight=weight),
        "objectness": settings.objectness_weight * losses.objectness(logits=objectness, inside=touched),
        "occupancy": settings.occupancy_weight * losses.occupancy(logits=silhouettes, covered=pictures.covered),
    }


def learning_rate(step: int, settings: PretrainSettings) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    decay = 0.5 * (1 + np.cos(np.pi * step / settings.steps)) * 0.98 + 0.02
    return settings.lr * min(1, (step + 1) / settings.warmup) * decay


def make_optimiser(model: nn.Module, settings: PretrainSettings) -> torch.optim.Optimizer:
    """AdamW; biases, norms and embeddings do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and "embedding" not in name].append(parameter)
    decays = {True: settings.weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [{"params": groups[decayed], "weight_decay": decays[decayed]} for decayed in (True, False)],
        lr=settings.lr,
        betas=(0.9, 0.98),
    )


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, step: int) -> None:
    """Exponential moving average of the weights, updated every fourth step."""
    if step % 4 == 3:
        keep = min(0.998, (step + 1) / (step + 10)) ** 4
        for kept, new in zip(average.parameters(), model.parameters()):
            kept.lerp_(new, 1 - keep)


def pretrain(settings: PretrainSettings, *, log_every: int = 100, probe_every: int = 500) -> Pretrainee:
    """Stage 1; every batch is rendered afresh. Returns the moving average of the weights, frozen."""
    model = build(settings.seed)
    average = copy.deepcopy(model).requires_grad_(False)
    optimiser = make_optimiser(model, settings)
    rng = np.random.default_rng([settings.seed, 7])
    start = time.process_time()
    sums: dict[str, float] = {"steps": 0.0}
    for step in range(settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, settings)
        indices = range(step * settings.batch, (step + 1) * settings.batch)
        pictures = load_pictures(PRETRAIN, indices, seed=settings.seed, size=model.side)
        terms = step_losses(model, pictures, rng, settings)
        optimiser.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        follow(average, model, step)
        sums["steps"] += 1
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + value.item()
        if (step + 1) % log_every == 0:
            means = " ".join(f"{name} {value / sums['steps']:.3f}" for name, value in sums.items() if name != "steps")
            print(f"{step + 1} {means} | cpu {time.process_time() - start:.0f} s", flush=True)
            sums = {"steps": 0.0}
        if (step + 1) % probe_every == 0:
            print(f"  {probe(average, settings.seed)}", flush=True)
    return average.eval()


@torch.no_grad()
def probe(model: Pretrainee, seed: int, n: int = 250) -> str:
    """Accuracies at the middle patch of validation things, and the IoU of the boxes predicted there."""
    frozen = freeze(model, COARSE_VAL, range(n), seed=seed)
    fine = freeze(model, VAL, range(n), seed=seed)
    scenes = Scenes.of_things(frozen.things, model.side)
    middle = central_patches(scenes.boxes, model.grid, 0.0).float().argmax(1)  # [O]
    picked = frozen.tokens[scenes.image, middle]
    names, words = model.encode_text([*NAMES, *WORDS]).split([len(NAMES), len(WORDS)])
    parts = []
    for name, layer in (("projection", model.projection), ("head", model.detector.class_head.dense0)):
        embedded = unit(layer(picked))
        right = [((embedded @ names.T).argmax(1) == scenes.classes).float().mean()]
        for slot, (start, stop) in enumerate(WORD_SPANS):
            best = (embedded @ words[start:stop].T).argmax(1)
            right.append((best == scenes.attributes[:, slot]).float().mean())
        figures = " ".join(f"{value:.2f}" for value in right)
        parts.append(f"{name}: class and slots {figures}, rank-1 {rank_one(model, layer, fine, VAL, seed=seed):.3f}")
    overlap = iou(model.boxes(frozen.tokens)[scenes.image, middle][:, None], scenes.boxes[:, None])
    return "; ".join([*parts, f"IoU {overlap.mean():.3f}"])


def make(
    out: Path, *, settings: PretrainSettings, head: HeadSettings, data: SyntheticSettings, stage1: Path | None = None
) -> dict[str, Any]:
    """Both stages, the folder, its figures on the synthetic data and its card; returns what provenance.json says.

    `data` is the world whose validation and test files are scored; `stage1` keeps stage 1 in that file, or reuses it
    where it exists. Raises DataError if `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; give a new folder, or empty it first")
    start, earlier = time.process_time(), 0.0
    if stage1 is not None and stage1.is_file():
        model, earlier = load_stage(stage1, settings.seed)
    else:
        model = pretrain(settings)
        if stage1 is not None:
            save_stage(model, stage1, time.process_time() - start)
    projection = rank_one(model, model.projection, freeze(model, VAL, range(250), seed=0), VAL, seed=0)
    model.detector.class_head, tried = choose(model, seed=settings.seed, settings=head)
    save_detector(model, out)
    recipe = {
        "stage1": asdict(settings),
        "stage2": asdict(head),
        "tried": [{"weight": weight, "validation_rank1": rank} for weight, rank in tried],
        "projection_validation_rank1": projection,
        "cpu_seconds": round(earlier + time.process_time() - start),
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = synthetic_root(temporary, data)
        figures = {"validation": measure(out, root, test=False), "test": measure(out, root, test=True)}
        write_provenance(out, root, recipe, figures)
    write_card(out)
    return recipe | {"figures": figures}


def main(arguments: list[str] | None = None) -> None:
    """The command line; `--help` explains it."""
    parser = argparse.ArgumentParser(
        prog="noctowl.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=PretrainSettings.steps, help="of stage 1")
    parser.add_argument("--threads", type=int, default=1, help="one is as fast as two where the machine is shared")
    parser.add_argument(
        "--stage1", type=Path, help="keep stage 1 in this safetensors file, or reuse it where it exists"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = PretrainSettings(seed=options.seed, steps=options.steps)
    try:
        done = make(
            options.out, settings=settings, head=HeadSettings(), data=SyntheticSettings(), stage1=options.stage1
        )
    except NoctowlError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(done["figures"], indent=1))


if __name__ == "__main__":
    main()
