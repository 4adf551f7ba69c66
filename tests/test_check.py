import io
import json

import pytest
from PIL import Image
from rich.console import Console

from noctowl.check import check, check_data
from noctowl.cli import main as cli
from noctowl.errors import DataError


@pytest.fixture
def root(tmp_path, fgovd, write_fgovd):
    """A valid data root: one annotation file, its two images."""
    write_fgovd(fgovd)
    for name, size in (("val2017/000000000000.jpg", (100, 50)), ("train2017/000000000007.jpg", (64, 64))):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True)
        Image.new("RGB", size).save(path)
    return tmp_path


def figures(root, capsys, **options):
    """Exit code and parsed report."""
    code = check_data(root, as_json=True, **options)
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_root(root, capsys):
    code, report = figures(root, capsys)
    assert (code, report["fatal"], report["problems"]) == (0, False, [])
    file = report["files"]["benchmarks/1_attributes.json"]
    assert (file["name"], file["images"], file["objects"], file["vocabularies"]) == ("hard", 2, 4, 3)
    assert file["negatives"] == {"min": 0, "mean": 1.0, "max": 2}
    assert file["tokens"] == {"longest": 6, "over_limit": 0}
    assert file["image_files"] == {
        "found": 2,
        "missing": 0,
        "corrupt": 0,
        "size": 0,
        "exif_upright": 0,
        "exif_stored": 0,
        "exif_ambiguous": 0,
    }
    assert list(file["subsets"]) == [str(n) for n in range(11)]
    assert file["subsets"]["1"] == {"images": 2, "objects": 3, "positive_captions": 2}
    assert file["subsets"]["3"] == {"images": 0, "objects": 0, "positive_captions": 0}


def test_odd_entries_are_counted_but_not_fatal(root, fgovd, write_fgovd, capsys):
    fgovd["annotations"][0]["bbox"] = [90, 5, 20, 30]
    fgovd["annotations"][1]["bbox"] = [0, 0, 0, 0]
    fgovd["categories"][1]["name"] = " A blue cup. "
    fgovd["annotations"][3]["neg_category_ids"] = [10, 10]
    fgovd["categories"][5]["name"] = "a " * 20
    write_fgovd(fgovd)
    code, report = figures(root, capsys)
    file = report["files"]["benchmarks/1_attributes.json"]
    assert code == 0
    assert file["counts"]["clipped"] == file["counts"]["dropped_zero_area"] == 1
    assert file["counts"]["duplicate_captions_in_vocabulary"] == 1
    assert file["counts"]["stray_blanks"] == 2
    assert file["tokens"] == {"longest": 22, "over_limit": 1}
    assert file["subsets"]["0"]["positive_captions"] == 1


@pytest.mark.faults
def test_missing_corrupt_and_wrong_images_are_fatal(root, capsys):
    first, second = root / "images/val2017/000000000000.jpg", root / "images/train2017/000000000007.jpg"
    first.unlink()
    Image.new("RGB", (64, 60)).save(second)
    code, report = figures(root, capsys)
    state = report["files"]["benchmarks/1_attributes.json"]["image_files"]
    assert (code, state["found"], state["missing"], state["size"]) == (1, 1, 1, 1)
    assert any("000000000000.jpg: the image file is missing" in problem for problem in report["problems"])
    assert any("64 x 60" in problem and "64 x 64" in problem for problem in report["problems"])
    second.write_bytes(b"")
    code, report = figures(root, capsys)
    assert (code, report["files"]["benchmarks/1_attributes.json"]["image_files"]["corrupt"]) == (1, 1)
    assert figures(root, capsys, skip_images=True)[0] == 0


def test_orientation_is_reported(root, capsys):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (50, 100)).save(root / "images/val2017/000000000000.jpg", exif=exif)
    Image.new("RGB", (64, 64)).save(root / "images/train2017/000000000007.jpg", exif=exif)
    code, report = figures(root, capsys)
    state = report["files"]["benchmarks/1_attributes.json"]["image_files"]
    assert (code, state["exif_upright"], state["exif_ambiguous"]) == (0, 1, 1)
    assert "EXIF asks for a turn that keeps 64 x 64" in report["problems"][0]


