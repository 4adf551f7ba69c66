"""One forward per distinct image serves every vocabulary, every benchmark and every N.

OWL scores captions independently of each other, so an image's tokens are scored against all captions that any benchmark
asks of it at once, and N only selects columns of the result.

Legend: P patches, Q distinct captions of one image, C columns of one vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noctowl.boxes import from_frame
from noctowl.data.fgovd import processable
from noctowl.data.records import Annotations
from noctowl.eval.ap import Detections
from noctowl.eval.coarse import Coarse
from noctowl.eval.controls import oracle_patches
from noctowl.eval.outcome import Outcome
from noctowl.eval.predictions import Predictions, select_rows
from noctowl.features import ImageSet, TextBank
from noctowl.model import ImageFeatures, OwlDetector
from noctowl.text import token_lengths


@dataclass
class Benchmark:
    """One annotation file that is to be scored, and what of it can be processed.

    `needed` bool [V]: vocabularies that are processable at one requested N at least. `caption_rows` int64 [K]: rows in
    the text bank, -1 for captions that no needed vocabulary reads or that are over the token limit.
    """

    annotations: Annotations
    n_negatives: tuple[int, ...]
    needed: np.ndarray
    caption_rows: np.ndarray
    lengths: np.ndarray | None
    image_rows: np.ndarray


def plan(
    annotations: Annotations,
    *,
    n_negatives: Sequence[int],
    bank: TextBank,
    images: ImageSet,
    short_vocabularies: str,
) -> Benchmark:
    """Which vocabularies and captions of a file have to be computed, and their rows in the text bank and the image set.

    Under the bank's policy "drop" a vocabulary with a caption over the token limit among its first 1 + N is left out at
    that N (FG-OVD paper, the "OWL subset"); under "truncate" nothing is left out.
    """
    lengths = _lengths(annotations, bank) if bank.policy == "drop" else None
    short = np.full(len(annotations.captions), 2, np.int64) if lengths is None else lengths
    needed = np.zeros(len(annotations), np.bool_)
    used = np.zeros(len(annotations.captions), np.bool_)
    for n in n_negatives:
        keep = processable(annotations, short, n, short=short_vocabularies)  # type: ignore[arg-type]
        needed |= keep
        for v in np.flatnonzero(keep):
            used[annotations.vocabulary(int(v))[: 1 + n]] = True
    rows = np.full(len(annotations.captions), -1, np.int64)
    rows[used] = bank.rows(annotations.captions.take(np.flatnonzero(used)))
    file_images = np.unique(annotations.vocab_image[needed])
    image_rows = np.full(len(annotations.image_ids), -1, np.int64)
    image_rows[file_images] = images.add(
        annotations.image_files.take(file_images), annotations.image_sizes[file_images]
    )
    return Benchmark(annotations, tuple(sorted(n_negatives)), needed, rows, lengths, image_rows)


def _lengths(annotations: Annotations, bank: TextBank) -> np.ndarray:
    """True token counts of the captions of a file; captions are counted, not encoded."""
    return token_lengths(bank.detector.tokenizer, list(annotations.captions))


@torch.no_grad()
def predict(
    detector: OwlDetector,
    benchmarks: Mapping[str, Benchmark],
    features: Iterable[tuple[list[int], ImageFeatures]],
    *,
    images: ImageSet,
    embeddings: Tensor,
    top: int,
    settings: Mapping[str, Any],
    coarse: Coarse | None = None,
) -> Outcome:
    """Score every needed vocabulary on the images that `features` delivers.

    Args:
        features: (rows of `images`, their features) a batch at a time.
        embeddings: the text bank's, [M, D].
        top: detections kept per vocabulary and N.
        settings: what the predictions come from (JSON), kept inside them.

    Returns:
        Predictions of each benchmark for the images delivered, coarse detections, and how many images and vocabularies
        were scored.
    """
    by_image = {name: _vocabularies_by_image(b) for name, b in benchmarks.items()}
    parts: dict[str, list[tuple[int, int, np.ndarray, np.ndarray]]] = {name: [] for name in benchmarks}
    detections: list[Detections] = []
    coarse_ids = {} if coarse is None else coarse.image_ids()
    counters = {"images": 0, "vocabularies": 0}
    for rows, batch in features:
        for i, row in enumerate(rows):
            counters["images"] += 1
            tokens = batch.tokens[i : i + 1]  # [1, P, Dv]
            boxes = from_frame(batch.boxes[i].float().cpu(), *images.sizes[row], detector.frame)  # [P, 4] pixels
            wanted = [(name, v) for name, index in by_image.items() for v in index.get(row, ())]
            if wanted:
                relative = batch.boxes[i].float().cpu()  # [P, 4]
                _score_image(detector, benchmarks, wanted, tokens, relative, embeddings, top, parts)
                counters["vocabularies"] += len(wanted)
            if coarse is not None and row in coarse_ids:
                detections.append(coarse.detect(detector, tokens, boxes.numpy(), coarse_ids[row]))
    predictions = {
        name: Predictions.from_parts(
            sorted(parts[name], key=lambda part: part[:2]),  # by key, as parts of several processes are merged
            n_negatives=b.n_negatives,
            top=top,
            settings={**settings, "annotations_sha256": b.annotations.sha256},
        )
        for name, b in benchmarks.items()
    }
    if coarse is None:
        return Outcome(predictions, None, counters)
    return Outcome(predictions, Detections.concatenate(detections), counters, {**settings, **coarse.settings})


def _vocabularies_by_image(benchmark: Benchmark) -> dict[int, list[int]]:
    """Row in the image set -> needed vocabularies of that image."""
    index: dict[int, list[int]] = {}
    for v in np.flatnonzero(benchmark.needed):
        index.setdefault(int(benchmark.image_rows[benchmark.annotations.vocab_image[v]]), []).append(int(v))
    return index


def _score_image(
    detector: OwlDetector,
    benchmarks: Mapping[str, Benchmark],
    wanted: list[tuple[str, int]],
    tokens: Tensor,
    relative: Tensor,
    embeddings: Tensor,
    top: int,
    parts: dict[str, list[tuple[int, int, np.ndarray, np.ndarray]]],
) -> None:
    """Logits of one image against all its captions, cut into vocabularies and appended to `parts`.

    Stored are the rows that any N needs, and the patch that fits each true box best (control "oracle"). Boxes are in
    the pixels of the annotated image, which is another one where images are exchanged (control "shuffled").
    """
    frames: dict[tuple[int, ...], np.ndarray] = {}
    columns = [_columns(benchmarks[name], v) for name, v in wanted]  # rows in the bank, -1 where not processable
    distinct, inverse = np.unique(np.concatenate(columns), return_inverse=True)
    queries = embeddings[torch.from_numpy(np.maximum(distinct, 0))].to(tokens.device)[None]  # [1, Q, D]
    logits = detector.score(tokens, queries).logits[0].float().cpu().numpy()  # [P, Q]
    logits[:, distinct < 0] = -np.inf
    start = 0
    for (name, v), own in zip(wanted, columns):
        benchmark = benchmarks[name]
        part = logits[:, inverse[start : start + len(own)]]  # [P, C]
        start += len(own)
        file = benchmark.annotations
        size = tuple(file.image_sizes[file.vocab_image[v]].tolist())
        if size not in frames:
            frames[size] = from_frame(relative, size[0], size[1], detector.frame).numpy()  # [P, 4] pixels
        boxes = frames[size]
        oracle = oracle_patches(boxes, file.object_boxes[file.objects(v)])
        keep = np.union1d(select_rows(part, benchmark.n_negatives, top), oracle)
        key = (int(file.image_ids[file.vocab_image[v]]), int(file.positive_ids[v]))
        parts[name].append((*key, boxes[keep], part[keep]))


def _columns(benchmark: Benchmark, v: int) -> np.ndarray:
    """Bank rows of a vocabulary's first 1 + max N captions; -1 from the first that cannot be processed."""
    rows = benchmark.caption_rows[benchmark.annotations.vocabulary(v)[: 1 + max(benchmark.n_negatives)]]
    missing = np.flatnonzero(rows < 0)
    if len(missing):
        rows = rows.copy()
        rows[missing[0] :] = -1
    return rows
