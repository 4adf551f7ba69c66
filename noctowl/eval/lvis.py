"""Coarse detection on annotation files in LVIS's format: reading, the two protocols, scoring.

Legend: I images, K classes, G objects, D detections, P patches.

Classes and images are known by their ids, never by a position. LVIS is federated: of an image only the classes with
objects or on its negative list are judged, and where a class is on its not-exhaustive list an unmatched detection is
ignored (LVIS paper, "federated dataset"). Figures equal the LVIS API's: AP over IoU .50 to .95, the best 300 detections
of an image, size by the annotated area, classes grouped by frequency (rare, common, frequent).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from numpy import ndarray
from torchvision.ops import nms

from noctowl.data.records import Strings, relative_path
from noctowl.errors import DataError
from noctowl.eval.ap import BoxScores, Detections, Federated, GroundTruth, Thresholds, score_matched
from noctowl.eval.greedy import rows_of
from noctowl.eval.matching import Matched, match_boxes

MAX_DETECTIONS = 300
GROUPS = {"rare": "r", "common": "c", "frequent": "f"}


@dataclass(frozen=True, eq=False)
class LvisAnnotations:
    path: Path
    sha256: str  # of the file
    image_ids: Int64[ndarray, "I"]
    image_files: Strings  # [I] e.g. "val2017/000000397133.jpg"
    image_sizes: Int32[ndarray, "I 2"]  # width, height in pixels
    category_ids: Int64[ndarray, "K"]
    names: Strings  # [K]
    frequency: ndarray  # [K] one of "r", "c", "f"
    objects: GroundTruth
    federated: Federated


def read_lvis(path: str | Path) -> LvisAnnotations:
    """Raises DataError for an absent or damaged file and for ids that it does not define; names file and entry."""
    path = Path(path)
    try:
        content = path.read_bytes()
        data = json.loads(content)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file. Download the LVIS v1 annotations, or correct the path.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: no valid JSON ({error}). Download or write it again.") from error
    try:
        return _pack(path, hashlib.sha256(content).hexdigest(), data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path}: not in LVIS's format ({type(error).__name__}: {error}). Needed: images with id, width, height, "
            "coco_url or file_name, neg_category_ids, not_exhaustive_category_ids; annotations with image_id, "
            "category_id, bbox, area; categories with id, name, frequency."
        ) from error


def _pack(path: Path, sha256: str, data: dict[str, Any]) -> LvisAnnotations:
    images, objects, categories = data["images"], data["annotations"], data["categories"]
    image_ids = np.array([entry["id"] for entry in images], np.int64)
    category_ids = np.array([entry["id"] for entry in categories], np.int64)
    for what, ids in (("image", image_ids), ("category", category_ids)):
        if len(np.unique(ids)) != len(ids):
            raise DataError(f"{path}: {what} ids occur twice; each must be unique. Mend the file.")
    frequency = np.array([entry["frequency"] for entry in categories], "<U1")
    if not np.isin(frequency, list(GROUPS.values())).all():
        raise DataError(f"{path}: frequency found {sorted(set(frequency.tolist()))}, allowed r, c, f. Mend the file.")
    numbers = np.array([(entry["image_id"], entry["category_id"]) for entry in objects], np.int64).reshape(-1, 2)
    boxes = np.array([entry["bbox"] for entry in objects], np.float64).reshape(-1, 4)
    federated = Federated(
        negative=_rows(images, "neg_category_ids"), not_exhaustive=_rows(images, "not_exhaustive_category_ids")
    )
    for where, rows in (("annotations", numbers), *vars(federated).items()):
        _check_ids(path, where, rows, image_ids, category_ids)
    return LvisAnnotations(
        path=path,
        sha256=sha256,
        image_ids=image_ids,
        image_files=Strings(_image_file(entry, path) for entry in images),
        image_sizes=np.array([(entry["width"], entry["height"]) for entry in images], np.int32).reshape(-1, 2),
        category_ids=category_ids,
        names=Strings(entry["name"] for entry in categories),
        frequency=frequency,
        objects=GroundTruth(
            image=numbers[:, 0],
            label=numbers[:, 1],
            boxes=np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1),
            area=np.array([entry["area"] for entry in objects], np.float64),
        ),
        federated=federated,
    )


def score(
    detections: Detections, annotations: LvisAnnotations, *, recall_thresholds: Thresholds = "float64"
) -> dict[str, float]:
    """ap, ap_50, ap_75, ap_{small,medium,large}, ap_{rare,common,frequent}; a figure without objects is absent.

    Raises DataError for detections of images or classes that the file does not have.
    """
    matched = match_classes(detections, annotations, recall_thresholds=recall_thresholds)
    return figures(score_classes(matched), annotations)


def score_classes(matched: Matched) -> BoxScores:
    """AP of every class, from what `match_classes` gave."""
    return score_matched(matched, max_detections=(MAX_DETECTIONS,))


def match_classes(
    detections: Detections, annotations: LvisAnnotations, *, recall_thresholds: Thresholds = "float64"
) -> Matched:
    """What AP and its intervals are read off; rows of images are the file's sorted ids. Errors as of `score`."""
    rows = np.stack([detections.image, detections.label], 1)
    _check_ids(annotations.path, "detections", rows, annotations.image_ids, annotations.category_ids)
    return match_boxes(
        detections=detections,
        ground_truth=annotations.objects,
        federated=annotations.federated,
        max_detections=MAX_DETECTIONS,
        max_per_image=MAX_DETECTIONS,
        thresholds=recall_thresholds,
        images=np.sort(annotations.image_ids),
    )


