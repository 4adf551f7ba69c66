"""The synthetic world: deterministic, in the published formats, and free of hints that need no image."""

import json
import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from noctowl.data import world
from noctowl.data.fgovd import read_fgovd
from noctowl.data.render import CLASSES, COLOURS, MATERIALS, PATTERNS, Thing, coverage, render
from noctowl.data.synthetic import SyntheticSettings, synthetic_root, write_synthetic
from noctowl.data.world import TEST, TRAIN, VAL, caption, held_out, scene, substitutes, vocabularies
from noctowl.errors import DataError
from noctowl.eval.blind import placed, text_sets
from noctowl.eval.controls import text_controls

SMALL = {"seed": 3, "n_train": 60, "n_val": 20, "n_test": 40, "size": 96}
STEMS = ("1_attributes", "2_attributes", "3_attributes", "shuffle_negatives", "color", "material", "pattern")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("synthetic") / "world", **SMALL)


def load(root: Path, name: str) -> dict:
    return json.loads((root / "annotations" / name).read_text())


# Pictures


def test_a_scene_depends_on_seed_split_and_index_alone():
    first, things, covered = scene(TEST, 7, seed=1)
    again, same, _ = scene(TEST, 7, seed=1)
    assert np.array_equal(first, again)
    assert things == same
    assert first.shape == (96, 96, 3)
    assert first.dtype == np.uint8
    assert covered.shape == (96, 96)
    for other in (scene(TEST, 8, seed=1), scene(TEST, 7, seed=2), scene(VAL, 7, seed=1)):
        assert not np.array_equal(first, other[0])


@pytest.mark.parametrize("size", [48, 96, 150])
def test_boxes_are_the_tight_boxes_of_what_is_drawn_and_do_not_overlap(size):
    for index in range(40):
        _, things, covered = scene(TEST, index, size=size)
        assert 1 <= len(things) <= 3
        inside = np.zeros((size, size), dtype=int)
        for thing in things:
            x, y, w, h = thing.box
            assert 0 <= x < x + w <= size
            assert 0 <= y < y + h <= size
            inside[y : y + h, x : x + w] += 1
            mask = coverage(thing)
            assert all(side.max() > 0.1 for side in (mask[0], mask[-1], mask[:, 0], mask[:, -1]))
        assert inside.max() == 1
        assert covered[inside == 0].max() == 0


@pytest.mark.parametrize(
    ("slot", "values"),
    [("cls", CLASSES), ("colour", COLOURS), ("pattern", PATTERNS), ("material", MATERIALS), ("transparency", range(3))],
)
def test_every_value_of_every_slot_looks_different(slot, values):
    plain = {"cls": 0, "colour": 6, "pattern": 1, "material": 0, "transparency": 0}
    pictures = []
    for value in range(len(values)):
        thing = Thing(**{**plain, slot: value}, box=(20, 20, 50, 50))
        pictures.append(render([thing], 96, np.random.default_rng(0))[0].astype(float))
    for a in range(len(pictures)):
        for b in range(a):
            assert np.abs(pictures[a] - pictures[b])[20:70, 20:70].mean() > 4, (slot, a, b)


# Captions


def test_captions():
    thing = Thing(cls=0, colour=0, pattern=1, material=1, transparency=0)
    assert caption(thing) == "A red striped metal cup."
    assert caption(thing, name_opaque=True) == "A opaque red striped metal cup."
    assert caption(Thing(2, 11, 0, 4, 2)) == "A transparent white plain rattan hat."
    assert caption(thing, slots=("colour", "material")) == "A red metal cup."


def test_one_colour_of_each_class_is_held_out():
    pairs = [(cls, colour) for cls in range(len(CLASSES)) for colour in range(len(COLOURS)) if held_out(cls, colour)]
    assert sorted(cls for cls, _ in pairs) == list(range(len(CLASSES)))
    assert max(Counter(colour for _, colour in pairs).values()) == 2


@pytest.mark.parametrize("slots", [["colour"], ["pattern"], ["colour", "material"], ["pattern", "colour", "material"]])
def test_substitutes_differ_pairwise_in_all_of_the_slots_and_nowhere_else(slots):
    rng = np.random.default_rng(0)
    for _ in range(50):
        thing = world.sample_thing(rng, TRAIN)
        things = [thing, *substitutes(rng, thing, slots, 10, shows_held_out=False)]
        assert len(things) == (11 if slots == ["colour"] else 6)
        for slot in ("cls", "transparency", "colour", "pattern", "material"):
            distinct = len({getattr(t, slot) for t in things})
            assert distinct == (len(things) if slot in slots else 1)
        assert not any(held_out(t.cls, t.colour) for t in things)


