"""Class head and teacher: cosines by hand, the query epsilon, fp32 under autocast, a teacher that cannot train."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from noctowl.errors import ModelError
from noctowl.head import ClassHead, TeacherHead, _Similarity, cosine
from noctowl.losses import compute_losses
from noctowl.model import OwlDetector


@pytest.fixture(scope="module")
def detector() -> OwlDetector:
    return OwlDetector.from_pretrained("tiny", weights="random", seed=0)


def test_cosine_by_hand():
    e, q = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [-3.0, -4.0], [4.0, -3.0]])
    torch.testing.assert_close(cosine(e, q), torch.tensor([[0.8, -1.0, 0.0]]), rtol=0, atol=1e-6)


def test_query_epsilon_is_added_to_every_component():
    e, q = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    # e / |e| = (.6, .8); q / |q| + 1e-6 = (1e-6, 1 + 1e-6): .8 + 1.4e-6 instead of .8
    with_epsilon = cosine(e.double().float(), q, query_epsilon=True) - cosine(e, q)
    assert with_epsilon.item() == pytest.approx(1.4e-6 + 0.4e-6, abs=2e-7)  # the clean one divides by |q| + 1e-6


def test_zero_vectors_give_zero_not_nan():
    assert cosine(torch.zeros(1, 4), torch.ones(2, 4)).tolist() == [[0.0, 0.0]]
    assert cosine(torch.ones(1, 4), torch.zeros(2, 4)).tolist() == [[0.0, 0.0]]


def test_cosine_shares_leading_dimensions():
    e, q = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    assert torch.equal(cosine(e, q)[1], cosine(e[1:], q[1:])[0])


def test_logits_are_shifted_and_stretched_per_token(detector):
    head = detector.head
    tokens = torch.randn(1, 4, 160, generator=torch.Generator().manual_seed(0))
    sims = torch.tensor([0.2, -0.3]).expand(1, 4, 2)
    scale = head.module.logit_scale(tokens)
    expected = (sims + head.module.logit_shift(tokens)) * (torch.where(scale > 0, scale, scale.exp() - 1) + 1)
    torch.testing.assert_close(head.logits(tokens, sims), expected)


def test_head_stays_fp32_under_autocast(detector):
    tokens, queries = torch.randn(1, 6, 160), torch.randn(1, 3, 96)
    plain = detector.head.similarity(tokens, queries)
    with torch.autocast("cpu", torch.bfloat16):
        under = detector.head.similarity(tokens, queries)
        teacher = detector.teacher.similarity(tokens, queries)
        logits = detector.head.logits(tokens, under)
    assert under.dtype == teacher.dtype == logits.dtype == torch.float32
    assert torch.equal(under, plain)
    assert torch.equal(teacher, plain)


def test_teacher_is_a_copy_that_cannot_train_or_leak():
    dense0 = nn.Linear(4, 3)
    teacher = TeacherHead(dense0)
    before = teacher.embed(torch.ones(1, 4))
    with torch.no_grad():
        dense0.weight.add_(1)
    assert torch.equal(teacher.embed(torch.ones(1, 4)), before)
    assert list(teacher.parameters()) == []
    assert teacher.state_dict() == {}
    assert not teacher.embed(torch.ones(1, 4, requires_grad=True)).requires_grad
    assert not teacher.train().training
    assert not nn.Sequential(teacher).train()[0].training
    assert teacher.to(torch.float64).weight.dtype == torch.float64  # buffers follow the module to another device


def test_student_gradient_reaches_dense0_only(detector):
    tokens, queries = torch.randn(1, 6, 160), torch.randn(1, 3, 96)
    head: ClassHead = detector.head
    head.similarity(tokens, queries).sum().backward()
    assert head.dense0.weight.grad.abs().sum() > 0
    assert {n for n, p in detector.named_parameters() if p.grad is not None} == {
        "model.class_head.dense0.weight",
        "model.class_head.dense0.bias",
    }
    detector.zero_grad()


def case(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dense0, tokens [2, 5, 6], queries [2, 3, 4] and weights of the similarities."""
    g = torch.Generator().manual_seed(3)
    layer = nn.Linear(6, 4).to(dtype)
    with torch.no_grad():
        layer.weight.normal_(generator=g)
        layer.bias.normal_(generator=g)
    draw = [torch.randn(shape, generator=g).to(dtype) for shape in ((2, 5, 6), (2, 3, 4), (2, 5, 3))]
    return layer, draw[0], draw[1], draw[2]


