"""Which image is it: the content of a file, not its name.

A file is hashed anew whenever anything about it has changed. What is remembered is kept in `hashes.json` of the store's
root, by path, size, time of change and inode; a file changed within the last seconds is never remembered, since a
second change could leave no trace in its times.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from noctowl.data.images import resolve_image
from noctowl.errors import DataError
from noctowl.features import ImageSet
from noctowl.runfolder import atomic
from noctowl.store.spec import canonical

SETTLED_NS = 2_000_000_000  # file systems tell times apart in steps of up to 2 s
State = tuple[int, int, int, int]


def file_state(path: Path) -> State:
    """Size, times of change and inode. The second time (ctime) cannot be set back by a program that copies files."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def identity(sha256: str, size: tuple[int, int]) -> str:
    """Content and expected (width, height)."""
    return f"{sha256}-{size[0]}x{size[1]}"


def image_part(identity: str) -> str:
    """An entry's identity without the objects that a sample of its patches was made for."""
    return identity.partition("+")[0]


def identities(images: ImageSet, rows: Sequence[int], *, cache: Path | None = None, threads: int = 4) -> list[str]:
    """Identity of each of `rows`. `cache` is a file to remember hashes in; one that cannot be written is left alone.

    Raises DataError for a missing or unreadable image, with its name.
    """
    known = _load(cache) if cache is not None else {}

    def one(row: int) -> tuple[str, str, list[int | str] | None]:
        path = resolve_image(images.root, images.files[row])
        try:
            state, name = file_state(path), str(path.absolute())
            remembered = known.get(name)
            if remembered is not None and tuple(remembered[:4]) == state:
                return name, str(remembered[4]), None
            sha256 = file_sha256(path)
            settled = time.time_ns() - max(state[1], state[2]) > SETTLED_NS and file_state(path) == state
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error}). Check data.root, data.images and the download."
            ) from error
        return name, sha256, [*state, sha256] if settled else None

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(one, rows))
    fresh = {name: line for name, _, line in found if line is not None}
    if cache is not None and fresh and cache.parent.is_dir():
        with suppress(OSError), atomic(cache) as file:  # a read-only store is read all the same
            file.write(canonical({**_load(cache), **fresh}))
    return [identity(sha256, images.sizes[row]) for row, (_, sha256, _) in zip(rows, found)]


def _load(cache: Path) -> dict[str, list[int | str]]:
    """What was remembered; nothing where the file is absent or damaged: it is only a cache."""
    try:
        stored = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {k: v for k, v in stored.items() if isinstance(v, list) and len(v) == 5 and len(str(v[4])) == 64}


class VerifiedImages(ImageSet):
    """An image set whose items are only given if the file is still the one that was planned."""

    def __init__(self, images: ImageSet, planned: dict[int, str]) -> None:
        super().__init__(images.root, images.preprocessor, images.files, images.sizes)
        self.planned = planned

    def for_workers(self) -> "VerifiedImages":
        """Itself: what was planned for each image goes along, a shard's worth at a time."""
        return self

    def __getitem__(self, row: int) -> Tensor:
        path = resolve_image(self.root, self.files[row])
        try:
            state = file_state(path)
            same = identity(file_sha256(path), self.sizes[row]) == self.planned[row]
            pixels = super().__getitem__(row)
            same = same and file_state(path) == state
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        if not same:
            raise DataError(f"{path}: the file was changed while features were built. Build again; the rest is kept.")
        return pixels
