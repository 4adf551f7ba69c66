"""Losses: hand-computed numbers, masks, compat switches, hostile inputs, and the published implementation's values."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from noctowl import losses
from noctowl.errors import ModelError
from noctowl.matcher import match

KINDS = {"triplet": "triplet", "infonce": "cross_entropy", "BCE": "bce"}
ROWS = torch.tensor([[0.5, 0.6, -0.1], [0.4, -0.7, 0.2]])  # [n=2, C=3]
SETTINGS = {"triplet": {"margin": 0.15}, "cross_entropy": {"temperature": 0.07}, "bce": {"gamma": 2.0}}
CLASS_LOSSES = {"triplet": losses.triplet, "cross_entropy": losses.cross_entropy, "bce": losses.bce}


def log_softmax0(values: list[float], temperature: float) -> float:
    return values[0] / temperature - math.log(sum(math.exp(v / temperature) for v in values))


def test_triplet_by_hand():
    # compat: |s|; row 0: .15 + .6 - .5 = .25, .15 + .1 - .5 < 0; row 1: .15 + .7 - .4 = .45, .15 + .2 - .4 < 0
    published = losses.triplet(similarities=ROWS, margin=0.15, compat=True)
    assert published.item() == pytest.approx((0.25 + 0.45) / (2 * 3))
    # clean: signs kept, the mean over the two negatives; row 1: -.7 is far below
    clean = losses.triplet(similarities=ROWS, margin=0.15, compat=False)
    assert clean.item() == pytest.approx(0.25 / (2 * 2))


def test_cross_entropy_by_hand():
    published = losses.cross_entropy(similarities=ROWS, temperature=0.1, compat=True)
    expected = -(log_softmax0([0.5, 0.6, 0.1], 0.1) + log_softmax0([0.4, 0.7, 0.2], 0.1)) / 2
    assert published.item() == pytest.approx(expected, rel=1e-6)
    clean = losses.cross_entropy(similarities=ROWS, temperature=0.1, compat=False)
    expected = -(log_softmax0([0.5, 0.6, -0.1], 0.1) + log_softmax0([0.4, -0.7, 0.2], 0.1)) / 2
    assert clean.item() == pytest.approx(expected, rel=1e-6)


def test_bce_by_hand():
    def focal(right: list[float]) -> float:
        return sum(-((1 - r) ** 2) * math.log(r) for r in right)

    published = losses.bce(similarities=ROWS, gamma=2.0, compat=True)
    expected = (focal([0.5, 0.4, 0.9]) + focal([0.4, 0.3, 0.8])) / 2
    assert published.item() == pytest.approx(expected, rel=1e-6)
    clean = losses.bce(similarities=ROWS, gamma=2.0, compat=False)  # (1 + s) / 2
    expected = (focal([0.75, 0.2, 0.55]) + focal([0.7, 0.85, 0.4])) / 2
    assert clean.item() == pytest.approx(expected, rel=1e-6)


def test_background_by_hand():
    def focal(a: float) -> float:
        return -(a**2) * math.log(1 - a)

    published = losses.background(similarities=ROWS, gamma=2.0, compat=True)
    assert published.item() == pytest.approx(sum(map(focal, (0.5, 0.6, 0.1, 0.4, 0.7, 0.2))) / 2, rel=1e-6)
    clean = losses.background(similarities=ROWS, gamma=2.0, compat=False)
    assert clean.item() == pytest.approx(sum(map(focal, (0.5, 0.6, 0.4, 0.2))) / 2, rel=1e-6)


def test_distillation_by_hand():
    teacher = torch.tensor([[0.3, 0.6, 0.1], [0.4, -0.5, 0.2]])
    mse = losses.distill_mse(student=ROWS, teacher=teacher)
    assert mse.item() == pytest.approx((0.04 + 0 + 0.04 + 0 + 0.04 + 0) / 6, rel=1e-5)
    published = losses.distill_ce(student=ROWS, teacher=teacher, temperature=0.07, compat=True)
    logs = [ROWS[i].double().log_softmax(0) for i in range(2)]
    assert published.item() == pytest.approx(-sum(float(teacher[i].double() @ logs[i]) for i in range(2)) / 2, rel=1e-6)
    # the proper version is smallest where the student is the teacher, the published one is not
    at_teacher = teacher.clone().requires_grad_()
    losses.distill_ce(student=at_teacher, teacher=teacher, temperature=0.07, compat=False).backward()
    assert at_teacher.grad.abs().max() < 1e-6
    at_teacher.grad = None
    losses.distill_ce(student=at_teacher, teacher=teacher, temperature=0.07, compat=True).backward()
    assert at_teacher.grad.abs().max() > 0.01


def test_published_ce_can_be_negative():
    negative = torch.full((1, 4), -0.5)
    assert losses.distill_ce(student=negative, teacher=negative, temperature=0.07, compat=True) < -1
    assert losses.distill_ce(student=negative, teacher=negative, temperature=0.07, compat=False) > 0


@pytest.mark.parametrize("compat", [True, False])
@pytest.mark.parametrize("kind", ["triplet", "cross_entropy", "bce", "background"])
def test_padded_columns_count_nowhere(kind, compat):
    loss = CLASS_LOSSES.get(kind, losses.background)
    settings = SETTINGS.get(kind, {"gamma": 2.0})
    padded = torch.cat((ROWS, torch.tensor([[0.99], [0.99]])), dim=1).requires_grad_()
    mask = torch.tensor([[True, True, True, False]] * 2)
    masked = loss(similarities=padded, mask=mask, compat=compat, **settings)
    assert masked.item() == pytest.approx(loss(similarities=ROWS, compat=compat, **settings).item(), rel=1e-6)
    masked.backward()
    assert padded.grad[:, 3].tolist() == [0, 0]
    assert padded.grad[:, :3].abs().sum() > 0


@pytest.mark.parametrize("compat", [True, False])
def test_ragged_rows_weigh_the_same(compat):
    ragged = torch.tensor([[True, True, False], [True, True, True]])
    value = losses.triplet(similarities=ROWS, mask=ragged, margin=0.15, compat=compat)
    rows = [
        losses.triplet(similarities=ROWS[i : i + 1, : int(ragged[i].sum())], margin=0.15, compat=compat).item()
        for i in range(2)
    ]
    assert value.item() == pytest.approx(sum(rows) / 2, rel=1e-6)


@pytest.mark.parametrize("compat", [True, False])
@pytest.mark.parametrize("kind", list(CLASS_LOSSES))
@pytest.mark.parametrize("distill", ["none", "mse", "ce"])
def test_no_foreground_is_zero_with_a_gradient(kind, distill, compat):
    similarities = torch.full((2, 4, 3), 0.2, requires_grad=True)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    student = torch.zeros(0, 5, requires_grad=True)
    terms = losses.compute_losses(
        similarities=similarities,
        positive=nothing,
        kind=kind,
        distill=distill,
        student=student,
        teacher=student.detach(),
        compat=compat,
    )
    assert terms.class_.item() == 0
    assert terms.distillation.item() == 0
    assert terms.total.item() == pytest.approx(-3 * 0.04 * math.log(0.8), rel=1e-5)
    terms.total.backward()
    assert similarities.grad.isfinite().all()


def test_all_foreground_has_no_background():
    similarities = torch.full((1, 2, 3), 0.2, requires_grad=True)
    terms = losses.compute_losses(similarities=similarities, positive=torch.ones(1, 2, dtype=torch.bool))
    assert terms.background.item() == 0


@pytest.mark.parametrize("compat", [True, False])
@pytest.mark.parametrize("kind", list(CLASS_LOSSES))
def test_cosines_of_one_are_clamped(kind, compat):
    extreme = torch.tensor([[[1.0, -1.0, 1.0 + 1e-6], [1.0 + 4e-3, 0.0, -1.0]]], requires_grad=True)
    terms = losses.compute_losses(
        similarities=extreme, positive=torch.tensor([[True, False]]), kind=kind, compat=compat
    )
    assert terms.background.item() == pytest.approx((2 if compat else 1) * -math.log(1e-6), rel=0.02)
    terms.total.backward()
    assert extreme.grad.isfinite().all()
    assert terms.total.isfinite()


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "nan"), (float("inf"), "inf"), (1.5, "1.5")])
def test_what_is_no_cosine_is_an_error(value, words):
    similarities = torch.zeros(1, 3, 2)
    similarities[0, 1, 1] = value
    with pytest.raises(ModelError, match=f"similarities: largest magnitude {words}.*logits were passed"):
        losses.compute_losses(similarities=similarities, positive=torch.tensor([[True, False, False]]))


def test_bf16_inputs_are_computed_in_fp32():
    similarities = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0)).mul(2).sub(1).bfloat16()
    positive = torch.arange(10).reshape(2, 5) % 3 == 0
    for kind in CLASS_LOSSES:
        half = losses.compute_losses(similarities=similarities, positive=positive, kind=kind).total
        full = losses.compute_losses(similarities=similarities.float(), positive=positive, kind=kind).total
        assert half.dtype == torch.float32
        assert torch.equal(half, full)
        with torch.autocast("cpu", torch.bfloat16):
            under = losses.compute_losses(similarities=similarities, positive=positive, kind=kind).total
        assert torch.equal(under, full)


def test_bad_arguments_name_what_is_allowed():
    similarities, positive = torch.zeros(1, 3, 2), torch.tensor([[True, False, False]])
    with pytest.raises(ValueError, match=r"'hinge'.*triplet, cross_entropy, bce"):
        losses.compute_losses(similarities=similarities, positive=positive, kind="hinge")
    with pytest.raises(ValueError, match="1 foreground rows"):
        losses.compute_losses(
            similarities=similarities,
            positive=positive,
            distill="mse",
            student=torch.zeros(3, 2),
            teacher=torch.zeros(3, 2),
        )
    with pytest.raises(ValueError, match=r"'kl'.*none, mse, ce"):
        losses.compute_losses(
            similarities=similarities,
            positive=positive,
            distill="kl",
            student=torch.zeros(1, 2),
            teacher=torch.zeros(1, 2),
        )


def test_weights_and_log_values():
    similarities = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(1))
    positive = torch.arange(10).reshape(2, 5) % 3 == 0
    student, teacher = similarities[positive], similarities[positive] * 0.5
    weights = {"class_weight": 2.0, "background_weight": 0.5, "distillation_weight": 10.0}
    terms = losses.compute_losses(
        similarities=similarities,
        positive=positive,
        distill="mse",
        student=student,
        teacher=teacher,
        **weights,
    )
    logged = terms.as_dict()
    total = 2 * logged["class"] + 0.5 * logged["background"] + 10 * logged["distillation"]
    assert logged["total"].item() == pytest.approx(total.item())


def test_box_distances_by_hand():
    pred = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0]]])
    gt = torch.tensor([[[0.0, 0.0, 1.0, 0.5], [0.2, 0.2, 0.4, 0.4]]])
    l1, giou = losses.box_distances(pred_boxes=pred, gt_boxes=gt, matched_patch=torch.tensor([[0, -1]]))
    assert l1.item() == pytest.approx(0.5)
    assert giou.item() == pytest.approx(0.5)


@pytest.mark.golden
def test_losses_and_gradients_of_the_published_implementation(shared):
    """4 cases x 3 class losses x 3 distillations (and margin 0.2): losses to 3e-7, gradients to 2e-7."""
    tensors = load_file(shared / "golden" / "loss_golden.safetensors")
    cases = json.loads((shared / "golden" / "loss_golden.json").read_text())["cases"]
    assert len(cases) == 40
    for case in cases:
        inputs = {k.split(".in.")[1]: v for k, v in tensors.items() if k.startswith(f"{case['case']}.in.")}
        sims, coarse = (inputs[k].clone().requires_grad_() for k in ("sims", "lvis_pred"))
        found = match(pred_boxes=inputs["pred_boxes"], similarities=sims, gt_boxes=inputs["gt_boxes"])
        assert found.positive.sum() == case["n_positive"]
        terms = losses.compute_losses(
            similarities=sims,
            positive=found.positive,
            kind=KINDS[case["ltype"]],
            margin=case["margin"],
            distill=case["distill"] or "none",
            student=coarse[found.positive],
            teacher=inputs["lvis_target"][found.positive],
        )
        terms.total.backward()
        values = terms.as_dict()
        for ours, theirs in (("class", "triplet"), ("background", "bg"), ("distillation", "rank")):
            assert abs(values[ours].item() - case[f"loss_{theirs}"]) <= 3e-7, (case["key"], ours)
        assert abs(values["total"].item() - case["total"]) <= 3e-7, case["key"]
        assert (sims.grad - tensors[f"{case['key']}.grad_sims"]).abs().max() <= 2e-7, case["key"]
        if case["distill"]:
            assert (coarse.grad - tensors[f"{case['key']}.grad_lvis_pred"]).abs().max() <= 2e-7, case["key"]
        l1, giou = losses.box_distances(
            pred_boxes=inputs["pred_boxes"], gt_boxes=inputs["gt_boxes"], matched_patch=found.matched_patch
        )
        assert l1.item() == pytest.approx(case["loss_bbox"], abs=3e-7)
        assert giou.item() == pytest.approx(case["loss_giou"], abs=3e-7)
