"""What is computed once: features in memory equal live ones through training, each caption is encoded once."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import pytorch_lightning as pl
import torch

from noctowl.assembly import make_images
from noctowl.data.datamodule import DataModule
from noctowl.data.fgovd import read_fgovd
from noctowl.data.images import Preprocessor
from noctowl.errors import DataError
from noctowl.features import ImageSet, TextBank, choose_mode, chunks, encode, store
from noctowl.text import tokenize
from noctowl.training import coarse_queries, training_data
from tests.test_module import make_module

CPU = torch.device("cpu")
LONG = "a red cup " * 6  # 20 tokens with start and end


def train(detector, world, *, stored: bool, epochs: int = 2):
    """Losses of every step and the trained head."""

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen.append(float(trainer.callback_metrics["train/total_step"]))

    images = make_images(detector, world / "images", 0.0)
    bank = TextBank(detector, policy="drop", device=CPU)
    file = world / "annotations" / "training_sets" / "1_attributes.json"
    options = {"images": images, "bank": bank, "n_negatives": 10, "short_vocabularies": "keep"}
    dataset = training_data(file, detector=detector, **options).dataset
    queries = coarse_queries(bank, ["cup", "chair"])
    dataset.embeddings = bank.embeddings
    if stored:
        dataset.stored = store(detector, images, batch_size=5, num_workers=0, device=CPU)
    losses = Losses()
    module = make_module(detector, coarse_queries=queries)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(module, datamodule=DataModule(dataset, batch_size=6, num_workers=0, seed=5))
    return losses.seen, detector.trainable_state()


@pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
def test_stored_equals_live(fresh_detector, world, kind):
    live, live_head = train(fresh_detector(kind), world, stored=False)
    memory, memory_head = train(fresh_detector(kind), world, stored=True)
    assert len(live) == len(memory) >= 4
    assert memory == pytest.approx(live, abs=1e-6)
    for name, value in live_head.items():
        torch.testing.assert_close(memory_head[name], value, rtol=0, atol=1e-6)


def test_two_runs_are_the_same_bit_by_bit(fresh_detector, world):
    first, head = train(fresh_detector(), world, stored=True, epochs=1)
    second, again = train(fresh_detector(), world, stored=True, epochs=1)
    assert first == second
    assert all(torch.equal(again[name], value) for name, value in head.items())


def test_stored_features_come_in_the_order_of_the_set(fresh_detector, world, caplog):
    detector = fresh_detector()
    images = make_images(detector, world / "images", 0.0)
    file = read_fgovd(world / "annotations" / "benchmarks" / "1_attributes.json")
    images.add(file.image_files, file.image_sizes)
    with caplog.at_level("INFO"):
        features = store(detector, images, batch_size=4, num_workers=0, device=CPU)
    assert f"encoding {len(images)} images" in caplog.messages
    assert features.tokens.shape == (len(images), 64, 160)
    assert features.boxes.shape == (len(images), 64, 4)
    for row in range(len(images)):
        alone = detector.encode_images(images[row][None])
        torch.testing.assert_close(features.tokens[row], alone.tokens[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(features.boxes[row], alone.boxes[0], rtol=0, atol=1e-6)
    wanted = [4, 1, 3]
    parts = list(chunks(features, wanted, 2))
    assert [rows for rows, _ in parts] == [[4, 1], [3]]
    assert torch.equal(torch.cat([part.tokens for _, part in parts]), features.tokens[wanted])
    live = list(encode(detector, images, wanted, batch_size=2, num_workers=0, device=CPU))
    assert [rows for rows, _ in live] == [[4, 1], [3]]


# Captions


@pytest.fixture
def encoded(fresh_detector, monkeypatch):
    """A detector and the list of how many captions each call of its text tower had."""
    detector, calls = fresh_detector(), []
    original = detector.encode_text

    def counting(ids, mask):
        calls.append(len(ids))
        return original(ids, mask)

    monkeypatch.setattr(detector, "encode_text", counting)
    return detector, calls


def test_each_caption_is_encoded_once(encoded):
    detector, calls = encoded
    bank = TextBank(detector, policy="error", device=CPU, batch_size=2)
    assert bank.rows(["a cup", "a cat", "a cup", "a dog"]).tolist() == [0, 1, 0, 2]
    assert bank.rows(["a dog", "a hat", "a cat"]).tolist() == [2, 3, 1]
    assert calls == [2, 1, 1]  # distinct captions in chunks of two, then the new one
    assert bank.forwards == sum(calls) == 4
    tokens = tokenize(detector.tokenizer, ["a cup", "a cat", "a dog", "a hat"])
    wanted = detector.encode_text(tokens.input_ids, tokens.attention_mask)
    torch.testing.assert_close(bank.embeddings, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(bank.embeddings.norm(dim=1), torch.ones(4))


def test_captions_over_the_limit_are_dropped(encoded):
    detector, calls = encoded
    bank = TextBank(detector, policy="drop", device=CPU)
    assert bank.rows(["a cup", LONG]).tolist() == [0, 1]
    assert (calls, bank.forwards, bank.n_over) == ([1], 1, 1)
    assert bank.lengths.tolist() == [4, 20]
    assert bank.kept.tolist() == [True, False]
    assert bank.embeddings[1].abs().max() == 0


def test_captions_over_the_limit_are_cut(encoded):
    detector, calls = encoded
    bank = TextBank(detector, policy="truncate", device=CPU)
    rows = bank.rows([LONG, "a red cup " * 5])
    assert calls == [2]
    assert bank.lengths.tolist() == [20, 17]
    torch.testing.assert_close(bank.embeddings[rows[0]], bank.embeddings[rows[1]])  # the same first 15 tokens


def test_captions_over_the_limit_are_refused(encoded):
    detector, calls = encoded
    bank = TextBank(detector, policy="error", device=CPU)
    with pytest.raises(DataError, match=r"has 20 tokens, the limit is 16"):
        bank.rows(["a cup", LONG])
    assert calls == []
    assert bank.rows(["a cup"]).tolist() == [0]  # a refused list leaves nothing behind


# Where features are kept


@pytest.fixture
def free(monkeypatch):
    def give(amount: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=amount))

    return give


def never() -> tuple[int, int]:
    raise AssertionError("the disk is asked although it does not matter")


def test_choice_of_the_mode(free):
    """Half of the free memory, else nine tenths of the free disk, else live."""
    free(80_000_000)
    assert choose_mode("auto", memory_bytes=40_000_000, disk=never) == (
        "memory",
        "features are computed once and kept in memory (0.04 GB in memory, 0.1 GB are free)",
    )
    assert choose_mode("auto", memory_bytes=40_000_001, disk=lambda: (90, 100))[0] == "disk"
    assert choose_mode("auto", memory_bytes=40_000_001, disk=lambda: (91, 100))[0] == "live"
    assert choose_mode("live", memory_bytes=1, disk=never)[0] == "live"
    assert choose_mode("disk", memory_bytes=1, disk=lambda: (91, 100))[0] == "disk"
    assert choose_mode("memory", memory_bytes=80_000_000, disk=never)[0] == "memory"
    with pytest.raises(DataError, match=r"features.mode=memory: 0.08 GB in memory, 0.1 GB are free.*features=live"):
        choose_mode("memory", memory_bytes=80_000_001, disk=never)


def test_an_image_has_one_size(fresh_detector, tmp_path):
    images: ImageSet = make_images(fresh_detector(), tmp_path, 0.0)
    assert images.add(["a.png", "b.png", "a.png"], np.array([[4, 3], [5, 5], [4, 3]])).tolist() == [0, 1, 0]
    assert images.sizes == [(4, 3), (5, 5)]
    with pytest.raises(DataError, match=r"b.png: one annotation file says \(5, 5\), another \(5, 4\)"):
        images.add(["c.png", "b.png"], [(1, 1), (5, 4)])


def test_workers_hold_arrays_only(fresh_detector, coco_mini):
    """No Python object per image: memory does not grow with the loader's workers."""
    images = ImageSet(coco_mini / "images", Preprocessor(fresh_detector().image_processor))
    file = read_fgovd(coco_mini / "annotations/benchmarks/1_attributes.json")
    images.add(file.image_files, file.image_sizes)
    held = images.for_workers()
    assert len(held) == len(images) == 35
    assert not [name for name, value in vars(held).items() if isinstance(value, list | dict | tuple)]
    assert torch.equal(held[3], images[3])
