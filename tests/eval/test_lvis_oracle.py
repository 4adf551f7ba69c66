"""Federated problems through our scorer, the original algorithm (package `lvis`) and faster-coco-eval's LVIS style."""

import contextlib
import copy
import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noctowl.eval.ap import Detections
from noctowl.eval.evidence import Asked, coarse_intervals
from noctowl.eval.lvis import match_classes, read_lvis, score, score_classes
from tests.eval.test_ap import problem

pytestmark = pytest.mark.lvis
FAR = [400.0, 400.0, 460.0, 460.0]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """bench/lvis_cost.py: it calls the original and makes problems of LVIS's shape."""
    pytest.importorskip("lvis", reason="the original algorithm is not installed: pip install lvis")
    path = Path(__file__).parents[2] / "bench" / "lvis_cost.py"
    spec = importlib.util.spec_from_file_location("lvis_cost", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # for bench/results.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("oracle") / "lvis.json"


def faster(data: dict, found: list[dict], max_dets: int = 300) -> dict[str, float]:
    """faster-coco-eval's figures. It has no cut over the classes of an image: that is done here, as LVIS does it."""
    from faster_coco_eval import COCO, COCOeval_faster

    kept = []
    for image in {entry["image_id"] for entry in found}:
        mine = [entry for entry in found if entry["image_id"] == image]
        kept += sorted(mine, key=lambda entry: entry["score"], reverse=True)[:max_dets]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(data)
        run = COCOeval_faster(truth, truth.loadRes(kept), "bbox", lvis_style=True)
        run.params.maxDets = [max_dets]
        run.evaluate()
        run.accumulate()
    precision = np.asarray(run.eval["precision"])[..., -1]  # [T, R, K, A]
    letters = {c["id"]: c["frequency"] for c in data["categories"]}
    group = np.array([letters[k] for k in run.params.catIds])

    def mean(values):
        values = values[values > -1]
        return values.mean() if values.size else None

    figures = {"ap": mean(precision[..., 0]), "ap_50": mean(precision[0, ..., 0]), "ap_75": mean(precision[5, ..., 0])}
    figures |= {f"ap_{size}": mean(precision[..., a]) for a, size in enumerate(("small", "medium", "large"), 1)}
    names = {"rare": "r", "common": "c", "frequent": "f"}
    figures |= {f"ap_{name}": mean(precision[:, :, group == letter, 0]) for name, letter in names.items()}
    return {name: float(value) for name, value in figures.items() if value is not None}


def as_lvis(seed: int, gt, image_ids, class_ids) -> dict:
    """An LVIS file around the objects: lists drawn at random, order of images and categories shuffled."""
    rng = np.random.default_rng(seed)
    present = {i: set(gt.label[gt.image == i].tolist()) for i in image_ids}
    images = [
        {
            "id": i,
            "width": 640,
            "height": 480,
            "coco_url": f"http://images.cocodataset.org/{rng.choice(['train2017', 'val2017'])}/{i:012}.jpg",
            "neg_category_ids": [k for k in class_ids if k not in present[i] and rng.random() < 0.4],
            "not_exhaustive_category_ids": [k for k in sorted(present[i]) if rng.random() < 0.3],
        }
        for i in image_ids
    ]
    categories = [{"id": k, "name": f"class {k}", "frequency": str(rng.choice(["r", "c", "f"]))} for k in class_ids]
    boxes = np.concatenate([gt.boxes[:, :2], gt.boxes[:, 2:] - gt.boxes[:, :2]], 1)
    rows = zip(gt.image.tolist(), gt.label.tolist(), boxes.tolist(), gt.area.tolist())
    objects = [  # ids from 1: the original takes an object with id 0 for none
        {"id": n, "image_id": i, "category_id": k, "bbox": b, "area": a} for n, (i, k, b, a) in enumerate(rows, 1)
    ]
    for entries in (images, categories, objects):
        rng.shuffle(entries)
    return {"images": images, "annotations": objects, "categories": categories}


def assert_equal(bench, file, data, detections):
    """Ours, the original and, where it counts the same detections, faster-coco-eval; the figures are returned.

    faster-coco-eval keeps detections without area, which the original leaves out.
    """
    file.write_text(json.dumps(data))
    ours = score(detections, read_lvis(file))
    found = bench.entries(detections)
    assert ours == pytest.approx(bench.original(copy.deepcopy(data), copy.deepcopy(found)), abs=1e-12)
    if (detections.boxes[:, 2:] > detections.boxes[:, :2]).all():
        assert ours == pytest.approx(faster(copy.deepcopy(data), copy.deepcopy(found)), abs=1e-12)
    return ours


def with_area(det: Detections) -> Detections:
    return replace(det, boxes=np.concatenate([det.boxes[:, :2], np.maximum(det.boxes[:, 2:], det.boxes[:, :2] + 1)], 1))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    images=st.integers(1, 6),
    classes=st.integers(1, 6),
    objects=st.integers(1, 30),
    detections=st.integers(1, 150),
    grid=st.booleans(),
)
def test_random_federated_problems(bench, file, seed, images, classes, objects, detections, grid):
    """Ids from 0 with gaps and shuffled, tied scores and boxes, classes without objects, empty groups."""
    det, gt = problem(
        seed, images=images, classes=classes, objects=objects, detections=detections, grid=grid, crowd=False
    )
    if seed % 4:
        det = with_area(det)
    data = as_lvis(seed, gt, (np.arange(images) * 3).tolist(), (np.arange(classes + 2) * 2).tolist())
    assert_equal(bench, file, data, det)


