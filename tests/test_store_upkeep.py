"""Feature store: which image is it, and looking after stores."""

# ruff: noqa: F811  (fixtures of test_store are used as arguments)

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from noctowl.errors import DataError
from noctowl.store import (
    FeatureStore,
    build,
    info,
    print_info,
    print_prune,
    print_verify,
    prune,
    verify,
)
from noctowl.store import identity as identity_module

from .test_store import CPU, ROW, SHARD, WORK, detector, images, store  # noqa: F401


class TestIdentity:
    def test_expected_size_is_part_of_it(self, store, images):
        (first,) = store.identities(images, [0]).values()
        assert first.endswith("-24x20")
        assert len(first.split("-")[0]) == 64

    def test_remembers_hashes_and_notices_changes(self, store, images, monkeypatch):
        store.root.mkdir()
        monkeypatch.setattr(identity_module, "SETTLED_NS", 0)
        before = store.identities(images)
        hashed = []
        real = identity_module.file_sha256
        monkeypatch.setattr(identity_module, "file_sha256", lambda path: hashed.append(path.name) or real(path))
        assert store.identities(images) == before
        assert hashed == []
        path = images.root / "004.png"
        state, data = path.stat(), bytearray(path.read_bytes())
        time.sleep(0.02)
        data[-20] ^= 1  # same size, and the time of change is set back
        path.write_bytes(data)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        after = store.identities(images)
        assert hashed == ["004.png"]
        assert [row for row in before if before[row] != after[row]] == [4]

    def test_recent_files_and_damaged_caches_are_hashed_anew(self, store, images):
        store.root.mkdir()
        before = store.identities(images)
        assert not (store.root / "hashes.json").exists()  # written a moment ago: not to be trusted
        for content in ("{", "[]", '{"a": 3}'):
            (store.root / "hashes.json").write_text(content)
            assert store.identities(images) == before

    def test_missing_image(self, store, images):
        (images.root / "001.png").unlink()
        with pytest.raises(DataError, match=r"001\.png"):
            store.identities(images)


class TestMaintenance:
    def test_info_and_tables(self, store, detector, images, capsys):
        build(store, detector, images, shard_bytes=SHARD, **WORK)
        (report,) = info(store.root)
        assert (report["images"], report["shards"], report["duplicates"], report["builders"]) == (8, 3, 0, 0)
        assert report["base_sha256"] == detector.content_hash()
        assert report["error"] == {"cosine": 0.0, "bound": 0.0}
        assert 8 * ROW < report["bytes"] < 8 * ROW + 15_000
        console = Console(width=80)
        print_info([report], console)
        assert print_verify(verify(store.root), console) == 0
        print_prune(prune(store.root, []), console)
        text = capsys.readouterr().out
        assert store.spec.key[:8] in text
        assert "all good" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_prune_is_a_dry_run_by_default(self, tmp_path, store, detector, images):
        other = FeatureStore.for_model(store.root, detector, images.preprocessor, dtype="fp16", device=CPU)
        for one in (store, other):
            build(one, detector, images, **WORK)
        (store.folder / ".shard-dead00000000-00001.safetensors.77.part").write_bytes(b"x" * 100)
        unknown = store.root / "something else"
        unknown.mkdir()
        planned = prune(store.root, [store.spec.key[:10]])
        assert {(Path(p["path"]).name, p["removed"]) for p in planned} == {
            (other.spec.key, False),
            (".shard-dead00000000-00001.safetensors.77.part", False),
        }
        assert other.folder.exists()
        assert all(p["removed"] for p in prune(store.root, [store.spec.key], dry_run=False))
        assert not other.folder.exists()
        assert unknown.exists()
        assert sorted(p.suffix for p in store.folder.iterdir() if "shard" in p.name) == [".json", ".safetensors"]
        store.reader(images)

    def test_unknown_keys_remove_nothing(self, store, detector, images):
        build(store, detector, images, **WORK)
        with pytest.raises(DataError, match=store.spec.key[:12]):
            prune(store.root, ["0000"], dry_run=False)
        with pytest.raises(DataError, match="no such folder"):
            info(store.root / "elsewhere")
        assert store.folder.exists()

    def test_room(self, store, detector, images):
        build(store, detector, images, [0, 1, 2], **WORK)
        room = store.room(images)
        assert (room.images, room.missing, room.needed) == (8, 5, 5 * ROW)
        assert room.free > 0


def test_one_is_not_plural(capsys):
    report = {"kind": "images", "key": "a" * 64, "images": 8, "shards": 1, "repaired": False, "problems": []}
    problem = {"file": "f", "kind": "missing", "detail": "", "images": 8, "action": "none"}
    assert print_verify([report, {**report, "shards": 2, "problems": [problem]}]) == 1
    said = capsys.readouterr().out
    assert "8 images in 1 shard, all good" in said
    assert "8 images in 2 shards, 1 problem\n" in said
