"""Makes the tiny detector from nothing: `python -m noctowl.pretrain --out checkpoints/tiny --seed 0`, about 30 minutes.

Two stages, both on the synthetic world (noctowl/data/world.py), whose held-out combinations they never see.
1. Everything trains. A projection that is thrown away afterwards learns sentences against sentences with one attribute
   changed, attribute words and class names; so the tokens know the attributes. The class head (dense0) learns class names
   only. Boxes, objectness and, on the first layer, silhouettes beside it.
2. The tokens are frozen and the class head starts anew (noctowl/pretrain_head.py): class names, plus a weak term with whole
   sentences. The weight of that term decides how much the pretrained head knows of attributes; it is on the card.

Legend: B images, P patches, M (object, patch) pairs, K classes, D width of text embeddings, Dv of tokens.
"""

import argparse
import copy
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer, Owlv2ForObjectDetection

from noctowl import pretrain_losses as losses
from noctowl.architectures import initialise, tiny
from noctowl.boxes import cxcywh_to_xyxy
from noctowl.data.world import COARSE_VAL, PRETRAIN, VAL, vocabularies, words
from noctowl.head import ClassHead, cosine, unit
from noctowl.pretrain_batch import NAMES, WORD_SPANS, WORDS, Scenes, central_patches, load_scenes, write_sentences
from noctowl.text import small_clip_tokenizer, tokenize


@dataclass(frozen=True)
class PretrainSettings:
    """The recipe; the defaults are those of the shipped checkpoint."""

    seed: int = 0
    steps: int = 5600
    batch: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.02
    warmup: int = 100
    n_merges: int = 4000
    sentence_negatives: int = 3
    attribute_weight: float = 0.5
    sentence_weight: float = 0.5
    projection_class_weight: float = 1.0
    head_weight: float = 1.5
    occupancy_weight: float = 2.0


