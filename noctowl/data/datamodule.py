"""Training items and their loader.

Legend: V vocabularies kept, C columns, G objects of a vocabulary. One item = one (image, positive caption).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from noctowl.boxes import Frame, to_frame
from noctowl.data.batch import Batch, Item, collate
from noctowl.data.loading import make_loader
from noctowl.data.order import Order
from noctowl.data.records import Annotations
from noctowl.features import ImageSet, Stored
from noctowl.store.sample import Target


@dataclass
class TrainingSet(Dataset[Item]):
    """The vocabularies of an annotation file that can be trained on.

    Args:
        annotations: the file.
        kept: bool [V], which of its vocabularies (token rule, short vocabularies).
        n_negatives: negatives per vocabulary at most; column 0 is the positive.
        images, image_rows: image set and the row of each of the file's images in it.
        embeddings, caption_rows: unit text embeddings [M, D] and the row of each of the file's captions in them.
        frame: the model's box frame.
        stored: features of all images of the set, or None: images are then read and preprocessed at each access.
        weights: of stored patches by image, [M], where a sample of them is stored; None: all are.
    """

    annotations: Annotations
    kept: np.ndarray
    n_negatives: int
    images: ImageSet | Dataset[torch.Tensor]
    image_rows: np.ndarray
    embeddings: torch.Tensor
    caption_rows: np.ndarray
    frame: Frame
    stored: Stored | None = None
    weights: Any = None

    def __post_init__(self) -> None:
        self.vocabularies = np.flatnonzero(self.kept)

    def __len__(self) -> int:
        return len(self.vocabularies)

    def __getitem__(self, index: int) -> Item:
        file, v = self.annotations, int(self.vocabularies[index])
        image = int(file.vocab_image[v])
        row = int(self.image_rows[image])
        columns = self._columns(v)
        return Item(
            key=(int(file.image_ids[image]), int(file.category_ids[columns[0]])),
            queries=self.embeddings[torch.from_numpy(self.caption_rows[columns])],  # [C, D]
            gt_boxes=self._boxes(v),
            pixel_values=self.images[row] if self.stored is None else None,
            tokens=None if self.stored is None else self.stored.tokens[row],
            patch_boxes=None if self.stored is None else self.stored.boxes[row],
            patch_weights=None if self.weights is None else self.weights[row],
        )

    def _columns(self, v: int) -> np.ndarray:
        """Captions of a vocabulary that are trained on: int64 [C]."""
        return self.annotations.vocabulary(v)[: 1 + self.n_negatives]

    def _boxes(self, v: int) -> torch.Tensor:
        """Its objects, [G, 4] xyxy relative to the model's square."""
        file = self.annotations
        width, height = (int(side) for side in file.image_sizes[file.vocab_image[v]])
        return to_frame(torch.from_numpy(file.object_boxes[file.objects(v)]).float(), width, height, self.frame)

    def targets(self) -> dict[int, list[Target]]:
        """Objects and numbers of columns of all items, by row of the image set."""
        found: dict[int, list[Target]] = {}
        for v in self.vocabularies.tolist():
            row = int(self.image_rows[self.annotations.vocab_image[v]])
            found.setdefault(row, []).append(Target(self._boxes(v), len(self._columns(v))))
        return found


class DataModule(pl.LightningDataModule):
    """The training loader: shuffled by (seed, epoch), shared out between processes, the last incomplete batch kept."""

    def __init__(self, dataset: TrainingSet, *, batch_size: int, num_workers: int, seed: int, pin_memory: bool = False):
        super().__init__()
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        # Stored features are a slice of memory: workers would only copy it once more.
        self.num_workers = num_workers if dataset.stored is None else 0
        self.pin_memory = pin_memory

    def order(self) -> Order:
        """What this process sees from here on: a continued run begins where its checkpoint stopped."""
        if self.trainer is None:
            return Order(len(self.dataset), batch_size=self.batch_size, seed=self.seed)
        order = Order(
            len(self.dataset),
            batch_size=self.batch_size,
            seed=self.seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        loop = self.trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.ready  # all of them where the checkpoint ended an epoch
        epoch = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        order.continue_at(epoch, done if done < self.rounds(order) else 0)
        return order

    def rounds(self, order: Order) -> int:
        """Batches of this process in an epoch."""
        limit = self.trainer.limit_train_batches if self.trainer is not None else None
        return min(order.rounds, limit) if isinstance(limit, int) else order.rounds

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of `batch_size` vocabularies (per process)."""
        return make_loader(
            self.dataset,
            batch_size=self.batch_size,
            sampler=self.order(),
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
        )
