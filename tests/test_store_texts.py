"""Text embeddings on disk: encoded once per text tower, equal bits, foreign and damaged entries never read."""

import json

import pytest
import torch

from noctowl import runfolder
from noctowl.errors import DataError
from noctowl.features import TextBank
from noctowl.model import OwlDetector
from noctowl.store import TextStore, info
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
    return TextBank(detector, policy=policy, device=CPU, shelf=TextStore(root, detector, CPU))


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
    stores = {name: TextStore(tmp_path, other, CPU) for name, other in changed.items()}
    assert len({key, *(store.key for store in stores.values())}) == 4
    assert [len(store) for store in stores.values()] == [0, 0, 0]
    with torch.no_grad():
        detector.head.dense0.weight.add_(1)
        detector.model.owlv2.vision_model.post_layernorm.weight.add_(1)
    detector.tokenizer("a cup", padding="max_length", truncation=True)  # leaves traces in the tokenizer
    assert len(TextStore(tmp_path, detector, CPU)) == 4


def test_renamed_store_is_not_read(detector, fresh_detector, tmp_path, kept):
    other = TextStore(tmp_path, fresh_detector(seed=1), CPU)
    kept.shelf.folder.rename(other.folder)
    assert len(TextStore(tmp_path, fresh_detector(seed=1), CPU)) == 0


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
    assert len(TextStore(tmp_path, detector, CPU)) == 0
    assert "its shard was cut" in caplog.text
    assert "its digest does not fit" in caplog.text


def test_an_interrupted_write_leaves_nothing_that_is_read(detector, tmp_path, kept, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "atomic", full)
    with pytest.raises(DataError, match=r"1 text embeddings cannot be written \(No space left on device\)"):
        bank(detector, tmp_path).rows(["a bee"])
    monkeypatch.undo()
    assert len(TextStore(tmp_path, detector, CPU)) == 4


def test_only_the_first_process_writes(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "process_rank", lambda: 1)
    bank(detector, tmp_path).rows(FIRST)
    assert not (tmp_path / "texts").exists()
    assert runfolder.process_rank() == 0


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
    assert [entry["images"] > 0 for entry in info(tmp_path)] == [True]  # texts are no store of images
