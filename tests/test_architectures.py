"""The real architectures at full size without memory for their weights: shapes, parameter counts, configs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from noctowl import architectures
from noctowl.architectures import ARCHITECTURES, image_processor, initialise
from noctowl.model import OwlDetector
from noctowl.text import small_clip_tokenizer

REAL = {  # family, side, P, Dv, D; parameters counted by `expected_parameters`
    "owl_b16": ("owlvit", 768, 2304, 768, 512),
    "owl_l14": ("owlvit", 840, 3600, 1024, 768),
    "owlv2_b16": ("owlv2", 960, 3600, 768, 512),
    "owlv2_l14": ("owlv2", 1008, 5184, 1024, 768),
}


def expected_parameters(name: str) -> int:
    """Counted from the published layer sizes: towers, projections, heads."""
    family, _, patches, dv, d = REAL[name]
    layers, patch = (12, 16) if name.endswith("b16") else (24, 14)

    def linear(i, o, bias=True):
        return i * o + bias * o

    def tower(width, n):
        return n * (4 * linear(width, width) + linear(width, 4 * width) + linear(4 * width, width) + 4 * width)

    vision = tower(dv, layers) + 3 * patch**2 * dv + dv + (patches + 1) * dv + 4 * dv
    text = tower(d, 12) + (49408 + 16) * d + 2 * d
    heads = linear(dv, d) + 2 * linear(dv, 1) + 2 * linear(dv, dv) + linear(dv, 4) + 2 * dv  # class, box, layer norm
    if family == "owlv2":
        heads += 2 * linear(dv, dv) + linear(dv, 1)
    return vision + text + linear(dv, d, False) + linear(d, d, False) + 1 + heads


@pytest.mark.parametrize("name", REAL)
def test_real_architectures_have_the_published_shapes(name):
    family, side, n_patches, dv, d = REAL[name]
    tokenizer = small_clip_tokenizer((), 0)
    with FakeTensorMode():
        config = ARCHITECTURES[name]()
        detector = OwlDetector(
            initialise(config, seed=0),
            tokenizer=tokenizer,
            image_processor=image_processor(config),
            base_id=name,
        )
        assert (detector.model_type, detector.image_size, detector.num_patches) == (family, side, n_patches)
        assert sum(p.numel() for p in detector.parameters()) == expected_parameters(name)
        assert sum(p.numel() for p in detector.parameters() if p.requires_grad) == d * dv + d
        features = detector.encode_images(torch.zeros(2, 3, side, side))
        assert features.tokens.shape == (2, n_patches, dv)
        assert features.boxes.shape == (2, n_patches, 4)
        assert (features.objectness is None) == (family == "owlvit")
        ids = torch.zeros(22, 16, dtype=torch.long)
        queries = detector.encode_text(ids, torch.ones_like(ids))
        assert queries.shape == (22, d)
        scores = detector.score(features.tokens, queries.reshape(2, 11, d), torch.ones(2, 11, dtype=torch.bool))
        assert scores.logits.shape == scores.similarities.shape == (2, n_patches, 11)


@pytest.mark.parametrize("name", REAL)
def test_real_architectures_have_the_published_configs(name):
    config = ARCHITECTURES[name]()
    large = name.endswith("l14")
    vision, text = config.vision_config, config.text_config
    assert (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads) == (
        (1024, 24, 16) if large else (768, 12, 12)
    )
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads) == (
        (768, 12, 12) if large else (512, 12, 8)
    )
    assert (vision.intermediate_size, text.intermediate_size) == ((4096, 3072) if large else (3072, 2048))
    assert (vision.hidden_act, text.hidden_act) == ("quick_gelu", "quick_gelu")
    assert (text.vocab_size, text.max_position_embeddings) == (49408, 16)
    assert config.projection_dim == (768 if large else 512)
    processor = image_processor(config)
    assert (processor.size["height"], processor.size["width"]) == (vision.image_size, vision.image_size)
    assert int(processor.resample) == (3 if name.startswith("owl_") else 2)  # bicubic; bilinear


def test_tiny_needs_a_tokenizer_whose_end_token_is_last():
    tokenizer = small_clip_tokenizer((), 20)
    tokenizer.add_tokens(["late"])
    with pytest.raises(ValueError, match="not the last"):
        architectures.tiny(tokenizer)
