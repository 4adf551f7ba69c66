import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noctowl.errors import DataError
from noctowl.eval import ap as ap_module
from noctowl.eval.ap import Detections, Federated, GroundTruth, score_boxes
from tests.eval.reference import assert_equal_scores, coco_scores


def boxes_of(*rows):
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def problem(seed: int, *, images: int, classes: int, objects: int, detections: int, grid: bool, crowd: bool):
    """Random problem: ids from 0 with gaps, tied scores and boxes on a grid, jittered copies of objects, three sizes."""
    rng = np.random.default_rng(seed)
    image_ids, class_ids = np.arange(images) * 3, np.arange(classes) * 2
    rng.shuffle(image_ids)
    side = np.exp(rng.uniform(np.log(8), np.log(160), (objects, 2)))
    side = np.maximum(np.round(side / 16) * 16, 16) if grid else side
    corner = rng.integers(0, 40, (objects, 2)) * 8.0
    gt_boxes = np.concatenate([corner, corner + side], 1)
    gt_image, gt_label = rng.choice(image_ids, objects), rng.choice(class_ids, objects)
    area = side.prod(1) * (1 if grid else rng.uniform(0.5, 1, objects))
    truth = GroundTruth(gt_image, gt_label, gt_boxes, area, rng.random(objects) < (0.3 if crowd else 0))
    source = rng.integers(0, objects, detections)
    copied = rng.random(detections) < 0.7
    shift = rng.integers(-2, 3, (detections, 4)) * 8.0 if grid else rng.normal(0, 5, (detections, 4))
    det_boxes = gt_boxes[source] + shift * (rng.random((detections, 1)) < 0.7)
    det_boxes = np.concatenate([det_boxes[:, :2], np.maximum(det_boxes[:, 2:], det_boxes[:, :2])], 1)
    scores = rng.integers(0, 8, detections) / 8 if grid else rng.random(detections)
    return Detections(
        image=np.where(copied, gt_image[source], rng.choice(image_ids, detections)),
        label=np.where(copied, gt_label[source], rng.choice(class_ids, detections)),
        boxes=det_boxes,
        scores=scores,
    ), truth


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    images=st.integers(1, 6),
    classes=st.integers(1, 4),
    objects=st.integers(1, 25),
    detections=st.integers(0, 150),
    grid=st.booleans(),
    crowd=st.booleans(),
)
def test_equals_both_public_scorers_on_random_problems(seed, images, classes, objects, detections, grid, crowd):
    det, gt = problem(
        seed, images=images, classes=classes, objects=objects, detections=detections, grid=grid, crowd=crowd
    )
    ours = score_boxes(detections=det, ground_truth=gt)
    assert_equal_scores(ours, coco_scores(det, gt))
    if detections:
        assert_equal_scores(ours, coco_scores(det, gt, faster=True))


@pytest.mark.parametrize("block", [1, 300])
def test_over_one_hundred_detections_and_small_blocks(block, monkeypatch):
    det, gt = problem(7, images=2, classes=2, objects=40, detections=900, grid=True, crowd=True)
    reference = coco_scores(det, gt)
    assert_equal_scores(score_boxes(detections=det, ground_truth=gt), reference)
    monkeypatch.setattr(ap_module, "BLOCK", block)
    assert_equal_scores(score_boxes(detections=det, ground_truth=gt), reference)