class Pretrainee(nn.Module):
    """The detector and the two layers that are thrown away: the projection and the silhouette predictor."""

    def __init__(self, detector: Owlv2ForObjectDetection):
        super().__init__()
        vision = detector.config.vision_config
        self.detector = detector
        self.projection = nn.Linear(vision.hidden_size, detector.config.projection_dim)
        self.silhouette = nn.Linear(vision.hidden_size, (vision.patch_size // 2) ** 2)

    @property
    def grid(self) -> int:
        vision = self.detector.config.vision_config
        return vision.image_size // vision.patch_size

    def tokens(self, pixels: Float[Tensor, "B 3 S S"]) -> tuple[Float[Tensor, "B P Dv"], Float[Tensor, "B P Dv"]]:
        """The detector's merged patch tokens, and the patch tokens after the first layer."""
        vision = self.detector.owlv2.vision_model
        output = vision(pixel_values=pixels, output_hidden_states=True)
        last = vision.post_layernorm(output.last_hidden_state)
        return self.detector.layer_norm(last[:, 1:] * last[:, :1]), output.hidden_states[1][:, 1:]

    def boxes(self, tokens: Float[Tensor, "B P Dv"]) -> Float[Tensor, "B P 4"]:
        """xyxy, relative to the image."""
        bias = self.detector.box_bias.to(tokens.device)
        return cxcywh_to_xyxy((self.detector.box_head(tokens) + bias).sigmoid())

    def encode_text(self, tokenizer: CLIPTokenizer, texts: Iterable[str]) -> Float[Tensor, "T D"]:
        """Unit embeddings; equal texts are encoded once."""
        texts = list(texts)
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        encoded = tokenize(tokenizer, list(rows))
        longest = int(encoded.lengths.max())  # cutting the padding changes nothing: the mask hides it
        pooled = self.detector.owlv2.text_model(
            input_ids=encoded.input_ids[:, :longest], attention_mask=encoded.attention_mask[:, :longest]
        ).pooler_output
        embeddings = F.normalize(self.detector.owlv2.text_projection(pooled), dim=-1)
        return embeddings[torch.tensor([rows[text] for text in texts])]


@torch.no_grad()
def warm_start(detector: Owlv2ForObjectDetection, pixels: Float[Tensor, "B 3 S S"], generator: torch.Generator) -> None:
    """Initial weights that save most of the steps a transformer needs to learn how to see.

    Sine-cosine positions, attention layers with query·key near the identity and value·output near its negative (mimetic
    initialisation, Trockman and Kolter 2023), and a patch embedding that whitens the patches of `pixels`.
    """
    vision = detector.owlv2.vision_model
    width, patch = detector.config.vision_config.hidden_size, detector.config.vision_config.patch_size
    grid = detector.config.vision_config.image_size // patch

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    line = torch.arange(grid).float()
    rates = 30 ** -(torch.arange(width // 4).float() / (width // 4))
    y, x = torch.meshgrid(line, line, indexing="ij")
    angles = [axis.reshape(-1, 1) * rates for axis in (x, y)]
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    vision.embeddings.position_embedding.weight[1:] = torch.cat(waves, dim=1)
    for layer in vision.encoder.layers:
        attention = layer.self_attn
        for first, second, scale, sign in (
            (attention.q_proj, attention.k_proj, 0.8, 1),
            (attention.v_proj, attention.out_proj, 0.6, -1),
        ):
            rotation = torch.linalg.qr(noise(width, width))[0]
            other = rotation if sign > 0 else -rotation.T
            first.weight.copy_(scale * rotation + 0.02 * noise(width, width))
            second.weight.copy_(scale * other + 0.02 * noise(width, width))
    patches = pixels.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * patch**2)
    patches = patches - patches.mean(0)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    values, vectors = values.flip(0)[:width], vectors.flip(1)[:, :width]  # the largest first
    rotation = torch.linalg.qr(noise(width, width))[0][:, : len(values)]
    filters = rotation @ (vectors / (values + 0.05).sqrt()).T
    vision.embeddings.patch_embedding.weight.copy_(filters.view(width, 3, patch, patch))


def build(settings: PretrainSettings) -> tuple[Pretrainee, CLIPTokenizer]:
    """The untrained model and its tokenizer."""
    tokenizer = small_clip_tokenizer(words(), n_merges=settings.n_merges)
    detector = initialise(tiny(tokenizer), seed=settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    size = detector.config.vision_config.image_size
    warm_start(detector, load_scenes(PRETRAIN, range(300), seed=settings.seed, size=size).pixels, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return Pretrainee(detector), tokenizer


def step_losses(
    model: Pretrainee, tokenizer: CLIPTokenizer, scenes: Scenes, rng: np.random.Generator, settings: PretrainSettings
) -> dict[str, Tensor]:
    """The weighted terms of one batch; their sum is what trains."""
    sentences = write_sentences(rng, scenes.things, settings.sentence_negatives)
    texts = model.encode_text(tokenizer, [*NAMES, *WORDS, *sentences.texts])
    names, attribute_words, captions = texts.split([len(NAMES), len(WORDS), len(sentences.texts)])
    tokens, first_layer = model.tokens(scenes.pixels)
    inside = central_patches(scenes.boxes, model.grid, 0.8)  # [O, P]
    rows, patches, weight = losses.pair_weights(inside)
    images = scenes.image[rows]
    picked, classes = tokens[images, patches], scenes.classes[rows]  # [M, Dv], [M]

    projected = unit(model.projection(picked))
    by_class = losses.weighted_cross_entropy(similarity=projected @ names.T, target=classes, weight=weight)
    by_word = [
        losses.weighted_cross_entropy(
            similarity=projected @ attribute_words[start:stop].T, target=scenes.attributes[rows, slot], weight=weight
        )
        for slot, (start, stop) in enumerate(WORD_SPANS)
    ]
    by_sentence = losses.caption_contrast(
        similarity=projected @ captions.T,
        own=rows * (1 + settings.sentence_negatives),
        ignored=sentences.true[rows],
        weight=weight,
    )
    boxes = model.boxes(tokens)[images, patches]
    touched = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    touched[images, patches] = True
    seen = model.detector.objectness_head(tokens.detach())[..., 0]  # [B, P]
    return {
        "classes": settings.projection_class_weight * by_class,
        "words": settings.attribute_weight * torch.stack(by_word).mean(),
        "sentences": settings.sentence_weight * by_sentence,
        "head": settings.head_weight * head_loss(model.detector.class_head, tokens, names, scenes),
        "boxes": losses.box_regression(boxes=boxes, target=scenes.boxes[rows], weight=weight),
        "objectness": 0.2 * losses.objectness(logits=seen, inside=touched),
        "occupancy": settings.occupancy_weight
        * losses.occupancy(logits=model.silhouette(first_layer), covered=scenes.covered),
    }


def head_loss(
    module: nn.Module, tokens: Float[Tensor, "B P Dv"], names: Float[Tensor, "K D"], scenes: Scenes
) -> Float[Tensor, ""]:
    """What the class head learns of class names: cross-entropy on the things, focal loss against the background.

    Patches on the border of a thing are neither.
    """
    grid = round(tokens.shape[1] ** 0.5)
    rows, patches, weight = losses.pair_weights(central_patches(scenes.boxes, grid, 0.8))
    images, classes = scenes.image[rows], scenes.classes[rows]
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


def learning_rate(step: int, settings: PretrainSettings) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    decay = 0.5 * (1 + np.cos(np.pi * step / settings.steps)) * 0.98 + 0.02
    return settings.lr * min(1, (step + 1) / settings.warmup) * decay


def pretrain(settings: PretrainSettings, *, report_every: int = 500) -> tuple[Pretrainee, CLIPTokenizer]:
    """Stage 1. Returns the exponential moving average of the weights."""
    model, tokenizer = build(settings)
    average = copy.deepcopy(model).requires_grad_(False)
    small = [p for n, p in model.named_parameters() if p.ndim < 2 or "embedding" in n]
    kept = {id(p) for p in small}
    large = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": large, "weight_decay": settings.weight_decay}, {"params": small, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
    rng = np.random.default_rng([settings.seed, 7])
    size = model.detector.config.vision_config.image_size
    start, sums, count = time.process_time(), {}, 0
    for step in range(settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, settings)
        first = step * settings.batch
        scenes = load_scenes(PRETRAIN, range(first, first + settings.batch), seed=settings.seed, size=size)
        terms = step_losses(model, tokenizer, scenes, rng, settings)
        optimiser.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        if step % 4 == 3:
            keep = min(0.998, (step + 1) / (step + 10)) ** 4
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
        sums, count = {name: sums.get(name, 0.0) + value.item() for name, value in terms.items()}, count + 1
        if step + 1 in (20, 100) or (step + 1) % 100 == 0:
            means = " ".join(f"{name} {value / count:.3f}" for name, value in sums.items())
            print(f"{step + 1} {means} | cpu {time.process_time() - start:.0f} s", flush=True)
            sums, count = {}, 0
        if (step + 1) % report_every == 0:
            print("  " + probe(average, tokenizer, settings), flush=True)
    return average.eval(), tokenizer


@torch.no_grad()
def probe(model: Pretrainee, tokenizer: CLIPTokenizer, settings: PretrainSettings, n: int = 250) -> str:
    """Accuracies at the middle patch of validation things, for the projection and the class head, and the boxes' IoU."""
    size = model.detector.config.vision_config.image_size
    scenes = load_scenes(COARSE_VAL, range(n), seed=settings.seed, size=size)
    tokens, _ = model.tokens(scenes.pixels)
    middle = central_patches(scenes.boxes, model.grid, 0.0).float().argmax(1)
    picked = tokens[scenes.image, middle]
    texts = model.encode_text(tokenizer, [*NAMES, *WORDS])
    names, attribute_words = texts.split([len(NAMES), len(WORDS)])
    parts = []
    for name, layer in (("projection", model.projection), ("head", model.detector.class_head.dense0)):
        embedded = unit(layer(picked))
        right = [(embedded @ names.T).argmax(1) == scenes.classes]
        for slot, (start, stop) in enumerate(WORD_SPANS):
            right.append((embedded @ attribute_words[start:stop].T).argmax(1) == scenes.attributes[:, slot])
        ranks = rank_one(model, tokenizer, layer, settings)
        figures = " ".join(f"{r.float().mean():.2f}" for r in right)
        parts.append(f"{name}: class, slots {figures}, rank-1 {ranks:.3f}")
    boxes = model.boxes(tokens)[scenes.image, middle]
    left_top, right_bottom = torch.maximum(boxes, scenes.boxes)[:, :2], torch.minimum(boxes, scenes.boxes)[:, 2:]
    shared = (right_bottom - left_top).clamp(min=0).prod(1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (scenes.boxes[:, 2:] - scenes.boxes[:, :2]).prod(1)
    return "; ".join([*parts, f"IoU {(shared / (area - shared)).mean():.3f}"])


def rank_one(
    model: Pretrainee, tokenizer: CLIPTokenizer, layer: nn.Module, settings: PretrainSettings, n: int = 250
) -> float:
    """How often the true caption beats five hard negatives at the middle patch of validation things (chance 1/6)."""
    size = model.detector.config.vision_config.image_size
    hits = []
    for chunk in range(0, n, 50):
        images = range(chunk, min(chunk + 50, n))
        scenes = load_scenes(VAL, images, seed=settings.seed, size=size)
        members = [[t for t, b in zip(scenes.things, scenes.image.tolist()) if b == k] for k in range(len(images))]
        embedded = unit(layer(model.tokens(scenes.pixels)[0]))  # [B, P, D]
        for k, index in enumerate(images):
            options = {"seed": settings.seed, "size": size, "train": False}
            for objects, texts in vocabularies(VAL, index, members[k], 1, **options):
                x, y, w, h = objects[0].box
                box = torch.tensor([[x, y, x + w, y + h]]) / size
                middle = int(central_patches(box, model.grid, 0.0)[0].float().argmax())
                scores = model.encode_text(tokenizer, texts[:6]) @ embedded[k, middle]
                hits.append(int(scores.argmax()) == 0)
    return float(np.mean(hits))


def save_stage(model: Pretrainee, path: Path) -> None:
    """Stage 1 on disk, so that stage 2 can be run again without it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)


def load_stage(path: Path, settings: PretrainSettings) -> tuple[Pretrainee, CLIPTokenizer]:
    model, tokenizer = build(settings)
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False), tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="noctowl.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=PretrainSettings.steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage1", type=Path, help="keep (or, if it exists, reuse) stage 1 in this safetensors file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = PretrainSettings(seed=options.seed, steps=options.steps)
    print(asdict(settings), flush=True)
    if options.stage1 and options.stage1.exists():
        model, tokenizer = load_stage(options.stage1, settings)
    else:
        model, tokenizer = pretrain(settings)
        if options.stage1:
            save_stage(model, options.stage1)


if __name__ == "__main__":
    main()