def test_closed_form_gradient_is_the_numeric_one():
    layer, tokens, queries, _ = case(torch.float64)
    weight, bias = layer.weight, layer.bias
    assert torch.autograd.gradcheck(lambda w, b: _Similarity.apply(tokens, w, b, queries), (weight, bias))
    flat = tokens[0]
    assert torch.autograd.gradcheck(lambda w, b: _Similarity.apply(flat, w, b, queries[0]), (weight, bias))
    assert torch.autograd.gradcheck(lambda w, b: _Similarity.apply(tokens, w, b, queries[0]), (weight, bias))


@pytest.mark.parametrize("epsilon", [False, True])
def test_lean_similarity_is_similarity(epsilon):
    """Values bit by bit; gradients to rounding, summed over several uses of the layer."""
    layer, tokens, queries, weights = case()
    head = ClassHead(nn.ModuleDict({"dense0": layer}))
    values, gradients = [], []
    for compute in (head.similarity, head.lean_similarity):
        layer.zero_grad()
        s = compute(tokens, queries, query_epsilon=epsilon)
        (s.abs() * weights).sum().backward()
        compute(tokens[0, :2], queries[0], query_epsilon=epsilon).square().sum().backward()
        values.append(s)
        gradients.append((layer.weight.grad.clone(), layer.bias.grad.clone()))
    assert torch.equal(*values)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_an_embedding_of_zero_has_no_gradient():
    layer, tokens, queries, _ = case()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    head = ClassHead(nn.ModuleDict({"dense0": layer}))
    gradients = []
    for compute in (head.similarity, head.lean_similarity):
        layer.zero_grad()
        s = compute(tokens, torch.zeros_like(queries))
        s.sum().backward()
        assert s.abs().max() == 0
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() == 0


def test_lean_similarity_refuses_tokens_that_want_a_gradient():
    layer, tokens, queries, _ = case()
    head = ClassHead(nn.ModuleDict({"dense0": layer}))
    with pytest.raises(ModelError, match="only dense0 trains"):
        head.lean_similarity(tokens.requires_grad_(), queries)


@pytest.mark.golden
@pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
def test_closed_form_gives_the_published_gradient(shared, kind):
    """The first update's gradient of the published implementation (two batches of the triplet with distillation)."""
    golden = load_file(shared / "golden" / f"train_{kind}_triplet_mse.safetensors")
    layer = nn.Linear(*golden["dense0.weight.init"].T.shape)
    layer.load_state_dict({name: golden[f"dense0.{name}.init"] for name in ("weight", "bias")})
    head = ClassHead(nn.ModuleDict({"dense0": layer}))
    names = golden["lvis.queries"][0]
    for i in range(2):
        batch = {k.split(".", 1)[1]: v for k, v in golden.items() if k.startswith(f"b{i}.")}
        tokens, positive = batch["image_feats"], batch["target_classes_spread"] == 0
        terms = compute_losses(
            similarities=head.lean_similarity(tokens, batch["queries"], query_epsilon=True),
            positive=positive,
            distill="mse",
            student=head.lean_similarity(tokens[positive], names, query_epsilon=True),
            teacher=batch["lvis_target"][positive],
        )
        (terms.total / 2).backward()
    for name in ("weight", "bias"):
        assert (getattr(layer, name).grad - golden[f"step0.grad.{name}"]).abs().max() <= 2e-7
