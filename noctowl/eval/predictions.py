"""What a detector said about one benchmark: written once, scored as often as wanted, for every N.

Legend: V vocabularies, R stored rows (patches), C = 1 + largest N captions, D detections, P patches of an image.

Conventions, fixed here:
- the key of a vocabulary is (image id, category id of its positive caption);
- column 0 is the positive, columns 1.. the negatives in file order; -inf where the vocabulary has fewer;
- with N negatives a patch scores max over columns 0..N, its label is the argmax, and the `top` best patches count
  (FG-OVD paper, section on inference). Logits are kept, as sigmoids saturate and tie; ties go to the earlier patch.
  Stored are the patches that are in the top list of any N of `n_negatives`, so each of these lists is exact.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int, Int64
from numpy import ndarray

from noctowl.errors import DataError
from noctowl.runfolder import atomic

FORMAT, VERSION = "noctowl-predictions", 1
ARRAYS = {"image_ids": "i8", "category_ids": "i8", "row_offsets": "i8", "boxes": "f4", "logits": "f4"}


@dataclass(frozen=True, eq=False)
class TopDetections:
    """Best patches of each vocabulary, best first."""

    offsets: Int64[ndarray, "V+1"]  # into D
    scores: Float32[ndarray, "D"]  # logit of the best caption
    columns: Int64[ndarray, "D"]  # that caption's column; 0 is the positive
    boxes: Float32[ndarray, "D 4"]  # xyxy, pixels
    rows: Int64[ndarray, "D"]  # rows of the Predictions


@dataclass(frozen=True, eq=False)
class Predictions:
    """One benchmark's predictions; see the head of this file. Raises DataError where the arrays do not fit together."""

    image_ids: Int64[ndarray, "V"]
    category_ids: Int64[ndarray, "V"]
    row_offsets: Int64[ndarray, "V+1"]
    boxes: Float32[ndarray, "R 4"]  # xyxy, pixels of the annotated image
    logits: Float32[ndarray, "R C"]
    n_negatives: tuple[int, ...]  # every N whose top list is complete
    top: int = 100
    settings: dict[str, Any] = field(default_factory=dict)  # JSON: model, hashes, processor ... of whoever predicted

    def __post_init__(self) -> None:
        n_vocab, n_row = len(self.image_ids), len(self.boxes)
        problems = [
            f"{name} is {getattr(self, name).dtype}{list(getattr(self, name).shape)}, needed {kind}"
            for name, kind in ARRAYS.items()
            if getattr(self, name).dtype != np.dtype(kind) or getattr(self, name).ndim != (1 + (kind == "f4"))
        ]
        if not problems:
            offsets = self.row_offsets
            fits = len(offsets) == n_vocab + 1 and offsets[0] == 0 and offsets[-1] == n_row
            checks = {
                "category_ids and image_ids differ in length": len(self.category_ids) == n_vocab,
                "row_offsets do not cut the rows into vocabularies": fits and bool((np.diff(offsets) >= 0).all()),
                "boxes are not [R, 4]": self.boxes.shape[1] == 4,
                "logits are not [R, 1 + largest N]": len(self.logits) == n_row
                and self.logits.shape[1] > max(self.n_negatives, default=0) >= 0,
                "boxes are not finite or inverted": bool(
                    np.isfinite(self.boxes).all() and (self.boxes[:, 2:] >= self.boxes[:, :2]).all()
                ),
                "logits hold NaN or +inf": not (np.isnan(self.logits).any() or np.isposinf(self.logits).any()),
                "a positive's logit is not finite": bool(np.isfinite(self.logits[:, :1]).all()),
                "a vocabulary occurs twice": len(set(self.keys())) == n_vocab,
                "top or n_negatives out of range": self.top > 0 and min(self.n_negatives, default=-1) >= 0,
            }
            problems = [text for text, good in checks.items() if not good]
        if problems:
            raise DataError(f"predictions are damaged: {'; '.join(problems)}. Predict again.")

    @classmethod
    def from_parts(
        cls,
        parts: Iterable[tuple[int, int, Float[ndarray, "S 4"], Float[ndarray, "S C_v"]]],
        *,
        n_negatives: Sequence[int],
        top: int = 100,
        settings: dict[str, Any] | None = None,
    ) -> "Predictions":
        """From (image id, positive category id, boxes, logits) of each vocabulary; S rows as `select_rows` chose them.

        C_v may be less than C (short vocabulary: the rest becomes -inf) or more (columns beyond the largest N).
        """
        items = list(parts)
        offsets = np.cumsum([0, *(len(boxes) for _, _, boxes, _ in items)], dtype=np.int64)
        logits = np.full((int(offsets[-1]), 1 + max(n_negatives, default=0)), -np.inf, np.float32)
        for first, last, (*_, part) in zip(offsets, offsets[1:], items):
            columns = min(part.shape[1], logits.shape[1])
            logits[first:last, :columns] = part[:, :columns]
        return cls(
            image_ids=np.array([item[0] for item in items], np.int64),
            category_ids=np.array([item[1] for item in items], np.int64),
            row_offsets=offsets,
            boxes=np.concatenate([np.zeros((0, 4), np.float32), *(item[2] for item in items)]).astype(np.float32),
            logits=logits,
            n_negatives=tuple(sorted(set(n_negatives))),
            top=top,
            settings=dict(settings or {}),
        )

    def __len__(self) -> int:
        return len(self.image_ids)

    def keys(self) -> list[tuple[int, int]]:
        """(image id, category id of the positive) of each vocabulary."""
        return list(zip(self.image_ids.tolist(), self.category_ids.tolist()))

    def at(self, n: int, vocabularies: Int[ndarray, "W"] | None = None, *, top: int | None = None) -> TopDetections:
        """Top lists with n negatives of the given vocabularies (all of them by default), in the given order.

        Raises DataError where n or `top` asks for more than what was stored.
        """
        top = self.top if top is None else top
        if n not in self.n_negatives or top > self.top:
            raise DataError(
                f"predictions hold the top {self.top} for N in {list(self.n_negatives)}; asked: top {top}, N = {n}. "
                "Ask for one of these or predict again with this N."
            )
        rows, counts = np.arange(len(self.boxes)), np.diff(self.row_offsets)
        if vocabularies is not None:
            counts = counts[vocabularies]
            first = np.cumsum(counts) - counts
            rows = np.arange(counts.sum()) + np.repeat(self.row_offsets[:-1][vocabularies] - first, counts)
        score = self.logits[rows, 0]
        for column in range(1, n + 1):
            np.maximum(score, self.logits[rows, column], out=score)
        vocab = np.repeat(np.arange(len(counts)), counts)
        order = np.lexsort((-score, vocab))  # stable
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = order[place < top]
        rows = rows[order]
        return TopDetections(
            offsets=np.concatenate([[0], np.cumsum(np.minimum(counts, top))]).astype(np.int64),
            scores=score[order],
            columns=self.logits[rows, : n + 1].argmax(1),
            boxes=self.boxes[rows],
            rows=rows,
        )

    def save(self, path: str | Path) -> Path:
        """Write one .npz without pickle; complete or not at all."""
        path = Path(path)
        head = {"format": FORMAT, "version": VERSION, "n_negatives": list(self.n_negatives), "top": self.top}
        text = json.dumps(head | {"settings": self.settings}, sort_keys=True, allow_nan=False)
        with atomic(path) as file:
            np.savez(
                file, head=np.frombuffer(text.encode(), np.uint8), **{name: getattr(self, name) for name in ARRAYS}
            )
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Predictions":
        """Raises DataError for an absent, truncated or foreign file and for one of another version."""
        path = Path(path)
        remedy = f"Allowed is a complete {FORMAT} file of version {VERSION}; predict again with this version."
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("head", *ARRAYS) if name in file.files}
            head = json.loads(arrays.pop("head").tobytes()) if "head" in arrays else {}
        except FileNotFoundError as error:
            raise DataError(f"{path}: no such predictions file. Predict first, or correct the path.") from error
        except (
            OSError,
            ValueError,
            EOFError,
            KeyError,
            TypeError,
            AttributeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as e:
            raise DataError(f"{path}: truncated, or no predictions file ({type(e).__name__}: {e}). {remedy}") from e
        found = (head.get("format"), head.get("version")) if isinstance(head, dict) else (None, None)
        if found != (FORMAT, VERSION) or set(arrays) != set(ARRAYS) or "n_negatives" not in head or "top" not in head:
            raise DataError(f"{path}: found format {found[0]}, version {found[1]}, arrays {sorted(arrays)}. {remedy}")
        try:
            n_negatives = tuple(int(n) for n in head["n_negatives"])
            return cls(**arrays, n_negatives=n_negatives, top=int(head["top"]), settings=head.get("settings", {}))
        except (DataError, TypeError, ValueError) as error:
            raise DataError(f"{path}: {error}") from error


def select_rows(logits: Float[ndarray, "P C"], n_list: Iterable[int], top: int = 100) -> Int64[ndarray, "S"]:
    """Patches that are among the `top` best for any N of n_list, ascending; ties go to the earlier patch.

    C may be smaller than N + 1: a short vocabulary is asked with what it has. Raises DataError for NaN.
    """
    if np.isnan(logits).any():
        raise DataError("logits hold NaN; the model or its input is damaged. Look at the checkpoint and the image.")
    best = np.maximum.accumulate(logits.T, axis=0)  # [C, P], row N: max over columns 0..N
    score = best[sorted({min(n, len(best) - 1) for n in n_list})]  # [N's, P]
    if score.shape[1] <= top:
        return np.arange(score.shape[1])
    least = np.partition(score, -top, axis=1)[:, -top, None]
    tied = score == least
    room = top - (score > least).sum(1, keepdims=True)
    return np.flatnonzero(((score > least) | (tied & (np.cumsum(tied, axis=1) <= room))).any(0))


def merge(parts: Sequence[Predictions], *, atol: float = 1e-3) -> Predictions:
    """One Predictions, sorted by key, from the parts of several processes.

    A vocabulary that several parts hold (samplers pad the last round) is taken once. Raises DataError where such
    copies differ by more than `atol` (logits and pixels), or where the parts were made with different settings.
    """
    if not parts:
        raise DataError("no predictions to merge; at least one part is needed. Look for the processes' part files.")
    first = parts[0]
    for number, part in enumerate(parts):
        differ = [n for n in ("n_negatives", "top", "settings") if getattr(part, n) != getattr(first, n)]
        if part.logits.shape[1] != first.logits.shape[1]:
            differ.append("number of logit columns")
        if differ:
            raise DataError(f"part {number} differs from part 0 in {differ}; only parts of one run can be merged.")
    where: dict[tuple[int, int], tuple[int, int]] = {}  # key -> part, vocabulary
    for number, part in enumerate(parts):
        for v, key in enumerate(part.keys()):
            other = where.setdefault(key, (number, v))
            if other != (number, v) and not _same(parts[other[0]], other[1], part, v, atol):
                raise DataError(
                    f"parts {other[0]} and {number} differ in vocabulary (image {key[0]}, category {key[1]}); copies "
                    "of one vocabulary must agree. The parts come from different weights or inputs: predict again."
                )
    chosen = sorted(where.items())
    slices = [(parts[p], slice(*parts[p].row_offsets[v : v + 2])) for _, (p, v) in chosen]
    return Predictions(
        image_ids=np.array([key[0] for key, _ in chosen], np.int64),
        category_ids=np.array([key[1] for key, _ in chosen], np.int64),
        row_offsets=np.cumsum([0, *(s.stop - s.start for _, s in slices)], dtype=np.int64),
        boxes=np.concatenate([first.boxes[:0], *(part.boxes[s] for part, s in slices)]),
        logits=np.concatenate([first.logits[:0], *(part.logits[s] for part, s in slices)]),
        n_negatives=first.n_negatives,
        top=first.top,
        settings=first.settings,
    )


def _same(a: Predictions, v: int, b: Predictions, w: int, atol: float) -> bool:
    left, right = slice(*a.row_offsets[v : v + 2]), slice(*b.row_offsets[w : w + 2])
    return left.stop - left.start == right.stop - right.start and all(
        np.allclose(getattr(a, name)[left], getattr(b, name)[right], rtol=0, atol=atol) for name in ("boxes", "logits")
    )
