"""LVIS rules on hand-made files; figures worked out by hand."""

import json

import numpy as np
import pytest

from noctowl.errors import DataError
from noctowl.eval.ap import Detections
from noctowl.eval.lvis import read_lvis, score, select_top_class, select_top_pairs

pytestmark = pytest.mark.lvis
ONE = pytest.approx(1.0, abs=1e-12)


@pytest.fixture
def lvis():
    """Images 0 and 12, classes 30 (rare), 2 (common), 77 (frequent), 5 (rare, without objects); order is not by id."""
    return {
        "images": [
            {
                "id": 12,
                "width": 640,
                "height": 480,
                "coco_url": "http://images.cocodataset.org/train2017/000000000012.jpg",
                "neg_category_ids": [30],
                "not_exhaustive_category_ids": [],
            },
            {
                "id": 0,
                "width": 640,
                "height": 480,
                "file_name": "val2017/000000000000.jpg",
                "neg_category_ids": [5],
                "not_exhaustive_category_ids": [77],
            },
        ],
        "annotations": [
            {"id": 1, "image_id": 0, "category_id": 30, "bbox": [0, 0, 50, 50], "area": 2000.0},
            {"id": 2, "image_id": 12, "category_id": 2, "bbox": [0, 0, 20, 20], "area": 300.0},
            {"id": 3, "image_id": 0, "category_id": 77, "bbox": [0, 0, 200, 200], "area": 30000.0},
        ],
        "categories": [
            {"id": 30, "name": "bow_(weapon)", "frequency": "r"},
            {"id": 2, "name": "cup", "frequency": "c"},
            {"id": 77, "name": "cat", "frequency": "f"},
            {"id": 5, "name": "unicorn", "frequency": "r"},
        ],
    }


@pytest.fixture
def scored(lvis, tmp_path):
    """scored(rows of (image, class, box, score), file) -> figures."""

    def run(rows, data=lvis):
        path = tmp_path / "lvis.json"
        path.write_text(json.dumps(data))
        image, label, boxes, scores = zip(*rows)
        return score(
            Detections(np.array(image), np.array(label), np.array(boxes, float), np.array(scores, float)),
            read_lvis(path),
        )

    return run


HITS = [(0, 30, [0, 0, 50, 50], 0.5), (12, 2, [0, 0, 20, 20], 0.5), (0, 77, [0, 0, 200, 200], 0.5)]
FAR = [400, 400, 460, 460]


def test_reader(lvis, tmp_path):
    path = tmp_path / "lvis.json"
    path.write_text(json.dumps(lvis))
    found = read_lvis(path)
    assert list(found.image_files) == ["train2017/000000000012.jpg", "val2017/000000000000.jpg"]
    assert found.image_ids.tolist() == [12, 0]
    assert list(found.names) == ["bow_(weapon)", "cup", "cat", "unicorn"]
    assert found.frequency.tolist() == ["r", "c", "f", "r"]
    assert found.objects.boxes.tolist()[2] == [0, 0, 200, 200]
    assert found.federated.negative.tolist() == [[12, 30], [0, 5]]
    assert found.federated.not_exhaustive.tolist() == [[0, 77]]


def test_all_found(scored):
    """Sizes go by the annotated area: 2000 medium, 300 small, 30,000 large. The class without objects is absent."""
    names = ["ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large", "ap_rare", "ap_common", "ap_frequent"]
    assert scored(HITS) == dict.fromkeys(names, ONE)


def test_empty_group_is_absent(lvis, scored):
    lvis["annotations"].pop(0)
    figures = scored(HITS[1:], lvis)
    assert "ap_rare" not in figures
    assert "ap_medium" not in figures
    assert figures["ap"] == ONE


def test_unjudged_class_is_dropped_and_a_negative_one_counts(scored):
    assert scored([*HITS, (0, 2, FAR, 0.9)])["ap_common"] == ONE  # class 2 was not looked for in image 0
    assert scored([*HITS, (12, 30, FAR, 0.9)])["ap_rare"] == pytest.approx(0.5)  # verified absent from image 12
    assert scored([*HITS, (0, 30, FAR, 0.9)])["ap_rare"] == pytest.approx(0.5)  # has objects in image 0


def test_not_exhaustive_class_ignores_what_is_unmatched(lvis, scored):
    assert scored([*HITS, (0, 77, FAR, 0.9)])["ap_frequent"] == ONE
    lvis["images"][1]["not_exhaustive_category_ids"] = []
    assert scored([*HITS, (0, 77, FAR, 0.9)], lvis)["ap_frequent"] == pytest.approx(0.5)


