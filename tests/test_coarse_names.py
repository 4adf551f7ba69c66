"""Names for distillation: built in, from an LVIS file, from a text list; the run records which."""

import hashlib
import json

import pytest

from noctowl.errors import DataError
from noctowl.training import coarse_names

pytestmark = pytest.mark.lvis


def test_built_in_names():
    names = coarse_names("lvis_v1", None)
    assert len(names) == len(set(names)) == 1203
    assert (names[0], names[-1]) == ("aerosol_can", "zucchini")
    assert "bow_(weapon)" in names


def test_an_lvis_file_gives_its_names_by_id(tmp_path):
    categories = [{"id": 7, "name": "cup"}, {"id": 0, "name": "bow_(weapon)"}, {"id": 3, "name": "cat"}]
    (tmp_path / "lvis.json").write_text(json.dumps({"categories": categories}))
    assert coarse_names("lvis.json", tmp_path) == ["bow_(weapon)", "cat", "cup"]


def test_a_text_list_is_taken_in_its_order(tmp_path):
    (tmp_path / "names.txt").write_text("cup\n\n  bow_(weapon) \ncat\n")
    assert coarse_names(str(tmp_path / "names.txt"), tmp_path / "elsewhere") == ["cup", "bow_(weapon)", "cat"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("a.json", '{"images": []}', "not an LVIS-format file"),
        ("b.json", "{", "not an LVIS-format file"),
        ("c.json", '{"categories": []}', "holds no names"),
        ("d.txt", "\n \n", "holds no names"),
        ("e.txt", None, "neither lvis_v1 nor a file"),
    ],
)
def test_errors_name_the_file(tmp_path, file, content, words):
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        coarse_names(file, tmp_path)
    assert file in str(caught.value)


def test_the_run_records_the_list(command, small, tmp_path):
    names = ["cup", "bow_(weapon)", "cat"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    chosen = [o for o in small if "coarse_names" not in o] + [
        f"data.coarse_names={tmp_path / 'names.txt'}",
        "test=false",
    ]
    found = command("train", *chosen)
    assert found.code == 0, found.err
    recorded = found.results["counts"]["coarse_names"]
    assert recorded["count"] == 3
    assert recorded["sha256"] == hashlib.sha256("\n".join(names).encode()).hexdigest()
    assert recorded["source"].endswith("names.txt")
