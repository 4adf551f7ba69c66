"""Class head and teacher: cosines by hand, the query epsilon, fp32 under autocast, a teacher that cannot train."""

import pytest
import torch
from torch import nn

from noctowl.head import ClassHead, TeacherHead, cosine
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
