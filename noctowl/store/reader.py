"""Stored features in the place of `ImageFeatures`: `reader.tokens[row]`, `reader.boxes[[1, 5, 7]]`, read when needed.

Legend: I images, P patches, M of them in a sample, Dv vision width. Rows are those of the image set.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noctowl.errors import DataError
from noctowl.model import ImageFeatures
from noctowl.store.shards import MappedShard, ShardIndex, row_check
from noctowl.store.spec import Spec, unpack

ABSENT = -1


class FeatureReader:
    """Features of images by row, from memory-mapped shards; fp32 tensors whatever the store's dtype.

    Attributes: `tokens` [I, P, Dv], `boxes` [I, P, 4], `objectness` [I, P] or None: indexed by a row, or by a list of
    rows, slice or tensor, which gives a stack. A single row of an fp32 store is a view of the map, no copy: do
    not write into it (the file would stay as it is, this reader's later answers would not).

    Every row's quick checksum is compared the first time that a process reads it (`verify=False` leaves that out). Maps
    are opened when needed, by each process for itself: a reader may be pickled, forked and spawned.
    """

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        indexes: Sequence[ShardIndex],
        identities: Mapping[int, str],
        n_rows: int,
        names: Sequence[str] = (),
        *,
        verify: bool = True,
    ) -> None:
        self.folder, self.spec, self.verify, self.names = folder, spec, verify, names
        self.sampled = spec.sample is not None
        self.indexes = [ShardIndex(**{**vars(index), "entries": ()}) for index in indexes]
        where = {e.identity: (s, e.row, e.check) for s, index in enumerate(indexes) for e in index.entries}
        self._shard = np.full(n_rows, ABSENT, np.int32)
        self._row = np.zeros(n_rows, np.int32)
        self._check = np.zeros(n_rows, np.uint32)
        self._seen = np.zeros(n_rows, np.bool_)
        missing = [row for row, identity in identities.items() if identity not in where]
        if missing:
            named = ", ".join(self._name(row) for row in missing[:5]) + (", …" if len(missing) > 5 else "")
            raise DataError(
                f"{folder}: {len(missing)} of {len(identities)} images are not in this store: {named}. Build it first: "
                "`noctowl features build`, or features.mode=disk, which builds what is missing."
            )
        for row, identity in identities.items():
            self._shard[row], self._row[row], self._check[row] = where[identity]
        self._open: dict[int, MappedShard] = {}

    # Made anew at each access: a reader that refers to itself would keep its maps until the garbage collector comes.

    @property
    def tokens(self) -> "Column":
        """[I, P, Dv]"""
        return Column(self, "tokens")

    @property
    def boxes(self) -> "Column":
        """[I, P, 4], xyxy relative to the model's square"""
        return Column(self, "boxes")

    @property
    def objectness(self) -> "Column | None":
        """[I, P], logits; None for OWL-ViT"""
        return Column(self, "objectness") if self.spec.objectness and not self.sampled else None

    @property
    def weights(self) -> "Column | None":
        """[M] by image where a sample of its patches is stored; None: all P are"""
        return Column(self, "weights") if self.sampled else None

    def __len__(self) -> int:
        return len(self._shard)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def read(self, rows: Sequence[int]) -> ImageFeatures:
        """fp32 features of some images, stacked. Raises DataError where a row was not asked for or is damaged."""
        objectness = None if self.objectness is None else self.objectness[rows]
        return ImageFeatures(self.tokens[rows], self.boxes[rows], objectness)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Have the system read these rows from disk in the background; where it cannot, nothing happens."""
        for row in rows:
            self._mapped(row).fetch(int(self._row[row]))

    def get(self, name: str, row: int) -> Tensor:
        """One tensor of one image, fp32."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} images")
        row = row % len(self)
        shard, place = self._mapped(row), int(self._row[row])
        unchecked = self.verify and not self._seen[row]
        if unchecked or name == "tokens":
            shard.fetch(place)
        if unchecked:
            if row_check(shard.row(place)) != int(self._check[row]):
                raise DataError(
                    f"{shard.path}: the features of {self._name(row)} are damaged (checksum). Run `noctowl features "
                    "verify --repair` and build again: only what is damaged is computed anew."
                )
            self._seen[row] = True
        value = shard.get(name, place)
        if name != "tokens":
            return value
        return unpack(value, shard.get("scales", place) if "scales" in shard.tensors else None)

    def _mapped(self, row: int) -> MappedShard:
        number = int(self._shard[row])
        if number == ABSENT:
            raise DataError(f"{self.folder}: {self._name(row)} was not asked for when the store was opened")
        if number not in self._open:
            self._open[number] = MappedShard(self.folder, self.indexes[number], self.spec)
        return self._open[number]

    def _name(self, row: int) -> str:
        return self.names[row] if row < len(self.names) else f"row {row}"


class Column:
    """One tensor of all images, indexed like a tensor along its first dimension."""

    def __init__(self, reader: FeatureReader, name: str) -> None:
        self.reader, self.name = reader, name

    @property
    def shape(self) -> torch.Size:
        """As the stacked tensor would have it (not for a sample, whose images differ in length)."""
        fields = {field.name: field.shape for field in self.reader.spec.fields}
        return torch.Size((len(self.reader), *fields[self.name]))

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, rows: Any) -> Tensor:
        """fp32 [...] for an integer, [n, ...] for a list, array, tensor or slice of rows."""
        if isinstance(rows, slice):
            rows = range(*rows.indices(len(self)))
        elif isinstance(rows, (Tensor, np.ndarray)):
            rows = rows.tolist()
        if not isinstance(rows, Sequence):
            return self.reader.get(self.name, int(rows))
        if self.reader.sampled:
            raise DataError(
                f"{self.reader.folder}: holds a sample of each image's patches (features.background), which serves "
                "training only. Evaluation needs all patches: set features.background=null, and build what is missing."
            )
        if not len(rows):
            return torch.empty(0, *self.shape[1:])
        return torch.stack([self.reader.get(self.name, int(row)) for row in rows])
