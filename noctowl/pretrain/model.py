"""The miniature before it is pretrained: the detector, two layers that are thrown away, and where they all start from.

Legend: B images, S image side, P patches, T texts, D width of text embeddings, Dv width of tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer

from noctowl.architectures import initialise, tiny
from noctowl.boxes import cxcywh_to_xyxy
from noctowl.data.world import PRETRAIN, words
from noctowl.pretrain.batch import load_pictures
from noctowl.text import small_clip_tokenizer, tokenize

N_MERGES = 4000  # of CLIP's byte-pair encoding that the tokenizer keeps, beside those that the world's words need


class Pretrainee(nn.Module):
    """The detector, the projection that teaches its tokens attributes, and the predictor of silhouettes.

    Unlike `OwlDetector`, all of it trains.
    """

    def __init__(self, detector: Any, tokenizer: CLIPTokenizer):
        super().__init__()
        vision = detector.config.vision_config
        self.detector: Any = detector
        self.tokenizer = tokenizer
        self.side: int = vision.image_size
        self.grid: int = vision.image_size // vision.patch_size
        self.projection = nn.Linear(vision.hidden_size, detector.config.projection_dim)
        self.silhouette = nn.Linear(vision.hidden_size, (vision.patch_size // 2) ** 2)

    def tokens(self, pixels: Float[Tensor, "B 3 S S"]) -> tuple[Float[Tensor, "B P Dv"], Float[Tensor, "B P Dv"]]:
        """The detector's merged patch tokens, and the patch tokens after the first layer."""
        vision = self.detector.owlv2.vision_model
        output = vision(pixel_values=pixels, output_hidden_states=True)
        last = vision.post_layernorm(output.last_hidden_state)  # [B, 1+P, Dv]
        return self.detector.layer_norm(last[:, 1:] * last[:, :1]), output.hidden_states[1][:, 1:]

    def boxes(self, tokens: Float[Tensor, "B P Dv"]) -> Float[Tensor, "B P 4"]:
        """xyxy, relative to the image."""
        return cxcywh_to_xyxy((self.detector.box_head(tokens) + self.detector.box_bias).sigmoid())

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "T D"]:
        """Unit embeddings; equal texts are encoded once."""
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        encoded = tokenize(self.tokenizer, list(rows))
        longest = int(encoded.lengths.max())  # cutting the padding changes nothing: the mask hides it
        pooled = self.detector.owlv2.text_model(
            input_ids=encoded.input_ids[:, :longest], attention_mask=encoded.attention_mask[:, :longest]
        ).pooler_output
        embeddings = F.normalize(self.detector.owlv2.text_projection(pooled), dim=-1)
        return embeddings[torch.tensor([rows[text] for text in texts])]


@torch.no_grad()
def warm_start(detector: Any, pixels: Float[Tensor, "B 3 S S"], generator: torch.Generator) -> None:
    """Initial weights that save most of the steps a transformer needs to learn how to see.

    Sine-cosine positions; attention layers with query·key near the identity and value·output near its negative (mimetic
    initialisation, Trockman and Kolter 2023); a patch embedding that whitens the patches of `pixels`.
    """
    vision, config = detector.owlv2.vision_model, detector.config.vision_config
    width, patch = config.hidden_size, config.patch_size

    def noise() -> Float[Tensor, "Dv Dv"]:
        return torch.randn(width, width, generator=generator)

    vision.embeddings.position_embedding.weight[1:] = _waves(config.image_size // patch, width)
    for layer in vision.encoder.layers:
        attention = layer.self_attn
        rotation = torch.linalg.qr(noise())[0]
        attention.q_proj.weight.copy_(0.8 * rotation + 0.02 * noise())
        attention.k_proj.weight.copy_(0.8 * rotation + 0.02 * noise())
        rotation = torch.linalg.qr(noise())[0]
        attention.v_proj.weight.copy_(0.6 * rotation + 0.02 * noise())
        attention.out_proj.weight.copy_(-0.6 * rotation.T + 0.02 * noise())
    pieces = pixels.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5)
    pieces = pieces.reshape(-1, 3 * patch**2)
    pieces = pieces - pieces.mean(0)
    values, vectors = torch.linalg.eigh(pieces.T @ pieces / len(pieces))
    values, vectors = values.flip(0)[:width], vectors.flip(1)[:, :width]  # the largest first
    rotation = torch.linalg.qr(noise())[0][:, : len(values)]
    filters = rotation @ (vectors / (values + 0.05).sqrt()).T
    vision.embeddings.patch_embedding.weight.copy_(filters.view(width, 3, patch, patch))


def _waves(grid: int, width: int) -> Float[Tensor, "P Dv"]:
    """Sines and cosines of both coordinates at geometric rates."""
    line = torch.arange(grid).float()
    rates = 30 ** -(torch.arange(width // 4).float() / (width // 4))
    y, x = torch.meshgrid(line, line, indexing="ij")
    angles = [axis.reshape(-1, 1) * rates for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


def build(seed: int) -> Pretrainee:
    """The untrained model; torch's global random state is left as it was."""
    tokenizer = small_clip_tokenizer(words(), n_merges=N_MERGES)
    detector: Any = initialise(tiny(tokenizer), seed=seed)
    pixels = load_pictures(PRETRAIN, range(300), seed=seed, size=detector.config.vision_config.image_size).pixels
    warm_start(detector, pixels, torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Pretrainee(detector, tokenizer)


def save_stage(model: Pretrainee, path: Path, cpu_seconds: float) -> None:
    """Stage 1 on disk, with what it cost, so that stage 2 can be run again without it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path, metadata={"cpu_seconds": str(cpu_seconds)})


def load_stage(path: Path, seed: int) -> tuple[Pretrainee, float]:
    """What `save_stage` wrote: the frozen model and its CPU seconds. Raises RuntimeError if names or shapes differ."""
    model = build(seed)
    model.load_state_dict(load_file(path))
    with safe_open(path, framework="pt") as file:
        seconds = float(file.metadata()["cpu_seconds"])
    return model.eval().requires_grad_(False), seconds
