"""Exports reload through transformers' Auto classes offline and differ from the base in the class head's layer only."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

from noctowl.architectures import image_processor, initialise
from noctowl.errors import ModelError
from noctowl.export import export, load_head, read_head, save_head, verify_export
from noctowl.model import TRAINABLE, OwlDetector
from noctowl.text import small_clip_tokenizer, tokenize

from .test_model import small_owlvit

CAPTIONS = ["A red cup.", "A blue cup.", "A green wooden chair."]


def detector_of(kind: str) -> OwlDetector:
    """A miniature of each family with a head that has moved from its base."""
    if kind == "owlv2":
        detector = OwlDetector.from_pretrained("tiny", weights="random", seed=3)
    else:
        tokenizer = small_clip_tokenizer(CAPTIONS, 500)
        config = small_owlvit(tokenizer)
        detector = OwlDetector(
            initialise(config, seed=3),
            tokenizer=tokenizer,
            image_processor=image_processor(config),
            base_id="small owlvit",
        )
    detector.content_hash()
    with torch.no_grad():
        detector.head.dense0.weight.add_(0.01)
        detector.head.dense0.bias.sub_(0.01)
    return detector


@pytest.mark.export
@pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
def test_auto_classes_give_the_modules_logits(tmp_path, kind):
    detector = detector_of(kind)
    folder = export(detector, tmp_path / "deep" / "export", {"settings": {"lr": 3e-5}})
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    model = AutoModelForZeroShotObjectDetection.from_pretrained(folder, local_files_only=True).eval()
    image = np.random.default_rng(0).integers(0, 255, (80, 120, 3), dtype=np.uint8)
    inputs = processor(text=[CAPTIONS], images=image, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    text = tokenize(detector.tokenizer, CAPTIONS)
    features = detector.encode_images(inputs["pixel_values"])
    scores = detector.score(features.tokens, detector.encode_text(text.input_ids, text.attention_mask)[None])
    torch.testing.assert_close(output.logits, scores.logits, rtol=1e-5, atol=5e-6)
    assert output.logits.std() > 1e-3
    again = OwlDetector.from_pretrained(folder, expect=kind)
    torch.testing.assert_close(again.head.dense0.weight, detector.head.dense0.weight, rtol=0, atol=0)


@pytest.mark.export
def test_exactly_the_trainable_layer_differs(tmp_path):
    detector = detector_of("owlv2")
    folder = export(detector, tmp_path / "export")
    base, saved = detector.base_state(), load_file(folder / "model.safetensors")
    assert {name for name in saved if not torch.equal(saved[name], base[name])} == set(TRAINABLE)
    verify_export(folder, base)
    saved["box_head.dense0.bias"] += 1
    save_file(saved, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"box_head\.dense0\.bias differs from the base; only class_head\.dense0"):
        verify_export(folder, base)
    del saved["box_head.dense0.bias"]
    save_file(saved, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"not those of the base.*box_head\.dense0\.bias"):
        verify_export(folder, base)


@pytest.mark.export
def test_provenance_says_how_it_was_made(tmp_path):
    detector = detector_of("owlv2")
    folder = export(detector, tmp_path / "export", {"pad_value": 0.5, "model_type": "cannot be overridden"})
    found = json.loads((folder / "provenance.json").read_text())
    assert found["base"]["sha256"] == detector.content_hash()
    assert found["pad_value"] == 0.5
    assert found["image_processor"]["library_pad_value"] == 0.0
    assert found["image_processor"]["frame"] == "padded"
    assert found["model_type"] == "owlv2"
    assert found["trained"] == list(TRAINABLE)
    assert "class_head.dense0" in (folder / "README.md").read_text()


@pytest.mark.faults
def test_nothing_is_overwritten_and_nothing_is_left_half_done(tmp_path, monkeypatch):
    detector = detector_of("owlv2")
    filled = tmp_path / "filled"
    filled.mkdir()
    (filled / "mine.txt").write_text("keep")
    with pytest.raises(ModelError, match="not an empty folder"):
        export(detector, filled)
    assert (filled / "mine.txt").read_text() == "keep"
    empty = tmp_path / "empty"
    empty.mkdir()
    export(detector, empty)
    assert (empty / "model.safetensors").is_file()
    with pytest.raises(TypeError):
        export(detector, tmp_path / "broken", {"not": object()})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "filled"]


@pytest.mark.faults
def test_a_changed_frozen_weight_is_not_exported(tmp_path):
    detector = detector_of("owlv2")
    with torch.no_grad():
        detector.model.box_head.dense0.bias.add_(1)
    with pytest.raises(ModelError, match="changed since they were loaded"):
        export(detector, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_head_files_round_trip_and_know_their_base(tmp_path):
    detector = detector_of("owlv2")
    file = save_head(detector, tmp_path / "heads" / "head.safetensors")
    state, metadata = read_head(file)
    assert set(state) == set(TRAINABLE)
    assert metadata["base_sha256"] == detector.content_hash()
    fresh = OwlDetector.from_pretrained("tiny", weights="random", seed=3)
    load_head(fresh, file)
    assert torch.equal(fresh.head.dense0.weight, detector.head.dense0.weight)
    other = OwlDetector.from_pretrained("tiny", weights="random", seed=4)
    with pytest.raises(ModelError, match=r"head\.safetensors.*another base.*") as error:
        load_head(other, file)
    assert detector.content_hash() in str(error.value)
    assert other.content_hash() in str(error.value)
    assert [p.name for p in file.parent.iterdir()] == ["head.safetensors"]


@pytest.mark.faults
def test_damaged_head_files_are_errors(tmp_path):
    file = tmp_path / "head.safetensors"
    with pytest.raises(ModelError, match="not a readable head file"):
        read_head(file)
    file.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    with pytest.raises(ModelError, match="not a readable head file"):
        read_head(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match="no head of noctowl"):
        read_head(file)
