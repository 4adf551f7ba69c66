"""Where weights come from: a local folder or a hub id, to a config, a model, an image processor and a tokenizer.

Everything is read from one folder; a hub id is first turned into its snapshot folder, so both ways are the same code.
Only safetensors are read, nothing is unpickled and no code of a repository is run. The model's class follows
`model_type` in config.json, never the name. Weights are fp32 whatever the file holds.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoTokenizer, Owlv2Config, OwlViTConfig, PreTrainedModel, PreTrainedTokenizerBase

from noctowl.architectures import FAMILY, MODEL_CLASSES, OwlConfig, OwlImageProcessor, image_processor
from noctowl.errors import ModelError
from noctowl.text import TOKEN_LIMIT

log = logging.getLogger(__name__)
CONFIG_CLASSES = {"owlvit": OwlViTConfig, "owlv2": Owlv2Config}
DOWNLOADED = ["*.json", "*.txt", "*.safetensors"]


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """Folder of a source: itself if it is a folder, the snapshot of a hub id otherwise (downloaded or cached).

    Raises ModelError if the folder does not exist, the id is unknown, or there is no network and nothing cached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"{source}: a local folder has no revision; remove revision={revision!r}")
        return path
    text = str(source)
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ModelError(
            f"{source}: no such folder. Give a folder with config.json and model.safetensors, or a hub id 'owner/name'."
        )
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=DOWNLOADED))
    except (OSError, ValueError) as error:
        parent = path.parent
        absent = (
            f"{text}: no such folder ({parent} holds: {_listing(parent)}). As a hub id: " if parent.is_dir() else ""
        )
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{absent}{text}{at} cannot be fetched from the hub and is not in the local cache "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Without network: run `hf download {text} "
            f"--local-dir FOLDER` on a machine that has it, copy FOLDER here and give its path as the model's source."
        ) from error


def load_config(folder: Path, *, expect: str | None = None) -> OwlConfig:
    """Config of a folder; raises ModelError for another architecture than OWL-ViT, OWLv2 or the expected one."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{file} is missing: {folder} is not a transformers model folder. It holds: {_listing(folder)}"
        )
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object ({error}): copy or download the folder again") from error
    if kind not in CONFIG_CLASSES:
        raise ModelError(f"{file}: model_type is {kind!r}; allowed: {', '.join(CONFIG_CLASSES)}")
    if expect is not None and kind != expect:
        raise ModelError(
            f"{folder} holds an {FAMILY[kind]} model (model_type {kind!r} in config.json) where {FAMILY[expect]} is "
            f"expected: choose a model config of that family, or give a folder of {FAMILY[expect]}"
        )
    try:
        return CONFIG_CLASSES[kind].from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file} is not a valid {FAMILY[kind]} config: {error}") from error


def load_weights(folder: Path, config: OwlConfig, *, attention: str = "sdpa") -> PreTrainedModel:
    """Model with the folder's weights in fp32, in eval mode.

    Raises ModelError if there are no safetensors, if they are damaged, or if any weight is missing or has another
    shape (the library would fill it at random).
    """
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ModelError(
            f"{folder} has no model.safetensors (it holds: {_listing(folder)}). Pickled weights are not read: convert "
            f"them, or give the revision of the repository that has safetensors"
        )
    try:
        model, info = MODEL_CLASSES[config.model_type].from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{folder}: weights cannot be loaded ({type(error).__name__}: {error})") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        found = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        raise ModelError(
            f"{folder}: {len(found)} weights are missing or have another shape than config.json says, "
            f"first {found[:3]}: the folder is incomplete or belongs to another architecture"
        )
    extra = sorted(key for key in info["unexpected_keys"] if not key.endswith("position_ids"))
    if extra:
        log.warning("%s: %d weights are not used by the model, first %s", folder, len(extra), extra[:3])
    return model.eval()


def load_image_processor(folder: Path, config: OwlConfig) -> OwlImageProcessor:
    """Image processor of a folder, of the class that belongs to the model; ModelError if absent or of another size."""
    try:
        processor = type(image_processor(config)).from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: no readable preprocessor_config.json or processor_config.json ({error})"
        ) from error
    side, size = config.vision_config.image_size, processor.size
    if (size["height"], size["width"]) != (side, side):
        raise ModelError(
            f"{folder}: the image processor makes {size['height']}x{size['width']}, the model takes {side}x{side}: "
            f"mend `size` in the processor's config"
        )
    return processor


def load_tokenizer(folder: Path, config: OwlConfig) -> PreTrainedTokenizerBase:
    """The folder's own tokenizer; raises ModelError if it has none or if it does not fit the text tower."""
    if not ((folder / "tokenizer.json").is_file() or all((folder / f).is_file() for f in ("vocab.json", "merges.txt"))):
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt): copy the base model's "
            f"tokenizer files into it, or pass `tokenizer` explicitly"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be read ({type(error).__name__}: {error})") from error
    check_tokenizer(tokenizer, config, where=str(folder))
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: OwlConfig, *, where: str) -> None:
    """Raises ModelError if the tokenizer has more ids than the text tower, or the tower fewer positions than 16."""
    known, ids = config.text_config.vocab_size, len(tokenizer)
    if ids > known:
        raise ModelError(f"{where}: the tokenizer has {ids} ids, the text tower {known}: it belongs to another model")
    if config.text_config.max_position_embeddings < TOKEN_LIMIT:
        raise ModelError(
            f"{where}: the text tower reads {config.text_config.max_position_embeddings} tokens, not {TOKEN_LIMIT}"
        )


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "") if names else "nothing"
