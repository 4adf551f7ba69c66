import hashlib
import json

import numpy as np
import pytest

from noctowl.data.fgovd import processable, read_fgovd, subset_counts
from noctowl.errors import DataError
from noctowl.text import clip_tokenizer, token_lengths


def test_arrays_of_a_small_file(fgovd, write_fgovd):
    a = read_fgovd(write_fgovd(fgovd))
    assert (a.name, len(a)) == ("hard", 3)
    assert a.image_ids.tolist() == [0, 7]
    assert list(a.image_files) == ["val2017/000000000000.jpg", "train2017/000000000007.jpg"]
    assert a.image_sizes.tolist() == [[100, 50], [64, 64]]
    assert a.category_ids.tolist() == [0, 10, 20, 30, 40, 50]
    assert a.vocab_image.tolist() == [0, 1, 0]
    assert a.vocab_offsets.tolist() == [0, 3, 5, 6]
    assert [a.captions.take(a.vocabulary(v)) for v in range(3)] == [
        ["A red cup.", "A blue cup.", "A green cup."],
        ["A wooden chair.", "A plastic chair."],
        ["A striped cat."],  # no neg_category_ids at all
    ]
    assert a.n_negatives.tolist() == [2, 1, 0]
    assert a.positive_ids.tolist() == [0, 30, 50]
    assert a.object_vocab.tolist() == [0, 0, 1, 2]
    assert a.object_ids.tolist() == [0, 9, 3, 4]
    assert [a.objects(v) for v in range(3)] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert a.object_boxes.tolist() == [[10, 5, 30, 35], [50.5, 0, 60.5, 10], [0, 0, 64, 64], [1, 2, 4, 6]]
    assert a.object_area.tolist() == [600, 100, 4096, 12]
    assert a.counts["objects"] == 4
    assert a.counts["vocabularies"] == 3
    assert (a.vocab_columns.dtype, a.object_vocab.dtype, a.object_ids.dtype) == (np.int32, np.int32, np.int64)


def test_an_unknown_stem_is_the_name(fgovd, write_fgovd):
    assert read_fgovd(write_fgovd(fgovd, "my_birds")).name == "my_birds"


def test_boxes_are_clipped_and_empty_ones_dropped(fgovd, write_fgovd):
    fgovd["annotations"][0]["bbox"] = [-5, 40, 200, 30]
    fgovd["annotations"][1]["bbox"] = [64, 0, 10, 10]  # beyond the edge: its vocabulary goes too
    fgovd["annotations"][2]["bbox"] = [5, 5, 0, 10]
    a = read_fgovd(write_fgovd(fgovd))
    assert a.object_boxes.tolist() == [[0, 40, 100, 50], [1, 2, 4, 6]]
    assert a.object_area.tolist() == [1000, 12]
    assert (a.counts["clipped"], a.counts["dropped_zero_area"], a.counts["objects"]) == (1, 2, 2)
    assert a.object_ids.tolist() == [0, 4]
    assert a.counts["images_without_objects"] == 1


def test_blanks_are_stripped_and_the_same_caption_text_is_one_vocabulary(fgovd, write_fgovd):
    fgovd["categories"].append({"id": 99, "name": "  A red  cup. \n"})
    fgovd["annotations"][2] |= {"category_id": 99, "neg_category_ids": [20]}
    a = read_fgovd(write_fgovd(fgovd))
    assert a.captions[-1] == "A red cup."
    assert len(a) == 3
    assert a.object_ids[a.objects(0)].tolist() == [0, 9]
    assert a.captions.take(a.vocabulary(0)) == ["A red cup.", "A blue cup.", "A green cup."]  # the first object's
    assert (a.counts["stray_blanks"], a.counts["differing_negatives"]) == (1, 1)


def test_the_same_caption_in_two_images_is_two_vocabularies(fgovd, write_fgovd):
    fgovd["annotations"][1] |= {"category_id": 0, "neg_category_ids": [10]}
    assert len(read_fgovd(write_fgovd(fgovd))) == 3


def test_duplicate_captions_are_counted_and_kept(fgovd, write_fgovd):
    fgovd["annotations"][3]["neg_category_ids"] = [10, 10, 50]
    a = read_fgovd(write_fgovd(fgovd))
    assert a.n_negatives.tolist() == [2, 1, 3]
    assert (a.counts["duplicate_captions_in_vocabulary"], a.counts["negatives_equal_to_positive"]) == (2, 1)


def _change(*keys, value):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


