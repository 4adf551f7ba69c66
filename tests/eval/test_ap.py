"""Our scorer against pycocotools, faster-coco-eval, torchmetrics and figures worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_iou

from noctowl.errors import ConfigError, DataError
from noctowl.eval import ap as ap_module
from noctowl.eval import reference
from noctowl.eval.ap import Detections, Federated, GroundTruth, score_boxes
from noctowl.eval.reference import reference_scores

ONE = pytest.approx(1.0, abs=1e-12)  # the protocol divides by tp + fp + 2e-16


def assert_equal_scores(ours, theirs):
    np.testing.assert_array_equal(ours.classes, theirs.classes)
    np.testing.assert_allclose(ours.ap, theirs.ap, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.recall, theirs.recall, rtol=0, atol=1e-12)
    assert ours.summary() == pytest.approx(theirs.summary(), abs=1e-12)


def detections(*rows):
    """(image, class, box, score) rows."""
    image, label, boxes, scores = zip(*rows) if rows else ([], [], [], [])
    return Detections(
        np.array(image, np.int64),
        np.array(label, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(scores, np.float64),
    )


def objects(*rows, crowd=None):
    """(image, class, box) rows; the area is the box's."""
    image, label, boxes = zip(*rows) if rows else ([], [], [])
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    crowd = None if crowd is None else np.array(crowd, bool)
    return GroundTruth(np.array(image, np.int64), np.array(label, np.int64), boxes, area, crowd)


def box(x, y=0, side=50):
    return [x, y, x + side, y + side]


def problem(seed: int, *, images: int, classes: int, objects: int, detections: int, grid: bool, crowd: bool):
    """Random problem: ids from 0 with gaps, tied scores and boxes on a grid, jittered copies of objects."""
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


@settings(max_examples=80, deadline=None)
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
    assert_equal_scores(ours, reference_scores(detections=det, ground_truth=gt))
    if detections:  # faster_coco_eval fails without any
        assert_equal_scores(ours, reference_scores(detections=det, ground_truth=gt, backend="faster_coco_eval"))


def test_over_one_hundred_detections_in_blocks_of_any_size(monkeypatch):
    det, gt = problem(7, images=2, classes=2, objects=40, detections=900, grid=True, crowd=True)
    theirs = reference_scores(detections=det, ground_truth=gt)
    assert theirs.summary()["mar_100"] > theirs.summary()["mar_10"]
    for block in (2_000_000, 300, 1):
        monkeypatch.setattr(ap_module, "BLOCK", block)
        assert_equal_scores(score_boxes(detections=det, ground_truth=gt), theirs)


@pytest.mark.parametrize("seed", range(3))
def test_float32_thresholds_equal_current_torchmetrics(seed):
    det, gt = problem(seed, images=6, classes=3, objects=60, detections=300, grid=True, crowd=False)
    metric = MeanAveragePrecision(backend="pycocotools")
    metric.warn_on_many_detections = False
    images = np.union1d(det.image, gt.image)

    def items(data, **more):
        return [
            {
                "boxes": torch.from_numpy(data.boxes[data.image == i]).float(),
                "labels": torch.from_numpy(data.label[data.image == i]),
                **{key: torch.from_numpy(value[data.image == i]) for key, value in more.items()},
            }
            for i in images
        ]

    metric.update(items(det, scores=det.scores), items(gt, area=gt.area))
    theirs = {key: float(value) for key, value in metric.compute().items() if key.startswith("ma")}
    ours = score_boxes(detections=det, ground_truth=gt, thresholds="float32").summary()
    assert len(ours) == 12
    assert ours == pytest.approx({key: theirs[key] for key in ours}, abs=1e-7)


def test_average_precision_by_hand():
    """Hits at .9 and .7, a false positive at .8: precision 1 up to recall .50 (51 points), then 2/3 (50 points)."""
    gt = objects((0, 3, box(0)), (5, 3, box(0)))
    det = detections((0, 3, box(0), 0.9), (5, 3, box(300), 0.8), (5, 3, box(0), 0.7))
    scores = score_boxes(detections=det, ground_truth=gt)
    expected = (51 + 50 * 2 / 3) / 101
    assert scores.mean_ap() == pytest.approx(expected, abs=1e-12)
    assert scores.per_class() == {3: pytest.approx(expected, abs=1e-12)}
    figures = scores.summary()
    assert figures["mar_1"] == 0.5  # the best of image 5 is the false positive
    assert figures["mar_10"] == figures["mar_100"] == 1.0
    assert figures["map_medium"] == pytest.approx(expected, abs=1e-12)
    assert "map_small" not in figures
    assert "mar_large" not in figures


