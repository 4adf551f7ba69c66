"""Text embeddings on disk: encoded once per text tower, equal bits, foreign and damaged entries never read."""

import json
import os
import time

import pytest
import torch
from rich.console import Console

from noctowl import runfolder
from noctowl.errors import DataError
from noctowl.features import TextBank
from noctowl.model import OwlDetector
from noctowl.store import TextStore, info, print_info, print_verify, prune, verify
from noctowl.store import texts as module
from noctowl.text import small_clip_tokenizer

from .test_store_faults import flip

CPU = torch.device("cpu")
LONG = "a red cup " * 6  # 20 tokens with start and end
FIRST, SECOND = ["a cup", "a cat"], ["a dog", "a hat", "a cat"]


@pytest.fixture
def detector(fresh_detector) -> OwlDetector:
    return fresh_detector()


def bank(detector, root, policy="drop") -> TextBank:
    return TextBank(detector, policy=policy, device=CPU, shelf=TextStore.for_model(root, detector, CPU))


@pytest.fixture
def kept(detector, tmp_path) -> TextBank:
    """The bank of a run that left two shards: two texts, then two more."""
    filled = bank(detector, tmp_path)
    filled.rows(FIRST)
    filled.rows(SECOND)
    assert (filled.forwards, filled.hits) == (4, 0)
    return filled