def test_the_set_of_captions_says_nothing_of_which_is_true():
    """Exchangeability, measured: given the set of values, each is equally often the true one (chi-square)."""
    rng = np.random.default_rng(5)
    counts = Counter()
    for _ in range(6000):
        thing = world.sample_thing(rng, TEST)
        others = substitutes(rng, thing, ["pattern", "material"], 2, shows_held_out=True)
        trio = sorted([(thing.pattern, thing.material), *((t.pattern, t.material) for t in others)])
        counts[trio.index((thing.pattern, thing.material))] += 1
    expected = 2000
    assert sum((counts[k] - expected) ** 2 / expected for k in range(3)) < 13.8  # p = .001 at 2 degrees of freedom


def test_a_vocabulary_about_transparency_is_balanced():
    rng = np.random.default_rng(6)
    chosen = Counter()
    for _ in range(6000):
        thing = world.sample_thing(rng, TEST)
        if world.choose_slots(rng, thing, "transparency", with_transparency=False):
            chosen[thing.transparency] += 1
    expected = sum(chosen.values()) / 3
    assert sum((chosen[k] - expected) ** 2 / expected for k in range(3)) < 13.8


# Files


def test_files_have_the_published_layout_and_are_read_by_the_reader_of_real_data(root):
    names = {str(p.relative_to(root / "annotations")) for p in (root / "annotations").rglob("*.json")}
    assert names == {
        "training_sets/1_attributes.json",
        "validation_sets/1_attributes.json",
        "lvis/coarse_val.json",
        "lvis/coarse_test.json",
        "benchmarks/transparency.json",
        *(f"benchmarks/{stem}.json" for stem in STEMS),
    }
    aliases = {"1_attributes": "hard", "2_attributes": "medium", "3_attributes": "easy", "shuffle_negatives": "trivial"}
    for stem in (*STEMS, "transparency"):
        file = read_fgovd(root / "annotations" / "benchmarks" / f"{stem}.json")
        assert file.name == aliases.get(stem, stem)
        assert not any(file.counts[key] for key in ("clipped", "dropped_zero_area", "differing_negatives"))
        assert file.counts["duplicate_captions_in_vocabulary"] == 0
        negatives = {"transparency": {2}, "1_attributes": {5, 10}, "color": {10}, "shuffle_negatives": {10}}
        assert set(file.n_negatives.tolist()) == negatives.get(stem, {5})
        assert (file.image_sizes == 96).all()
        first = next(iter(file.image_files))
        with Image.open(root / "images" / first) as image:
            assert (image.size, image.mode) == ((96, 96), "RGB")


def test_annotations_agree_with_the_scenes(root):
    data = load(root, "benchmarks/1_attributes.json")
    names = {entry["id"]: entry["name"] for entry in data["categories"]}
    boxes = {}
    for entry in data["annotations"]:
        boxes.setdefault(entry["image_id"], set()).add((names[entry["category_id"]], tuple(entry["bbox"])))
    assert len(data["images"]) == SMALL["n_test"]
    for index, record in enumerate(data["images"]):
        _, things, _ = scene(TEST, index, seed=SMALL["seed"])
        expected = {(caption(t), tuple(map(float, t.box))) for t in things}
        assert boxes[record["id"]] == expected


def test_training_set_follows_the_weak_set_policy(root):
    data = load(root, "training_sets/1_attributes.json")
    assert all(record["file_name"].startswith("train2017/") for record in data["images"])
    of_image = Counter((entry["image_id"], entry["category_id"]) for entry in data["annotations"])
    assert max(of_image.values()) == 1
    twin = [Thing(0, 0, 0, 0, 0, box=(0, 0, 9, 9)), Thing(0, 0, 0, 0, 0, box=(20, 0, 9, 9))]
    options = {"seed": 0, "size": 96}
    assert vocabularies(TRAIN, 0, twin, "colour", train=True, **options) == []
    (members, texts), *rest = vocabularies(TEST, 0, twin, "colour", train=False, **options)
    assert (members, rest, len(texts)) == (twin, [], 11)


def test_held_out_combinations_occur_in_the_tests_alone_and_are_flagged(root):
    pairs = {(CLASSES[cls], list(COLOURS)[c]) for cls in range(16) for c in range(12) if held_out(cls, c)}

    def shows(name: str) -> bool:
        parts = name.rstrip(".").split()
        return any((parts[-1], part) in pairs for part in parts)

    for name in ("training_sets/1_attributes.json", "validation_sets/1_attributes.json"):
        data = load(root, name)
        assert not any(shows(entry["name"]) for entry in data["categories"])
        assert not any("held_out" in entry for entry in data["annotations"])
    assert not any("held_out" in entry for entry in load(root, "lvis/coarse_val.json")["annotations"])
    for index in range(300):
        _, things, _ = scene(world.PRETRAIN, index)
        assert not any(held_out(t.cls, t.colour) for t in things)
    data = load(root, "benchmarks/1_attributes.json")
    names = {entry["id"]: entry["name"] for entry in data["categories"]}
    flags = [entry.get("held_out", False) for entry in data["annotations"]]
    assert flags == [shows(names[entry["category_id"]]) for entry in data["annotations"]]
    assert 0 < sum(flags) < 0.25 * len(flags)


