"""Damage and strangers: each ends in a rebuild of just what is wrong, or in a clear error; never a wrong number."""

# ruff: noqa: F811  (fixtures of test_store are used as arguments)

import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from noctowl.errors import DataError, ModelError
from noctowl.features import store as in_memory
from noctowl.model import OwlDetector
from noctowl.store import FeatureStore, build, shards, verify
from noctowl.store.claims import Claims

from .test_store import CPU, ROW, SHARD, WORK, detector, image_set, images, store  # noqa: F401

pytestmark = pytest.mark.faults


@pytest.fixture
def built(store, detector, images):
    """A store of 8 images in shards of 3, 3 and 2."""
    build(store, detector, images, shard_bytes=SHARD, **WORK)
    return store


@pytest.fixture
def exact(detector, images):
    return in_memory(detector, images, **WORK)


def shard_files(store: FeatureStore) -> list[Path]:
    return sorted(store.folder.glob("shard-*.safetensors"))


def times(store: FeatureStore) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in store.folder.glob("shard-*")}


def problems(store: FeatureStore, **options: bool) -> list[tuple[str, int]]:
    return [(p["kind"], p["images"]) for p in verify(store.root, [store.spec.key], **options)[0]["problems"]]


def assert_whole(store: FeatureStore, images, exact) -> None:
    """Everything is there, every byte is right, nothing is left over."""
    reader = store.reader(images)
    assert torch.equal(reader.tokens[:], exact.tokens)
    assert torch.equal(reader.boxes[:], exact.boxes)
    assert problems(store) == []
    others = {p.name for p in store.folder.iterdir() if not p.name.startswith(("shard-", ".meta.json."))}
    assert others == {"claims", "lock", "meta.json"}
    assert list((store.folder / "claims").glob("*.json")) == []


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


class TestDamage:
    def test_truncated_shard(self, built, detector, images, exact):
        first, *others = shard_files(built)
        untouched = {p.name: times(built)[p.name] for p in others}
        os.truncate(first, first.stat().st_size - 1)
        with pytest.raises(DataError, match="3 of 8 images"):
            built.reader(images)
        assert problems(built) == [("truncated", 3)]
        assert build(built, detector, images, **WORK).encoded == 3
        assert untouched.items() <= times(built).items()
        assert_whole(built, images, exact)

    def test_shard_cut_while_it_is_read(self, built, images):
        reader = built.reader(images)
        for path in shard_files(built):
            os.truncate(path, 100)
        with pytest.raises(DataError, match="verify --repair"):
            reader.tokens[0]

    def test_flipped_byte_is_not_read(self, built, detector, images, exact):
        """The last byte of the first shard belongs to the tokens of its last image."""
        first = shard_files(built)[0]
        flip(first, -1)
        reader = built.reader(images)
        with pytest.raises(DataError, match=r"002\.png are damaged.*verify --repair"):
            reader.tokens[[0, 1, 2]]
        with pytest.raises(DataError, match="damaged"):
            reader.boxes[2]
        assert torch.equal(reader.tokens[[0, 1, 3]], exact.tokens[[0, 1, 3]])
        assert problems(built) == [("checksum", 1)]
        assert build(built, detector, images, **WORK).encoded == 0  # sizes are right: only `verify` reads every byte
        before = times(built)[first.name]
        assert problems(built, repair=True) == [("checksum", 1)]
        assert times(built)[first.name] == before  # the good rows stay where they are
        assert build(built, detector, images, **WORK).encoded == 1
        assert_whole(built, images, exact)

    @pytest.mark.parametrize("tensor", ["boxes", "objectness", "tokens"])
    def test_flipped_byte_in_each_tensor(self, built, images, tensor):
        index = built.indexes()[0]
        start = {f.name: o for f, o in shards.offsets(built.spec, index.count)}[tensor]
        flip(shard_files(built)[0], index.data_start + start)
        with pytest.raises(DataError, match=r"000\.png are damaged"):
            built.reader(images).tokens[0]

    def test_all_rows_flipped(self, built, detector, images, exact):
        path = shard_files(built)[2]
        for row in (1, 2):
            flip(path, -row * 64 * 160 * 4)
        assert problems(built, repair=True) == [("checksum", 2)]
        assert not path.exists()
        assert build(built, detector, images, **WORK).encoded == 2
        assert_whole(built, images, exact)

    def test_flipped_byte_in_the_header(self, built, detector, images, exact):
        flip(shard_files(built)[1], 40)
        assert torch.equal(built.reader(images).tokens[:], exact.tokens)  # reading does not need it
        assert problems(built, repair=True) == [("header", 3)]
        assert build(built, detector, images, **WORK).encoded == 3
        assert_whole(built, images, exact)

    @pytest.mark.parametrize("offset", [2, 30, 200, -40])
    def test_flipped_byte_in_the_index(self, built, detector, images, exact, offset):
        """The shard's own header has the list once more: nothing is encoded again."""
        flip(shard_files(built)[0].with_suffix(".json"), offset)
        with pytest.raises(DataError, match="3 of 8"):
            built.reader(images)
        before = {p.name: times(built)[p.name] for p in shard_files(built)}
        report = build(built, detector, images, **WORK)
        assert (report.encoded, report.others) == (0, 0)
        assert before.items() <= times(built).items()
        assert_whole(built, images, exact)

    def test_index_without_shard(self, built, detector, images, exact):
        shard_files(built)[1].unlink()
        assert problems(built) == [("no shard", 3)]
        assert build(built, detector, images, **WORK).encoded == 3
        assert_whole(built, images, exact)

    def test_shard_without_index(self, built, detector, images, exact):
        shard_files(built)[1].with_suffix(".json").unlink()
        assert problems(built) == [("no index", 0)]
        assert build(built, detector, images, **WORK).encoded == 0
        assert_whole(built, images, exact)

    def test_damaged_shard_without_index(self, built, detector, images, exact):
        """One bad row: the two good ones are kept. A bad header: the shard goes."""
        first, second, _ = shard_files(built)
        for path in (first, second):
            path.with_suffix(".json").unlink()
        flip(first, -1)
        flip(second, 30)
        assert build(built, detector, images, **WORK).encoded == 1 + 3
        assert_whole(built, images, exact)

    def test_damaged_meta(self, built, images, detector):
        (built.folder / "meta.json").write_text('{"key": "')
        with pytest.raises(DataError, match="delete it and build again: shards are kept"):
            FeatureStore(built.root, built.spec)
        (built.folder / "meta.json").unlink()
        assert build(FeatureStore(built.root, built.spec), detector, images, **WORK).encoded == 0

    def test_verify_without_repair_changes_nothing(self, built):
        os.truncate(shard_files(built)[0], 100)
        flip(shard_files(built)[1], -1)
        shard_files(built)[2].unlink()
        before = times(built)
        assert sorted(problems(built)) == [("checksum", 1), ("no shard", 2), ("truncated", 3)]
        assert times(built) == before