BAD = {
    "unknown category": (_change("annotations", 1, "category_id", value=5), r"annotation 3: unknown category id 5"),
    "unknown negative": (
        _change("annotations", 1, "neg_category_ids", value=[40, 77]),
        r"annotation 3: unknown category id 77 in 'neg_category_ids'",
    ),
    "unknown image": (_change("annotations", 1, "image_id", value=1), r"annotation 3: unknown image id 1"),
    "unhashable id": (_change("annotations", 1, "image_id", value=[1]), r"annotation 3: unknown image id \[1\]"),
    "negatives no list": (_change("annotations", 0, "neg_category_ids", value=3), r"neg_category_ids is 3"),
    "duplicate annotation": (_change("annotations", 1, "id", value=0), r"duplicate id 0 in 'annotations'"),
    "duplicate image": (_change("images", 1, "id", value=0), r"duplicate id 0 in 'images'"),
    "duplicate category": (_change("categories", 1, "id", value=0), r"duplicate id 0 in 'categories'"),
    "id of a wrong type": (_change("images", 1, "id", value="7"), r"images\[1\] has the id '7'"),
    "entry of a wrong type": (_change("images", 1, value=3), r"images\[1\] has the id None"),
    "no annotations": (_change("annotations", value=[]), r"no object is left: the list 'annotations' is empty"),
    "missing key": (_change("categories", value=None), r"missing top-level list\(s\) \['categories'\]"),
    "nan": (
        _change("annotations", 0, "bbox", value=[0, 0, float("nan"), 3]),
        r"annotation 0: bad bbox \[0, 0, nan, 3\]",
    ),
    "negative": (_change("annotations", 0, "bbox", value=[0, 0, -1, 3]), r"bad bbox \[0, 0, -1, 3\]; allowed are four"),
    "three numbers": (_change("annotations", 0, "bbox", value=[0, 0, 1]), r"bad bbox \[0, 0, 1\]"),
    "text": (_change("annotations", 0, "bbox", value=[0, 0, "1", 1]), r"bad bbox"),
    "no box": (_change("annotations", 0, "bbox", value=None), r"bad bbox None"),
    "infinite": (_change("annotations", 0, "bbox", value=[0, 0, float("inf"), 1]), r"bad bbox"),
    "crowd": (_change("annotations", 0, "iscrowd", value=1), r"iscrowd is 1"),
    "size": (_change("images", 0, "width", value=0), r"image 0: width x height is 0 x 50"),
    "no size": (_change("images", 0, "height", value=None), r"image 0: width x height is 100 x None"),
    "no name": (_change("categories", 0, "name", value=None), r"category 0: 'name' is None"),
    "empty caption": (_change("categories", 0, "name", value="  "), r"annotation 0: category 0 is an empty caption"),
    "no file": (_change("images", 0, "file_name", value=""), r"image 0: neither 'file_name' nor 'coco_url'"),
    "parent path": (_change("images", 0, "file_name", value="../x.jpg"), r"image 0: the path '\.\./x\.jpg' leaves"),
    "absolute path": (
        _change("images", 0, "file_name", value="/etc/passwd"),
        r"image 0: the path '/etc/passwd' leaves",
    ),
    "url path": (
        _change("images", 1, "coco_url", value="http://a/../x.jpg"),
        r"image 7: the path '\.\./x\.jpg' leaves",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", BAD)
def test_bad_entries_are_named(case, fgovd, write_fgovd):
    change, message = BAD[case]
    change(fgovd)
    path = write_fgovd(fgovd)
    with pytest.raises(DataError, match=message) as error:
        read_fgovd(path)
    assert str(path) in str(error.value)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "annotation file is empty"),
        ("  \n", "annotation file is empty"),
        ("no json", "not valid JSON"),
        ('{"images": [', r"not valid JSON .* truncated"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", r"missing top-level list\(s\) .* found list"),
        ('{"images": []}', r"missing top-level list\(s\) \['annotations', 'categories'\]; found \['images'\]"),
    ],
)
def test_bad_files_are_named(content, message, write_fgovd):
    with pytest.raises(DataError, match=message):
        read_fgovd(write_fgovd(content))


@pytest.mark.faults
def test_bytes_that_are_no_text(write_fgovd):
    path = write_fgovd("x")
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="not valid JSON"):
        read_fgovd(path)


@pytest.mark.faults
def test_a_missing_file_lists_what_is_there(fgovd, write_fgovd):
    path = write_fgovd(fgovd)
    with pytest.raises(DataError, match=r"2_attributes\.json: the annotation file is missing.*1_attributes\.json"):
        read_fgovd(path.with_name("2_attributes.json"))


