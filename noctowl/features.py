"""What is constant while the head trains, computed once: text embeddings of captions, tokens and boxes of images.

Legend: M distinct captions, I distinct images, P patches, Dv vision width, D class embedding width.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil
import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch import Tensor
from torch.utils.data import Dataset

from noctowl.data.images import Preprocessor, load_rgb, resolve_image
from noctowl.data.loading import make_loader
from noctowl.data.records import Annotations, Strings
from noctowl.errors import DataError
from noctowl.model import ImageFeatures, OwlDetector
from noctowl.text import Policy, tokenize

log = logging.getLogger(__name__)

EXCHANGED = 32  # images that processes hand over at a time: a few hundred MB on the device
Mode = Literal["auto", "memory", "disk", "live", "stream"]


class TextShelf(Protocol):
    """Embeddings that outlast a run: `noctowl.store.TextStore`."""

    def read(self, texts: Sequence[str]) -> dict[int, Tensor]:
        """[D] by position, of the texts that are there."""

    def write(self, texts: Sequence[str], embeddings: Tensor) -> None:
        """Add texts with their embeddings [n, D]."""


class TextBank:
    """Unit embeddings of distinct captions; each is encoded once, whatever asks for it, or read from a `shelf`.

    Attributes: `embeddings` fp32 [M, D] on the CPU (zeros for captions that the policy dropped), `lengths` int64 [M]
    true token counts, `kept` bool [M], `forwards` captions encoded, `hits` captions read.
    """

    def __init__(
        self,
        detector: OwlDetector,
        *,
        policy: Policy,
        device: torch.device,
        batch_size: int = 512,
        shelf: TextShelf | None = None,
    ):
        self.detector, self.policy, self.device, self.batch_size = detector, policy, device, batch_size
        self.shelf, self.hits = shelf, 0
        self.embeddings = torch.empty(0, detector.config.projection_dim)
        self.lengths = np.empty(0, np.int64)
        self.kept = np.empty(0, np.bool_)
        self.forwards = 0
        self._rows: dict[str, int] = {}

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """Rows of `embeddings` for each text; texts not seen before are encoded first.

        Raises DataError for a caption over the token limit under the policy "error".
        """
        return self._rows_of(texts, self.policy)

    def prompt_rows(self, prompts: Sequence[str]) -> np.ndarray:
        """`rows` of the prompts of class names: one over the token limit is cut whatever the policy, never dropped."""
        return self._rows_of(prompts, "truncate")

    def _rows_of(self, texts: Sequence[str], policy: Policy) -> np.ndarray:
        cut = policy == "truncate"  # what was dropped as a caption may be asked for as a prompt
        new = [text for text in texts if (row := self._rows.get(text)) is None or (cut and not self.kept[row])]
        if new:
            self._encode(list(dict.fromkeys(new)), policy)
        return np.fromiter((self._rows[text] for text in texts), np.int64, len(texts))

    def caption_rows(self, annotations: Annotations) -> np.ndarray:
        """int64 [K]: the row of each caption of an annotation file."""
        return self.rows(list(annotations.captions))

    @property
    def n_over(self) -> int:
        """Distinct captions over the token limit."""
        return int((self.lengths[list(self._rows.values())] > self.detector.text_limit).sum())

    def _encode(self, texts: list[str], policy: Policy) -> None:
        tokens = tokenize(self.detector.tokenizer, texts, policy)
        kept = tokens.kept.numpy()
        fresh = torch.zeros(len(texts), self.embeddings.shape[1])
        todo = np.flatnonzero(kept)
        if self.shelf is not None:
            found = self.shelf.read([texts[i] for i in todo])
            for i, embedding in found.items():
                fresh[todo[i]] = embedding
            self.hits += len(found)
            todo = np.delete(todo, list(found))
        todo = todo[np.argsort(tokens.lengths.numpy()[todo], kind="stable")]  # like lengths together: less padding
        for start in range(0, len(todo), self.batch_size):
            chunk = torch.from_numpy(todo[start : start + self.batch_size])
            longest = int(tokens.attention_mask[chunk].sum(1).max())
            ids = tokens.input_ids[chunk, :longest].to(self.device)
            mask = tokens.attention_mask[chunk, :longest].to(self.device)
            fresh[chunk] = self.detector.encode_text(ids, mask).float().cpu()  # [chunk, D]
        self.forwards += len(todo)
        if self.shelf is not None:
            self.shelf.write([texts[i] for i in todo], fresh[torch.from_numpy(todo)])
        first = len(self.embeddings)
        self._rows.update({text: first + i for i, text in enumerate(texts)})
        self.embeddings = torch.cat([self.embeddings, fresh])
        self.lengths = np.concatenate([self.lengths, tokens.lengths.numpy()])
        self.kept = np.concatenate([self.kept, kept])


@dataclass
class ImageSet(Dataset[Tensor]):
    """Distinct images of one or more annotation files, read and preprocessed one by one.

    `files` relative to `root`; `sizes` (width, height) as the annotation files have them. Item i is [3, S, S].
    """

    root: Path
    preprocessor: Preprocessor
    files: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)

    def add(self, files: Iterable[str], sizes: Iterable[Sequence[int]]) -> np.ndarray:
        """int64 rows of the given images, new ones appended.

        Raises DataError where two annotation files give the same image different sizes.
        """
        rows = []
        for file, size in zip(files, sizes):
            wanted = (int(size[0]), int(size[1]))
            row = self._rows.setdefault(file, len(self.files))
            if row == len(self.files):
                self.files.append(file)
                self.sizes.append(wanted)
            elif self.sizes[row] != wanted:
                raise DataError(
                    f"{file}: one annotation file says {self.sizes[row]}, another {wanted} (width, height). "
                    "Boxes of one of them are in another frame: correct the file."
                )
            rows.append(row)
        return np.array(rows, np.int64)

    def for_workers(self) -> Dataset[Tensor]:
        """The set as loader workers hold it."""
        return _WorkerImages(self)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        path = resolve_image(self.root, self.files[row])
        return self.preprocessor(load_rgb(path, expected_size=self.sizes[row]))


class _WorkerImages(Dataset[Tensor]):
    """An image set in arrays, no Python object per image: memory does not grow with the workers."""

    def __init__(self, images: ImageSet):
        self.root, self.preprocessor = images.root, images.preprocessor
        self.files, self.sizes = Strings(images.files), np.array(images.sizes, np.int32).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        width, height = (int(side) for side in self.sizes[row])
        return self.preprocessor(load_rgb(resolve_image(self.root, self.files[row]), expected_size=(width, height)))


@dataclass
class _Selected(Dataset[tuple[int, Tensor]]):
    images: Dataset[Tensor]
    rows: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return int(self.rows[index]), self.images[int(self.rows[index])]


def encode(
    detector: OwlDetector,
    images: ImageSet,
    rows: Sequence[int],
    *,
    batch_size: int,
    num_workers: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Iterator[tuple[list[int], ImageFeatures]]:
    """One forward per image, in the order of `rows`; yields (rows, features on `device`) a batch at a time."""
    loader = make_loader(
        _Selected(images.for_workers(), np.asarray(rows, np.int64)), batch_size=batch_size, num_workers=num_workers
    )
    precision: Any = torch.autocast(device.type, autocast) if autocast else nullcontext()
    for chunk, pixels in loader:
        with precision:
            yield chunk.tolist(), detector.encode_images(pixels.to(device))


class Stored(Protocol):
    """Features of all images of a set, indexed by a row or a list of rows; on the CPU, fp32.

    `ImageFeatures` in memory and `noctowl.store.FeatureReader` on disk are of this form.
    """

    @property
    def tokens(self) -> Any:
        """[I, P, Dv]"""

    @property
    def boxes(self) -> Any:
        """[I, P, 4] xyxy relative to the model's square."""


