"""The class head: the one trainable layer, and the frozen teacher that remembers it as it was.

Legend: B images, P patches, C captions of a vocabulary, K coarse names, Dv vision width, D class embedding width.

  e = W x + b                             class embedding of a token; W, b = `class_head.dense0`, all that trains
  s = cos(e, q)                           similarity to a text embedding q; what the losses see
  logit = (s + shift(x)) (ELU(scale(x)) + 1)     at inference; shift and scale stay as pretrained

Everything here is computed in fp32, also under autocast: the layer is small beside the towers, and bf16 cosines
(3 digits) would drown the differences between hard negatives.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

EPS = 1e-6  # added to norms, as transformers does


def unit(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """x / (|x| + 1e-6): zero vectors stay zero instead of becoming NaN."""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + EPS)


def cosine(
    embeddings: Float[Tensor, "*b P D"], queries: Float[Tensor, "*b C D"], *, query_epsilon: bool = False
) -> Float[Tensor, "*b P C"]:
    """Cosine similarity of every embedding with every query, in fp32.

    `query_epsilon` switches on an oddity of the published implementation: queries are normalised as q / |q| + 1e-6, the
    epsilon being added to every component instead of to the norm.
    """
    embeddings, queries = unit(embeddings.float()), queries.float()
    if query_epsilon:
        # The floor keeps padding (zero queries) from becoming NaN, which would reach the gradient through 0 * NaN.
        queries = queries / torch.linalg.vector_norm(queries, dim=-1, keepdim=True).clamp(min=1e-12) + EPS
    else:
        queries = unit(queries)
    # Queries on the left: rounds like the published implementation, bit by bit.
    return (queries @ embeddings.transpose(-1, -2)).transpose(-1, -2)  # [*b, P, C]


class ClassHead:
    """View on the class head of a transformers model: owns nothing, so nothing is registered or saved twice."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def dense0(self) -> nn.Linear:
        """Vision width -> class embedding width; the trainable layer."""
        layer = self.module.dense0
        assert isinstance(layer, nn.Linear)
        return layer

    def embed(self, tokens: Float[Tensor, "*n Dv"]) -> Float[Tensor, "*n D"]:
        """Class embeddings e = W x + b, not normalised."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self.dense0(tokens.float())

    def similarity(
        self, tokens: Float[Tensor, "*b P Dv"], queries: Float[Tensor, "*b C D"], *, query_epsilon: bool = False
    ) -> Float[Tensor, "*b P C"]:
        """cos(e, q) of every token with every query."""
        with torch.autocast(tokens.device.type, enabled=False):
            return cosine(self.embed(tokens), queries, query_epsilon=query_epsilon)

    def logits(
        self, tokens: Float[Tensor, "*b P Dv"], similarities: Float[Tensor, "*b P C"]
    ) -> Float[Tensor, "*b P C"]:
        """Similarities moved and stretched per token; equals the logits of transformers' forward pass."""
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float()
            shift, scale = self.module.logit_shift(tokens), self.module.logit_scale(tokens)  # type: ignore[operator]
            return (similarities.float() + shift) * (F.elu(scale) + 1)  # [*b, P, C]


class TeacherHead(nn.Module):
    """Frozen copy of the pretrained dense0, run on the same tokens as the student.

    It cannot train or leak: weights are non-persistent buffers (no parameters, nothing in `state_dict`), outputs carry
    no gradient, and `train()` leaves it in eval mode.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, dense0: nn.Linear):
        super().__init__()
        self.register_buffer("weight", dense0.weight.detach().clone(), persistent=False)
        self.register_buffer("bias", dense0.bias.detach().clone(), persistent=False)
        self.eval()

    def train(self, mode: bool = True) -> "TeacherHead":
        """Stays in eval mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def embed(self, tokens: Float[Tensor, "*n Dv"]) -> Float[Tensor, "*n D"]:
        """Class embeddings of the pretrained head, not normalised."""
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.float(), self.weight, self.bias)

    @torch.no_grad()
    def similarity(
        self, tokens: Float[Tensor, "*b P Dv"], queries: Float[Tensor, "*b C D"], *, query_epsilon: bool = False
    ) -> Float[Tensor, "*b P C"]:
        """cos(e, q) under the pretrained head."""
        with torch.autocast(tokens.device.type, enabled=False):
            return cosine(self.embed(tokens), queries, query_epsilon=query_epsilon)