@pytest.mark.faults
def test_one_unreadable_file_does_not_hide_the_others(root, write_fgovd, capsys):
    write_fgovd('{"images": [', "color")
    code, report = figures(root, capsys)
    assert code == 1
    assert "not valid JSON" in report["files"]["benchmarks/color.json"]["error"]
    assert report["files"]["benchmarks/1_attributes.json"]["objects"] == 4
    assert figures(root, capsys, files=["benchmarks/1_attributes.json"])[0] == 0


@pytest.mark.faults
def test_nothing_to_check(tmp_path, root):
    with pytest.raises(DataError, match=r"data\.root: the folder .*nowhere is missing"):
        check_data(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"color\.json: the annotation file is missing.*1_attributes\.json"):
        check_data(root, files=["benchmarks/color.json"])
    (tmp_path / "bare/annotations/benchmarks").mkdir(parents=True)
    with pytest.raises(DataError, match="no annotation files to check"):
        check_data(tmp_path / "bare")


def test_the_table_says_it_all(root, write_fgovd, fgovd):
    fgovd["images"][0]["file_name"] = "val2017/none.jpg"
    path = write_fgovd(fgovd, "pattern")
    out = io.StringIO()
    files = [root / "annotations/benchmarks/1_attributes.json", path]
    check(files=files, images=root / "images", root=root / "annotations").print(Console(file=out, width=80))
    printed = out.getvalue()
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:4]]
        for line in printed.splitlines()
        if "│" in line
    }
    assert rows["objects"] == ["4", "4"]
    assert rows["kept at N = 1"] == ["2/3/2", "2/3/2"]
    assert rows["image files missing"] == ["0", "1"]
    assert "none.jpg: the image file is missing" in printed
    assert "FATAL" in printed
    out = io.StringIO()
    check(files=files[:1], images=None).print(Console(file=out))
    assert "image files" not in out.getvalue()
    assert "Nothing fatal." in out.getvalue()


def test_files_that_training_would_read(root, capsys):
    """Missing ones are told, and fatal where they were asked for."""
    there, overrides = "benchmarks/1_attributes.json", ["check", "data=fgovd", f"data.root={root}"]
    train, val = (root / "annotations" / f"{kind}_sets" / "1_attributes.json" for kind in ("training", "validation"))
    assert cli(overrides) == 0
    said = capsys.readouterr().out
    assert f"- data.train_file: {train} is missing: training would stop there. Set data.train_file to one of" in said
    assert f"- data.val_file: {val} is missing" in said
    assert "tokens of OWL's CLIP tokenizer; model=tiny has a smaller one" in " ".join(said.split())
    assert cli([*overrides, f"data.train_file={there}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["configured"]
    assert report["data.train_file"] == {"path": str(root / "annotations" / there), "found": True, "asked": True}
    assert report["data.val_file"] == {"path": str(val), "found": False, "asked": False}
    assert cli([*overrides, "data.val_file=validation_sets/1_attributes.json"]) == 1
    assert "FATAL" in capsys.readouterr().out


@pytest.mark.golden
def test_real_images_are_all_sound(coco_mini, capsys):
    code, report = figures(coco_mini, capsys)
    files = {file["name"]: file for file in report["files"].values()}
    assert (code, report["problems"]) == (0, [])
    assert set(files) == {"hard", "medium", "easy", "trivial", "pattern", "transparency"}
    assert (files["hard"]["image_files"]["found"], files["hard"]["objects"]) == (35, 83)


@pytest.mark.golden
def test_table_1_and_the_owl_subset_by_the_command(shared, capsys):
    code, report = figures(shared / "data/fgovd", capsys, skip_images=True)
    benchmarks = {file["name"]: file for path, file in report["files"].items() if path.startswith("benchmarks/")}
    assert code == 0
    assert {name: (f["images"], f["objects"], f["vocabularies"]) for name, f in benchmarks.items()} == {
        "hard": (1707, 3545, 2349),
        "medium": (1537, 2968, 2034),
        "easy": (853, 1299, 971),
        "trivial": (1707, 3545, 2349),
        "pattern": (321, 467, 337),
        "transparency": (230, 409, 238),
    }
    subset = {name: tuple(f["subsets"]["1"].values()) for name, f in benchmarks.items()}
    assert subset["easy"] == (417, 657, 445)
    assert subset["pattern"] == (188, 294, 193)
    assert subset["transparency"] == (177, 323, 180)
