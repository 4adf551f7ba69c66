"""Shards and their indexes: written whole or not at all, read by known offsets, checked row by row.

A shard is a safetensors file; its index is a JSON file of the same name. The index is all that reading needs; the
shard's own header carries the same list once more, so that a shard whose index was lost is not lost.

Each image has two checksums over its bytes in the order of `Spec.fields`: a quick one, checked when a row is first
read, and sha256, checked by `verify`. The quick one is the CRC-32 of the sums of 64-bit words over blocks of 4 kB, at
memory speed: any damage within one word changes the sum, and a CRC misses one change of many bits in 4 billion.
"""

import ctypes
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noctowl.errors import DataError
from noctowl.hashing import tensor_bytes
from noctowl.runfolder import atomic
from noctowl.store.spec import Field, Spec, canonical, read_signed, signed

ALIGNMENT = 64  # bytes; where the tensors of a shard begin
BLOCK = 4096
MAX_HEADER = 64 << 20
LIBC = ctypes.CDLL(None) if os.name == "posix" else None
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}


class Entry(NamedTuple):
    """One image in a shard."""

    row: int
    identity: str
    check: int  # the quick checksum
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """What a shard holds. `count` rows lie in it; those without an entry were found damaged and are not read."""

    name: str  # without suffix
    key: str
    count: int
    data_start: int
    bytes: int
    header_sha256: str
    entries: tuple[Entry, ...]
    facts: dict[str, Any] = field(default_factory=dict)  # device, versions, error of the dtype
    starts: tuple[int, ...] = ()  # first patch of each row and the end, where rows differ in length

    @property
    def units(self) -> int:
        """Length of the tensors' leading dimension: rows, or the patches of all rows."""
        return self.starts[-1] if self.starts else self.count


class Damaged(Exception):
    """A shard or index that must not be read; `kind` as in `verify`'s report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Problem(NamedTuple):
    """One thing that is wrong in a store, and what was or would be done about it."""

    file: str
    kind: str  # index, no shard, truncated, header, checksum, no index, foreign, leftover
    detail: str
    images: int  # images (in a store of texts: texts) that have to be encoded again because of it
    action: str


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def row_sums(parts: Sequence[Tensor]) -> tuple[int, str]:
    """Both checksums of one image's tensors."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(tensor_bytes(part))
    return row_check(parts), digest.hexdigest()


