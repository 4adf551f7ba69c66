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
from noctowl.store.shards import sync_folder
from noctowl.store.spec import arithmetic, canonical

ENCODER_VERSION = 1  # raise it whenever `OwlDetector.encode_text` or tokenization gives other numbers
LAYOUT_VERSION = 1
log = logging.getLogger(__name__)


@dataclass
class _Shard:
    """An index that fits its shard by size; the shard is read, and its checksum compared, when a text is wanted."""

    path: Path  # of the index
    sha256: str
    embeddings: Tensor | None = None


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

    def __init__(self, root: str | Path, detector: OwlDetector, device: torch.device) -> None:
        self.ingredients = ingredients(detector, device)
        self.key = hashlib.sha256(canonical(self.ingredients)).hexdigest()
        self.folder, self.width = Path(root) / "texts" / self.key, int(self.ingredients["width"])
        self._where: dict[str, tuple[_Shard, int]] = {}
        for path in sorted(self.folder.glob("*.json")):
            if path.name != "meta.json":
                self._open(path)

    def __len__(self) -> int:
        return len(self._where)

    def _open(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_bytes())
            index, shard = stored["index"], path.with_suffix(".safetensors")
            if hashlib.sha256(canonical(index)).hexdigest() != stored["digest"]:
                raise ValueError("its digest does not fit its content")
            if index["key"] != self.key or index["bytes"] != shard.stat().st_size:
                raise ValueError("it is another store's, or its shard was cut")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: not used (%s); its texts are encoded again", path, error)
            return
        found = _Shard(path, index["sha256"])
        self._where |= {text: (found, row) for row, text in enumerate(index["texts"])}

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
        path = shard.path.with_suffix(".safetensors")
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != shard.sha256:
                raise ValueError("damaged (checksum)")
            embeddings = load(data)["embeddings"]
            if embeddings.ndim != 2 or embeddings.shape[1] != self.width:
                raise ValueError(f"of shape {tuple(embeddings.shape)}")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("%s: %s; its texts are encoded again", path, error)
            self._where = {text: place for text, place in self._where.items() if place[0] is not shard}
            try:
                shard.path.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            except OSError as failure:
                log.warning("%s: cannot be removed (%s)", path, failure)
            return False
        shard.embeddings = embeddings
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
            meta = {"key": self.key, "ingredients": self.ingredients}
            files = {f"{name}.safetensors": data}
            files[f"{name}.json"] = canonical({"digest": hashlib.sha256(canonical(index)).hexdigest(), "index": index})
            if not (self.folder / "meta.json").is_file():
                files["meta.json"] = canonical(meta)
            for file, content in files.items():
                with atomic(self.folder / file) as out:
                    out.write(content)
            sync_folder(self.folder)
        except OSError as error:
            raise DataError(
                f"{self.folder}: {len(texts)} text embeddings cannot be written ({error.strerror}). Make room, or set "
                "features.root to a folder that can be written to, or use features=memory or live."
            ) from error
        shard = _Shard(self.folder / f"{name}.json", digest, embeddings)
        self._where |= {text: (shard, row) for row, text in enumerate(texts)}
