"""Tables by N, caption, size, split, crowd and attribute, by hand; and on the published files."""

import json

import numpy as np
import pytest

from noctowl.data.fgovd import read_fgovd
from noctowl.eval.analysis import (
    analyse,
    attribute_type,
    by_length,
    by_negatives,
    chosen_columns,
    confusions,
    group_table,
    object_facts,
    pearson,
    substitutions,
    value_type,
)


@pytest.fixture
def cups(fgovd, write_fgovd):
    return read_fgovd(write_fgovd(fgovd))


def test_facts_of_a_file(cups):
    """Two red cups and a cat in a val2017 image, a chair of 64 x 64 pixels alone in a train2017 image."""
    facts = object_facts(cups, np.array([True, True, True, False]), 1)
    assert facts["words"].tolist() == [3, 3, 3]
    assert facts["size"] == ["small", "small", "medium"]
    assert facts["split"] == ["val2017", "val2017", "train2017"]
    assert facts["crowd"] == ["3", "3", "1"]
    assert facts["attribute"] == ["color", "color", "material"]
    assert object_facts(cups, np.array([False, False, False, True]), 1)["attribute"] == ["other"]
    tables = analyse(np.array([1, 2, 1]), facts)
    assert tables["split"]["val2017"] == {"objects": 2, "top1": 0.5, "rank_mean": 1.5, "rank_median": 1.5}
    assert list(tables["size"]) == ["small", "medium"]
    assert tables["length"]["bins"]["0-6"]["objects"] == 3
    assert tables["length"]["pearson"] is None
    assert {key: row["rank_mean"] for key, row in tables["crowd"].items()} == {"1": 1, "3": 1.5}
    assert tables["attribute"]["material"]["top1"] == 1
    json.dumps(tables, allow_nan=False)


def test_group_table_keeps_the_order():
    table = group_table(np.array([1, 3, 3, 1]), ["b", "a", "a", "c"], order=["c", "x"])
    assert list(table) == ["c", "a", "b"]
    assert table["a"] == {"objects": 2, "top1": 0, "rank_mean": 3, "rank_median": 3}
    assert group_table(np.zeros(0, int), []) == {}


def test_by_negatives():
    table = by_negatives({5: np.array([1, 6]), 2: np.array([1, 1, 3]), 9: np.zeros(0, int)})
    assert list(table) == ["n2", "n5"]
    assert table["n2"] == {
        "objects": 3,
        "top1": pytest.approx(2 / 3),
        "rank_mean": pytest.approx(5 / 3),
        "rank_median": 1,
        "chance": pytest.approx(1 / 3),
    }
    assert table["n5"]["chance"] == pytest.approx(1 / 6)


def test_by_length():
    found = by_length(np.array([1, 2, 3, 4, 5, 6]), np.array([6, 7, 10, 11, 14, 15]))
    assert {name: row["rank_mean"] for name, row in found["bins"].items()} == {
        "0-6": 1,
        "7-10": 2.5,
        "11-14": 4.5,
        "15+": 6,
    }
    assert found["objects"] == 6
    assert found["pearson"] == pytest.approx(np.corrcoef([6, 7, 10, 11, 14, 15], range(6))[0, 1])


def test_pearson_by_hand():
    """x = 1 2 3, y = 1 3 2: covariance 1/3, variances 2/3: r = 1/2."""
    assert pearson(np.array([1, 2, 3]), np.array([1, 3, 2])) == pytest.approx(0.5)
    assert pearson(np.array([1, 2]), np.array([5, 3])) == pytest.approx(-1)
    assert pearson(np.array([1]), np.array([1])) is None
    assert pearson(np.array([1, 1]), np.array([1, 2])) is None


@pytest.mark.parametrize(
    ("positive", "negative", "expected"),
    [
        ("A red cup.", "A blue cup", [("red", "blue")]),
        ("A light grey cup", "A light pink cup", [("light grey", "light pink")]),
        ("A dark blue cup", "A light blue cup", [("dark blue", "light blue")]),
        ("A light grey cup", "A grey cup", [("light grey", "grey")]),
        ("A grey cup", "A dark grey cup", [("grey", "dark grey")]),
        (
            "A red cup with a wood lid",
            "A light green cup with a metal lid",
            [("red", "light green"), ("wood", "metal")],
        ),
        ("A cup", "A cup.", []),
        ("A cup", "A red cup", [("cup", "red cup")]),
        ("A grey wooden cup", "A dark red metal cup", [("grey", "dark red"), ("wooden", "metal")]),
        ("A light grey dotted cup", "A light pink striped cup", [("light grey", "light pink"), ("dotted", "striped")]),
        ("A plaid metal cup", "A plain red cup", [("plaid metal", "plain red")]),
    ],
)
def test_substitutions(positive, negative, expected):
    assert substitutions(positive, negative) == expected


