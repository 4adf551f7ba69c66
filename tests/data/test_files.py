import pytest

from noctowl.data import files
from noctowl.errors import DataError


def test_the_two_layouts(tmp_path):
    (tmp_path / "val2017").mkdir()
    (tmp_path / "benchmarks").mkdir()
    assert files.find_images(tmp_path) == tmp_path
    assert files.find_annotations(tmp_path) == tmp_path
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations/training_sets").mkdir(parents=True)
    assert files.find_images(tmp_path) == tmp_path / "images"
    assert files.find_annotations(tmp_path) == tmp_path / "annotations"
    (tmp_path / "other").mkdir()
    assert files.find_images(tmp_path, "other") == tmp_path / "other"
    assert files.find_annotations(tmp_path, tmp_path / "other") == tmp_path / "other"


def test_files_and_benchmarks(tmp_path, fgovd, write_fgovd):
    color, hard = write_fgovd(fgovd, "color"), write_fgovd(fgovd)
    write_fgovd(fgovd, "mine")
    folder = tmp_path / "annotations"
    train = write_fgovd(fgovd, folder="training_sets")
    assert files.find_file(folder, files.TRAIN_FILE) == train
    assert files.find_file(folder, hard) == hard
    assert list(files.find_benchmarks(folder).items()) == [("hard", hard), ("color", color)]
    assert files.find_benchmarks(folder, ["color"]) == {"color": color}
    assert files.find_benchmarks(folder, ["1_attributes"]) == {"hard": hard}
    assert [path.stem for path in files.annotation_files(folder)] == ["1_attributes", "color", "mine", "1_attributes"]


@pytest.mark.faults
def test_what_is_missing_is_named_with_what_is_there(tmp_path, fgovd, write_fgovd):
    write_fgovd(fgovd)
    with pytest.raises(DataError, match=r"data\.root: the folder .*nowhere is missing"):
        files.find_annotations(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no images; .* found \['annotations'\].*data\.images"):
        files.find_images(tmp_path)
    with pytest.raises(DataError, match=r"data\.images: the folder .* is missing"):
        files.find_images(tmp_path, "pictures")
    with pytest.raises(DataError, match=r"data\.annotations: the folder .* is missing.*benchmarks/1_attributes\.json"):
        files.find_annotations(tmp_path, "labels")
    with pytest.raises(
        DataError, match=r"training_sets/1_attributes\.json.* missing.*there: benchmarks/1_attributes\.json"
    ):
        files.find_file(tmp_path / "annotations", files.TRAIN_FILE)
    with pytest.raises(DataError, match=r"no file for the benchmark\(s\) \['color', 'colour'\]; known are"):
        files.find_benchmarks(tmp_path / "annotations", ["hard", "color", "colour"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no annotations; .*No annotation files"):
        files.find_annotations(tmp_path / "empty")
    with pytest.raises(DataError, match=r"no file for the benchmark\(s\) \['hard', .*does not exist"):
        files.find_benchmarks(tmp_path / "void")
