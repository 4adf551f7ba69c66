"""Pictures that a person can judge: ground truth on the left, prediction on the right, boxes and captions on both."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from noctowl import fonts
from noctowl.boxes import iou
from noctowl.data.images import load_rgb, resolve_image
from noctowl.data.records import Annotations
from noctowl.eval.predictions import Predictions
from noctowl.eval.ranks import IOU

SIDE = 384  # pixels of one half; small images are enlarged to it
LETTERS, LINE = 15, 24  # pixels of the captions, and from line to line
RIGHT, WRONG, TRUTH = "#2a9d3a", "#c8321e", "#1f5fbf"


@dataclass(frozen=True)
class Sample:
    """One vocabulary of one image: what is there, and the best detection with its caption."""

    file: str
    size: tuple[int, int]
    truth: str
    truth_boxes: np.ndarray  # [G, 4] xyxy, pixels
    predicted: str | None  # None: nothing detected
    predicted_box: np.ndarray  # [0 or 1, 4]
    score: float

    @property
    def correct(self) -> bool:
        """The best detection carries the true caption."""
        return self.predicted == self.truth


def samples(
    annotations: Annotations, predictions: Predictions, *, n_negatives: int, count: int, seed: int
) -> list[Sample]:
    """`count` vocabularies drawn at random (not chosen), those with a detection only."""
    rows = {key: row for row, key in enumerate(predictions.keys())}
    keys = list(zip(annotations.image_ids[annotations.vocab_image].tolist(), annotations.positive_ids.tolist()))
    present = [v for v, key in enumerate(keys) if key in rows and annotations.n_negatives[v] >= 1]
    chosen = np.random.default_rng(seed).permutation(present)[:count].tolist()
    return [_sample(annotations, predictions, v, rows[keys[v]], n_negatives) for v in chosen]


def ranked(
    annotations: Annotations, predictions: Predictions, *, n_negatives: int, count: int
) -> dict[str, list[Sample]]:
    """The `count` "worst" and "best" vocabularies, by the lead of the right caption over the best wrong one (logits).

    Read at the best detection. Best: it is right, and covers an object of the vocabulary. Worst: it is wrong. No
    vocabulary stands in both, and of one image there is one at most in each.
    """
    found = predictions.at(n_negatives, top=1)
    rows = np.flatnonzero(np.diff(found.offsets))  # with a detection
    logits = predictions.logits[found.rows, : n_negatives + 1]  # [rows, C]
    if logits.shape[1] < 2 or not len(rows):
        return {"worst": [], "best": []}
    lead = logits[:, 0] - logits[:, 1:].max(1)
    keys = zip(annotations.image_ids[annotations.vocab_image].tolist(), annotations.positive_ids.tolist())
    place = {key: v for v, key in enumerate(keys)}
    own = predictions.keys()
    vocab = np.array([place.get(own[row], -1) for row in rows])
    taken = {"worst": np.flatnonzero((lead < 0) & (vocab >= 0)), "best": np.flatnonzero((lead > 0) & (vocab >= 0))}
    order = {"worst": lambda i: lead[i], "best": lambda i: -lead[i]}
    chosen: dict[str, list[Sample]] = {}
    for kind, candidates in taken.items():
        picked: list[Sample] = []
        seen: set[int] = set()
        for i in sorted(candidates.tolist(), key=order[kind]):
            v = int(vocab[i])
            image = int(annotations.vocab_image[v])
            if len(picked) == count or image in seen:
                continue
            if kind == "best" and not _covers(annotations.object_boxes[annotations.objects(v)], found.boxes[i]):
                continue
            seen.add(image)
            picked.append(_sample(annotations, predictions, v, int(rows[i]), n_negatives))
        chosen[kind] = picked
    return chosen


def _covers(objects: np.ndarray, box: np.ndarray) -> bool:
    return bool((iou(torch.from_numpy(objects), torch.from_numpy(box[None].astype(np.float64))) > IOU).any())


def _sample(annotations: Annotations, predictions: Predictions, v: int, row: int, n: int) -> Sample:
    best = predictions.at(n, np.array([row]), top=1)
    image = int(annotations.vocab_image[v])
    columns = annotations.vocabulary(v)
    width, height = (int(side) for side in annotations.image_sizes[image])
    found = len(best.columns) > 0
    return Sample(
        file=annotations.image_files[image],
        size=(width, height),
        truth=annotations.captions[columns[0]],
        truth_boxes=annotations.object_boxes[annotations.objects(v)],
        predicted=annotations.captions[columns[int(best.columns[0])]] if found else None,
        predicted_box=best.boxes[:1],
        score=float(1 / (1 + np.exp(-best.scores[0]))) if found else 0.0,
    )


def panel(sample: Sample, images_root: Path) -> Image.Image:
    """The two halves of one sample, [SIDE + caption lines, 2 SIDE]."""
    rgb = load_rgb(resolve_image(images_root, sample.file), expected_size=sample.size)
    colour = RIGHT if sample.correct else WRONG
    predicted = sample.predicted or "nothing detected"
    left = _half(rgb, sample.truth_boxes, TRUTH, f"truth: {sample.truth}")
    right = _half(rgb, sample.predicted_box, colour, f"predicted ({sample.score:.2f}): {predicted}")
    sheet = Image.new("RGB", (left.width + right.width + 8, max(left.height, right.height)), "white")
    sheet.paste(left, (0, 0))
    sheet.paste(right, (left.width + 8, 0))
    return sheet


def contact_sheet(panels: Sequence[Image.Image], columns: int = 2) -> Image.Image:
    """Panels in rows, 12 pixels apart. Raises ValueError for none."""
    if not panels:
        raise ValueError("a contact sheet needs at least one panel")
    width, height = max(p.width for p in panels), max(p.height for p in panels)
    lines = -(-len(panels) // columns)
    sheet = Image.new("RGB", (columns * (width + 12) - 12, lines * (height + 12) - 12), "white")
    for i, one in enumerate(panels):
        sheet.paste(one, ((i % columns) * (width + 12), (i // columns) * (height + 12)))
    return sheet


def _half(rgb: np.ndarray, boxes: np.ndarray, colour: str, caption: str) -> Image.Image:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OpenCV")  # supervision draws with numpy without it
        import supervision as sv
    scale = SIDE / max(rgb.shape[:2])
    size = (round(rgb.shape[1] * scale), round(rgb.shape[0] * scale))
    scene = Image.fromarray(rgb).resize(size, Image.Resampling.BICUBIC if scale < 1 else Image.Resampling.NEAREST)
    if len(boxes):
        detections = sv.Detections(xyxy=np.asarray(boxes, float) * scale, class_id=np.zeros(len(boxes), int))
        scene = sv.BoxAnnotator(color=sv.Color.from_hex(colour), thickness=3).annotate(scene, detections)
    return _under(scene, caption, colour)


def _under(scene: Image.Image, caption: str, colour: str) -> Image.Image:
    """The caption in lines below the picture: nothing of the picture is covered, long captions are not cut."""
    lines = fonts.wrap(caption, SIDE - 8, LETTERS)
    whole = Image.new("RGB", (SIDE, scene.height + LINE * len(lines) + 6), "white")
    whole.paste(scene, (0, 0))
    for i, line in enumerate(lines):
        fonts.write(whole, (4, scene.height + 4 + LINE * i), line, size=LETTERS, fill=colour)
    return whole
