"""OwlDetector: OWL-ViT and OWLv2 behind `encode_images`, `encode_text` and `score`.

Legend: B images, S image side, P patches (= predictions), M captions, L tokens, C columns of a vocabulary (column 0 is
the positive), K coarse names, Dv vision width, D class embedding width.

What trains is `class_head.dense0`, nothing else: tokens, boxes and text embeddings are constants of a run and are
computed without gradients. Names of weights are those of the transformers model.

Precision: the two towers may run under autocast; what follows them (token merging, box head, text projection, class
head, similarities) is fp32 always. Weights are kept in fp32.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    Owlv2Processor,
    OwlViTProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from noctowl import pretrained, text
from noctowl.architectures import ARCHITECTURES, OwlConfig, OwlImageProcessor, image_processor, initialise, tiny
from noctowl.boxes import Frame, cxcywh_to_xyxy
from noctowl.errors import ModelError
from noctowl.hashing import state_sha256
from noctowl.head import ClassHead, TeacherHead

TRAINABLE = ("class_head.dense0.weight", "class_head.dense0.bias")
FRAMES: dict[str, Frame] = {"owlvit": "warped", "owlv2": "padded"}
# Settings that change what the weights compute; with them they make up a base model's identity.
HASHED_SETTINGS = ("hidden_act", "num_attention_heads", "layer_norm_eps", "image_size", "patch_size")


class ImageFeatures(NamedTuple):
    """What one pass of the vision tower gives; all of it constant while the head trains."""

    tokens: Float[Tensor, "B P Dv"]  # input of the class head
    boxes: Float[Tensor, "B P 4"]  # xyxy relative to the model's square, not clipped
    objectness: Float[Tensor, "B P"] | None  # logits; None for OWL-ViT, which has no such head


class Scores(NamedTuple):
    """Similarities (what the losses see) and logits (what inference ranks by, sigmoid = score)."""

    similarities: Float[Tensor, "B P C"]  # 0 where masked
    logits: Float[Tensor, "B P C"]  # -inf where masked


class OwlDetector(nn.Module):
    """A transformers OWL model with its processor, a frozen teacher of its class head and a freeze policy.

    Attributes: `model` (Owlv2ForObjectDetection or OwlViTForObjectDetection), `teacher`, `tokenizer`,
    `image_processor`, `base_id` (folder, hub id or architecture it came from), `revision` (commit of a hub model).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: OwlImageProcessor,
        base_id: str,
        revision: str | None = None,
    ):
        super().__init__()
        self.model: Any = model  # Any: transformers' attributes are typed Tensor | Module
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.base_id, self.revision = base_id, revision
        self.teacher = TeacherHead(self.head.dense0)
        self._base_sha256: str | None = None
        self.freeze()
        self.train(False)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        weights: Literal["pretrained", "random"] = "pretrained",
        seed: int = 0,
        expect: Literal["owlvit", "owlv2"] | None = None,
        attention: str = "sdpa",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "OwlDetector":
        """Detector from a folder, a hub id, or (weights="random" only) the name of an architecture.

        `expect` is the family that the caller's settings are made for. `tokenizer` replaces the folder's own. With
        random weights the tokenizer is CLIP's, built offline, unless the source has one.

        Raises ModelError: source absent or offline, another family than expected, weights damaged or incomplete,
        tokenizer or image processor absent or not fitting.
        """
        name = str(source)
        if weights == "random" and (name in ARCHITECTURES or name == "tiny"):
            return cls._from_architecture(name, seed=seed, expect=expect, attention=attention, tokenizer=tokenizer)
        if name in ARCHITECTURES or name == "tiny":
            raise ModelError(f"{name} names an architecture: it has no weights of its own; give a folder or a hub id")
        folder = pretrained.resolve(source, revision)
        config = pretrained.load_config(folder, expect=expect)
        if tokenizer is None:
            tokenizer = pretrained.load_tokenizer(folder, config)
        pretrained.check_tokenizer(tokenizer, config, where=name)
        processor = pretrained.load_image_processor(folder, config)
        if weights == "random":
            model = initialise(config, seed=seed, attention=attention)
        else:
            model = pretrained.load_weights(folder, config, attention=attention)
        commit = None if Path(source).expanduser().is_dir() else folder.name  # a hub snapshot is named by its commit
        detector = cls(model, tokenizer=tokenizer, image_processor=processor, base_id=name, revision=commit)
        detector.content_hash()  # now, while the weights are surely the base's
        return detector

    @classmethod
    def _from_architecture(
        cls, name: str, *, seed: int, expect: str | None, attention: str, tokenizer: PreTrainedTokenizerBase | None
    ) -> "OwlDetector":
        if tokenizer is None:
            tokenizer = text.small_clip_tokenizer(()) if name == "tiny" else text.clip_tokenizer()
        config: OwlConfig = tiny(tokenizer) if name == "tiny" else ARCHITECTURES[name]()
        if expect is not None and config.model_type != expect:
            raise ModelError(f"{name} is of family {config.model_type!r} where {expect!r} is expected")
        pretrained.check_tokenizer(tokenizer, config, where=name)
        return cls(
            initialise(config, seed=seed, attention=attention),
            tokenizer=tokenizer,
            image_processor=image_processor(config),
            base_id=f"{name} (random weights, seed {seed})",
        )

    # Properties of the architecture

    @property
    def config(self) -> OwlConfig:
        """The transformers config (Owlv2Config or OwlViTConfig)."""
        return self.model.config

    @property
    def model_type(self) -> str:
        """ "owlvit" or "owlv2"."""
        return self.config.model_type

    @property
    def frame(self) -> Frame:
        """Frame of boxes: OWLv2 pads images to a square, OWL-ViT warps them."""
        return FRAMES[self.model_type]

    @property
    def image_size(self) -> int:
        """Side of the square that the model takes, in pixels."""
        return self.config.vision_config.image_size

    @property
    def num_patches(self) -> int:
        """P: patches, tokens and predictions per image."""
        return (self.image_size // self.config.vision_config.patch_size) ** 2

    @property
    def text_limit(self) -> int:
        """Longest caption in tokens, start and end included."""
        return self.config.text_config.max_position_embeddings

    @property
    def head(self) -> ClassHead:
        """View on the class head, which holds the trainable layer."""
        return ClassHead(self.model.class_head)

    @property
    def processor(self) -> Owlv2Processor | OwlViTProcessor:
        """Image processor and tokenizer as transformers saves them."""
        kind = Owlv2Processor if self.model_type == "owlv2" else OwlViTProcessor
        return kind(self.image_processor, self.tokenizer)

    # What a detector computes

    @torch.no_grad()
    def encode_images(self, pixel_values: Float[Tensor, "B 3 height width"]) -> ImageFeatures:
        """Tokens, boxes and objectness; equal to transformers' own, without the dummy text that it would encode.

        Tokens are the patch tokens times the class token, both after the tower's last norm, normalised once more.
        """
        if pixel_values.shape[-2:] != (self.image_size, self.image_size):
            raise ModelError(f"pixel_values {tuple(pixel_values.shape)}: the model takes side {self.image_size}")
        vision = getattr(self.model, self.model_type).vision_model
        hidden = vision(pixel_values=pixel_values).last_hidden_state  # [B, 1+P, Dv]
        with torch.autocast(pixel_values.device.type, enabled=False):
            hidden = vision.post_layernorm(hidden.float())
            tokens = self.model.layer_norm(hidden[:, 1:] * hidden[:, :1])  # [B, P, Dv]
            cxcywh = (self.model.box_head(tokens) + self.model.box_bias).sigmoid()  # [B, P, 4]
            objectness = None
            if self.model_type == "owlv2":
                objectness = self.model.objectness_head(tokens).squeeze(-1)  # [B, P]
        return ImageFeatures(tokens, cxcywh_to_xyxy(cxcywh), objectness)

    @torch.no_grad()
    def encode_text(self, input_ids: Int[Tensor, "M L"], attention_mask: Int[Tensor, "M L"]) -> Float[Tensor, "M D"]:
        """Unit text embeddings; equal to transformers' own. Raises ModelError for captions over the token limit."""
        if input_ids.shape[1] > self.text_limit:
            raise ModelError(f"captions of {input_ids.shape[1]} tokens: the text tower reads {self.text_limit}")
        towers = getattr(self.model, self.model_type)
        pooled = towers.text_model(input_ids=input_ids, attention_mask=attention_mask).pooler_output  # [M, Dt]
        with torch.autocast(input_ids.device.type, enabled=False):
            projected = towers.text_projection(pooled.float())
            return projected / torch.linalg.vector_norm(projected, dim=-1, keepdim=True)

    def score(
        self,
        tokens: Float[Tensor, "B P Dv"],
        queries: Float[Tensor, "B C D"],
        query_mask: Bool[Tensor, "B C"] | None = None,
        *,
        query_epsilon: bool = False,
    ) -> Scores:
        """Similarities and logits of every patch with every query; gradients reach dense0 only.

        `query_mask` is False where a ragged vocabulary is padded: those columns get logit -inf and can never win (the
        library pads with a blank caption that can). `query_epsilon`: see `noctowl.head.cosine`.
        """
        similarities = self.head.similarity(tokens, queries, query_epsilon=query_epsilon)
        logits = self.head.logits(tokens, similarities)
        if query_mask is not None:
            padded = ~query_mask.unsqueeze(1)  # [B, 1, C]
            similarities, logits = similarities.masked_fill(padded, 0.0), logits.masked_fill(padded, -torch.inf)
        return Scores(similarities, logits)

    def coarse_pair(
        self, rows: Float[Tensor, "n Dv"], names: Float[Tensor, "K D"], *, query_epsilon: bool = False
    ) -> tuple[Float[Tensor, "n K"], Float[Tensor, "n K"]]:
        """Similarities of student and teacher for K coarse names on the foreground rows (tokens[positive])."""
        student = self.head.similarity(rows, names, query_epsilon=query_epsilon)
        return student, self.teacher.similarity(rows, names, query_epsilon=query_epsilon)

    # Freeze policy and checkpoints

    def freeze(self) -> None:
        """Exactly dense0 gets requires_grad."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in TRAINABLE)

    def fork(self) -> "OwlDetector":
        """A detector with a class head of its own on the same frozen towers: several heads, one copy of the rest."""
        model = copy.copy(self.model)
        model._modules = {**self.model._modules, "class_head": copy.deepcopy(self.model.class_head)}
        fork = OwlDetector(
            model,
            tokenizer=self.tokenizer,
            image_processor=self.image_processor,
            base_id=self.base_id,
            revision=self.revision,
        )
        fork.teacher = self.teacher
        fork._base_sha256 = self._base_sha256
        return fork

    @torch.no_grad()
    def reset_head(self) -> None:
        """The trainable layer as it was when loaded."""
        for name, value in zip(TRAINABLE, (self.teacher.weight, self.teacher.bias)):
            self.model.get_parameter(name).copy_(value)

    def train(self, mode: bool = True) -> "OwlDetector":
        """Only the trainable layer and this container follow; everything frozen stays in eval mode."""
        super().train(False)
        self.training = mode
        self.head.dense0.train(mode)
        return self

    def base_state(self) -> dict[str, Tensor]:
        """State dict of the base model: what is frozen as it stands, and dense0 as it was when loaded."""
        initial = dict(zip(TRAINABLE, (self.teacher.weight, self.teacher.bias)))
        return {**self.model.state_dict(), **initial}

    def compute_base_hash(self) -> str:
        """sha256 of `base_state` and of the settings that change what the weights compute, from the tensors."""
        towers = {part: getattr(self.config, f"{part}_config").to_dict() for part in ("text", "vision")}
        chosen = {part: {k: v for k, v in sorted(d.items()) if k in HASHED_SETTINGS} for part, d in towers.items()}
        return state_sha256(self.base_state(), {"model_type": self.model_type, **chosen})

    def content_hash(self) -> str:
        """Identity of the base model, computed once (`compute_base_hash`)."""
        if self._base_sha256 is None:
            self._base_sha256 = self.compute_base_hash()
        return self._base_sha256

    def trainable_state(self) -> dict[str, Tensor]:
        """Copies of the trainable weights on the CPU, by name: what a checkpoint holds."""
        return {name: self.model.get_parameter(name).detach().cpu().clone() for name in TRAINABLE}

    @torch.no_grad()
    def load_trainable(self, state: Mapping[str, Tensor], base_sha256: str) -> None:
        """Puts back what `trainable_state` gave. Strict.

        Raises ModelError if the weights were trained on another base, or if names or shapes are not exactly those
        of the trainable layer.
        """
        if base_sha256 != self.content_hash():
            raise ModelError(
                f"the checkpoint was trained on another base model: its base has sha256 {base_sha256}, "
                f"{self.base_id} has {self.content_hash()}; load it onto the base that it names"
            )
        found, needed = {k: tuple(v.shape) for k, v in state.items()}, {}
        for name in TRAINABLE:
            needed[name] = tuple(self.model.get_parameter(name).shape)
        if found != needed:
            raise ModelError(f"the checkpoint's weights are {found}; exactly {needed} are allowed")
        for name, value in state.items():
            self.model.get_parameter(name).copy_(value)
