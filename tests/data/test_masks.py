"""Boxes beside their masks."""

import json

import pytest

from noctowl.data.masks import boxes_off_their_masks


def square(left, top, right, bottom):
    return [[left, top, right, top, right, bottom, left, bottom]]


def test_boxes_are_compared_with_polygons_and_runs(tmp_path):
    """A box that fits, one 5 px off, an uncompressed run-length mask that fits, none at all, a damaged one."""
    runs = {"size": [40, 60], "counts": [400, *([20, 20] * 9), 20, 1620]}  # column by column: x 10..19, y 0..19
    annotations = [
        {"id": 1, "image_id": 7, "bbox": [10, 10, 20, 15], "segmentation": square(10, 10, 30, 25)},
        {"id": 2, "image_id": 7, "bbox": [15, 10, 20, 15], "segmentation": square(10, 10, 30, 25)},
        {"id": 3, "image_id": 7, "bbox": [10, 0, 10, 20], "segmentation": runs},
        {"id": 4, "image_id": 7, "bbox": [0, 0, 5, 5]},
        {"id": 5, "image_id": 7, "bbox": [0, 0, 5, 5], "segmentation": [["a", "b"]]},
    ]
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"images": [{"id": 7, "width": 60, "height": 40}], "annotations": annotations}))
    assert boxes_off_their_masks(path) == {"masks": 4, "boxes_off_their_masks": 1, "damaged_masks": 1}


@pytest.mark.golden
def test_published_boxes_are_those_of_their_masks(shared):
    found = boxes_off_their_masks(shared / "data/fgovd/benchmarks/pattern.json")
    assert found == {"masks": 467, "boxes_off_their_masks": 1, "damaged_masks": 0}
