"""Builders in trouble: a full or read-only disk, SIGKILL, rivals at the same store."""

# ruff: noqa: F811  (fixtures of other files are used as arguments)

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from noctowl import runfolder
from noctowl.errors import DataError
from noctowl.features import store as in_memory
from noctowl.store import FeatureStore, build, folder, prune, shards
from noctowl.store import claims as claims_module
from noctowl.store.claims import Claims

from .test_store import CPU, ROW, SHARD, WORK, detector, image_set, images, store  # noqa: F401
from .test_store_faults import assert_whole, built, exact, problems, shard_files, times  # noqa: F401

pytestmark = pytest.mark.faults
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def one_thread():
    """As in the children: the bits of an encoding depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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

    def test_small_leftovers_go_when_they_are_old(self, built):
        (built.folder / "claims").mkdir(exist_ok=True)
        fresh, old = (built.folder / "claims" / f".{name}.json.9.part" for name in ("fresh", "old"))
        meta = built.folder / ".meta.json.9.part"
        for path in (fresh, old, meta):
            path.write_bytes(b"{")
        for path in (old, meta):
            os.utime(path, (time.time() - 1000, time.time() - 1000))
        assert problems(built, repair=True) == [("leftover", 0), ("leftover", 0)]
        assert fresh.exists()
        assert not old.exists()
        assert not meta.exists()

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


@pytest.mark.ddp
def test_processes_of_one_launch_build_a_share_each(coco_mini, tmp_path):
    """torchrun with two processes: every image is encoded by one of them, and nothing is left to do."""
    words = ["model=tiny", "data=fgovd", f"data.root={coco_mini}", "trainer=cpu", "trainer.num_workers=0"]
    words += [f"data.{name}_file=benchmarks/1_attributes.json" for name in ("train", "val")]
    command = ["-m", "noctowl", "features", "build", *words, f"features.root={tmp_path}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = [int(number) for number in re.findall(r"0 found, (\d+) encoded", done.stdout)]
    assert len(shares) == 2
    assert min(shares) > 0
    again = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert f"{sum(shares)} found, 0 encoded" in again.stdout
