"""The architectures by name: transformers configs, image processor settings, seeded initialisation.

Nothing here needs a download: a model can be built, tested and timed at full size with random weights. The numbers are
those of the configs that are published beside the weights (google/owlvit-*, google/owlv2-*).

  name       side  patch  P     vision             text              D
  owl_b16    768   16     2304  768 x 12 layers    512 x 12 layers   512
  owl_l14    840   14     3600  1024 x 24 layers   768 x 12 layers   768
  owlv2_b16  960   16     3600  768 x 12 layers    512 x 12 layers   512
  owlv2_l14  1008  14     5184  1024 x 24 layers   768 x 12 layers   768
  tiny       96    12     64    160 x 3 layers     96 x 2 layers     96
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import (
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessor,
    OwlViTConfig,
    OwlViTForObjectDetection,
    OwlViTImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from noctowl.text import TOKEN_LIMIT

OwlConfig: TypeAlias = Any  # OwlViTConfig | Owlv2Config, whose tower configs transformers types as dict | None
OwlImageProcessor = OwlViTImageProcessor | Owlv2ImageProcessor
MODEL_CLASSES: dict[str, Any] = {"owlvit": OwlViTForObjectDetection, "owlv2": Owlv2ForObjectDetection}
FAMILY = {"owlvit": "OWL-ViT", "owlv2": "OWLv2"}


def _tower(width: int, layers: int, heads: int, act: str = "quick_gelu") -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_act": act,
    }


def _base16(side: int) -> dict[str, Any]:
    vision = _tower(768, 12, 12) | {"image_size": side, "patch_size": 16}
    return {"text_config": _tower(512, 12, 8), "vision_config": vision, "projection_dim": 512}


def _large14(side: int) -> dict[str, Any]:
    vision = _tower(1024, 24, 16) | {"image_size": side, "patch_size": 14}
    return {"text_config": _tower(768, 12, 12), "vision_config": vision, "projection_dim": 768}


def owl_b16() -> OwlViTConfig:
    """OWL-ViT B/16 (google/owlvit-base-patch16)."""
    return OwlViTConfig(**_base16(768))


def owl_l14() -> OwlViTConfig:
    """OWL-ViT L/14 (google/owlvit-large-patch14)."""
    return OwlViTConfig(**_large14(840))


def owlv2_b16() -> Owlv2Config:
    """OWLv2 B/16 (google/owlv2-base-patch16, also -ensemble and -finetuned)."""
    return Owlv2Config(**_base16(960))


def owlv2_l14() -> Owlv2Config:
    """OWLv2 L/14 (google/owlv2-large-patch14, also -ensemble and -finetuned)."""
    return Owlv2Config(**_large14(1008))


def tiny(tokenizer: PreTrainedTokenizerBase) -> Owlv2Config:
    """Miniature OWLv2 for laptops and tests; its text tower has the vocabulary of the tokenizer given.

    The text tower reads a caption at its highest token id, so the tokenizer's end token must be its last one.
    """
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if special["eos_token_id"] != len(tokenizer) - 1:
        raise ValueError(f"end token id {special['eos_token_id']} is not the last of {len(tokenizer)} ids")
    text = _tower(96, 2, 4, "gelu") | {"vocab_size": len(tokenizer), "max_position_embeddings": TOKEN_LIMIT} | special
    vision = _tower(160, 3, 4, "gelu") | {"image_size": 96, "patch_size": 12}
    return Owlv2Config(text_config=text, vision_config=vision, projection_dim=96)


ARCHITECTURES: dict[str, Callable[[], OwlConfig]] = {
    "owl_b16": owl_b16,
    "owl_l14": owl_l14,
    "owlv2_b16": owlv2_b16,
    "owlv2_l14": owlv2_l14,
}


def image_processor(config: OwlConfig) -> OwlImageProcessor:
    """The library's preprocessing at the config's image side: warp and bicubic (OWL-ViT), pad and bilinear (OWLv2)."""
    side = config.vision_config.image_size
    size = {"height": side, "width": side}
    if config.model_type == "owlvit":
        return OwlViTImageProcessor(size=size, crop_size=size)
    return Owlv2ImageProcessor(size=size)


def initialise(config: OwlConfig, *, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """Model of the config with seeded random weights; torch's global random state is left as it was.

    The library draws the weights of the class, box and objectness heads with standard deviation 1, which saturates
    boxes and scores; here they are drawn with in_features ** -0.5, and the last layers smaller still, so that boxes
    start as their patch and objectness low. Scores start as sigmoid(10 (s - 0.5)).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_CLASSES[config.model_type]._from_config(config, attn_implementation=attention)
        heads = [model.class_head, model.box_head]
        if config.model_type == "owlv2":
            heads.append(model.objectness_head)
        with torch.no_grad():
            for head in heads:
                for layer in head.modules():
                    if isinstance(layer, nn.Linear):
                        layer.weight.normal_(0, layer.in_features**-0.5)
                        layer.bias.zero_()
            for layer in (model.class_head.logit_shift, model.class_head.logit_scale, *(h.dense2 for h in heads[1:])):
                layer.weight.mul_(0.1)
            model.class_head.logit_shift.bias.fill_(-0.5)
            model.class_head.logit_scale.bias.fill_(9.0)  # ELU(9) + 1 = 10
            if config.model_type == "owlv2":
                model.objectness_head.dense2.bias.fill_(-3.0)
    return model