def row_check(parts: Sequence[Tensor]) -> int:
    """The quick one of the two."""
    crc = 0
    for part in parts:
        data = np.frombuffer(tensor_bytes(part), np.uint8)
        whole = data.size - data.size % BLOCK
        sums = data[:whole].view("<u8").reshape(-1, BLOCK // 8).sum(1, dtype="<u8")  # modulo 2^64
        crc = zlib.crc32(data[whole:].data, zlib.crc32(sums.data, crc))
    return crc


def offsets(spec: Spec, units: int) -> Iterator[tuple[Field, int]]:
    """Each tensor with its offset from the start of the data."""
    start = 0
    for item in spec.fields:
        yield item, start
        start += units * item.row_bytes


def write_shard(
    folder: Path,
    name: str,
    spec: Spec,
    rows: Mapping[str, Tensor],
    identities: Sequence[str],
    facts: Mapping[str, Any],
    starts: Sequence[int] = (),
) -> ShardIndex:
    """Write shard and index; `rows` are the packed tensors [n, ...] of the images `identities`, or [sum of lengths,
    ...] with `starts` as in `ShardIndex`.

    The shard appears first. A crash between the two leaves a shard without index, which the next build takes up.
    """
    ends = starts or range(len(identities) + 1)
    sums = [row_sums([rows[f.name][a:b] for f in spec.fields]) for a, b in pairwise(ends)]
    entries = tuple(Entry(i, identity, *sums[i]) for i, identity in enumerate(identities))
    header = _header(spec, entries, facts, starts)
    index = _index(name, header, spec, entries, dict(facts), starts)
    with atomic(folder / f"{name}.safetensors") as file:
        file.write(header)
        for item in spec.fields:
            file.write(tensor_bytes(rows[item.name]))
    write_index(folder, index)
    return index


def write_index(folder: Path, index: ShardIndex) -> None:
    """The index beside its shard, with a digest of its own."""
    content = asdict(index) | {"entries": [list(entry) for entry in index.entries]}
    with atomic(folder / f"{index.name}.json") as file:
        file.write(signed(content))
    sync_folder(folder)


def _header(spec: Spec, entries: Sequence[Entry], facts: Mapping[str, Any], starts: Sequence[int]) -> bytes:
    """safetensors header: length, JSON, padded with spaces so that the data begins aligned."""
    units = starts[-1] if starts else len(entries)
    content: dict[str, Any] = {}
    for item, start in offsets(spec, units):
        span = [start, start + units * item.row_bytes]
        content[item.name] = {
            "dtype": SAFETENSORS_NAMES[item.dtype],
            "shape": [units, *item.shape],
            "data_offsets": span,
        }
    own: dict[str, Any] = {"key": spec.key, "entries": [list(entry) for entry in entries], "facts": dict(facts)}
    if starts:
        own["starts"] = list(starts)
    content["__metadata__"] = {"noctowl": canonical(own).decode()}
    text = canonical(content)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _index(
    name: str,
    header: bytes,
    spec: Spec,
    entries: tuple[Entry, ...],
    facts: dict[str, Any],
    starts: Sequence[int],
) -> ShardIndex:
    units, digest = starts[-1] if starts else len(entries), hashlib.sha256(header).hexdigest()
    total = len(header) + units * spec.unit_bytes
    return ShardIndex(name, spec.key, len(entries), len(header), total, digest, entries, facts, tuple(starts))


def read_index(path: Path, spec: Spec) -> ShardIndex:
    """The index file `path`, found to belong to the store and to its shard's size.

    Raises Damaged: "index" (unreadable), "foreign" (another store's), "no shard", "truncated" (another size).
    """
    try:
        content = read_signed(path)
        entries, starts = tuple(Entry(*entry) for entry in content["entries"]), tuple(content.get("starts", ()))
        index = ShardIndex(**content | {"entries": entries, "starts": starts})
        if starts and (len(starts) != index.count + 1 or any(a > b for a, b in pairwise((0, *starts)))):
            raise ValueError("its rows do not follow each other")
        if index.name != path.stem or any(not 0 <= entry.row < index.count for entry in index.entries):
            raise ValueError("its content contradicts itself")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged("index", f"{path}: not a readable index ({type(error).__name__}: {error})") from error
    if index.key != spec.key:
        raise Damaged("foreign", f"{path}: belongs to the store {index.key}, not to {spec.key}")
    shard = path.with_suffix(".safetensors")
    try:
        found = shard.stat().st_size
    except FileNotFoundError as error:
        raise Damaged("no shard", f"{path}: its shard is missing") from error
    expected = index.data_start + index.units * spec.unit_bytes
    if not found == index.bytes == expected:
        raise Damaged("truncated", f"{shard}: {found} bytes; it was written with {expected}")
    return index


def header_sha256(shard: Path, data_start: int) -> str:
    """sha256 of everything before the data."""
    with shard.open("rb") as file:
        return hashlib.sha256(file.read(data_start)).hexdigest()


def recover_index(shard: Path, spec: Spec) -> ShardIndex:
    """The index of a shard from the shard itself, every row checked.

    Raises Damaged: "truncated", "header" (unreadable), "foreign", "checksum" (no row is good).
    """
    try:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            text = file.read(length)
        own = json.loads(json.loads(text)["__metadata__"]["noctowl"])
        entries = tuple(Entry(*entry) for entry in own["entries"])
        key, facts, starts = own["key"], own["facts"], own.get("starts", [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged("header", f"{shard}: not a readable header ({type(error).__name__}: {error})") from error
    if key != spec.key:
        raise Damaged("foreign", f"{shard}: belongs to the store {key}, not to {spec.key}")
    header = length.to_bytes(8, "little") + text
    if header != _header(spec, entries, facts, starts):
        raise Damaged("header", f"{shard}: its header contradicts itself")
    index = _index(shard.stem, header, spec, entries, facts, starts)
    if shard.stat().st_size != index.bytes:
        raise Damaged("truncated", f"{shard}: {shard.stat().st_size} bytes; it was written with {index.bytes}")
    return without_bad_rows(index, bad_rows(shard.parent, index, spec))


def bad_rows(folder: Path, index: ShardIndex, spec: Spec) -> list[Entry]:
    """Entries whose bytes are not those that were written (sha256)."""
    shard = MappedShard(folder, index, spec)
    bad = []
    for entry in index.entries:
        shard.fetch(entry.row)
        if row_sums(shard.row(entry.row))[1] != entry.sha256:
            bad.append(entry)
    return bad


def without_bad_rows(index: ShardIndex, bad: Sequence[Entry]) -> ShardIndex:
    """The index of what is left. Raises Damaged ("checksum") if nothing is."""
    good = tuple(entry for entry in index.entries if entry not in set(bad))
    if not good:
        raise Damaged("checksum", f"{index.name}: none of its {index.count} rows has the checksum it was written with")
    return ShardIndex(**{**vars(index), "entries": good})


class MappedShard:
    """The tensors [n, ...] of a shard as a private memory map: reading a row reads that row, the file stays as it is.

    The map needs no open file, so a store of many shards does not run into the limit of open files.
    """

    def __init__(self, folder: Path, index: ShardIndex, spec: Spec) -> None:
        self.path = path = folder / f"{index.name}.safetensors"
        try:
            storage = torch.UntypedStorage.from_file(str(path), False, index.bytes)
        except RuntimeError as error:
            raise DataError(
                f"{path}: cannot be mapped ({str(error).splitlines()[0]}). If the shard is missing or was cut, run "
                "`noctowl features verify --repair` and build again."
            ) from error
        advise(storage.data_ptr(), index.bytes, "MADV_RANDOM")
        self.tensors: dict[str, Tensor] = {}
        self.index = index
        for item, start in offsets(spec, index.units):
            shape, first = (index.units, *item.shape), (index.data_start + start) // item.dtype.itemsize
            strides = torch.empty(shape, device="meta").stride()
            empty: Any = torch.empty(0, dtype=item.dtype)
            self.tensors[item.name] = empty.set_(storage, first, shape, strides)

    def row(self, row: int) -> list[Tensor]:
        """One image's tensors in the order of `Spec.fields`: views of the map."""
        return [self.get(name, row) for name in self.tensors]

    def get(self, name: str, row: int) -> Tensor:
        """One of them: [P, ...], or [M, ...] where rows differ in length."""
        tensor = self.tensors[name]
        starts = self.index.starts
        return tensor[starts[row] : starts[row + 1]] if starts else tensor[row]

    def fetch(self, row: int) -> None:
        """Have the system read a row in the background, all of it and nothing else."""
        for part in self.row(row):
            advise(part.data_ptr(), part.nbytes, "MADV_WILLNEED")


def advise(address: int, length: int, advice: str) -> None:
    """madvise on whole pages. Left to itself the system reads ahead of each access, up to several MB of rows that
    nobody asked for. Only a hint: where it is not known, nothing happens."""
    value, call = getattr(mmap, advice, None), getattr(LIBC, "madvise", None)
    if value is not None and call is not None:
        start = address - address % mmap.PAGESIZE
        call(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), ctypes.c_int(value))