def chunks(features: Stored, rows: Sequence[int], size: int) -> Iterator[tuple[list[int], ImageFeatures]]:
    """Stored features in the form of `encode`."""
    for start in range(0, len(rows), size):
        part = [int(row) for row in rows[start : start + size]]
        yield part, ImageFeatures(features.tokens[part], features.boxes[part], None)


def choose_mode(mode: Mode, *, memory_bytes: int, disk: Callable[[], tuple[int, int]]) -> tuple[Mode, str]:
    """What "auto" comes to, and why: memory if features fill at most half of the free memory, else disk, else live.

    Args:
        memory_bytes: what the features of all images take in memory (fp32).
        disk: gives bytes still to be written to the store and bytes free there; asked only where it matters.

    Raises DataError if "memory" is asked for and does not fit ("disk" is checked by the store, before it writes).
    """
    free = psutil.virtual_memory().available
    memory = f"{memory_bytes / 1e9:.2f} GB in memory, {free / 1e9:.1f} GB are free"
    if mode == "memory" and memory_bytes > free:
        raise DataError(f"features.mode=memory: {memory}. Use features=disk or features=live.")
    if mode == "memory" or (mode == "auto" and memory_bytes <= free / 2):
        return "memory", f"features are computed once and kept in memory ({memory})"
    if mode == "live":
        return "live", "features are computed anew in every epoch"
    if mode == "stream":
        return "stream", "features are computed once per epoch for all heads of a sweep, and not kept"
    needed, room = disk()
    amounts = f"{memory}; {needed / 1e9:.2f} GB to write, {room / 1e9:.1f} GB are free"
    if mode == "auto" and needed > 0.9 * room:
        return "live", f"features are computed anew in every epoch ({amounts})"
    return "disk", f"features are computed once and kept on disk ({amounts})"


def store(detector: OwlDetector, images: ImageSet, *, shared: bool = False, **work: Any) -> ImageFeatures:
    """fp32 tokens [I, P, Dv] and boxes [I, P, 4] of all images, on the CPU. `work`: keyword arguments of `encode`.

    shared: all processes of this launch are here; each encodes a share, and every process gets all.
    """
    width = detector.config.vision_config.hidden_size
    tokens = torch.empty(len(images), detector.num_patches, width)
    boxes = torch.empty(len(images), detector.num_patches, 4)
    state = PartialState(cpu=work["device"].type == "cpu") if shared else None
    rank, processes = (state.process_index, state.num_processes) if state is not None else (0, 1)
    bounds = [len(images) * r // processes for r in range(processes + 1)]
    own = range(bounds[rank], bounds[rank + 1])
    log.info("encoding %s images", len(own))
    for rows, part in encode(detector, images, own, **work):
        tokens[rows], boxes[rows] = part.tokens.float().cpu(), part.boxes.float().cpu()
    if state is not None and processes > 1:
        for sender, (first, end) in enumerate(pairwise(bounds)):
            for start in range(first, end, EXCHANGED):
                piece = slice(start, min(start + EXCHANGED, end))
                for values in (tokens, boxes):
                    values[piece] = broadcast(values[piece].to(state.device), from_process=sender).cpu()
    return ImageFeatures(tokens, boxes, None)