def test_token_rule_by_hand(fgovd, write_fgovd):
    a = read_fgovd(write_fgovd(fgovd))
    lengths = [16, 16, 17, 16, 16, 3]  # the second negative of vocabulary 0 does not fit
    expected = {0: [1, 1, 1], 1: [1, 1, 0], 2: [0, 0, 0], 3: [0, 0, 0]}
    for n, fits in expected.items():
        assert processable(a, lengths, n).tolist() == list(map(bool, fits))
    assert processable(a, lengths, 2, short="keep").tolist() == [False, True, True]
    assert processable(a, lengths, 2, limit=17).tolist() == [True, False, False]
    assert processable(a, lengths, 0, limit=15).tolist() == [False, False, True]
    kept = processable(a, lengths, 2, short="keep")
    assert subset_counts(a, kept, 2, short="keep") == {
        "images": 2,
        "objects": 2,
        "positive_captions": 2,
        "neg_per_positive": 0.5,
        "forced_fn_objects": 2,  # the two cups: their image still shows the cat
        "forced_fn_classes": 1,
        "annotation_ids_sha1": hashlib.sha1(b"3,4").hexdigest(),
    }
    chair = processable(a, lengths, 1) & [False, True, True]
    assert subset_counts(a, chair, 1)["forced_fn_objects"] == 0  # no image has both
    cat = np.array([False, False, True])
    assert subset_counts(a, cat, 2)["forced_fn_objects"] == 2
    assert subset_counts(a, cat, 3)["forced_fn_objects"] == 0  # the cups have too few negatives: not asked at all
    assert subset_counts(a, np.zeros(3, bool))["neg_per_positive"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_negatives": -1}, "n_negatives is -1"),
        ({"n_negatives": 1, "short": "pad"}, "short is 'pad'"),
        ({"n_negatives": 1, "lengths": [1, 2]}, r"lengths has the shape \(2,\)"),
    ],
)
def test_token_rule_refuses(arguments, message, fgovd, write_fgovd):
    a = read_fgovd(write_fgovd(fgovd))
    with pytest.raises(DataError, match=message):
        processable(a, **{"lengths": [1] * 6} | arguments)


# FG-OVD paper, Table 1: images, objects, positive captions, negatives per positive.
TABLE_1 = {
    "hard": (1707, 3545, 2349, 9.9),
    "medium": (1537, 2968, 2034, 10.0),
    "easy": (853, 1299, 971, 10.0),
    "trivial": (1707, 3545, 2349, 9.9),
    "pattern": (321, 467, 337, 7.4),
    "transparency": (230, 409, 238, 2.2),
}


@pytest.mark.golden
def test_published_files_hold_what_table_1_says(shared):
    found = {}
    for path in (shared / "data/fgovd/benchmarks").glob("*.json"):
        a = read_fgovd(path)
        found[a.name] = (len(a.image_ids), len(a.object_ids), len(a), round(float(a.n_negatives.mean()), 1))
        assert a.counts["dropped_zero_area"] == a.counts["clipped"] == a.counts["differing_negatives"] == 0
    assert found == TABLE_1


@pytest.mark.golden
def test_token_rule_reproduces_the_owl_subset_for_every_n(shared):
    golden = json.loads((shared / "golden/owl_subset.json").read_text())
    tokenizer = clip_tokenizer()
    checked = 0
    for name, facts in golden.items():
        a = read_fgovd(shared / f"data/fgovd/{name}.json")
        assert a.sha256 == facts["sha256"]
        every = subset_counts(a, np.ones(len(a), bool))
        assert {key: every[key] for key in facts["all"]} == pytest.approx(facts["all"], abs=1e-12)
        lengths = token_lengths(tokenizer, a.captions[:])
        for n, expected in facts["owl_subset_by_N"].items():
            assert subset_counts(a, processable(a, lengths, int(n)), int(n)) == pytest.approx(expected, abs=1e-12)
            checked += 1
    assert checked == 51


@pytest.mark.golden
@pytest.mark.parametrize(
    ("stem", "expected"),
    [("3_attributes", (417, 657, 445)), ("pattern", (188, 294, 193)), ("transparency", (177, 323, 180))],
)
def test_owl_subset_of_the_papers(shared, stem, expected):
    a = read_fgovd(shared / f"data/fgovd/benchmarks/{stem}.json")
    kept = processable(a, token_lengths(clip_tokenizer(), a.captions[:]), 1)
    counts = subset_counts(a, kept)
    assert (counts["images"], counts["objects"], counts["positive_captions"]) == expected
