"""What the cost benchmarks share: one thread, process CPU time, detectors, counted towers, a small training world.

Importing this file sets OMP_NUM_THREADS=1, so it has to come before torch.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noctowl.architectures import image_processor, initialise, owlv2_b16, tiny
from noctowl.data.batch import Batch, collate
from noctowl.data.datamodule import TrainingSet
from noctowl.data.fgovd import read_fgovd
from noctowl.data.images import Preprocessor
from noctowl.features import ImageSet, TextBank, store
from noctowl.model import OwlDetector
from noctowl.module import NoctOWL
from noctowl.text import clip_tokenizer, tokenize

CPU = torch.device("cpu")
PER_IMAGE = 18041 / 15366  # items per image of FG-OVD's training set
OPTIMIZER = {"name": "adamw", "lr": 3e-5, "weight_decay": 0.1, "decay_bias": True}
LOSSES: dict[str, dict[str, Any]] = {
    "triplet": {"name": "triplet", "margin": 0.15, "weight": 1.0, "background_weight": 1.0, "gamma": 2.0},
    "cross_entropy": {
        "name": "cross_entropy",
        "temperature": 0.07,
        "weight": 1.0,
        "background_weight": 1.0,
        "gamma": 2.0,
    },
    "bce": {"name": "bce", "weight": 1.0, "background_weight": 1.0, "gamma": 2.0},
}


def start() -> None:
    """One thread; libraries say nothing."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def cpu_seconds(work: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Median process CPU time, and the last result."""
    times, value = [], None
    for _ in range(repeats):
        begin = time.process_time()
        value = work()
        times.append(time.process_time() - begin)
    return statistics.median(times), value


def finish(result: dict[str, Any]) -> int:
    """The JSON line that every benchmark ends with."""
    print(json.dumps(result))
    return 0


def make_detector(side: int | None = None, *, attention: str = "sdpa", seed: int = 0) -> OwlDetector:
    """OWLv2 B/16 with random weights at an image side; None: the miniature, with CLIP's whole vocabulary."""
    tokenizer = clip_tokenizer()
    config: Any = tiny(tokenizer) if side is None else owlv2_b16()
    if side is not None:
        config.vision_config.image_size = side
    model = initialise(config, seed=seed, attention=attention)
    return OwlDetector(model, tokenizer=tokenizer, image_processor=image_processor(config), base_id="random weights")


class Counted:
    """Counts what goes through the towers of a detector: images and captions, one by one."""

    def __init__(self, detector: OwlDetector):
        self.images = self.texts = 0
        encode_images, encode_text = detector.encode_images, detector.encode_text

        def images(pixel_values: Tensor) -> Any:
            self.images += len(pixel_values)
            return encode_images(pixel_values)

        def text(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            self.texts += len(input_ids)
            return encode_text(input_ids, attention_mask)

        detector.encode_images, detector.encode_text = images, text  # type: ignore[method-assign]

    def take(self) -> tuple[int, int]:
        """(images, captions) since the last call."""
        taken, self.images, self.texts = (self.images, self.texts), 0, 0
        return taken


class NoiseImages(ImageSet):
    """Seeded noise in the place of each image: files are neither read nor needed."""

    def __init__(self, detector: OwlDetector):
        super().__init__(Path(), Preprocessor(detector.image_processor, frame=detector.frame, pad_value=0.0))
        self.side = detector.image_size

    def for_workers(self) -> "NoiseImages":
        """Itself: there are no files whose names a worker would have to hold."""
        return self

    def __getitem__(self, row: int) -> Tensor:
        return torch.randn(3, self.side, self.side, generator=torch.Generator().manual_seed(row))


def captions(count: int, seed: int = 0) -> list[str]:
    """Distinct captions in the style of FG-OVD, each within 16 tokens."""
    colors = ("red", "blue", "green", "yellow", "black", "white", "grey", "brown", "pink", "purple", "orange")
    materials = ("wooden", "metal", "plastic", "glass", "leather", "paper", "stone", "fabric", "rattan", "ceramic")
    patterns = ("plain", "striped", "dotted", "checkered", "floral", "banded", "woven")
    things = ("mug", "chair", "lamp", "bowl", "table", "shoe", "bottle", "basket", "hat", "vase", "plate", "box")
    every = [f"A {c} {p} {m} {t}." for c in colors for m in materials for p in patterns for t in things]
    return [every[i] for i in np.random.default_rng(seed).permutation(len(every))[:count]]


def write_training_file(path: Path, n_images: int, n_items: int, n_negatives: int = 10) -> Path:
    """An FG-OVD file: items spread over the images, one or two objects each, no caption twice."""
    rng = np.random.default_rng(0)
    width = 1 + n_negatives
    names = captions(n_items * width)
    images = [{"id": i, "width": 640, "height": 480, "file_name": f"train2017/{i:012}.jpg"} for i in range(n_images)]
    annotations: list[dict[str, Any]] = []
    for item in range(n_items):
        for _ in range(1 + item % 2):
            box = [*rng.uniform(0, 300, 2).round(1), *rng.uniform(40, 160, 2).round(1)]
            first = item * width
            entry = {"id": len(annotations), "image_id": item % n_images, "category_id": first, "bbox": box}
            annotations.append(entry | {"neg_category_ids": list(range(first + 1, first + width))})
    categories = [{"id": i, "name": name} for i, name in enumerate(names)]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations}))
    return path


