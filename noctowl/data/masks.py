"""Masks of annotation files: not trained on, but they tell whether a box is where its object is."""

import json
from pathlib import Path

import numpy as np
from pycocotools import mask as coco

TOLERANCE = 2.0  # pixels: masks are drawn on the pixel grid, boxes are not


def boxes_off_their_masks(path: Path) -> dict[str, int]:
    """Annotations with a mask; those whose box differs from its extent by more than 2 pixels; masks that are damaged.

    Polygons and run-length encodings are read, as COCO has them. The file is one that `read_fgovd` has accepted.
    """
    data = json.loads(path.read_bytes())
    sizes = {image["id"]: (int(image["height"]), int(image["width"])) for image in data["images"]}
    counts = {"masks": 0, "boxes_off_their_masks": 0, "damaged_masks": 0}
    for entry in data["annotations"]:
        found = entry.get("segmentation")
        if not found:
            continue
        counts["masks"] += 1
        try:
            x, y, width, height = coco.toBbox(_encoded(found, *sizes[entry["image_id"]]))
        except Exception:  # pycocotools raises the bare class; the mask is counted, and nothing else reads it
            counts["damaged_masks"] += 1
            continue
        left, top, wide, high = entry["bbox"]
        differences = np.array([x - left, y - top, x + width - left - wide, y + height - top - high])
        counts["boxes_off_their_masks"] += bool(np.abs(differences).max() > TOLERANCE)
    return counts


def _encoded(segmentation: list | dict, height: int, width: int) -> dict:
    """One run-length encoding of polygons, or of counts that are not compressed yet."""
    if isinstance(segmentation, list):
        return coco.merge(coco.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco.frPyObjects(segmentation, height, width)
    return segmentation