def test_value_types():
    texts = ("dark red", "wooden", "floral", "opaque", "cat", "")
    assert [value_type(t) for t in texts] == ["color", "material", "pattern", "transparency", "other", "other"]


def test_two_attributes_side_by_side_are_mixed(fgovd, write_fgovd):
    """Both words are changed: no figure of materials is mixed with colours."""
    for row, name in enumerate(("A red metal cup.", "A blue wooden cup.", "A green glass cup.")):
        fgovd["categories"][row]["name"] = name
    file = read_fgovd(write_fgovd(fgovd))
    assert attribute_type(file, 0, 2) == "mixed"
    assert confusions(file, np.array([0]), np.array([1]), 1) == {
        "color": {"red": {"blue": {"asked": 1, "chosen": 1}}},
        "material": {"metal": {"wooden": {"asked": 1, "chosen": 1}}},
    }


def test_attribute_type_of_a_vocabulary(fgovd, write_fgovd):
    fgovd["categories"][2]["name"] = "A red glass cup."
    file = read_fgovd(write_fgovd(fgovd))
    assert attribute_type(file, 0, 1) == "color"
    assert attribute_type(file, 0, 2) == "mixed"
    assert attribute_type(file, 2, 2) == "other"


def test_chosen_columns_by_hand():
    """Object 0 is called by column 2, object 1 rightly, object 2 lies elsewhere, object 3 has all columns equal."""
    objects = np.array([[0, 0, 10, 10], [20, 20, 30, 30], [80, 80, 90, 90], [40, 40, 50, 50.0]])
    boxes = np.array([[0, 0, 10, 9], [0, 0, 9, 10], [20, 20, 30, 30], [40, 40, 50, 50.0]])
    logits = np.array([[1, 0, 5], [4, 0, 0], [3, 2, 2], [1, 1, 1.0]])
    chosen = chosen_columns(
        object_boxes=objects, object_group=np.zeros(4, int), boxes=boxes, offsets=np.array([0, 4]), logits=logits
    )
    assert chosen.tolist() == [2, 0, -1, -1]


def test_confusions_by_hand(cups):
    """One red cup is called green, the other rightly; the chair is called plastic; the cat is not found."""
    table = confusions(cups, np.array([0, 0, 1, 2]), np.array([2, 0, 1, -1]), 2)
    assert table == {
        "color": {"red": {"blue": {"asked": 2, "chosen": 0}, "green": {"asked": 2, "chosen": 1}}},
        "material": {"wooden": {"plastic": {"asked": 1, "chosen": 1}}},
    }
    assert confusions(cups, np.array([0]), np.array([1]), 1)["color"] == {"red": {"blue": {"asked": 1, "chosen": 1}}}
    assert confusions(cups, np.zeros(0, int), np.zeros(0, int), 2) == {}


@pytest.mark.golden
@pytest.mark.parametrize(
    ("stem", "n", "known", "kinds"),
    [
        ("1_attributes", 5, 0.99, {"color", "material", "pattern", "transparency", "mixed", "other"}),
        ("pattern", 2, 0.92, {"pattern", "other"}),
        ("transparency", 2, 1.0, {"transparency"}),
    ],
)
def test_published_substitutions_are_recognised(shared, stem, n, known, kinds):
    """The rest are words that the benchmark replaced inside of others: "textured" for "studdedured"."""
    file = read_fgovd(shared / "data/fgovd/benchmarks" / f"{stem}.json")
    facts = object_facts(file, np.ones(len(file.object_vocab), bool), n)
    assert set(facts["attribute"]) <= kinds
    table = confusions(file, file.object_vocab, np.zeros(len(file.object_vocab), int), n)
    asked = {kind: sum(e["asked"] for cell in t.values() for e in cell.values()) for kind, t in table.items()}
    assert 1 - asked.get("other", 0) / sum(asked.values()) >= known
    assert set(facts["split"]) <= {"train2017", "val2017"}