class World:
    """Images, items and captions to train on, in the proportions of FG-OVD's training set; the coarse names."""

    def __init__(
        self, detector: OwlDetector, *, n_images: int, n_coarse: int, batch_size: int, n_items: int | None = None
    ):
        self.detector, self.batch_size, self.n_images = detector, batch_size, n_images
        self.n_items = n_items or round(n_images * PER_IMAGE)
        with tempfile.TemporaryDirectory() as folder:
            self.file = read_fgovd(write_training_file(Path(folder) / "train.json", n_images, self.n_items))
        self.images = NoiseImages(detector)
        self.image_rows = self.images.add(self.file.image_files, self.file.image_sizes)
        self.pixels = torch.stack([self.images[row] for row in range(n_images)])  # [I, 3, S, S]
        self.text = tokenize(detector.tokenizer, list(self.file.captions), "error")
        names = torch.randn(n_coarse, detector.config.projection_dim, generator=torch.Generator().manual_seed(1))
        self.names = names / names.norm(dim=-1, keepdim=True)  # [K, D]; constant either way, so no text tower for them
        self.start = detector.trainable_state()

    def schedule(self, epochs: int) -> list[list[list[int]]]:
        """Items of each batch of each epoch, shuffled by a seed."""
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(self.n_items, generator=generator) for _ in range(epochs)]
        return [[part.tolist() for part in order.split(self.batch_size)] for order in orders]

    def module(self, loss: str = "triplet", distill: str = "mse", lr: float = OPTIMIZER["lr"]) -> NoctOWL:
        """A fresh module on the pretrained head."""
        self.detector.load_trainable(self.start, self.detector.content_hash())
        return NoctOWL(
            detector=self.detector,
            loss=LOSSES[loss],
            distill={"name": distill, "weight": 1.0},
            optimizer={**OPTIMIZER, "lr": lr},
            schedule={"name": "constant", "warmup_epochs": 0, "min_lr": 0.0},
            coarse_queries=self.names,
        )

    def dataset(self, *, stored: bool) -> TrainingSet:
        """The items; with `stored`, every image and every distinct caption is encoded, once."""
        bank = TextBank(self.detector, policy="error", device=CPU, batch_size=64)
        rows = np.arange(len(self.file.captions))
        features = None
        if stored:
            rows = bank.caption_rows(self.file)
            features = store(self.detector, self.images, batch_size=self.batch_size, num_workers=0, device=CPU)
        kept = np.ones(len(self.file), np.bool_)
        frame = self.detector.frame
        embeddings = bank.embeddings
        return TrainingSet(self.file, kept, 10, self.images, self.image_rows, embeddings, rows, frame, stored=features)

    def live_batch(self, items: Sequence[int]) -> Batch:
        """As a plain loop has it: pixels in memory, towers run over the batch's images and captions."""
        pixels, boxes, columns = [], [], []
        for v in items:
            pixels.append(self.pixels[int(self.image_rows[self.file.vocab_image[v]])])
            boxes.append(self.boxes(v))
            columns.append(torch.from_numpy(self.file.vocabulary(v)).long())
        flat = torch.cat(columns)
        queries = self.detector.encode_text(self.text.input_ids[flat], self.text.attention_mask[flat])
        queries = queries.view(len(items), -1, queries.shape[-1])  # [B, C, D]
        longest = max(len(b) for b in boxes)
        gt_boxes, gt_mask = torch.zeros(len(items), longest, 4), torch.zeros(len(items), longest, dtype=torch.bool)
        for i, b in enumerate(boxes):
            gt_boxes[i, : len(b)], gt_mask[i, : len(b)] = b, True
        everything = torch.ones(queries.shape[:2], dtype=torch.bool)
        return Batch([(v, v) for v in items], queries, everything, gt_boxes, gt_mask, torch.stack(pixels))

    def boxes(self, v: int) -> Tensor:
        """[G, 4] relative to the padded square of 640 pixels."""
        return torch.from_numpy(self.file.object_boxes[self.file.objects(v)]).float() / 640


