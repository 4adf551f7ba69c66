"""The class head: the one trainable layer, and the frozen teacher that remembers it as it was.

Legend: B images, P patches, C captions of a vocabulary, K coarse names, Dv vision width, D class embedding width.

  e = W x + b                             class embedding of a token; W, b = `class_head.dense0`, all that trains
  s = cos(e, q)                           similarity to a text embedding q; what the losses see
  logit = (s + shift(x)) (ELU(scale(x)) + 1)     at inference; shift and scale stay as pretrained

Everything here is computed in fp32, also under autocast: the layer is small beside the towers, and bf16 cosines
(3 digits) would drown the differences between hard negatives.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from noctowl.errors import ModelError

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
    # Queries on the left: rounds like the published implementation, bit by bit.
    return (_unit_queries(queries, query_epsilon) @ unit(embeddings.float()).transpose(-1, -2)).transpose(-1, -2)


def _unit_queries(queries: Tensor, query_epsilon: bool) -> Tensor:
    queries = queries.float()
    if query_epsilon:
        # The floor keeps padding (zero queries) from becoming NaN, which would reach the gradient through 0 * NaN.
        return queries / torch.linalg.vector_norm(queries, dim=-1, keepdim=True).clamp(min=1e-12) + EPS
    return unit(queries)


class _Similarity(torch.autograd.Function):
    """s = u q with u = e / (|e| + eps), e = W x + b, and its gradient in closed form.

      dL/de = (sum_c ds_c q_c) / (|e| + eps) - u (sum_c ds_c s_c) / |e|       dL/dW = sum_p dL/de x^T

    Autograd would run over the large [P, D] tensors a dozen times; here they are written once on either way. Values are
    those of `cosine(F.linear(x, W, b), q)`, bit by bit. Tokens and queries are constants: no gradient for them.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor, queries: Tensor) -> Tensor:
        directions = F.linear(tokens, weight, bias)  # [*b, P, D], e
        norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)  # [*b, P, 1]
        directions.div_(norms + EPS)  # u
        similarities = (queries @ directions.transpose(-1, -2)).transpose(-1, -2)  # [*b, P, C]
        ctx.save_for_backward(tokens, queries, directions, norms, similarities)
        return similarities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        tokens, queries, directions, norms, similarities = ctx.saved_tensors
        turn = (grad * similarities).sum(-1, keepdim=True) / norms  # [*b, P, 1]
        pull = grad / (norms + EPS)  # [*b, P, C]
        d_embedding = directions * -turn.masked_fill(norms == 0, 0.0)  # [*b, P, D]
        width, columns = directions.shape[-1], queries.shape[-2]
        flat = d_embedding.view(-1, directions.shape[-2], width)
        flat.baddbmm_(
            pull.reshape(len(flat), -1, columns),
            queries.expand(*pull.shape[:-2], -1, -1).reshape(len(flat), columns, width),
        )
        rows = d_embedding.view(-1, width)
        return None, rows.T @ tokens.reshape(len(rows), -1), rows.sum(0), None


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
        """cos(e, q) of every token with every query; its gradient rounds like the published implementation's."""
        with torch.autocast(tokens.device.type, enabled=False):
            return cosine(self.embed(tokens), queries, query_epsilon=query_epsilon)

    def lean_similarity(
        self, tokens: Float[Tensor, "*b P Dv"], queries: Float[Tensor, "*b C D"], *, query_epsilon: bool = False
    ) -> Float[Tensor, "*b P C"]:
        """`similarity`, bit by bit, with the gradient in closed form: 1.5 times faster in training, equal to rounding.

        Raises ModelError for tokens or queries that ask for a gradient: they are constants here.
        """
        if torch.is_grad_enabled() and (tokens.requires_grad or queries.requires_grad):
            raise ModelError("tokens or queries ask for a gradient; detach them (only dense0 trains) or use similarity")
        with torch.autocast(tokens.device.type, enabled=False):
            layer = self.dense0
            return _Similarity.apply(tokens.float(), layer.weight, layer.bias, _unit_queries(queries, query_epsilon))

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
