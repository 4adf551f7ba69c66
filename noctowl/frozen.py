"""Where the image features of a run come from: memory, the store on disk, or the detector in every epoch.

`tree` is a checked, plain configuration (see `noctowl.config`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from noctowl.data.datamodule import TrainingSet
from noctowl.data.images import Preprocessor
from noctowl.features import ImageSet, Stored, TextBank, choose_mode, store
from noctowl.launch import started
from noctowl.model import OwlDetector
from noctowl.store import FeatureReader, FeatureStore, TextStore, build

Tree = dict[str, Any]
PRECISIONS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class Frozen:
    """Where the image features of a run come from, and how many images were encoded for it beforehand."""

    stored: Stored | None  # None: computed live
    reason: str
    encoded: int = 0
    sampled: FeatureReader | None = None  # training's own, where it needs only a sample of the patches

    def give(self, dataset: TrainingSet) -> None:
        """Hand a training set its features."""
        if self.sampled is None:
            dataset.stored = self.stored
        else:
            dataset.stored, dataset.weights = self.sampled, self.sampled.weights


def make_images(detector: OwlDetector, root: Path, pad_value: float) -> ImageSet:
    """An empty image set with the detector's own preprocessing."""
    return ImageSet(root, Preprocessor(detector.image_processor, frame=detector.frame, pad_value=pad_value))


def work_of(tree: Tree, device: torch.device) -> Tree:
    """How images are fed to the towers outside of training."""
    return {
        "batch_size": tree["benchmark"]["batch_size"],
        "num_workers": tree["trainer"]["num_workers"],
        "device": device,
        "autocast": PRECISIONS.get(tree["trainer"]["precision"]),
    }


def store_of(tree: Tree, detector: OwlDetector, images: ImageSet, device: torch.device) -> FeatureStore:
    """The store of all patches that a configuration names."""
    chosen, work = tree["features"], work_of(tree, device)
    options: dict[str, Any] = {"dtype": chosen["dtype"], "device": device, "autocast": work["autocast"]}
    return FeatureStore.for_model(Path(chosen["root"]).expanduser(), detector, images.preprocessor, **options)


def text_bank(tree: Tree, detector: OwlDetector, device: torch.device) -> TextBank:
    """An empty bank of text embeddings; with features=disk they are read from the store and kept there."""
    chosen = tree["features"]
    root = Path(chosen["root"]).expanduser()
    shelf = TextStore.for_model(root, detector, device) if chosen["mode"] == "disk" else None
    return TextBank(detector, policy=tree["data"]["token_policy"], device=device, shelf=shelf)


class Wanted(NamedTuple):
    """A store that a run reads, the rows of it, and the bytes that stores built after it will ask of the disk."""

    store: FeatureStore
    rows: list[int]
    later: int


def stores_of(
    tree: Tree,
    detector: OwlDetector,
    images: ImageSet,
    device: torch.device,
    *,
    dataset: TrainingSet,
    evaluated: Sequence[int],
) -> list[Wanted]:
    """Stores that a training run reads, in the order in which to build them: one of all images; or, with
    `features.background`, samples of the patches of those that are trained on, then one of the images that are
    evaluated. What the last one needs is known beforehand, so that the first can be refused room for both."""
    full, chosen = store_of(tree, detector, images, device), tree["features"]
    if chosen["background"] is None:
        return [Wanted(full, list(range(len(images))), 0)]
    targets = dataset.targets()
    sampled = full.sampled(chosen["background"], chosen["background_seed"], targets)
    later = full.room(images, evaluated).needed
    return [Wanted(sampled, sorted(targets), later), Wanted(full, list(evaluated), 0)]


def features_of(
    tree: Tree, detector: OwlDetector, images: ImageSet, device: torch.device, *, keep: bool = True
) -> Frozen:
    """Features of all images of the set as `features.mode` says: in memory, in the store, or to be computed live.

    Without `keep`, "auto" never comes to "disk".
    """
    mode, work = tree["features"]["mode"], work_of(tree, device)
    shelf = store_of(tree, detector, images, device)

    def disk() -> tuple[int, int]:
        if mode == "auto" and not keep:
            return 1, 0  # no room: this run is not to write a store
        room = shelf.room(images)
        return room.needed, room.free

    exact = replace(shelf.spec, dtype="fp32").bytes_per_image
    chosen, reason = choose_mode(mode, memory_bytes=len(images) * exact, disk=disk)
    if chosen in ("live", "stream"):
        return Frozen(None, reason)
    if chosen == "memory":
        # Processes that training starts itself (trainer.devices without a launcher) come later: the first one is alone.
        features = store(detector, images, shared=started(os.environ) is not None, **work)
        return Frozen(features, reason, encoded=len(images))
    report = build(shelf, detector, images, **work)
    return Frozen(shelf.reader(images), f"{reason}: {report.found} found, {report.encoded} encoded", report.encoded)


def training_features(
    tree: Tree,
    detector: OwlDetector,
    images: ImageSet,
    device: torch.device,
    *,
    dataset: TrainingSet,
    evaluated: Sequence[int],
) -> Frozen:
    """`features_of` for a training run; with `features.background` a sample of the patches of the images trained on.

    `evaluated`: rows of the image set that need all patches.
    """
    background = tree["features"]["background"]
    if background is None:
        return features_of(tree, detector, images, device)
    stores = stores_of(tree, detector, images, device, dataset=dataset, evaluated=evaluated)
    work: Mapping[str, Any] = work_of(tree, device)
    reports = [build(shelf, detector, images, rows, beside=later, **work) for shelf, rows, later in stores]
    sampled, full = (shelf.reader(images, rows) for shelf, rows, _ in stores)
    found, encoded = (sum(getattr(report, name) for report in reports) for name in ("found", "encoded"))
    reason = "features are computed once and kept on disk, of training images every patch that can become foreground "
    reason += f"and {background} of the others: {found} found, {encoded} encoded"
    return Frozen(full, reason, encoded, sampled=sampled)