def optimizer_of(module: NoctOWL) -> torch.optim.Optimizer:
    """The module's own, without a trainer; the rate is constant."""
    return module.make_optimizer(epochs=1, updates_per_epoch=1)[0]


def steps(module: NoctOWL, batches: Sequence[Sequence[int]], make: Callable[[Sequence[int]], Batch]) -> Tensor:
    """Plain gradient steps on the batches; the change of the weights.

    Plain, because AdamW makes a whole step of a gradient that is a rounding error: captions that are padded to other
    lengths differ in the last digit.
    """
    before = module.detector.head.dense0.weight.detach().clone()
    plain = torch.optim.SGD(module.detector.head.dense0.parameters(), lr=1.0)
    return resume(module, plain, batches, make) - before


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest change."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def resume(
    module: NoctOWL, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[int]], make: Callable[..., Batch]
) -> Tensor:
    """Go on training with an optimiser that has run before."""
    for items in batches:
        terms, _ = module.losses(make(items))
        terms.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.detector.head.dense0.weight.detach().clone()


def read_batch(dataset: TrainingSet) -> Callable[[Sequence[int]], Batch]:
    """Batches of a data set with stored features."""
    return lambda items: collate([dataset[i] for i in items])


def components(world: World, dataset: TrainingSet, repeats: int) -> dict[str, float]:
    """Seconds per item of the two towers and of a head step: b, t, h."""
    items = list(range(world.batch_size))
    columns = torch.cat([torch.from_numpy(world.file.vocabulary(v)).long() for v in items])
    ids, mask = world.text.input_ids[columns], world.text.attention_mask[columns]
    pixels = world.pixels[: len(items)]
    backbone, _ = cpu_seconds(lambda: world.detector.encode_images(pixels), repeats)
    text, _ = cpu_seconds(lambda: world.detector.encode_text(ids, mask), repeats)
    module = world.module()
    optimizer, read = optimizer_of(module), read_batch(dataset)
    head, _ = cpu_seconds(lambda: resume(module, optimizer, [items], read), max(repeats, 7))
    return {"backbone": backbone / len(pixels), "text": text / len(items), "head": head / len(items)}


def expected(parts: dict[str, float], epochs: int, runs: int = 1, per_image: float = PER_IMAGE) -> dict[str, float]:
    """Ratio by the components, and its limit where a head step costs nothing."""
    b, t, h = parts["backbone"], parts["text"], parts["head"]
    n, once = runs * epochs, b / per_image + t
    return {"expected": n * (b + t + h) / (once + n * h), "limit": n * (b + t) / once}


def full_size() -> dict[str, float]:
    """Components of B/16 at its own 960 pixels: one image forward, a head step of eight items."""
    world = World(make_detector(960), n_images=1, n_items=8, n_coarse=1203, batch_size=8)
    return components(world, world.dataset(stored=True), 1)
