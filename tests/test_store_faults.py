"""Damage, crashes and rivals: each ends in a rebuild of just what is wrong, or in a clear error; never a wrong number."""

# ruff: noqa: F811  (fixtures of test_store are used as arguments)

import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from noctowl import runfolder
from noctowl.errors import DataError, ModelError
from noctowl.features import store as in_memory
from noctowl.model import OwlDetector
from noctowl.store import FeatureStore, build, folder, prune, shards, verify
from noctowl.store import claims as claims_module
from noctowl.store.claims import Claims

from .test_store import CPU, ROW, SHARD, WORK, detector, image_set, images, store  # noqa: F401

pytestmark = pytest.mark.faults
fork = multiprocessing.get_context("fork")


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
    allowed = {"claims", "lock", "meta.json"}
    assert {p.name for p in store.folder.iterdir() if not p.name.startswith("shard-")} == allowed
    assert list((store.folder / "claims").iterdir()) == []


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


class TestDisk:
    def test_too_little_room(self, store, detector, images, monkeypatch):
        monkeypatch.setattr(folder, "free_bytes", lambda _: 8 * ROW - 1)
        with pytest.raises(DataError, match=rf"{8 * ROW} bytes.*{8 * ROW - 1} bytes.*fp16.*live.*prune"):
            build(store, detector, images, **WORK)
        assert not store.root.exists()
        monkeypatch.setattr(folder, "free_bytes", lambda _: 8 * ROW)
        assert build(store, detector, images, **WORK).encoded == 8

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_full_in_the_middle(self, store, detector, images, monkeypatch, exact, code):
        real, written = runfolder.atomic, []

        @contextmanager
        def atomic(path):
            with real(path) as file:
                yield file
                if path.suffix == ".safetensors":
                    written.append(path)
                    if len(written) == 3:
                        raise OSError(code, os.strerror(code))

        monkeypatch.setattr(shards, "atomic", atomic)
        with pytest.raises(DataError, match=r"disk is full.*6 images are stored.*fp16"):
            build(store, detector, images, shard_bytes=SHARD, **WORK)
        assert len(store.stored()) == 6
        assert problems(store) == []
        assert [p for p in store.folder.rglob("*") if p.suffix == ".part"] == []
        monkeypatch.undo()
        before = times(store)
        assert build(store, detector, images, **WORK).encoded == 2
        assert before.items() <= times(store).items()
        assert_whole(store, images, exact)

    def test_read_only(self, detector, images):
        """As a user who may not write: reading works, building says why it cannot. (Root may write anywhere.)"""
        with tempfile.TemporaryDirectory() as place:
            Path(place).chmod(0o755)
            store = FeatureStore.for_model(place, detector, images.preprocessor, device=CPU)
            build(store, detector, images, [0, 1, 2], **WORK)
            pixels = [images[row] for row in range(4)]
            known = store.identities(images)
            for path in [Path(place), *Path(place).rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
            monkeypatched = pytest.MonkeyPatch()  # nobody may not enter pytest's folders: identities are known
            monkeypatched.setattr(FeatureStore, "identities", lambda self, _, rows=None: {r: known[r] for r in rows})
            results = fork.SimpleQueue()

            def child() -> None:
                torch.set_num_threads(1)
                if os.geteuid() == 0:
                    os.setuid(65534)
                equal = torch.equal(
                    store.reader(images, [1]).tokens[1], detector.encode_images(pixels[1][None]).tokens[0]
                )
                try:
                    same = build(store, detector, images, [0, 1], **WORK).encoded
                    build(store, detector, images, [3], **WORK)
                except DataError as error:
                    results.put((equal, same, str(error)))

            process = fork.Process(target=child)
            process.start()
            process.join(60)
            monkeypatched.undo()
            assert process.exitcode == 0
            equal, same, message = results.get()
            assert equal
            assert same == 0
            assert "cannot be written to" in message
            assert "Reading works" in message
            for path in [Path(place), *Path(place).rglob("*")]:
                path.chmod(0o755)


def run_build(store, detector, images, ready=None) -> None:
    """In a child process."""
    torch.set_num_threads(1)
    if ready is not None:
        ready.set()
    build(store, detector, images, shard_bytes=SHARD, **WORK)


class TestProcesses:
    def test_killed_ten_times(self, tmp_path, detector):
        images = image_set(tmp_path / "images", detector, 48)
        clean = FeatureStore.for_model(tmp_path / "clean", detector, images.preprocessor, device=CPU)
        begin = time.monotonic()
        build(clean, detector, images, shard_bytes=SHARD, **WORK)
        whole = time.monotonic() - begin
        store = FeatureStore.for_model(tmp_path / "killed", detector, images.preprocessor, device=CPU)
        dice, kills, rounds = random.Random(0), 0, []
        while kills < 10:
            if len(store.stored()) == 48:  # a fast machine: take the last shards away again
                for path in shard_files(store)[-12:]:
                    path.unlink()
            ready = fork.Event()
            process = fork.Process(target=run_build, args=(store, detector, images, ready))
            process.start()
            assert ready.wait(30)
            time.sleep(dice.uniform(0, whole / 6))
            before = len(store.stored())
            process.kill()
            process.join(30)
            kills += process.exitcode == -9
            rounds.append(before)
            assert len(store.stored()) >= before  # what was written stays
        assert build(store, detector, images, shard_bytes=SHARD, **WORK).images == 48
        assert_whole(store, images, clean.reader(images).read(list(range(48))))
        assert len(store.indexes()) <= 48 / 3 + 10  # each kill costs at most one shard, here: leaves a smaller one

    def test_two_builders_at_once(self, tmp_path, detector):
        images = image_set(tmp_path / "images", detector, 36)
        store = FeatureStore.for_model(tmp_path / "features", detector, images.preprocessor, device=CPU)
        processes = [fork.Process(target=run_build, args=(store, detector, images)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        names = [entry.identity for index in store.indexes() for entry in index.entries]
        assert len(names) == len(set(names)) == 36  # nothing twice
        assert len({index.name.split("-")[1] for index in store.indexes()}) == 2  # and both took part
        assert_whole(store, images, in_memory(detector, images, **WORK))

    def test_a_dead_builders_part_is_taken_over(self, store, detector, images, exact, monkeypatch):
        """A claim of a process that is gone is void at once, one of another machine when it has been silent."""
        store.create("test")
        names = list(store.identities(images).values())
        place = store.folder / "claims"
        place.mkdir()
        gone = {"machine": claims_module.machine(), "pid": 2**22 + 5, "started": 1.0, "images": names[:4]}
        far = {"machine": "elsewhere", "pid": 1, "started": 1.0, "images": names[4:]}
        (place / "aaaaaaaaaaaa.json").write_text(json.dumps(gone))
        (place / "bbbbbbbbbbbb.json").write_text(json.dumps(far))
        leftovers = [store.folder / f".shard-{builder * 12}-00000.safetensors.5.part" for builder in "ab"]
        for path in leftovers:
            path.write_bytes(b"half")
        monkeypatch.setattr(claims_module, "STALE", 1.0)
        begin = time.monotonic()
        report = build(store, detector, images, shard_bytes=SHARD, **WORK)
        assert report.encoded == 8
        assert time.monotonic() - begin > 0.9  # it waited for the other machine
        assert not leftovers[0].exists()
        assert leftovers[1].exists()  # its builder seemed alive when this build began
        assert [Path(p["path"]).name for p in prune(store.root, None, dry_run=False)] == [leftovers[1].name]
        assert_whole(store, images, exact)

    def test_two_shards_of_the_same_images(self, built, detector, images, exact, tmp_path):
        """Builders without locks may both encode an image: read once, counted as duplicates."""
        other = FeatureStore.for_model(tmp_path / "other", detector, images.preprocessor, device=CPU)
        build(other, detector, images, [1, 2], **WORK)
        for path in other.folder.glob("shard-*"):
            shutil.copy(path, built.folder / path.name)
        assert len(built.stored()) == 8
        assert_whole(built, images, exact)

    def test_a_living_builder_is_left_alone(self, built, detector, images):
        with Claims(built.folder) as claims:
            claims.take(["x"])
            leftover = built.folder / f".shard-{claims.builder}-00001.safetensors.1.part"
            leftover.write_bytes(b"half")
            assert problems(built, repair=True) == []
            assert [p["removed"] for p in prune(built.root, [], dry_run=False)] == [False]
            assert leftover.exists()
