"""Coarse detection under one of the two published protocols, on the tokens that the benchmarks are scored on.

Legend: P patches, K classes, D class embedding width, T prompt templates, Dv vision width.

  noctowl   one prompt, 'a ' + name; each patch keeps its best class, then the best 300 patches (NoctOWL's in-training
            evaluation)
  owl       seven templates, the logits averaged over them; the best 300 of all patch-class pairs, no suppression, no
            threshold (the evaluation that OWL-ViT's authors published with their code)

A logit is affine in the cosine, so the mean over templates is the logit of the mean cosine, cos(e, m) |m| with m the
mean of the T unit embeddings. m is *not* brought to unit length: that would favour classes whose prompts disagree.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from noctowl.errors import ConfigError
from noctowl.eval.ap import Detections
from noctowl.eval.lvis import MAX_DETECTIONS, LvisAnnotations, read_lvis, select_top_class, select_top_pairs
from noctowl.features import ImageSet, TextBank
from noctowl.model import OwlDetector
from noctowl.text import class_prompt, template_prompts

Protocol = Literal["noctowl", "owl"]


@dataclass(eq=False)
class Coarse:
    """The classes of an LVIS-format file, ready to be scored image by image."""

    annotations: LvisAnnotations
    image_rows: Int[np.ndarray, "I"]  # rows of the image set
    queries: Float[Tensor, "K D"]  # unit embeddings
    strength: Float[Tensor, "K"]  # |m|; 1 with one template
    protocol: Protocol
    nms_iou: float | None  # None suppresses nothing, as published for LVIS; always None under "owl"
    settings: dict[str, Any]  # JSON: what the detections come from
    top: int = MAX_DETECTIONS

    @classmethod
    def build(
        cls, path: Path, *, protocol: Protocol, nms_iou: float | None, images: ImageSet, bank: TextBank
    ) -> "Coarse":
        """Read the file, encode each distinct prompt once, plan its images.

        nms_iou: belongs to "noctowl"; "owl" suppresses nothing and does not look at it. Raises DataError for a damaged
        file and ConfigError for an unknown protocol.
        """
        if protocol not in ("noctowl", "owl"):
            raise ConfigError(f"benchmark.coarse_protocol: found {protocol!r}; allowed are 'noctowl' and 'owl'.")
        nms_iou = nms_iou if protocol == "noctowl" else None
        annotations = read_lvis(path)
        prompts = [template_prompts(n) if protocol == "owl" else [class_prompt(n)] for n in annotations.names]
        flat = [prompt for of_class in prompts for prompt in of_class]
        rows = bank.prompt_rows(flat)  # before `embeddings` is read: new prompts are added to it
        mean = (
            bank.embeddings[torch.from_numpy(rows)].view(len(prompts), -1, bank.embeddings.shape[1]).mean(1)
        )  # [K, D]
        strength = torch.linalg.vector_norm(mean, dim=-1)  # [K]
        settings = {
            "file": path.name,
            "sha256": annotations.sha256,
            "protocol": protocol,
            "prompts": len(flat),
            "prompts_sha256": hashlib.sha256("\n".join(flat).encode()).hexdigest(),
            "prompts_over_limit": int((bank.lengths[rows] > bank.detector.text_limit).sum()),
            "top": MAX_DETECTIONS,
            "nms_iou": nms_iou,
            "processor": images.preprocessor.settings(),  # with the pad value
        }
        image_rows = images.add(annotations.image_files, annotations.image_sizes)
        queries = mean / strength[:, None] if protocol == "owl" else mean
        strength = strength if protocol == "owl" else torch.ones(len(mean))
        return cls(annotations, image_rows, queries, strength, protocol, nms_iou, settings)

    def image_ids(self) -> dict[int, int]:
        """Row of the image set -> image id."""
        return dict(zip(self.image_rows.tolist(), self.annotations.image_ids.tolist()))

    def detect(
        self, detector: OwlDetector, tokens: Float[Tensor, "1 P Dv"], boxes: Float[np.ndarray, "P 4"], image_id: int
    ) -> Detections:
        """One image, cut to `top` before anything else is looked at; boxes in pixels. Scores are logits: sigmoids of
        large ones are equal in fp32, and ties would be made that the model did not make."""
        queries, strength = self.queries.to(tokens.device)[None], self.strength.to(tokens.device)
        similarities = detector.head.similarity(tokens, queries) * strength  # [1, P, K]
        logits = detector.head.logits(tokens, similarities)[0].float().cpu().numpy()  # [P, K]
        if self.protocol == "owl":
            return select_top_pairs(logits, boxes, image_id, self.annotations.category_ids, self.top)
        return select_top_class(logits, boxes, image_id, self.annotations.category_ids, self.nms_iou, self.top)
