"""Two optimiser steps of the published implementation, from pixels to weights, and its inference.

The tiny random models lie in ../shared; the last tests check the same facts by hand, on the built-in miniature.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2

from noctowl.boxes import from_frame
from noctowl.losses import box_distances, compute_losses
from noctowl.matcher import match
from noctowl.model import OwlDetector
from noctowl.text import clip_tokenizer, tokenize

RUNS = ["owlv2_triplet_mse", "owlv2_triplet_none", "owlv2_triplet_ce", "owlv2_infonce_mse", "owlvit_triplet_mse"]
KINDS = {"triplet": "triplet", "infonce": "cross_entropy"}


@pytest.fixture(autouse=True)
def two_threads():
    """The order of sums depends on the number of threads; with one, a weight is a last digit (6e-8) off."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def load(shared, kind: str) -> OwlDetector:
    return OwlDetector.from_pretrained(
        shared / "golden" / "models" / f"tiny-{kind}", tokenizer=clip_tokenizer(), expect=kind
    )


def optimiser(detector: OwlDetector, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    trainable = [p for p in detector.parameters() if p.requires_grad]
    return create_optimizer_v2(trainable, opt="adamw", lr=lr, weight_decay=weight_decay, filter_bias_and_bn=False)


@pytest.mark.golden
@pytest.mark.parametrize("run", RUNS)
def test_two_steps_of_the_published_implementation(shared, run):
    golden = load_file(shared / "golden" / f"train_{run}.safetensors")
    meta = json.loads((shared / "golden" / f"train_{run}.json").read_text())
    detector = load(shared, meta["kind"]).train()
    layer = detector.head.dense0
    assert torch.equal(layer.weight, golden["dense0.weight.init"])
    optimizer = optimiser(detector, lr=3e-3, weight_decay=0.1)
    names = None
    if meta["distill"] != "none":
        ids = golden["lvis.input_ids"]
        names = detector.encode_text(ids, torch.ones_like(ids))
        assert (names - golden["lvis.queries"][0]).abs().max() <= 3e-7
        # Adam divides by |gradient|: 2e-7 in a query can move a weight by as much. So the golden coarse queries and
        # targets go on from here; tokens, caption queries and similarities are bitwise equal and need no such help.
        names = golden["lvis.queries"][0]
        tokens = tokenize(detector.tokenizer, meta["lvis_prompts"]).input_ids
        assert torch.equal(tokens[:, : ids.shape[1]], ids)
    for i in range(4):
        batch = {k.split(".", 1)[1]: v for k, v in golden.items() if k.startswith(f"b{i}.")}
        features = detector.encode_images(batch["pixel_values"])
        ids = batch["input_ids"]
        queries = detector.encode_text(ids, torch.ones_like(ids)).reshape(len(features.tokens), -1, layer.out_features)
        assert (features.tokens - batch["image_feats"]).abs().max() <= 1e-6
        assert (features.boxes - batch["pred_boxes_xyxy"]).abs().max() <= 5e-7
        assert (queries - batch["queries"]).abs().max() <= 1e-6
        sims = detector.head.similarity(features.tokens, queries, query_epsilon=True)
        assert (sims - batch["sims"]).abs().max() <= 1e-6
        found = match(pred_boxes=features.boxes, similarities=sims, gt_boxes=batch["gt_boxes_xyxy"])
        assert torch.equal(found.matched_patch, batch["matched_idx"])
        assert torch.equal(found.positive, batch["target_classes_spread"] == 0)
        assert found.positive.sum() == meta["n_positive_per_batch"][i]
        student = teacher = None
        if names is not None:
            student, teacher = detector.coarse_pair(features.tokens[found.positive], names, query_epsilon=True)
            assert (student - batch["lvis_sims"][found.positive]).abs().max() <= 1e-6
            assert (teacher - batch["lvis_target"][found.positive]).abs().max() <= 3e-7
            teacher = batch["lvis_target"][found.positive]
        terms = compute_losses(
            similarities=sims,
            positive=found.positive,
            kind=KINDS[meta["ltype"]],
            distill=meta["distill"],
            student=student,
            teacher=teacher,
        )
        expected, values = meta["batches"][i], terms.as_dict()
        for ours, theirs in (("class", "triplet"), ("background", "bg"), ("distillation", "rank")):
            value = expected[f"loss_{theirs}"]
            assert abs(values[ours].item() - value) <= 3e-7 * max(1, abs(value)), (i, ours)
        l1, giou = box_distances(
            pred_boxes=features.boxes, gt_boxes=batch["gt_boxes_xyxy"], matched_patch=found.matched_patch
        )
        assert l1.item() == pytest.approx(expected["loss_bbox"], abs=3e-7)
        assert giou.item() == pytest.approx(expected["loss_giou"], abs=3e-7)
        (terms.total / 2).backward()  # accumulate 2
        if i % 2 == 1:
            step = i // 2
            for name in ("weight", "bias"):
                gradient = getattr(layer, name).grad
                assert (gradient - golden[f"step{step}.grad.{name}"]).abs().max() <= 2e-7, (step, name)
            optimizer.step()
            optimizer.zero_grad()
            for name in ("weight", "bias"):
                assert (getattr(layer, name) - golden[f"step{step}.{name}"]).abs().max() <= 5e-8, (step, name)
    changed = {k for k, v in detector.base_state().items() if not torch.equal(v, detector.model.state_dict()[k])}
    assert changed == set(meta["hf_state_dict_keys_changed_by_export"])


@pytest.mark.golden
@pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
def test_inference_of_the_published_implementation(shared, kind):
    golden = load_file(shared / "golden" / f"infer_{kind}.safetensors")
    meta = json.loads((shared / "golden" / f"infer_{kind}.json").read_text())
    detector = load(shared, kind)
    for i, item in enumerate(meta):
        text = tokenize(detector.tokenizer, item["vocabulary"])
        ids = golden[f"{i}.input_ids"]
        assert torch.equal(text.input_ids[:, : ids.shape[1]], ids)
        features = detector.encode_images(golden[f"{i}.pixel_values"])
        scores = detector.score(features.tokens, detector.encode_text(text.input_ids, text.attention_mask)[None])
        logits = scores.logits[0].detach()
        assert (logits - golden[f"{i}.logits"][0]).abs().max() <= 2e-6
        best, label = logits.max(1)
        order = best.argsort(descending=True)[:100]
        height, width = item["hw"]
        pixels = from_frame(features.boxes[0], width, height, detector.frame)
        assert (best.sigmoid()[order] - golden[f"{i}.out.scores"]).abs().max() <= 1e-6
        assert torch.equal(torch.tensor(item["vocabulary_ids"])[label[order]], golden[f"{i}.out.labels"])
        assert (logits.sigmoid()[order] - golden[f"{i}.out.total_scores"]).abs().max() <= 1e-6
        assert (pixels[order] - golden[f"{i}.out.boxes"]).abs().max() <= 1e-4


def miniature() -> OwlDetector:
    return OwlDetector.from_pretrained("tiny", weights="random", seed=1)


def forward(detector: OwlDetector, pixels: torch.Tensor, captions: list[str], names: list[str]):
    """One image, one vocabulary, a box around the whole square: total loss of triplet and mse distillation."""
    features = detector.encode_images(pixels)
    text, coarse = tokenize(detector.tokenizer, captions), tokenize(detector.tokenizer, names)
    queries = detector.encode_text(text.input_ids, text.attention_mask)[None]
    sims = detector.head.similarity(features.tokens, queries, query_epsilon=True)
    found = match(pred_boxes=features.boxes, similarities=sims, gt_boxes=torch.tensor([[[0.1, 0.1, 0.4, 0.4]]]))
    student, teacher = detector.coarse_pair(
        features.tokens[found.positive], detector.encode_text(coarse.input_ids, coarse.attention_mask)
    )
    return compute_losses(similarities=sims, positive=found.positive, distill="mse", student=student, teacher=teacher)


def test_one_adamw_step_by_hand():
    """First AdamW step: w (1 - lr wd) - lr g / (|g| + eps), on weight and bias alike; nothing else moves."""
    detector = miniature().train()
    before = {k: v.clone() for k, v in detector.model.state_dict().items()}
    pixels = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    optimizer = optimiser(detector, lr=1e-2, weight_decay=0.1)
    forward(detector, pixels, ["A red cup.", "A blue cup."], ["a cup", "a chair"]).total.backward()
    gradients = {
        name: detector.model.get_parameter(f"class_head.dense0.{name}").grad.clone() for name in ("weight", "bias")
    }
    optimizer.step()
    after = detector.model.state_dict()
    for name, gradient in gradients.items():
        start = before[f"class_head.dense0.{name}"]
        expected = start * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[f"class_head.dense0.{name}"], expected, rtol=0, atol=1e-6)
        assert gradient.abs().max() > 1e-5
    assert {k for k in after if not torch.equal(after[k], before[k])} == {
        "class_head.dense0.weight",
        "class_head.dense0.bias",
    }


