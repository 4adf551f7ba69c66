import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noctowl.data.records import Strings, relative_path
from noctowl.errors import DataError

text = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(text))
def test_strings_are_the_list_they_were_made_of(texts):
    strings = Strings(texts)
    assert list(strings) == texts
    assert strings[:] == texts
    assert strings[1::2] == texts[1::2]
    assert list(pickle.loads(pickle.dumps(strings))) == texts
    assert strings.buffer.nbytes == len("".join(texts).encode())


def test_strings_index_like_a_list():
    strings = Strings(["a", "", "ü世"])
    assert (strings[2], strings[-1], strings[1]) == ("ü世", "ü世", "")
    assert strings.take([2, 0]) == ["ü世", "a"]
    assert strings.offsets.tolist() == [0, 1, 1, 6]
    for index in (3, -4):
        with pytest.raises(IndexError, match="of 3 strings"):
            strings[index]


@pytest.mark.parametrize(
    "name",
    ["../x.jpg", "a/../../x.jpg", "/etc/passwd", "C:\\x.jpg", "..\\x.jpg", "\\x", "", ".", "a\0b", "a\nb", "//h/x"],
)
def test_a_path_that_leaves_its_root_is_refused(name):
    with pytest.raises(DataError, match=r"file\.json: the path .* leaves the images' folder"):
        relative_path(name, where="file.json")


@pytest.mark.parametrize("name", ["val2017/1.jpg", "./val2017/1.jpg", "val2017\\1.jpg"])
def test_a_path_below_its_root_is_normalised(name):
    assert relative_path(name, where="") == "val2017/1.jpg"
    assert relative_path("a..b.jpg", where="") == "a..b.jpg"
