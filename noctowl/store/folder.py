"""A store's folder: opening, meta.json, which images it has, how much room it needs.

<root>/hashes.json                     content hashes of image files that have been seen (a cache)
<root>/<key>/meta.json                 all that the key is made of, in clear
<root>/<key>/shard-<builder>-<n>.safetensors, .json
<root>/<key>/claims/, lock             builders at work
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from noctowl.data.images import Preprocessor
from noctowl.errors import DataError
from noctowl.features import ImageSet
from noctowl.model import OwlDetector
from noctowl.runfolder import atomic
from noctowl.store.identity import identities
from noctowl.store.reader import FeatureReader
from noctowl.store.sample import Target, settings, target_digest
from noctowl.store.shards import Damaged, ShardIndex, read_index
from noctowl.store.spec import Spec, canonical, describe

META = "meta.json"


@dataclass(frozen=True)
class Room:
    """What building asks of the disk: bytes needed for the images that are missing, and bytes free.

    Of a sample of patches `needed` is an upper bound, all patches of each image; `build` estimates it more closely
    where that does not fit (`build.estimated`).
    """

    images: int
    missing: int
    needed: int
    free: int
    estimated: bool = False


class FeatureStore:
    """The features of one spec below a root folder. Opening writes nothing.

    `targets`: objects by row of the image set, where only a sample of the patches is stored.
    """

    def __init__(self, root: str | Path, spec: Spec, targets: Mapping[int, Sequence[Target]] | None = None) -> None:
        self.root, self.spec, self.targets = Path(root), spec, targets
        self.folder = self.root / spec.key
        self._parsed: dict[str, tuple[tuple[int, ...], ShardIndex]] = {}  # index files, by name, that were read before
        if (self.folder / META).is_file():
            read_meta(self.folder)

    @classmethod
    def for_model(
        cls,
        root: str | Path,
        detector: OwlDetector,
        preprocessor: Preprocessor,
        *,
        dtype: str = "fp32",
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> "FeatureStore":
        """The store for a model as it computes on `device`. Raises ConfigError for a dtype that is not offered."""
        return cls(root, describe(detector, preprocessor, dtype=dtype, device=device, autocast=autocast))

    def sampled(self, background: int, seed: int, targets: Mapping[int, Sequence[Target]]) -> "FeatureStore":
        """The store beside this one with the patches that can become foreground and `background` of the others.

        It serves training on the objects `targets` of the image set's rows, and holds these rows only.
        """
        return FeatureStore(self.root, replace(self.spec, sample=settings(background, seed)), targets)

    @classmethod
    def open(cls, folder: str | Path) -> "FeatureStore":
        """An existing store by its own folder, no model needed. Raises DataError if it is none or was renamed."""
        folder = Path(folder)
        return cls(folder.parent, read_meta(folder))

    def identities(self, images: ImageSet, rows: Sequence[int] | None = None) -> dict[int, str]:
        """Identity by row, for the given rows or all (that have targets, if these are asked for)."""
        if rows is None:
            rows = range(len(images)) if self.targets is None else sorted(self.targets)
        chosen = [int(row) for row in rows]
        found = dict(zip(chosen, identities(images, chosen, cache=self.root / "hashes.json")))
        if self.targets is None:
            return found
        return {row: f"{name}+{target_digest(self.targets[row])}" for row, name in found.items()}

    def indexes(self) -> list[ShardIndex]:
        """All shards that can be read, by name. Damaged ones are left out: their images count as missing."""
        good: list[ShardIndex] = []
        parsed: dict[str, tuple[tuple[int, ...], ShardIndex]] = {}
        for path in sorted(self.folder.glob("shard-*.json")):
            with suppress(Damaged, FileNotFoundError):
                index_state, shard = path.stat(), path.with_suffix(".safetensors").stat()
                state = (index_state.st_mtime_ns, index_state.st_size, index_state.st_ino, shard.st_size)
                known = self._parsed.get(path.name)
                index = known[1] if known is not None and known[0] == state else read_index(path, self.spec)
                parsed[path.name] = (state, index)
                good.append(index)
        self._parsed = parsed
        return good

    def stored(self) -> set[str]:
        """Identities that can be read."""
        return {entry.identity for index in self.indexes() for entry in index.entries}

    def room(self, images: ImageSet, rows: Sequence[int] | None = None) -> Room:
        """Bytes needed and free for building these images."""
        return self.room_of(set(self.identities(images, rows).values()))

    def room_of(self, wanted: Set[str]) -> Room:
        """The same by identities."""
        missing = wanted - self.stored()
        return Room(len(wanted), len(missing), len(missing) * self.spec.bytes_per_image, free_bytes(self.root))

    def reader(self, images: ImageSet, rows: Sequence[int] | None = None, *, verify: bool = True) -> FeatureReader:
        """Features of the image set by row; only `rows` if given. Raises DataError naming images that are missing."""
        found = self.identities(images, rows)
        return FeatureReader(self.folder, self.spec, self.indexes(), found, len(images), images.files, verify=verify)

    def read(self, wanted: Sequence[str]) -> FeatureReader:
        """Features by identity, in the order given."""
        return FeatureReader(self.folder, self.spec, self.indexes(), dict(enumerate(wanted)), len(wanted), list(wanted))

    def create(self, base_id: str) -> None:
        """Folder and meta.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / META).is_file():
            content = {"key": self.spec.key, "base": base_id, "ingredients": self.spec.ingredients}
            with atomic(self.folder / META) as file:
                file.write((json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def read_meta(folder: Path) -> Spec:
    """The spec in meta.json, found to be the one that the folder's name is the key of.

    Raises DataError for a missing or damaged file and for a store that lies under another key.
    """
    path = folder / META
    try:
        content = json.loads(path.read_bytes())
        spec = Spec(**content["ingredients"])
        key = hashlib.sha256(canonical(content["ingredients"])).hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a readable description of a feature store ({type(error).__name__}: {error}). If only this "
            "file is damaged, delete it and build again: shards are kept."
        ) from error
    if not key == content["key"] == folder.name:
        raise DataError(
            f"{path}: describes the store {key}, but lies in {folder.name}. Move it back to its own folder."
        )
    return spec


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` is or will be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
