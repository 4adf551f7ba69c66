"""Building a store: what is missing is encoded once and written shard by shard.

Any number of processes and machines may build the same store at once: each claims a part of what nobody has yet, and
all return when everything is there. A builder that dies loses the shard it was filling; the others take over its part.
"""

import errno
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noctowl.errors import DataError, ModelError
from noctowl.features import ImageSet, encode
from noctowl.model import ImageFeatures, OwlDetector
from noctowl.store.accuracy import similarity_error
from noctowl.store.claims import Claims
from noctowl.store.folder import FeatureStore, Room
from noctowl.store.identity import VerifiedImages, image_part
from noctowl.store.maintain import mend
from noctowl.store.sample import Target, candidates, thin
from noctowl.store.shards import write_shard
from noctowl.store.spec import describe, pack, unpack

SHARD_BYTES = 256 << 20
LARGEST_PART = 1024  # images that a builder claims at a time, at most
PILOT = 32  # images that are encoded to estimate the room for samples, where the disk is not ample
POLL = 0.2  # seconds between looks at what other builders have done
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildReport:
    """What a build did: distinct images asked for, found, encoded here, encoded by others meanwhile."""

    images: int
    found: int
    encoded: int
    others: int
    shards: int
    bytes: int
    seconds: float


def build(
    store: FeatureStore,
    detector: OwlDetector,
    images: ImageSet,
    rows: Sequence[int] | None = None,
    *,
    batch_size: int,
    num_workers: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: int = 0,
) -> BuildReport:
    """Have features of `rows` (default: all) in the store. Nothing is written where nothing is missing.

    `beside`: bytes that will be written to the same disk afterwards; there has to be room for these, too.

    Raises:
        ModelError: the store is another model's.
        DataError: too little room, a disk that fills up or cannot be written to, an image that cannot be read or is
            changed meanwhile. Shards written so far stay, and the next build goes on from them.
    """
    _check_model(store, detector, images, device, autocast)
    start, wanted = time.monotonic(), store.identities(images, rows)
    distinct = {identity: row for row, identity in reversed(wanted.items())}
    found = len(distinct.keys() & store.stored())
    work: Any = {"batch_size": batch_size, "num_workers": num_workers, "device": device, "autocast": autocast}
    encoded = shards = written = 0
    if found < len(distinct):
        room = store.room_of(distinct.keys())
        if room.needed + beside > room.free and store.spec.sample is not None:
            room = estimated(store, detector, images, distinct, room, **work)
        check_room(store, room, beside)
        with _clear_disk_errors(store, found, len(distinct)):
            store.create(detector.base_id)
            with Claims(store.folder) as claims:
                with claims.lock():
                    mend(store, full=False, repair=True, living={claims.builder, *claims.others()})
                    found = len(distinct.keys() & store.stored())  # shards whose index was lost are back
                targets = {name: store.targets[row] for name, row in distinct.items()} if store.targets else None
                with ShardWriter(store, detector, claims.builder, shard_bytes, targets) as writer:
                    for part in _parts(store, claims, distinct, writer.images_per_shard):
                        planned = {distinct[identity]: identity for identity in part}
                        verified = VerifiedImages(images, {row: image_part(name) for row, name in planned.items()})
                        log.info("features: encoding %s images (%s)", len(part), store.folder)
                        for batch, features in encode(detector, verified, list(planned), **work):
                            writer.add([planned[row] for row in batch], features)
                        writer.flush()
                    encoded, shards, written = writer.images, writer.shards, writer.bytes
    return BuildReport(
        images=len(distinct),
        found=found,
        encoded=encoded,
        others=len(distinct) - found - encoded,
        shards=shards,
        bytes=written,
        seconds=time.monotonic() - start,
    )