def test_coarse_files_are_lvis_with_frequency_groups(root):
    data = load(root, "lvis/coarse_test.json")
    groups = "".join(entry["frequency"] for entry in data["categories"])
    assert groups == "f" * 8 + "c" * 4 + "r" * 4
    assert [entry["name"] for entry in data["categories"]] == list(CLASSES)
    present: dict[int, set[int]] = {}
    for entry in data["annotations"]:
        present.setdefault(entry["image_id"], set()).add(entry["category_id"])
    for record in data["images"]:
        assert sorted(present[record["id"]] | set(record["neg_category_ids"])) == list(range(1, 17))
        assert not present[record["id"]] & set(record["neg_category_ids"])
    drawn = Counter()
    for index in range(2000):
        drawn.update(t.cls for t in world.layout(np.random.default_rng([0, 0, index]), world.PRETRAIN, 96))
    f, c, r = (np.mean([drawn[k] for k in group]) for group in (range(8), range(8, 12), range(12, 16)))
    assert f > 1.6 * c > 4 * r > 0
    trained = {
        name.rstrip(".").split()[-1]
        for name in (e["name"] for e in load(root, "training_sets/1_attributes.json")["categories"])
    }
    assert trained <= set(CLASSES[:8])


def test_image_i_does_not_depend_on_how_many_there_are(root, tmp_path):
    more = write_synthetic(tmp_path / "more", **{**SMALL, "n_train": 61, "n_val": 21, "n_test": 41})
    for name in (
        "training_sets/1_attributes.json",
        "benchmarks/2_attributes.json",
        "benchmarks/shuffle_negatives.json",
    ):
        small, large = load(root, name), load(more, name)
        for key in ("images", "annotations", "categories"):
            assert large[key][: len(small[key])] == small[key]
    for file in sorted((root / "images").rglob("*.png"))[::10]:
        assert file.read_bytes() == (more / file.relative_to(root)).read_bytes()


# No prior: rankers that see only text


@pytest.fixture(scope="module")
def texts_only(tmp_path_factory):
    """Annotations of a larger world; the pictures are the price of going through the real files."""
    return write_synthetic(tmp_path_factory.mktemp("texts") / "world", seed=0, n_train=1500, n_val=1, n_test=500)


@pytest.fixture(scope="module")
def training_texts(texts_only):
    return text_sets(read_fgovd(texts_only / "annotations/training_sets/1_attributes.json"))


@pytest.mark.parametrize("stem", [*STEMS, "transparency"])
def test_rankers_that_see_only_text_are_at_chance(texts_only, training_texts, stem):
    wanted = 2 if stem in ("color", "material", "pattern", "transparency") else 5
    sets = text_sets(read_fgovd(texts_only / f"annotations/benchmarks/{stem}.json"), wanted)
    assert sets.columns.shape[1] == 1 + wanted
    chance = 1 / (1 + wanted)
    margin = 4 * (chance * (1 - chance) / len(sets)) ** 0.5
    scores, trained_on = text_controls(sets, training_texts)
    top1 = {name: float(placed(table)[0].mean()) for name, table in scores.items()}
    print(f"{stem}: chance {chance:.3f}, {len(sets)} vocabularies, {top1}")
    assert set(top1) == {"blind", "blind_cv", "centroid", "centroid_tfidf"}
    assert trained_on["blind"] == len(training_texts)
    assert all(abs(value - chance) < margin for value in top1.values())


# Caching


def test_an_existing_world_is_kept_and_checked(root):
    before = (root / "manifest.json").stat().st_mtime_ns
    assert write_synthetic(root, **SMALL) == root
    assert (root / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="asked for version"):
        write_synthetic(root, **{**SMALL, "seed": 4})


def test_foreign_folders_and_values_out_of_range_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"manifest\.json"):
        write_synthetic(tmp_path)
    with pytest.raises(DataError, match=r"seed is -1, .*; size is 7, allowed is 48 to 1023"):
        write_synthetic(tmp_path / "new", seed=-1, size=7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.faults
def test_damage_is_noticed(tmp_path):
    settings = SyntheticSettings(n_train=2, n_val=2, n_test=2)
    folder = synthetic_root(tmp_path, settings)
    file = folder / "annotations/benchmarks/color.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(DataError, match=r"benchmarks/color\.json"):
        synthetic_root(tmp_path, settings)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="unreadable"):
        synthetic_root(tmp_path, settings)


@pytest.mark.faults
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("noctowl.data.synthetic.fine_grained_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_synthetic(tmp_path / "world", n_train=1, n_val=1, n_test=1)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_start_at_once(tmp_path):
    settings = SyntheticSettings(n_train=10, n_val=5, n_test=5)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.starmap(synthetic_root, [(tmp_path, settings)] * 2)
    assert folders[0] == folders[1]
    assert [p.name for p in tmp_path.iterdir()] == [folders[0].name]
