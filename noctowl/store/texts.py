"""Text embeddings on disk: each distinct text is encoded once per text tower, whatever run asks for it.

<root>/texts/<key>/meta.json               all that the key is made of, in clear
<root>/texts/<key>/<name>.safetensors      "embeddings" fp32 [n, D]
<root>/texts/<key>/<name>.json             its index: the n texts, sha256 of the shard, a digest of its own

The key is the sha256 of what an embedding depends on besides the text: weights and settings of the text tower, the
tokenizer with its limit, arithmetic, versions. The policy for long texts is not among it: one that is encoded at all is
cut at the limit, and is the same embedding under every policy.

A writer adds a shard of its own; nothing is changed in place, and two writers at once store a text twice at worst.
Bits are those of the first encoding: the rounding of an embedding depends on what it was padded with.
"""

import hashlib
import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from noctowl.errors import DataError
from noctowl.hashing import state_sha256
from noctowl.model import HASHED_SETTINGS, OwlDetector
from noctowl.runfolder import atomic, process_rank
from noctowl.store.claims import STALE, idle_seconds
from noctowl.store.folder import META
from noctowl.store.shards import Damaged, Problem, sync_folder
from noctowl.store.spec import arithmetic, canonical, read_signed, signed

ENCODER_VERSION = 1  # raise it whenever `OwlDetector.encode_text` or tokenization gives other numbers
LAYOUT_VERSION = 1
TEXTS = "texts"  # folder of all text stores below a root
log = logging.getLogger(__name__)


@dataclass
class _Shard:
    """An index that fits its shard by size; the shard is read, and its checksum compared, when a text is wanted."""

    path: Path  # of the index
    sha256: str
    texts: Sequence[str]
    embeddings: Tensor | None = None