def test_overlap_decides_how_many_thresholds_are_met():
    """IoU .75 exactly: met at .50, .55 ... .75, 6 of 10 thresholds."""
    scores = score_boxes(
        detections=detections((1, 1, [0, 0, 100, 75], 1)), ground_truth=objects((1, 1, box(0, 0, 100)))
    )
    assert scores.mean_ap() == pytest.approx(0.6, abs=1e-12)
    assert scores.mean_ap(iou=0.75) == ONE
    assert scores.mean_ap(iou=0.8) == 0.0


def test_an_area_on_the_border_belongs_to_both_sizes_and_others_are_ignored():
    gt = objects((0, 0, box(0, 0, 32)), (0, 0, box(200, 200, 100)))  # area 1024 and 10,000
    figures = score_boxes(detections=detections((0, 0, box(0, 0, 32), 0.5)), ground_truth=gt).summary()
    assert (figures["map_small"], figures["map_medium"], figures["map_large"]) == (ONE, ONE, 0.0)
    assert figures["map"] == pytest.approx(51 / 101, abs=1e-12)


def test_crowd_swallows_detections_and_is_not_to_be_found():
    gt = objects((0, 1, box(0)), (0, 1, [100, 0, 300, 200]), crowd=[False, True])
    inside = [(0, 1, box(120 + 5 * i), 0.9) for i in range(3)]
    assert score_boxes(detections=detections(*inside, (0, 1, box(0), 0.1)), ground_truth=gt).mean_ap() == ONE
    only_crowd = objects((0, 1, [100, 0, 300, 200]), crowd=[True])
    assert score_boxes(detections=detections(*inside), ground_truth=only_crowd).summary() == {}


def test_the_hundred_best_of_an_image_and_class_count():
    gt = objects((0, 1, box(0)), (0, 2, box(0)))
    wrong = [(0, 1, box(500), 0.9)] * 100
    late = detections(*wrong, (0, 1, box(0), 0.1), (0, 2, box(0), 0.1))
    assert score_boxes(detections=late, ground_truth=gt).per_class() == {1: 0.0, 2: ONE}
    in_time = detections(*wrong[1:], (0, 1, box(0), 0.1))
    assert score_boxes(detections=in_time, ground_truth=gt).per_class()[1] == pytest.approx(0.01, abs=1e-12)


def test_nothing_to_find_and_nothing_found():
    assert score_boxes(detections=detections((0, 0, box(0), 1)), ground_truth=objects()).summary() == {}
    assert score_boxes(detections=detections(), ground_truth=objects()).summary() == {}
    nothing = score_boxes(detections=detections(), ground_truth=objects((0, 0, box(0))))
    assert nothing.summary()["map"] == nothing.summary()["mar_100"] == 0.0
    assert Detections.concatenate([]).boxes.shape == (0, 4)


def test_group_means_go_by_class_id():
    gt = objects((0, 10, box(0)), (0, 4, box(0)), (0, 7, box(0)))
    scores = score_boxes(detections=detections((0, 10, box(0), 1), (0, 7, box(300), 1)), ground_truth=gt)
    assert scores.mean_ap(classes=[10]) == ONE
    assert scores.mean_ap(classes={10, 7}) == pytest.approx(0.5)
    assert scores.mean_ap(classes=[5]) is None


def test_federated_rules():
    """Class 1 has an object in image 0. Its false positives count where it was looked for, and only there."""
    gt = objects((0, 1, box(0)))
    none = np.zeros((0, 2), np.int64)
    det = detections((3, 1, box(0), 0.9), (0, 1, box(300), 0.8), (0, 1, box(0), 0.7))

    def ap(negative, not_exhaustive):
        federated = Federated(np.array(negative).reshape(-1, 2), np.array(not_exhaustive).reshape(-1, 2))
        return score_boxes(detections=det, ground_truth=gt, federated=federated).mean_ap()

    assert ap([(3, 1)], none) == pytest.approx(1 / 3)  # both false positives count
    assert ap(none, none) == pytest.approx(1 / 2)  # image 3 was not looked at: dropped
    assert ap([(9, 1), (3, 8)], none) == pytest.approx(1 / 2)  # ids that do not occur change nothing
    assert ap(none, [(0, 1)]) == ONE  # the other one is ignored too; the hit counts all the same
    assert ap([(3, 1)], [(0, 1)]) == pytest.approx(1 / 2)


