"""OwlDetector against transformers itself; loading and its errors; the freeze policy and what a checkpoint holds."""

import json
import shutil

import pytest
import torch
from transformers import OwlViTConfig

from noctowl.architectures import image_processor, initialise, tiny
from noctowl.errors import ModelError
from noctowl.hashing import state_sha256
from noctowl.model import TRAINABLE, OwlDetector
from noctowl.text import clip_tokenizer, small_clip_tokenizer, tokenize

RAGGED = [["A red cup.", "A blue cup.", "A green cup."], ["A wooden chair."]]


def small_owlvit(tokenizer) -> OwlViTConfig:
    """The miniature's sizes in an OWL-ViT."""
    like = tiny(tokenizer).to_dict()
    drop = {"model_type", "architectures"}
    towers = {part: {k: v for k, v in like[part].items() if k not in drop} for part in ("text_config", "vision_config")}
    return OwlViTConfig(**towers, projection_dim=96)


@pytest.fixture(scope="module", params=["owlv2", "owlvit"])
def detector(request) -> OwlDetector:
    tokenizer = small_clip_tokenizer([caption for captions in RAGGED for caption in captions], 200)
    config = tiny(tokenizer) if request.param == "owlv2" else small_owlvit(tokenizer)
    return OwlDetector(
        initialise(config, seed=0),
        tokenizer=tokenizer,
        image_processor=image_processor(config),
        base_id=f"small {request.param}",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> "object":
    """A saved miniature OWLv2."""
    path = tmp_path_factory.mktemp("owlv2")
    detector = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    detector.model.save_pretrained(path)
    detector.processor.save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the saved miniature, to be damaged."""
    return shutil.copytree(folder, tmp_path / "copy")


def pixels(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 96, 96, generator=torch.Generator().manual_seed(0))


# Equal to transformers


def test_images_equal_transformers(detector):
    found = detector.encode_images(pixels())
    with torch.no_grad():
        feature_map, _ = detector.model.image_embedder(pixels())
        tokens = feature_map.flatten(1, 2)
        cxcywh = detector.model.box_predictor(tokens, feature_map)
    torch.testing.assert_close(found.tokens, tokens, rtol=0, atol=1e-6)
    corners = torch.cat((cxcywh[..., :2] - cxcywh[..., 2:] / 2, cxcywh[..., :2] + cxcywh[..., 2:] / 2), dim=-1)
    torch.testing.assert_close(found.boxes, corners, rtol=0, atol=1e-6)
    if detector.model_type == "owlv2":
        with torch.no_grad():
            objectness = detector.model.objectness_predictor(tokens)
        torch.testing.assert_close(found.objectness, objectness, rtol=0, atol=1e-6)
    else:
        assert found.objectness is None
    assert found.tokens.shape == (2, detector.num_patches, 160)


def test_text_and_logits_equal_transformers(detector):
    text = tokenize(detector.tokenizer, RAGGED[0] * 2)
    with torch.no_grad():
        output = detector.model(
            input_ids=text.input_ids, attention_mask=text.attention_mask, pixel_values=pixels(), return_dict=True
        )
    queries = detector.encode_text(text.input_ids, text.attention_mask).reshape(2, 3, -1)
    torch.testing.assert_close(queries, output.text_embeds, rtol=0, atol=1e-6)
    scores = detector.score(detector.encode_images(pixels()).tokens, queries)
    torch.testing.assert_close(scores.logits, output.logits, rtol=1e-5, atol=5e-6)
    assert scores.similarities.abs().max() <= 1 + 1e-6


def test_a_padded_query_wins_in_the_library_and_never_here(detector):
    """The library pads ragged vocabularies with a blank caption; pixels are searched where that caption wins."""
    texts = [RAGGED[0], [*RAGGED[1], " ", " "]]
    text = tokenize(detector.tokenizer, [t for row in texts for t in row])
    with torch.no_grad():
        output = detector.model(
            input_ids=text.input_ids, attention_mask=text.attention_mask, pixel_values=pixels(), return_dict=True
        )
    assert (output.logits[1].argmax(-1) > 0).any()
    queries = detector.encode_text(text.input_ids, text.attention_mask).reshape(2, 3, -1)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    scores = detector.score(detector.encode_images(pixels()).tokens, queries, mask)
    assert (scores.logits[1].argmax(-1) == 0).all()
    assert (scores.logits[1, :, 1:] == -torch.inf).all()
    assert (scores.similarities[1, :, 1:] == 0).all()
    torch.testing.assert_close(scores.logits[0], output.logits[0], rtol=1e-5, atol=5e-6)


def test_captions_score_independently_of_their_neighbours(detector):
    text = tokenize(detector.tokenizer, RAGGED[0])
    tokens = detector.encode_images(pixels(1)).tokens
    together = detector.score(tokens, detector.encode_text(text.input_ids, text.attention_mask)[None]).logits
    short = text.input_ids[1:2, : int(text.lengths[1])]
    alone = detector.score(tokens, detector.encode_text(short, torch.ones_like(short))[None]).logits
    torch.testing.assert_close(together[..., 1:2], alone, rtol=1e-5, atol=1e-5)


def test_autocast_keeps_outputs_fp32_and_near(detector):
    text = tokenize(detector.tokenizer, RAGGED[0])
    plain, plain_text = detector.encode_images(pixels()), detector.encode_text(text.input_ids, text.attention_mask)
    with torch.autocast("cpu", torch.bfloat16):
        half, half_text = detector.encode_images(pixels()), detector.encode_text(text.input_ids, text.attention_mask)
    assert half.tokens.dtype == half.boxes.dtype == half_text.dtype == torch.float32
    assert (half.boxes - plain.boxes).abs().max() < 0.01
    assert (half_text * plain_text).sum(-1).min() > 0.999
    torch.testing.assert_close(half_text.norm(dim=-1), torch.ones(3))


def test_wrong_sizes_are_errors(detector):
    with pytest.raises(ModelError, match="the model takes side 96"):
        detector.encode_images(torch.zeros(1, 3, 64, 96))
    with pytest.raises(ModelError, match="17 tokens: the text tower reads 16"):
        detector.encode_text(torch.zeros(1, 17, dtype=torch.long), torch.ones(1, 17, dtype=torch.long))


# Freeze policy, identity, checkpoints


def test_exactly_dense0_trains_and_the_rest_stays_in_eval(detector):
    assert {n for n, p in detector.model.named_parameters() if p.requires_grad} == set(TRAINABLE)
    detector.train()
    assert {n for n, m in detector.named_modules() if m.training} == {"", "model.class_head.dense0"}
    features = detector.encode_images(pixels(1))
    assert not features.tokens.requires_grad
    assert not features.boxes.requires_grad
    detector.eval()
    assert not any(m.training for m in detector.modules())
    assert not any("teacher" in name for name in detector.state_dict())


def test_frame_and_sizes(detector):
    assert detector.frame == {"owlv2": "padded", "owlvit": "warped"}[detector.model_type]
    assert (detector.num_patches, detector.image_size, detector.text_limit) == (64, 96, 16)


def test_hash_names_the_base_not_the_training():
    first = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    torch.manual_seed(99)  # the global state has no part in it
    second = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    other = OwlDetector.from_pretrained("tiny", weights="random", seed=1)
    assert first.content_hash() == second.content_hash() != other.content_hash()
    with torch.no_grad():
        first.head.dense0.weight.add_(1)
    assert first.compute_base_hash() == first.content_hash()
    with torch.no_grad():
        first.model.layer_norm.weight.add_(1)
    assert first.compute_base_hash() != first.content_hash()


def test_hash_of_a_state_dict():
    a, b = torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)
    reference = state_sha256({"a": a, "b": b}, {"n": 1})
    assert state_sha256({"b": b, "a": a}, {"n": 1}) == reference
    others = [
        state_sha256({"a": a.reshape(2, 3), "b": b}, {"n": 1}),
        state_sha256({"a": a.double(), "b": b}, {"n": 1}),
        state_sha256({"a": a, "c": b}, {"n": 1}),
        state_sha256({"a": a + 1, "b": b}, {"n": 1}),
        state_sha256({"a": a, "b": b}, {"n": 2}),
    ]
    assert len({reference, *others}) == 6
    assert state_sha256({"a": torch.arange(12.0)[::2]}) == state_sha256({"a": torch.arange(0.0, 12.0, 2)})


def test_trainable_state_round_trip_is_strict():
    detector = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    with torch.no_grad():
        detector.head.dense0.weight.add_(0.5)
    state = detector.trainable_state()
    fresh = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    fresh.load_trainable(state, detector.content_hash())
    assert torch.equal(fresh.head.dense0.weight, detector.head.dense0.weight)
    assert not torch.equal(fresh.teacher.weight, fresh.head.dense0.weight)
    bias = {"class_head.dense0.bias": state["class_head.dense0.bias"]}
    for bad in (bias, {**state, "extra": torch.zeros(1)}, {**state, "class_head.dense0.bias": torch.zeros(1)}):
        with pytest.raises(ModelError, match=r"exactly .* are allowed"):
            fresh.load_trainable(bad, detector.content_hash())
    other = OwlDetector.from_pretrained("tiny", weights="random", seed=1)
    with pytest.raises(ModelError, match="another base") as error:
        other.load_trainable(state, detector.content_hash())
    assert detector.content_hash() in str(error.value)
    assert other.content_hash() in str(error.value)


def test_small_heads_keep_boxes_and_scores_alive(detector):
    features = detector.encode_images(pixels())
    size = features.boxes[..., 2:] - features.boxes[..., :2]
    assert 0.05 < size.median() < 0.3  # about a patch (1/8), not saturated
    text = tokenize(detector.tokenizer, RAGGED[0])
    queries = detector.encode_text(text.input_ids, text.attention_mask).expand(2, -1, -1)
    assert detector.score(features.tokens, queries).logits.abs().max() < 20


# Loading


def test_folder_loads_what_was_saved(folder):
    built = OwlDetector.from_pretrained("tiny", weights="random", seed=0)
    loaded = OwlDetector.from_pretrained(folder, expect="owlv2")
    assert loaded.content_hash() == built.content_hash()
    assert loaded.tokenizer("A red cup.").input_ids == built.tokenizer("A red cup.").input_ids
    redrawn = OwlDetector.from_pretrained(folder, weights="random", seed=5)
    assert redrawn.content_hash() != built.content_hash()


def test_other_family_than_expected_is_an_error(folder, tmp_path):
    with pytest.raises(ModelError, match=r"OWLv2 model.*where OWL-ViT is expected"):
        OwlDetector.from_pretrained(folder, expect="owlvit")
    tokenizer = small_clip_tokenizer((), 50)
    initialise(small_owlvit(tokenizer), seed=0).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"OWL-ViT model.*where OWLv2 is expected"):
        OwlDetector.from_pretrained(tmp_path, expect="owlv2")
    with pytest.raises(ModelError, match="'owlv2' where 'owlvit' is expected"):
        OwlDetector.from_pretrained("tiny", weights="random", expect="owlvit")


def test_the_name_of_a_folder_decides_nothing(folder, tmp_path):
    disguised = shutil.copytree(folder, tmp_path / "google-owlvit-base-patch16")
    assert OwlDetector.from_pretrained(disguised).model_type == "owlv2"


def test_hub_model_without_network_is_an_error_that_helps(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("noctowl.pretrained.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"google/owlv2-base-patch16.*no route.*--local-dir"):
        OwlDetector.from_pretrained("google/owlv2-base-patch16")


def test_hub_model_is_its_snapshot_and_remembers_the_commit(monkeypatch, folder, tmp_path):
    commit = shutil.copytree(folder, tmp_path / "snapshots" / "0123abc")
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(commit)

    monkeypatch.setattr("noctowl.pretrained.snapshot_download", download)
    detector = OwlDetector.from_pretrained("someone/owlv2-copy", revision="main", expect="owlv2")
    assert (detector.base_id, detector.revision) == ("someone/owlv2-copy", "0123abc")
    assert asked["revision"] == "main"
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("source", "words"),
    [("./absent", "no such folder"), ("/absent/model", "no such folder"), ("tiny", "names an architecture")],
)
def test_absent_sources_are_errors(source, words):
    with pytest.raises(ModelError, match=words):
        OwlDetector.from_pretrained(source)


def test_a_path_that_looks_like_a_hub_id(tmp_path, monkeypatch):
    """outputs/<run> misspelt: what is there comes before advice about the hub."""

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("noctowl.pretrained.snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "run1").mkdir(parents=True)
    with pytest.raises(
        ModelError, match=r"^outputs/run2: no such folder \(outputs holds: run1\)\. As a hub id: outputs"
    ):
        OwlDetector.from_pretrained("outputs/run2")
    with pytest.raises(ModelError, match=r"^owner/name cannot be fetched from the hub"):
        OwlDetector.from_pretrained("owner/name")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", b"{", "not a JSON object"),
        ("config.json", b'{"model_type": "clip"}', "'clip'; allowed: owlvit, owlv2"),
        ("model.safetensors", None, r"no model\.safetensors.*Pickled weights are not read"),
        ("model.safetensors", b"\x80\x04", "weights cannot be loaded"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("processor_config.json", None, "no readable preprocessor_config"),
    ],
)
def test_damaged_folders_are_errors(copy, file, content, words):
    if content is None:
        (copy / file).rename(copy / "pytorch_model.bin")
    else:
        (copy / file).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        OwlDetector.from_pretrained(copy)


@pytest.mark.faults
def test_incomplete_weights_are_an_error_not_random(copy):
    from safetensors.torch import load_file, save_file

    state = load_file(copy / "model.safetensors")
    del state["box_head.dense0.weight"]
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing.*box_head\.dense0\.weight"):
        OwlDetector.from_pretrained(copy)


def test_what_does_not_fit_the_config_is_an_error(copy):
    with pytest.raises(ModelError, match="49408 ids, the text tower"):
        OwlDetector.from_pretrained(copy, tokenizer=clip_tokenizer())
    processor = json.loads((copy / "processor_config.json").read_text())
    processor["image_processor"]["size"] = {"height": 100, "width": 100}
    (copy / "processor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match="makes 100x100, the model takes 96x96"):
        OwlDetector.from_pretrained(copy)


def test_half_precision_weights_are_loaded_as_fp32(copy):
    OwlDetector.from_pretrained(copy).model.half().save_pretrained(copy)
    loaded = OwlDetector.from_pretrained(copy)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