def read_index(path: Path, key: str) -> _Shard:
    """The index file `path`, found to belong to the store and to its shard's size.

    Raises Damaged: "index" (unreadable), "foreign" (another store's), "no shard", "truncated" (another size).
    """
    try:
        index = read_signed(path)
        own, size, sha256, texts = (index[name] for name in ("key", "bytes", "sha256", "texts"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged("index", f"{path}: not a readable index ({type(error).__name__}: {error})") from error
    if own != key:
        raise Damaged("foreign", f"{path}: belongs to the store {own}, not to {key}")
    shard = path.with_suffix(".safetensors")
    if not shard.is_file():
        raise Damaged("no shard", f"{path}: its shard is missing")
    if (found := shard.stat().st_size) != size:
        raise Damaged("truncated", f"{shard}: {found} bytes; it was written with {size}")
    return _Shard(path, sha256, texts)


def read_shard(shard: _Shard, width: int) -> Float[Tensor, "n D"]:
    """Its embeddings, every byte checked. Raises Damaged ("checksum")."""
    path = shard.path.with_suffix(".safetensors")
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise ValueError("damaged (checksum)")
        embeddings = load(data)["embeddings"]
        if embeddings.shape != (len(shard.texts), width):
            raise ValueError(f"of shape {tuple(embeddings.shape)}")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Damaged("checksum", f"{path}: {error}") from error
    return embeddings


def ingredients(detector: OwlDetector, device: torch.device) -> dict[str, Any]:
    """What the embedding of a text depends on."""
    settings = {k: v for k, v in sorted(detector.config.text_config.to_dict().items()) if k in HASHED_SETTINGS}
    tower = {name: value for name, value in detector.model.state_dict().items() if ".text_" in name}
    tokenizer = json.loads(detector.tokenizer.backend_tokenizer.to_str())
    rules = {name: value for name, value in tokenizer.items() if name not in ("truncation", "padding")}
    rules |= {"limit": int(detector.tokenizer.model_max_length), "pad": detector.tokenizer.pad_token_id}
    return {
        "tower_sha256": state_sha256(tower, settings),
        "tokenizer_sha256": hashlib.sha256(canonical(rules)).hexdigest(),
        "arithmetic": arithmetic(device, None),
        "encoder_version": ENCODER_VERSION,
        "layout_version": LAYOUT_VERSION,
        "width": detector.config.projection_dim,
    }


class TextStore:
    """Embeddings of one text tower below a root folder, by text. Opening writes nothing; foreign, cut or damaged files
    are never read: their texts count as missing."""

    def __init__(self, root: str | Path, ingredients: dict[str, Any], base_id: str = "") -> None:
        self.ingredients, self.base_id = ingredients, base_id
        self.key = hashlib.sha256(canonical(ingredients)).hexdigest()
        self.folder, self.width = Path(root) / TEXTS / self.key, int(ingredients["width"])
        self._where: dict[str, tuple[_Shard, int]] = {}
        for path in self.index_files():
            try:
                shard = read_index(path, self.key)
            except Damaged as error:
                log.warning("%s; its texts are encoded again", error)
            else:
                self._where |= {text: (shard, row) for row, text in enumerate(shard.texts)}

    @classmethod
    def for_model(cls, root: str | Path, detector: OwlDetector, device: torch.device) -> "TextStore":
        """The store of a model's text tower as it computes on `device`."""
        return cls(root, ingredients(detector, device), detector.base_id)

    @classmethod
    def open(cls, folder: str | Path) -> "TextStore":
        """An existing store by its own folder, no model needed. Raises DataError if it is none or was renamed."""
        path = Path(folder) / META
        try:
            content = json.loads(path.read_bytes())
            store = cls(path.parents[2], content["ingredients"], str(content.get("base", "")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: not a readable description of a text store ({type(error).__name__}: {error}). Delete the "
                "folder: its texts are encoded again when they are wanted."
            ) from error
        if not store.key == content["key"] == path.parent.name:
            raise DataError(
                f"{path}: describes the store {store.key}, but lies in {path.parent.name}. Move it back to its own "
                "folder, or delete it."
            )
        return store

    def __len__(self) -> int:
        return len(self._where)

    def index_files(self) -> list[Path]:
        """Of all shards, whole or not."""
        return [path for path in sorted(self.folder.glob("*.json")) if path.name != META]

    def read(self, texts: Sequence[str]) -> dict[int, Tensor]:
        """fp32 [D] by position, of the texts that are stored. A damaged shard is taken away, and told."""
        found = {}
        for i, text in enumerate(texts):
            shard, row = self._where.get(text, (None, 0))
            if shard is not None and (shard.embeddings is not None or self._load(shard)):
                assert shard.embeddings is not None
                found[i] = shard.embeddings[row]
        return found

    def _load(self, shard: _Shard) -> bool:
        try:
            shard.embeddings = read_shard(shard, self.width)
        except Damaged as error:
            log.warning("%s; its texts are encoded again", error)
            self._where = {text: place for text, place in self._where.items() if place[0] is not shard}
            try:
                _remove(shard.path)
            except OSError as failure:
                log.warning("%s: cannot be removed (%s)", shard.path, failure)
            return False
        return True

    def write(self, texts: Sequence[str], embeddings: Float[Tensor, "n D"]) -> None:
        """Add texts as one shard. The first process of a launch writes; all of them have encoded the same.

        Raises DataError where nothing can be written.
        """
        if process_rank() > 0 or not len(texts):
            return
        name = uuid.uuid4().hex[:12]
        data = save({"embeddings": embeddings.contiguous()})
        digest = hashlib.sha256(data).hexdigest()
        index = {"key": self.key, "bytes": len(data), "sha256": digest, "texts": list(texts)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files: dict[str, bytes] = {}
            if not (self.folder / META).is_file():
                meta = {"key": self.key, "base": self.base_id, "ingredients": self.ingredients}
                files[META] = canonical(meta)
            files[f"{name}.safetensors"] = data
            files[f"{name}.json"] = signed(index)
            for file, content in files.items():
                with atomic(self.folder / file) as out:
                    out.write(content)
            sync_folder(self.folder)
        except OSError as error:
            raise DataError(
                f"{self.folder}: {len(texts)} text embeddings cannot be written ({error.strerror}). Make room, or set "
                "features.root to a folder that can be written to, or use features=memory or live."
            ) from error
        shard = _Shard(self.folder / f"{name}.json", digest, tuple(texts), embeddings)
        self._where |= {text: (shard, row) for row, text in enumerate(texts)}


def mend_texts(store: TextStore, *, repair: bool) -> list[Problem]:
    """Find what is wrong in a store of texts, every byte read; with `repair` take away just that.

    A shard is checked as a whole, so one that is damaged goes as a whole. What another process may be writing at this
    moment (files without a partner, younger than `claims.STALE`) is left alone.
    """
    problems = []
    for path in store.index_files():
        try:
            read_shard(read_index(path, store.key), store.width)
        except Damaged as error:
            foreign = error.kind == "foreign"
            action = "left, never read: move it to its own store" if foreign else "removed"
            detail = "all texts of its shard" if error.kind == "checksum" else str(error)
            problems.append(Problem(path.name, error.kind, detail, 0 if foreign else _count(path), action))
            if repair and not foreign:
                _remove(path)
    lone = _without_index(store)
    for kind, detail, paths in (
        ("no index", "nobody knows whose embeddings these are", [path for path in lone if idle_seconds(path) > STALE]),
        ("leftover", "of a run that died", leftover_texts(store)),
    ):
        problems += [Problem(path.name, kind, detail, 0, "removed") for path in paths]
        if repair:
            for path in paths:
                path.unlink(missing_ok=True)
    if repair and problems:
        sync_folder(store.folder)
    return problems


def leftover_texts(store: TextStore) -> list[Path]:
    """Files that were being written when their process died."""
    return [path for path in sorted(store.folder.glob(".*.part")) if idle_seconds(path) > STALE]


def being_written(store: TextStore) -> bool:
    """Whether a run is adding texts at this moment."""
    half = [*store.folder.glob(".*.part"), *_without_index(store)]
    return any(idle_seconds(path) <= STALE for path in half)


def text_facts(store: TextStore) -> dict[str, Any]:
    """One entry of `info`: key, base, texts, how many of them lie there twice, shards, bytes, width."""
    shards = []
    for path in store.index_files():
        with suppress(Damaged):
            shards.append(read_index(path, store.key))
    stored = [text for shard in shards for text in shard.texts]
    size = sum(path.stat().st_size for path in store.folder.iterdir() if path.name != META)
    return {
        "kind": TEXTS,
        "key": store.key,
        "base": store.base_id,
        "arithmetic": store.ingredients["arithmetic"],
        "width": store.width,
        "texts": len(set(stored)),
        "duplicates": len(stored) - len(set(stored)),
        "shards": len(shards),
        "bytes": size,
    }


def _without_index(store: TextStore) -> list[Path]:
    return [path for path in sorted(store.folder.glob("*.safetensors")) if not path.with_suffix(".json").exists()]


def _count(path: Path) -> int:
    """Texts that an index names, as far as that can be said."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return len(json.loads(path.read_bytes())["index"]["texts"])
    return 0


def _remove(index: Path) -> None:
    """An index first, then its shard: what is left by a crash in between is found as a shard without index."""
    index.unlink(missing_ok=True)
    index.with_suffix(".safetensors").unlink(missing_ok=True)