def federated_ap(det, gt, federated, limit):
    """Mean AP by the rules as they are written down, one detection after the other."""
    negative, exempt = ({tuple(row) for row in rows.tolist()} for rows in vars(federated).values())
    present = set(zip(gt.image.tolist(), gt.label.tolist()))
    ranked = sorted(range(len(det.scores)), key=lambda d: -det.scores[d])
    ranked = [d for p, d in enumerate(ranked) if sum(det.image[e] == det.image[d] for e in ranked[:p]) < limit]
    ranked = [d for d in ranked if (det.boxes[d, 2:] > det.boxes[d, :2]).all()]
    values = []
    for label in np.unique(gt.label):
        mine = sorted((d for d in ranked if det.label[d] == label), key=lambda d: (-det.scores[d], det.image[d]))
        truth = [g for g in range(len(gt.label)) if gt.label[g] == label]
        for threshold in np.linspace(0.5, 0.95, 10):
            taken, hits = set(), []
            for d in mine:
                key = (int(det.image[d]), int(label))
                if key not in negative | present:
                    continue
                free = [g for g in truth if g not in taken and gt.image[g] == det.image[d]]
                ious = [box_iou(torch.from_numpy(det.boxes[[d]]), torch.from_numpy(gt.boxes[[g]])).item() for g in free]
                best = max(range(len(free)), key=lambda i: (ious[i], i), default=None)
                if best is not None and ious[best] >= threshold:
                    taken.add(free[best])
                    hits.append(1)
                elif key not in exempt:
                    hits.append(0)
            tp = np.cumsum(hits)
            precision, recall = tp / np.arange(1, len(hits) + 1), tp / len(truth)
            points = [precision[recall >= r].max(initial=0) for r in np.linspace(0, 1, 101)]
            values.append(np.mean(points))
    return np.mean(values)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), limit=st.sampled_from([3, 6, 300]), tied=st.booleans())
def test_federated_rules_on_random_problems(seed, limit, tied):
    det, gt = problem(seed, images=4, classes=3, objects=10, detections=30, grid=False, crowd=False)
    if tied:
        det = replace(det, scores=np.round(det.scores * 4))
    rng = np.random.default_rng(seed)
    pairs = np.array([(i, k) for i in (0, 3, 6, 9) for k in (0, 2, 4)])
    federated = Federated(pairs[rng.random(12) < 0.4], pairs[rng.random(12) < 0.3])
    scores = score_boxes(
        detections=det, ground_truth=gt, federated=federated, max_detections=(300,), max_per_image=limit
    )
    assert scores.mean_ap() == pytest.approx(federated_ap(det, gt, federated, limit), abs=1e-12)


def test_without_area_there_is_nothing_to_find_in_lvis():
    """Neither the object nor the detection counts; COCO counts both."""
    gt = objects((0, 1, box(0)), (0, 2, [5, 5, 5, 50]))
    det = detections((0, 1, [9, 9, 9, 50], 0.9), (0, 1, box(0), 0.5))
    none = np.zeros((0, 2), np.int64)
    federated = score_boxes(detections=det, ground_truth=gt, federated=Federated(none, none))
    assert federated.per_class() == {1: ONE}
    assert score_boxes(detections=det, ground_truth=gt).per_class() == {1: pytest.approx(0.5), 2: 0.0}


def test_limit_per_image_goes_over_classes():
    gt = objects((0, 1, box(0)))
    many = [(0, 2, box(0), 0.9)] * 299
    found = detections(*many, (0, 1, box(0), 0.1))
    lost = detections((0, 3, box(0), 0.9), *many, (0, 1, box(0), 0.1))
    for det, expected in ((found, ONE), (lost, 0.0)):
        scores = score_boxes(detections=det, ground_truth=gt, max_detections=(300,), max_per_image=300)
        assert scores.mean_ap() == expected


@pytest.mark.parametrize("field", ["scores", "boxes"])
def test_damaged_input(field):
    det, gt = detections((0, 0, box(0), 1)), objects((0, 0, box(0)))
    getattr(det, field)[0] = np.nan
    with pytest.raises(DataError, match="non-finite"):
        score_boxes(detections=det, ground_truth=gt)
    short = Detections(det.image[:0], det.label, np.zeros((1, 4)), np.ones(1))
    with pytest.raises(DataError, match="unequal length"):
        score_boxes(detections=short, ground_truth=gt)


def test_reference_without_its_package(monkeypatch):
    monkeypatch.setitem(reference.MODULES, "faster_coco_eval", ("no_such_package", "no_such_package", "X"))
    with pytest.raises(ConfigError, match="not installed"):
        reference_scores(detections=detections(), ground_truth=objects(), backend="faster_coco_eval")
