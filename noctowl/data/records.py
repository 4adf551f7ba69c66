"""One annotation file as arrays: images, captions, vocabularies and objects.

Legend: I images, K captions (categories), V vocabularies, A objects, N_v negatives of vocabulary v.

A *vocabulary* is the list of captions that one group of objects is told apart with: column 0 is the positive, the
negatives follow in file order. All objects of one image with the same positive caption share one vocabulary (FG-OVD
paper, "dynamic vocabularies"). Objects are sorted by vocabulary, vocabularies by first appearance in the file.

Everything is kept in flat arrays, captions and file names in one byte buffer: no Python object per item, so that the
pages of a forked data-loader worker are never touched by reference counts and memory does not grow with the workers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from noctowl.errors import DataError

Int = npt.NDArray[np.int64]
Row = npt.NDArray[np.int32]
Float = npt.NDArray[np.float64]


class Strings(Sequence[str]):
    """An immutable list of strings in one UTF-8 buffer: `buffer` uint8 [bytes], `offsets` int64 [M+1]."""

    __slots__ = ("buffer", "offsets")

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode() for text in texts]
        self.offsets: Int = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(item) for item in encoded], out=self.offsets[1:])
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """One string for an integer (negative ones count from the end), a list of strings for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = int(index)
        i = i + len(self) if i < 0 else i
        if not 0 <= i < len(self):
            raise IndexError(f"index {index} of {len(self)} strings")
        return self.buffer[self.offsets[i] : self.offsets[i + 1]].tobytes().decode()

    def take(self, rows: Iterable[int] | Row | Int) -> list[str]:
        """The strings of the given rows, in that order."""
        return [self[row] for row in rows]

    def __repr__(self) -> str:
        return f"Strings({len(self)} strings, {self.buffer.nbytes} bytes)"


@dataclass(frozen=True, eq=False)
class Annotations:
    """One annotation file; see the head of this file for the letters and the order of the arrays."""

    name: str  # benchmark alias ("hard", ...) where the file's stem is a published one, otherwise the stem
    path: Path
    sha256: str  # of the file's bytes
    image_ids: Int  # [I]
    image_files: Strings  # [I] relative to the images' folder, e.g. "val2017/000000000139.jpg"
    image_sizes: Row  # [I, 2] width, height in pixels
    category_ids: Int  # [K]
    captions: Strings  # [K]
    vocab_image: Row  # [V] row into images
    vocab_offsets: Int  # [V+1] into vocab_columns
    vocab_columns: Row  # [sum_v 1+N_v] rows into categories; first of each vocabulary = the positive
    object_vocab: Row  # [A] ascending
    object_ids: Int  # [A] annotation ids of the file
    object_boxes: Float  # [A, 4] xyxy in pixels, clipped to the image
    object_area: Float  # [A] width · height of the clipped box, square pixels
    counts: dict[str, int]  # what was read, and what was mended on the way

    def __len__(self) -> int:
        return len(self.vocab_image)

    @property
    def n_negatives(self) -> Int:
        """[V] number of negatives of each vocabulary."""
        return np.diff(self.vocab_offsets) - 1

    @property
    def positive_ids(self) -> Int:
        """[V] category id of the positive: with the image id, the key of a vocabulary."""
        return self.category_ids[self.vocab_columns[self.vocab_offsets[:-1]]]

    def vocabulary(self, v: int) -> Row:
        """[1+N_v] rows into captions / category_ids: the positive, then the negatives."""
        return self.vocab_columns[self.vocab_offsets[v] : self.vocab_offsets[v + 1]]

    def objects(self, v: int) -> slice:
        """The rows of the objects of vocabulary v."""
        first, last = np.searchsorted(self.object_vocab, (v, v + 1))
        return slice(int(first), int(last))


def relative_path(name: str, *, where: str) -> str:
    """`name` with forward slashes, if it stays below the folder it is relative to.

    The check is made on the text: links inside the folder are the user's own and are followed.
    Raises DataError for absolute paths, drive letters, `..`, control characters and empty names.
    """
    posix, windows = PurePosixPath(name.replace("\\", "/")), PureWindowsPath(name)
    leaves = posix.is_absolute() or windows.drive or windows.root or ".." in posix.parts
    if leaves or not posix.parts or any(ord(char) < 32 for char in name):
        raise DataError(
            f"{where}: the path {name!r} leaves the images' folder or is empty. Allowed is a path below it, without "
            "'..', drive or leading slash, such as 'val2017/000000000139.jpg'. Correct the file: nothing else is read."
        )
    return str(posix)