def figures(result: BoxScores, annotations: LvisAnnotations) -> dict[str, float]:
    """What `score` gives, from the classes' AP."""
    found = {"ap": result.mean_ap(), "ap_50": result.mean_ap(iou=0.5), "ap_75": result.mean_ap(iou=0.75)}
    found |= {f"ap_{area}": result.mean_ap(area=area) for area in ("small", "medium", "large")}
    for group, members in frequency_groups(annotations).items():
        found[f"ap_{group}"] = result.mean_ap(classes=members)
    return {name: value for name, value in found.items() if value is not None}


def frequency_groups(annotations: LvisAnnotations) -> dict[str, list[int]]:
    """Class ids by frequency: rare, common, frequent."""
    return {
        group: annotations.category_ids[annotations.frequency == letter].tolist() for group, letter in GROUPS.items()
    }


def select_top_class(
    logits: Float[ndarray, "P K"],
    boxes: Float[ndarray, "P 4"],
    image_id: int,
    category_ids: Int[ndarray, "K"],
    nms_iou: float | None = None,
    top: int = MAX_DETECTIONS,
) -> Detections:
    """One image by NoctOWL's in-training protocol: the best class of each patch, then the `top` best patches.

    nms_iou: class-agnostic suppression before the cut; None (as published) suppresses nothing. Best first.
    """
    label, best = logits.argmax(1), logits.max(1)  # [P]
    order = np.argsort(-best, kind="stable")
    if nms_iou is not None:
        order = nms(torch.from_numpy(boxes).float(), torch.from_numpy(best).float(), nms_iou).numpy()
    return _detections(image_id, category_ids[label], boxes, best, order[:top])


def select_top_pairs(
    logits: Float[ndarray, "P K"],
    boxes: Float[ndarray, "P 4"],
    image_id: int,
    category_ids: Int[ndarray, "K"],
    top: int = MAX_DETECTIONS,
) -> Detections:
    """One image by OWL's own protocol: the `top` best of all patch-class pairs, no suppression; best first."""
    flat = logits.ravel()  # [P * K]
    start = max(len(flat) - top, 0)
    least = np.partition(flat, start)[start] if len(flat) else -np.inf
    candidates = np.flatnonzero(flat >= least)  # ties at the border: the earlier pair
    pair = candidates[np.argsort(-flat[candidates], kind="stable")][:top]
    patch, label = np.divmod(pair, logits.shape[1])
    return _detections(image_id, category_ids[label], boxes[patch], flat[pair], np.arange(len(pair)))


def _detections(image_id: int, label: ndarray, boxes: ndarray, scores: ndarray, order: ndarray) -> Detections:
    image = np.full(len(order), image_id, np.int64)
    return Detections(image=image, label=label[order].astype(np.int64), boxes=boxes[order], scores=scores[order])


def _rows(images: Sequence[dict[str, Any]], key: str) -> Int64[ndarray, "N 2"]:
    return np.array([(entry["id"], k) for entry in images for k in entry[key]], np.int64).reshape(-1, 2)


def _check_ids(path: Path, where: str, rows: ndarray, image_ids: ndarray, category_ids: ndarray) -> None:
    for what, found, known in (("image", rows[:, 0], image_ids), ("category", rows[:, 1], category_ids)):
        lacking = rows_of(found, np.sort(known)) < 0
        if lacking.any():
            strange = np.unique(found[lacking])
            raise DataError(
                f"{path}, {where}: {what} ids {strange[:5].tolist()} ({len(strange)} such) are not among the file's "
                f"{len(known)} {what} ids. Ids are needed, not positions."
            )


def _image_file(entry: dict[str, Any], path: Path) -> str:
    """Folder and name from the coco_url (images lie in train2017 and val2017); otherwise file_name."""
    url = entry.get("coco_url", "")
    name = "/".join(url.split("/")[-2:]) if url.startswith(("http://", "https://")) else entry["file_name"]
    return relative_path(name, where=f"{path}, image {entry['id']}")