class TestForeign:
    def test_another_model_is_refused(self, built, images):
        other = OwlDetector.from_pretrained("tiny", weights="random", seed=1)
        with pytest.raises(ModelError, match="base_sha256 differ"):
            build(built, other, images, **WORK)

    def test_shards_of_another_store_are_never_read(self, built, detector, images, exact):
        other = FeatureStore.for_model(built.root, detector, images.preprocessor, dtype="fp16", device=CPU)
        build(other, detector, images, [0, 1], **WORK)
        alien = shard_files(built)[0]
        for path in (alien, alien.with_suffix(".json")):
            shutil.copy(path, other.folder / path.name)
        with pytest.raises(DataError, match="6 of 8"):
            other.reader(images)
        assert problems(other) == [("foreign", 0)]
        assert build(other, detector, images, **WORK).encoded == 6
        assert (other.folder / alien.name).exists()  # not ours to delete
        (other.folder / alien.name).with_suffix(".json").unlink()
        assert problems(other, repair=True) == [("foreign", 0)]
        torch.testing.assert_close(other.reader(images).tokens[:], exact.tokens, rtol=2**-11, atol=1e-6)

    def test_a_renamed_store_is_refused(self, built, detector, images):
        other = FeatureStore.for_model(built.root, detector, images.preprocessor, dtype="fp16", device=CPU)
        built.folder.rename(other.folder)
        with pytest.raises(DataError, match="Move it back"):
            FeatureStore.open(other.folder)
        with pytest.raises(DataError, match="Move it back"):
            FeatureStore(built.root, other.spec)


class TestImages:
    def test_changed_after_the_build(self, built, detector, images):
        shutil.copy(images.root / "003.png", images.root / "spare.png")
        (images.root / "003.png").write_bytes(changed(images.root / "003.png"))
        with pytest.raises(DataError, match=r"1 of 8 images .* 003\.png"):
            built.reader(images)
        assert build(built, detector, images, **WORK).encoded == 1
        assert_whole(built, images, in_memory(detector, images, **WORK))
        shutil.copy(images.root / "spare.png", images.root / "003.png")  # and back: the old entry is still right
        assert build(built, detector, images, **WORK).encoded == 0

    def test_changed_during_the_build(self, store, detector, images, monkeypatch):
        """Planned with one content, read with another: nothing is stored under the old one."""
        real, path = Claims.take, images.root / "005.png"
        content = changed(path)

        def take(self, names):
            real(self, names)
            path.write_bytes(content)

        monkeypatch.setattr(Claims, "take", take)
        with pytest.raises(DataError, match=r"005\.png: the file was changed"):
            build(store, detector, images, shard_bytes=SHARD, **WORK)
        monkeypatch.undo()
        build(store, detector, images, shard_bytes=SHARD, **WORK)
        assert_whole(store, images, in_memory(detector, images, **WORK))

    def test_an_unreadable_image_costs_one_shard(self, store, detector, images):
        (images.root / "004.png").write_bytes(b"no image")
        with pytest.raises(DataError, match=r"004\.png"):
            build(store, detector, images, shard_bytes=SHARD, **WORK)
        assert len(store.stored()) == 3
        assert problems(store) == []


def changed(path: Path) -> bytes:
    """The picture with one pixel changed."""
    picture = Image.open(path)
    value = picture.getpixel((5, 5))
    picture.putpixel((5, 5), tuple(255 - v for v in value))
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()