@pytest.mark.parametrize("seed", range(3))
def test_more_than_three_hundred_detections(bench, file, seed):
    """The cut goes over all classes of an image; ties at its border fall to the earlier detection."""
    det, gt = problem(seed, images=2, classes=5, objects=40, detections=900, grid=seed == 0, crowd=False)
    det = with_area(det) if seed else det
    data = as_lvis(seed, gt, [0, 3], list(range(0, 12, 2)))
    ours = assert_equal(bench, file, data, det)
    ranked = np.argsort(-det.scores, kind="stable")
    best = np.sort(np.concatenate([ranked[det.image[ranked] == i][:300] for i in (0, 3)]))
    assert len(best) == 600
    assert score(Detections(*(a[best] for a in vars(det).values())), read_lvis(file)) == ours


def test_a_problem_of_lvis_proportions(bench, file):
    annotations, detections = bench.write_problem(file, 4, seed=3)
    assert len(annotations.category_ids) == 1203
    ours = assert_equal(bench, file, json.loads(file.read_text()), detections)
    assert 0.05 < ours["ap"] < 0.95
    assert set(ours) == set(bench.FIGURES.values())
    matched = match_classes(detections, annotations)
    intervals, resamples = coarse_intervals(matched, score_classes(matched), detections, annotations, Asked())
    assert resamples == 100
    assert set(intervals) == set(ours)
    assert all(low <= ours[name] <= high for name, (low, high) in intervals.items())
    assert 0.1 < intervals["ap"][1] - intervals["ap"][0] < 0.3


def hand_made() -> dict:
    """Images 12 (train2017) and 7; classes 9 (no object), 4 (rare), 1 (the first id, frequent), 30 (common)."""
    url = "http://images.cocodataset.org/{}/{:012}.jpg"
    image = {"width": 640, "height": 480}
    return {
        "images": [
            {"id": 12, "coco_url": url.format("train2017", 12), **image}
            | {"neg_category_ids": [4], "not_exhaustive_category_ids": []},
            {"id": 7, "coco_url": url.format("val2017", 7), **image}
            | {"neg_category_ids": [9], "not_exhaustive_category_ids": [30]},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 4, "bbox": [0, 0, 50, 50], "area": 2000.0},
            {"id": 2, "image_id": 12, "category_id": 1, "bbox": [0, 0, 20, 20], "area": 300.0},
            {"id": 3, "image_id": 7, "category_id": 30, "bbox": [0, 0, 200, 200], "area": 30000.0},
        ],
        "categories": [
            {"id": 9, "name": "unicorn", "frequency": "r"},
            {"id": 4, "name": "bow_(weapon)", "frequency": "r"},
            {"id": 1, "name": "aerosol_can", "frequency": "f"},
            {"id": 30, "name": "cup", "frequency": "c"},
        ],
    }


def rows(*found) -> Detections:
    image, label, boxes, scores = zip(*found)
    return Detections(np.array(image), np.array(label), np.array(boxes, float), np.array(scores, float))


HITS = [(7, 4, [0, 0, 50, 50], 0.5), (12, 1, [0, 0, 20, 20], 0.5), (7, 30, [0, 0, 200, 200], 0.5)]
CASES = {
    "all found": (HITS, {"ap": 1.0, "ap_frequent": 1.0}),
    "the first class is missed": ([HITS[0], HITS[2]], {"ap_frequent": 0.0, "ap": 2 / 3}),
    "false positive of a not-exhaustive class": ([*HITS, (7, 30, FAR, 0.9)], {"ap_common": 1.0}),
    "false positive of an unjudged class": ([*HITS, (7, 1, FAR, 0.9)], {"ap_frequent": 1.0}),
    "false positive of a negative class": ([*HITS, (12, 4, FAR, 0.9)], {"ap_rare": 0.5}),
    "false positive of a class without objects": ([*HITS, (7, 9, FAR, 0.9)], {"ap_rare": 1.0}),
    "rank 300": ([(7, 1, FAR, 0.9)] * 299 + HITS[:1], {"ap_rare": 1.0}),
    "rank 301": ([(7, 1, FAR, 0.9)] * 300 + HITS[:1], {"ap_rare": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_hand_made_problem(bench, file, case):
    found, expected = CASES[case]
    ours = assert_equal(bench, file, hand_made(), rows(*found))
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert list(read_lvis(file).image_files) == ["train2017/000000000012.jpg", "val2017/000000000007.jpg"]


def test_bench_runs_in_seconds(bench, file, capsys, monkeypatch):
    """`--quick` on three images: a table, and JSON as the last line."""
    monkeypatch.setitem(bench.IMAGES, "quick", 3)
    monkeypatch.setattr(sys, "argv", ["lvis_cost.py", "--quick"])
    assert bench.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["equal"] is True
    assert {"name", "ratio", "gate", "goal", "memory_gb"} <= last.keys()