def test_three_hundred_and_one_detections(scored):
    others = [(0, 2, FAR, 0.9)] * 299  # unjudged, but they take places
    assert scored([*others, *HITS[:1], *HITS[1:2]])["ap_rare"] == ONE
    assert scored([*others, (0, 2, FAR, 0.9), *HITS[:1]])["ap_rare"] == 0.0


def test_order_of_categories_does_not_matter(lvis, scored):
    rows = [HITS[0], (12, 2, FAR, 0.9), HITS[1], (0, 77, FAR, 0.5)]
    before = scored(rows, lvis)
    assert before == pytest.approx(
        {"ap": 0.5, "ap_50": 0.5, "ap_75": 0.5, "ap_small": 1.0, "ap_medium": 1.0, "ap_large": 0.0}
        | {"ap_rare": 1.0, "ap_common": 0.5, "ap_frequent": 0.0}
    )
    for key in ("categories", "images", "annotations"):
        lvis[key].reverse()
    assert scored(rows, lvis) == before


def test_positions_in_place_of_ids_are_refused(scored):
    with pytest.raises(DataError, match=r"category ids \[1\].*not positions"):
        scored([(0, 1, FAR, 0.5)])
    with pytest.raises(DataError, match=r"image ids \[3\]"):
        scored([(3, 2, FAR, 0.5)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("categories"), "not in LVIS's format.*categories"),
        (lambda d: d["images"][0].pop("neg_category_ids"), "neg_category_ids"),
        (lambda d: d["categories"][0].update(frequency="x"), "allowed r, c, f"),
        (lambda d: d["categories"][0].update(id=2), "category ids occur twice"),
        (lambda d: d["annotations"][0].update(category_id=31), r"annotations: category ids \[31\]"),
        (lambda d: d["images"][0].update(neg_category_ids=[31]), r"negative: category ids \[31\]"),
        (lambda d: d["images"][1].update(file_name="../../etc/passwd"), "image 0"),
    ],
)
def test_damaged_files(lvis, tmp_path, change, words):
    change(lvis)
    path = tmp_path / "lvis.json"
    path.write_text(json.dumps(lvis))
    with pytest.raises(DataError, match=words):
        read_lvis(path)


def test_absent_and_truncated_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_lvis(tmp_path / "lvis.json")
    (tmp_path / "lvis.json").write_text('{"images": [')
    with pytest.raises(DataError, match="no valid JSON"):
        read_lvis(tmp_path / "lvis.json")


def test_top_class_protocol():
    logits = np.array([[1.0, 3.0], [5.0, 4.0], [2.0, 0.0]], np.float32)
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 11], [50, 50, 60, 60]], np.float32)
    found = select_top_class(logits, boxes, 4, np.array([70, 9]))
    assert found.label.tolist() == [70, 9, 70]
    assert found.scores.tolist() == [5, 3, 2]
    assert found.boxes[:, 3].tolist() == [11, 10, 60]
    assert found.image.tolist() == [4, 4, 4]
    assert select_top_class(logits, boxes, 4, np.array([70, 9]), None, 2).scores.tolist() == [5, 3]
    assert select_top_class(logits, boxes, 4, np.array([70, 9]), 0.5).scores.tolist() == [5, 2]
    assert select_top_class(logits, boxes, 4, np.array([70, 9]), 0.5, 1).scores.tolist() == [5]


def test_top_pairs_protocol():
    logits = np.array([[1.0, 3.0], [5.0, 4.0], [2.0, 0.0]], np.float32)
    boxes = np.repeat(np.arange(3.0)[:, None], 4, 1)
    found = select_top_pairs(logits, boxes, 4, np.array([70, 9]), 3)
    assert found.label.tolist() == [70, 9, 9]
    assert found.scores.tolist() == [5, 4, 3]
    assert found.boxes[:, 0].tolist() == [1, 1, 0]
    assert len(select_top_pairs(logits, boxes, 4, np.array([70, 9])).scores) == 6
    ties = select_top_pairs(np.zeros((4, 3)), np.zeros((4, 4)), 4, np.array([1, 2, 3]), 5)
    assert ties.label.tolist() == [1, 2, 3, 1, 2]


def test_top_pairs_equal_a_full_sort():
    rng = np.random.default_rng(0)
    logits, boxes = rng.normal(size=(200, 40)), rng.uniform(size=(200, 4))
    order = np.argsort(-logits.ravel())[:300]
    found = select_top_pairs(logits, boxes, 1, np.arange(40) * 3)
    np.testing.assert_array_equal(found.scores, logits.ravel()[order])
    np.testing.assert_array_equal(found.label, order % 40 * 3)
    np.testing.assert_array_equal(found.boxes, boxes[order // 40])
