"""CLIP's tokenizer built offline, captions to token ids under the 16-token limit, and the prompts of class names.

Legend: M texts, L = 16 tokens (start and end included).

CLIP's byte-pair encoding works on words: after NFC and lower case, a word is a sequence of byte symbols, the last one
marked `</w>`, and the merges are applied in the order of their rank. The rank list ships with open_clip_torch.
"""

import gzip
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import CLIPTokenizer, PreTrainedTokenizerBase

from noctowl.errors import DataError, ModelError

START, END, PAD = "<|startoftext|>", "<|endoftext|>", "!"
TOKEN_LIMIT = 16  # model_max_length of OWL-ViT and OWLv2, start and end included
N_MERGES = 49_152 - 256 - 2  # merges of the published vocabulary of 49,408 tokens
# The seven best templates of CLIP's prompt engineering notebook; OWL-ViT and OWLv2 are evaluated with them.
CLIP_TEMPLATES = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)

Policy = Literal["error", "truncate", "drop"]
Merge = tuple[str, str]


def clip_tokenizer() -> CLIPTokenizer:
    """OWL's tokenizer, built offline: CLIP's vocabulary, start/end 49406/49407, pad "!" (id 0), at most 16 tokens."""
    return _build(_merges())


def small_clip_tokenizer(words: Iterable[str], n_merges: int = 4000) -> CLIPTokenizer:
    """The same encoding cut to its first `n_merges` merges and those that `words` need; for small models.

    Every text of `words` gets the same pieces as from the full vocabulary: the merges that its encoding applies are
    kept in their order, so at each step the best merge is the same one. Ids are dense, start and end come last (the
    text tower pools at the highest id).
    """
    merges = _merges()
    if not 0 <= n_merges <= len(merges):
        raise ModelError(f"n_merges is {n_merges}; allowed is 0 to {len(merges)}.")
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    backend = _build([]).backend_tokenizer
    needed = set(range(n_merges))
    for text in words:
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
            needed |= _applied([*word[:-1], word[-1] + "</w>"], ranks)
    return _build([merges[rank] for rank in sorted(needed)])


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of M texts. Rows that are not kept are padding only and must not be encoded."""

    input_ids: Int[Tensor, "M L"]
    attention_mask: Int[Tensor, "M L"]
    lengths: Int[Tensor, "M"]  # true token counts, start and end included, before any cut
    kept: Bool[Tensor, "M"]
    n_over: int  # texts over the limit, under every policy

    def __len__(self) -> int:
        return len(self.lengths)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], policy: Policy = "error") -> TokenizedText:
    """Token ids of `texts`, padded to the tokenizer's limit.

    `policy` for texts over the limit: "error" raises and names the longest; "truncate" cuts and keeps the end token;
    "drop" marks them as not kept. All are counted in `n_over`.

    Raises:
        DataError: a text over the limit under "error"; an unknown policy.
    """
    if policy not in ("error", "truncate", "drop"):
        raise DataError(f"text policy is {policy!r}; allowed are 'error', 'truncate' and 'drop'.")
    limit = int(tokenizer.model_max_length)
    rows = _encode(tokenizer, texts)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))  # [M]
    over = lengths > limit
    if policy == "error" and over.any():
        worst = int(lengths.argmax())
        raise DataError(
            f"caption too long: {texts[worst]!r} has {lengths[worst]} tokens, the limit is {limit} with start and end; "
            f"{over.sum()} of {len(rows)} captions are over it. Shorten it, or choose the policy 'drop' or 'truncate'."
        )
    kept = ~over if policy == "drop" else np.ones_like(over)
    ids = np.full((len(rows), limit), tokenizer.pad_token_id, np.int64)  # [M, L]
    mask = np.zeros_like(ids)
    for m, row in enumerate(rows):
        if kept[m]:
            n = min(len(row), limit)
            ids[m, :n], mask[m, :n] = row[:n], 1
            ids[m, n - 1] = row[-1]  # the end token, also after a cut
    return TokenizedText(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask),
        lengths=torch.from_numpy(lengths),
        kept=torch.from_numpy(kept),
        n_over=int(over.sum()),
    )


def token_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Int[np.ndarray, "M"]:
    """True token counts of `texts`, start and end included."""
    rows = _encode(tokenizer, texts)
    return np.fromiter(map(len, rows), np.int64, len(rows))


def class_prompt(name: str) -> str:
    """Prompt of a class name for coarse distillation (NoctOWL paper): "bow_(weapon)" -> "a bow weapon".

    'a ' and the name in lower case; every character outside [a-z0-9-# ] becomes a blank, blanks are collapsed.
    """
    return " ".join(("a " + re.sub(r"[^a-z0-9\-# ]", " ", name.lower())).split())


def canonical(text: str) -> str:
    """Canonical text of OWL-ViT's published evaluation: lower case, a-z, 0-9, single dashes and single blanks."""
    text = re.sub(r"[^a-z0-9\-# ]", " ", text.lower())
    return " ".join(re.sub(r"-+", "-", text).replace("#", "").split())


def template_prompts(name: str) -> list[str]:
    """The prompts of a class name under CLIP_TEMPLATES, in canonical text."""
    return [canonical(template.format(name)) for template in CLIP_TEMPLATES]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids with start and end, neither cut nor padded."""
    if not len(texts):
        return []
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(list(texts), **options).input_ids


def _build(merges: Iterable[Merge]) -> CLIPTokenizer:
    symbols, merges = _byte_symbols(), list(merges)
    tokens = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in merges), START, END]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # pairs are what the encoder takes
        bos_token=START,
        eos_token=END,
        unk_token=END,
        pad_token=PAD,
        model_max_length=TOKEN_LIMIT,
    )


@lru_cache(maxsize=1)
def _merges() -> tuple[Merge, ...]:
    """CLIP's merges by rank, from the file that open_clip_torch carries (found without importing the package)."""
    spec = importlib.util.find_spec("open_clip")
    path = Path(spec.origin).parent / "bpe_simple_vocab_16e6.txt.gz" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(
            f"CLIP's vocabulary is missing ({path}); it comes with open_clip_torch: pip install open_clip_torch."
        )
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : N_MERGES + 1]  # the first line is a header
    pairs = [tuple(line.split()) for line in lines]
    if len(pairs) != N_MERGES or any(len(pair) != 2 for pair in pairs):
        raise ModelError(
            f"{path} is not CLIP's vocabulary: {N_MERGES} merges of two parts are needed. Reinstall open_clip_torch."
        )
    return tuple((a, b) for a, b in pairs)


def _byte_symbols() -> list[str]:
    """One visible character for each of the 256 bytes: printable ones stand for themselves and come first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def _applied(symbols: list[str], ranks: dict[Merge, int]) -> set[int]:
    """Ranks of the merges that encode one word."""
    applied: set[int] = set()
    while len(symbols) > 1:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not pairs:
            break
        rank, i = min(pairs)
        applied.add(rank)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return applied