def test_distillation_starts_at_zero_and_brakes():
    """Student and teacher are equal at the start; after a step on the class loss they differ."""
    detector = miniature().train()
    pixels = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    optimizer = optimiser(detector, lr=1e-3, weight_decay=0.0)
    first = forward(detector, pixels, ["A red cup.", "A blue cup."], ["a cup", "a chair"])
    assert first.distillation.item() < 1e-12
    first.total.backward()
    optimizer.step()
    second = forward(detector, pixels, ["A red cup.", "A blue cup."], ["a cup", "a chair"])
    assert second.distillation.item() > 1e-6
    assert second.total.item() < first.total.item()


def test_foreground_rows_give_the_gradient_of_all_patches():
    """Scoring K names on all patches and masking gives the same loss and gradient as scoring foreground rows only."""
    detector = miniature()
    with torch.no_grad():
        detector.head.dense0.weight.mul_(1.1).add_(0.01)
    tokens = detector.encode_images(torch.rand(2, 3, 96, 96)).tokens
    names = torch.nn.functional.normalize(torch.randn(5, 96), dim=-1)
    positive = torch.rand(2, 64) < 0.1
    gradients = []
    student, teacher = detector.coarse_pair(tokens[positive], names)
    everywhere = detector.head.similarity(tokens, names.expand(2, -1, -1))
    targets = detector.teacher.similarity(tokens, names.expand(2, -1, -1))
    masked = ((everywhere - targets).square() * positive[..., None]).sum() / (positive.sum() * 5)
    for loss in ((student - teacher).square().mean(), masked):
        detector.zero_grad()
        loss.backward()
        gradients.append(detector.head.dense0.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-8)