def shards(root):
    return sorted(root.glob("texts/*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def test_a_second_run_encodes_nothing(detector, tmp_path, kept):
    assert len(shards(tmp_path)) == 2
    again = bank(detector, tmp_path)
    order = ["a hat", "a cup", "a cat", "a dog", "a cup"]
    rows = again.rows(order)
    assert (again.forwards, again.hits) == (0, 4)
    assert torch.equal(again.embeddings[rows], kept.embeddings[kept.rows(order)])
    assert again.lengths[rows].tolist() == [4] * 5
    more = again.rows(["a bee", "a cat"])
    assert (again.forwards, again.hits) == (1, 4)
    assert torch.equal(again.embeddings[more[1]], again.embeddings[rows[2]])
    assert len(shards(tmp_path)) == 3


def test_long_texts_are_the_same_under_every_policy(detector, tmp_path):
    """Dropped: not encoded, not stored. Cut: one embedding, which a prompt may read under the policy "drop"."""
    assert bank(detector, tmp_path).rows([LONG]).tolist() == [0]
    assert shards(tmp_path) == []
    cut = bank(detector, tmp_path, "truncate")
    cut.rows([LONG])
    other = bank(detector, tmp_path, "drop")
    other.rows([LONG])
    assert other.hits == other.forwards == 0
    row = other.prompt_rows([LONG])
    assert (other.hits, other.forwards) == (1, 0)
    assert torch.equal(other.embeddings[row], cut.embeddings)


def test_key(detector, fresh_detector, tmp_path, kept):
    """Another tower or tokenizer reads nothing; another vision tower or a trained head everything."""
    key = kept.shelf.key
    changed = {}
    changed["tower"] = fresh_detector(seed=1)
    changed["tokenizer"] = fresh_detector()
    changed["tokenizer"].tokenizer = small_clip_tokenizer(["zebra"])
    changed["limit"] = fresh_detector()
    changed["limit"].tokenizer = small_clip_tokenizer(())
    changed["limit"].tokenizer.model_max_length = 12
    stores = {name: TextStore.for_model(tmp_path, other, CPU) for name, other in changed.items()}
    assert len({key, *(store.key for store in stores.values())}) == 4
    assert [len(store) for store in stores.values()] == [0, 0, 0]
    with torch.no_grad():
        detector.head.dense0.weight.add_(1)
        detector.model.owlv2.vision_model.post_layernorm.weight.add_(1)
    detector.tokenizer("a cup", padding="max_length", truncation=True)  # leaves traces in the tokenizer
    assert len(TextStore.for_model(tmp_path, detector, CPU)) == 4


def test_renamed_store_is_not_read(detector, fresh_detector, tmp_path, kept):
    other = TextStore.for_model(tmp_path, fresh_detector(seed=1), CPU)
    kept.shelf.folder.rename(other.folder)
    assert len(TextStore.for_model(tmp_path, fresh_detector(seed=1), CPU)) == 0


@pytest.mark.parametrize("where", [-1, 100, 0])
def test_flipped_byte(detector, tmp_path, kept, caplog, where):
    first, second = shards(tmp_path)
    flip(first, where)
    again = bank(detector, tmp_path)
    rows = again.rows([*FIRST, *SECOND])
    assert (again.forwards, again.hits) == (2, 2)
    assert "damaged (checksum)" in caplog.text
    torch.testing.assert_close(again.embeddings[rows], kept.embeddings[kept.rows([*FIRST, *SECOND])], rtol=0, atol=1e-6)
    assert not first.exists()
    assert second.exists()
    third = bank(detector, tmp_path)
    third.rows([*FIRST, *SECOND])
    assert (third.forwards, third.hits) == (0, 4)


def test_cut_shards_and_damaged_indexes(detector, tmp_path, kept, caplog):
    first, second = shards(tmp_path)
    first.write_bytes(first.read_bytes()[:-8])
    index = second.with_suffix(".json")
    content = json.loads(index.read_text())
    content["index"]["texts"].reverse()  # as a wrong answer would look
    index.write_text(json.dumps(content))
    assert len(TextStore.for_model(tmp_path, detector, CPU)) == 0
    assert f"{first.stat().st_size} bytes; it was written with {first.stat().st_size + 8}" in caplog.text
    assert "its digest does not fit" in caplog.text


def test_an_interrupted_write_leaves_nothing_that_is_read(detector, tmp_path, kept, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "atomic", full)
    with pytest.raises(DataError, match=r"1 text embeddings cannot be written \(No space left on device\)"):
        bank(detector, tmp_path).rows(["a bee"])
    monkeypatch.undo()
    assert len(TextStore.for_model(tmp_path, detector, CPU)) == 4


def test_only_the_first_process_writes(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "process_rank", lambda: 1)
    bank(detector, tmp_path).rows(FIRST)
    assert not (tmp_path / "texts").exists()
    assert runfolder.process_rank() == 0


class TestUpkeep:
    def test_info_lists_them(self, detector, tmp_path, kept, capsys):
        kept.shelf.write(["a cat", "a bee"], torch.zeros(2, 96))  # another writer had "a cat" already
        (told,) = info(tmp_path)
        files = [path for path in kept.shelf.folder.iterdir() if path.name != "meta.json"]
        assert told == {
            "kind": "texts",
            "key": kept.shelf.key,
            "base": detector.base_id,
            "arithmetic": "float32",
            "width": 96,
            "texts": 5,
            "duplicates": 1,
            "shards": 3,
            "bytes": sum(path.stat().st_size for path in files),
        }
        print_info([told], Console(width=80))
        said = capsys.readouterr().out
        assert all(word in said for word in (kept.shelf.key[:8], "96", "5 (+1 twice)"))

    def test_sound_stores_have_no_problems(self, tmp_path, kept, capsys):
        before = {path: path.read_bytes() for path in kept.shelf.folder.iterdir()}
        for repair in (False, True):
            (report,) = verify(tmp_path, [kept.shelf.key[:6]], repair=repair)
            assert (report["kind"], report["texts"], report["shards"], report["problems"]) == ("texts", 4, 2, [])
        assert {path: path.read_bytes() for path in kept.shelf.folder.iterdir()} == before
        assert print_verify([report], Console(width=80)) == 0
        assert "4 texts in 2 shards, all good" in capsys.readouterr().out

    @pytest.mark.parametrize("damage", ["checksum", "truncated", "no shard", "index"])
    def test_damage_is_found_and_dropped(self, detector, tmp_path, kept, damage):
        first, second = shards(tmp_path)
        index = first.with_suffix(".json")
        if damage == "checksum":
            flip(first, -1)
        elif damage == "truncated":
            first.write_bytes(first.read_bytes()[:-8])
        elif damage == "no shard":
            first.unlink()
        else:
            flip(index, index.read_bytes().index(b"a cup"))
        (report,) = verify(tmp_path)
        assert [(p["file"], p["kind"], p["images"], p["action"]) for p in report["problems"]] == [
            (index.name, damage, 2, "removed")
        ]
        assert index.exists()
        assert print_verify([report], Console(width=80)) == 1
        (report,) = verify(tmp_path, repair=True)
        assert (report["texts"], report["shards"], len(report["problems"])) == (2, 1, 1)
        assert sorted(kept.shelf.folder.glob("*.safetensors")) == [second]
        assert verify(tmp_path)[0]["problems"] == []
        again = bank(detector, tmp_path)
        again.rows([*FIRST, *SECOND])
        assert (again.forwards, again.hits) == (2, 2)

    def test_foreign_shards_stay_and_lone_ones_go_when_they_are_old(self, tmp_path, kept, fresh_detector):
        other = bank(fresh_detector(seed=1), tmp_path)
        other.rows(FIRST)
        (foreign,) = other.shelf.folder.glob("*.safetensors")
        for path in (foreign, foreign.with_suffix(".json")):
            (kept.shelf.folder / path.name).write_bytes(path.read_bytes())
        lone, half = kept.shelf.folder / "0123.safetensors", kept.shelf.folder / ".4567.json.9.part"
        for path in (lone, half):
            path.write_bytes(b"x")

        def kinds():
            (report,) = verify(tmp_path, [kept.shelf.key], repair=True)
            return [p["kind"] for p in report["problems"]]

        assert kinds() == ["foreign"]  # the others may be being written
        for path in (lone, half):
            os.utime(path, (time.time() - 1000, time.time() - 1000))
        assert kinds() == ["foreign", "no index", "leftover"]
        assert kinds() == ["foreign"]
        assert (kept.shelf.folder / foreign.name).exists()
        assert not lone.exists()
        assert not half.exists()

    def test_prune(self, detector, fresh_detector, tmp_path, kept):
        """The rules of image stores: dry by default, what is not kept goes, what is being written to stays."""
        other = bank(fresh_detector(seed=1), tmp_path)
        other.rows(FIRST)
        assert prune(tmp_path, None) == []
        planned = prune(tmp_path, [kept.shelf.key[:8]])
        size = sum(path.stat().st_size for path in other.shelf.folder.iterdir())
        assert planned == [{"path": str(other.shelf.folder), "bytes": size, "why": "not kept", "removed": False}]
        half = other.shelf.folder / ".x.json.9.part"
        half.write_bytes(b"x")
        assert [p["removed"] for p in prune(tmp_path, [kept.shelf.key], dry_run=False)] == [False]
        os.utime(half, (time.time() - 1000, time.time() - 1000))
        lone = other.shelf.folder / "0123.safetensors"  # its index is about to follow
        lone.write_bytes(b"x")
        assert [p["removed"] for p in prune(tmp_path, [kept.shelf.key], dry_run=False)] == [False]
        lone.unlink()
        assert [p["path"] for p in prune(tmp_path, None, dry_run=False)] == [str(half)]
        assert [p["removed"] for p in prune(tmp_path, [kept.shelf.key], dry_run=False)] == [True]
        assert not other.shelf.folder.exists()
        assert len(TextStore.for_model(tmp_path, detector, CPU)) == 4
        with pytest.raises(DataError, match=f"there are: {kept.shelf.key[:12]}"):
            prune(tmp_path, [other.shelf.key])

    def test_damaged_and_renamed_descriptions(self, tmp_path, kept):
        meta = kept.shelf.folder / "meta.json"
        assert TextStore.open(kept.shelf.folder).ingredients == kept.shelf.ingredients
        kept.shelf.folder.rename(kept.shelf.folder.with_name("f" * 64))
        with pytest.raises(DataError, match=f"describes the store {kept.shelf.key}, but lies in ffff"):
            info(tmp_path)
        kept.shelf.folder.with_name("f" * 64).rename(kept.shelf.folder)
        meta.write_text("{")
        with pytest.raises(DataError, match="not a readable description of a text store"):
            verify(tmp_path)


def test_runs_share_texts(small, command, tmp_path):
    """Counters of results.json: the first run encodes, the next reads, with the same figures."""
    words = [*small, "features=disk", f"features.root={tmp_path}", "test=false", "trainer.num_workers=0"]
    first, second = (command("train", *words) for _ in range(2))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    one, two = (run.results["provenance"]["text"] for run in (first, second))
    assert one["captions_encoded"] > 0 == one["captions_read"]
    assert (two["captions_encoded"], two["captions_read"]) == (0, one["captions_encoded"])
    heads = [run.results["provenance"]["head_sha256"] for run in (first, second)]
    assert heads[0] == heads[1]
    assert [(entry["kind"], entry[entry["kind"]] > 0) for entry in info(tmp_path)] == [
        ("images", True),
        ("texts", True),
    ]