def _check_model(
    store: FeatureStore, detector: OwlDetector, images: ImageSet, device: torch.device, autocast: torch.dtype | None
) -> None:
    if (store.spec.sample is None) != (store.targets is None):
        raise DataError(
            f"{store.folder}: a sample of patches depends on the objects of each image, so the two go together: "
            "FeatureStore.sampled, or features.background on the command line of a training."
        )
    options: Any = {"dtype": store.spec.dtype, "device": device, "autocast": autocast, "sample": store.spec.sample}
    spec = describe(detector, images.preprocessor, **options)
    if spec != store.spec:
        differing = [name for name, value in vars(spec).items() if value != getattr(store.spec, name)]
        raise ModelError(
            f"{store.folder}: belongs to another model or other settings ({', '.join(differing)} differ). Build the "
            "store that is made for this model: FeatureStore.for_model, or features.mode=disk."
        )


def estimated(
    store: FeatureStore, detector: OwlDetector, images: ImageSet, distinct: Mapping[str, int], room: Room, **work: Any
) -> Room:
    """The room that the missing images of a sample take, estimated by encoding up to PILOT of them, spread evenly: the
    mean number of patches kept, and two standard errors more. Nothing is written. `distinct`: row by identity."""
    assert store.spec.sample is not None
    assert store.targets is not None
    stored = store.stored()
    missing = sorted((row, name) for name, row in distinct.items() if name not in stored)
    chosen = dict(missing[i * len(missing) // PILOT] for i in range(PILOT)) if len(missing) > PILOT else dict(missing)
    verified = VerifiedImages(images, {row: image_part(name) for row, name in chosen.items()})
    kept = []
    for rows, features in encode(detector, verified, list(chosen), **work):
        for row, boxes in zip(rows, features.boxes.float().cpu()):
            certain = int(candidates(pred_boxes=boxes, targets=store.targets[row]).sum())
            kept.append(min(certain + store.spec.sample["background"], store.spec.patches))
    patches = float(np.mean(kept))
    if len(missing) > len(kept):
        patches = min(patches + 2 * float(np.std(kept, ddof=1)) / len(kept) ** 0.5, store.spec.patches)
    log.info("features: %.0f of %s patches an image are kept, by %s images", patches, store.spec.patches, len(kept))
    return replace(room, needed=math.ceil(len(missing) * patches * store.spec.unit_bytes), estimated=True)


def check_room(store: FeatureStore, room: Room, beside: int = 0) -> None:
    """Raises DataError if the missing images, and what is to be written `beside` them, do not fit on the disk, with all
    numbers and what else can be done."""
    if room.needed + beside <= room.free:
        return
    smaller = {"fp32": "features.dtype=fp16 (half the size), ", "fp16": "features.dtype=int8 (half the size), "}
    fewer = "" if store.spec.sample is None else "a smaller features.background, "
    also = f", those kept with all patches {beside / 1e9:.2f} GB ({beside} bytes) more" if beside else ""
    raise DataError(
        f"features: {room.missing} images need {'about ' if room.estimated else ''}{room.needed / 1e9:.2f} GB "
        f"({room.needed} bytes){also}, {store.root} has {room.free / 1e9:.2f} GB free ({room.free} bytes). Nothing was "
        f"written. Use another disk for the store, {fewer}"
        f"{smaller.get(store.spec.dtype, '')}features.mode=live (no room needed, one pass of the backbone per epoch), "
        "or `noctowl features prune`."
    )


def _parts(store: FeatureStore, claims: Claims, distinct: Mapping[str, int], capacity: int) -> Iterator[list[str]]:
    """Parts of what is missing and claimed by nobody, in the order of rows, until everything is there.

    A part is half of this builder's share of the rest, whole shards of it: the builders end at about the same time.
    """
    said = False
    while True:
        with claims.lock():
            stored, others = store.stored(), claims.others()
            missing = [identity for identity in distinct if identity not in stored]
            taken = set().union(*others.values())
            free = sorted((i for i in missing if i not in taken), key=distinct.__getitem__)
            share = min(LARGEST_PART, len(free) // (2 * (len(others) + 1)))
            part = free[: max(capacity, share - share % capacity)]
            claims.take(part)
        if part:
            yield part
        elif not missing:
            return
        else:
            if not said:
                log.info("features: waiting for %s images that other builders have claimed", len(missing))
                said = True
            time.sleep(POLL)


class ShardWriter:
    """Collects features and writes full shards, in the background while the next ones are encoded.

    Leaving the context by an exception drops the shard that is being filled; one that is being written is finished.
    `targets`: objects of the images by identity, where the store holds a sample of their patches.
    """

    def __init__(
        self,
        store: FeatureStore,
        detector: OwlDetector,
        builder: str,
        shard_bytes: int,
        targets: Mapping[str, Sequence[Target]] | None = None,
    ) -> None:
        self.store, self.detector, self.builder, self.targets = store, detector, builder, targets
        self.capacity = max(1, shard_bytes // store.spec.unit_bytes)  # images, or patches of a sample
        self.images_per_shard = max(1, self.capacity // (store.spec.patches if targets is not None else 1))
        self.images = self.shards = self.bytes = 0
        self._rows: dict[str, Tensor] = {}
        self._identities: list[str] = []
        self._starts = [0]
        self._facts: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[Any] | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def add(self, identities: Sequence[str], features: ImageFeatures) -> None:
        """A batch of encoded images. Raises what writing an earlier shard raised."""
        packed, sample = pack(features, self.store.spec), self.store.spec.sample
        for i, identity in enumerate(identities):
            rows = {name: values[i : i + 1] for name, values in packed.items()}  # [1, P, ...]
            if sample is not None and self.targets is not None:
                options = {"background": sample["background"], "seed": sample["seed"], "name": identity}
                rows = thin({name: values[0] for name, values in rows.items()}, self.targets[identity], **options)
            used, n = self._starts[-1], len(rows["tokens"])
            if self._identities and used + n > self.capacity:
                self._write()
                used = 0
            if not self._identities:
                self._begin(features, max(n, self.capacity))
            for name, buffer in self._rows.items():
                buffer[used : used + n] = rows[name]
            self._identities.append(identity)
            self._starts.append(used + n)
            if used + n >= self.capacity:
                self._write()

    def flush(self) -> None:
        """Write what there is and wait until it is on the disk."""
        if self._identities:
            self._write()
        self._wait()

    def _begin(self, features: ImageFeatures, length: int) -> None:
        """A new buffer; the first image shows what the dtype costs."""
        spec = self.store.spec
        self._rows = {f.name: torch.empty(length, *f.shape, dtype=f.dtype) for f in spec.fields}
        error = {"cosine": 0.0, "bound": 0.0}
        if spec.dtype != "fp32":
            objectness = None if features.objectness is None else features.objectness[:1]
            first = ImageFeatures(features.tokens[:1], features.boxes[:1], objectness)
            packed = pack(first, spec)
            stored = unpack(packed["tokens"], packed.get("scales"))  # [1, P, Dv]
            error = similarity_error(self.detector, first.tokens.float(), stored.to(first.tokens.device))
        made = {"device": str(features.tokens.device.type), "torch": str(torch.__version__)}
        self._facts = {**made, "error": error}

    def _write(self) -> None:
        self._wait()
        name, units = f"shard-{self.builder}-{self.shards:05d}", self._starts[-1]
        rows = {name: value[:units] for name, value in self._rows.items()}
        starts = self._starts if self.targets is not None else ()
        arguments = (self.store.folder, name, self.store.spec, rows, self._identities, self._facts, starts)
        self._writing = self._pool.submit(write_shard, *arguments)
        self.images, self.shards = self.images + len(self._identities), self.shards + 1
        self.bytes += units * self.store.spec.unit_bytes
        self._rows, self._identities, self._starts = {}, [], [0]

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()


@contextmanager
def _clear_disk_errors(store: FeatureStore, found: int, images: int) -> Iterator[None]:
    """Errors of the disk in the user's words. What was written whole stays."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            kept = len(store.stored())
            raise DataError(
                f"{store.folder}: the disk is full ({error.strerror}). {kept} images are stored ({found} before), of "
                f"{images} asked for; they stay. Make room and build again, which goes on from there; or use "
                "features.dtype=fp16, features.mode=live, or another disk."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise DataError(
                f"{store.folder}: cannot be written to ({error.strerror}); {images - found} of {images} images are "
                "missing. Reading works. Build it where it can be written, or use features.mode=live or memory."
            ) from error
        raise
