"""The training step: what trains, what a checkpoint holds, accumulation, rates, ragged vocabularies, precision."""

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from noctowl.data.batch import Batch, Item, collate
from noctowl.errors import ModelError
from noctowl.model import TRAINABLE
from noctowl.module import PREFIX, NoctOWL

LOSSES = {
    "triplet": {"name": "triplet", "margin": 0.15, "weight": 1.0, "background_weight": 1.0, "gamma": 2.0},
    "cross_entropy": {"name": "cross_entropy", "temperature": 0.07, "weight": 1, "background_weight": 1, "gamma": 2.0},
    "bce": {"name": "bce", "weight": 1.0, "background_weight": 1.0, "gamma": 2.0},
}
OPTIMIZER = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "decay_bias": True}
CONSTANT = {"name": "constant", "warmup_epochs": 0, "min_lr": 0.0}


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coarse_queries() -> Tensor:
    return F.normalize(torch.randn(7, 96, generator=draw(99)), dim=-1)


def make_item(seed: int, columns: int = 4, objects: int = 1) -> Item:
    """Random tokens and boxes; the objects lie near two patches."""
    g = draw(seed)
    corner, side = torch.rand(64, 2, generator=g) * 0.6, 0.1 + 0.3 * torch.rand(64, 2, generator=g)
    boxes = torch.cat([corner, corner + side], -1)  # [P, 4]
    return Item(
        key=(seed, 0),
        queries=F.normalize(torch.randn(columns, 96, generator=g), dim=-1),
        gt_boxes=boxes[:objects] + 0.01,
        pixel_values=None,
        tokens=torch.randn(64, 160, generator=g),
        patch_boxes=boxes,
    )


def make_batches(count: int, size: int = 2) -> list[Batch]:
    return [collate([make_item(size * b + i) for i in range(size)]) for b in range(count)]


def make_module(detector: Any, loss: str = "triplet", **options: Any) -> NoctOWL:
    settings = {
        "loss": LOSSES[loss],
        "distill": {"name": "mse", "weight": 1.0},
        "optimizer": OPTIMIZER,
        "schedule": CONSTANT,
        "coarse_queries": coarse_queries(),
    }
    return NoctOWL(detector=detector, **{**settings, **options})


def fit(module: NoctOWL, batches: list[Batch], *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{**quiet, "max_epochs": 1, **options},
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


def head_of(module: NoctOWL) -> dict[str, Tensor]:
    return module.detector.trainable_state()


# What trains


@pytest.mark.parametrize("distill", ["none", "mse", "ce"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_requires_grad_is_what_gets_one(fresh_detector, loss, distill):
    module = make_module(fresh_detector(), loss, distill={"name": distill, "weight": 1.0})
    terms, positives = module.losses(make_batches(1)[0])
    terms.total.backward()
    parameters = dict(module.named_parameters())
    wanted = {PREFIX + name for name in TRAINABLE}
    assert {name for name, p in parameters.items() if p.requires_grad} == wanted
    assert {name for name, p in parameters.items() if p.grad is not None} == wanted
    assert all(parameters[name].grad.abs().max() > 0 for name in wanted)
    assert positives >= 2  # one matched patch for each of the two objects


def test_the_teacher_neither_trains_nor_leaks(fresh_detector):
    module = make_module(fresh_detector())
    before = {k: v.clone() for k, v in module.state_dict().items()}
    teacher = {k: v.clone() for k, v in module.detector.teacher.named_buffers()}
    module.train()
    frozen = [m for n, m in module.detector.named_modules() if n not in ("", "model.class_head.dense0")]
    assert not any(m.training for m in frozen)
    fit(module, make_batches(2), max_epochs=2)
    assert not module.detector.teacher.training
    assert not list(module.detector.teacher.parameters())
    for name, value in module.detector.teacher.named_buffers():
        assert torch.equal(value, teacher[name])
    after = module.state_dict()
    assert not [name for name in after if "teacher" in name or "coarse" in name]
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {PREFIX + name for name in TRAINABLE}


def test_distillation_needs_names(fresh_detector):
    with pytest.raises(ModelError, match=r"distill=mse needs the embeddings of coarse names"):
        make_module(fresh_detector(), coarse_queries=None)


def test_distillation_starts_at_zero(fresh_detector):
    """Student and teacher are the same layer before the first step."""
    terms, _ = make_module(fresh_detector()).losses(make_batches(1)[0])
    assert terms.distillation.item() == pytest.approx(0.0, abs=1e-14)


# Accumulation, rates


def by_hand(detector: Any, windows: list[list[Batch]], epochs: int) -> dict[str, Tensor]:
    """A plain loop: each update takes the mean of its window's losses."""
    module = make_module(detector)
    optimizer = torch.optim.AdamW(detector.head.dense0.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(epochs):
        for window in windows:
            optimizer.zero_grad()
            torch.stack([module.losses(batch)[0].total for batch in window]).mean().backward()
            optimizer.step()
    return detector.trainable_state()


def test_accumulation_with_an_incomplete_last_window(fresh_detector):
    batches = make_batches(6)
    module = make_module(fresh_detector())
    trainer = fit(module, batches, accumulate_grad_batches=4, max_epochs=2)
    assert trainer.global_step == 4
    wanted = by_hand(fresh_detector(), [batches[:4], batches[4:]], 2)
    start = fresh_detector().trainable_state()
    for name, value in head_of(module).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-7)
        assert (value - start[name]).abs().max() > 1e-3


@pytest.mark.parametrize(("decay_bias", "wanted"), [(True, 0.1), (False, 0.0)])
def test_decay_of_the_bias(fresh_detector, decay_bias, wanted):
    module = make_module(fresh_detector(), optimizer={**OPTIMIZER, "decay_bias": decay_bias})
    groups = fit(module, make_batches(1)).optimizers[0].param_groups
    found = {tuple(p.shape): group["weight_decay"] for group in groups for p in group["params"]}
    assert found == {(96, 160): 0.1, (96,): wanted}


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


LR, MIN, FIRST = 1e-3, 1e-5, 1e-5  # FIRST: warm-up starts at a hundredth of the rate
T, W = 9, 3  # three epochs of 5 batches in windows of two: three updates each; one epoch of warm-up
WARM = [FIRST + (LR - FIRST) * k / W for k in range(W)]
RATES = {
    ("constant", 0): [LR] * T,
    ("constant", 1): WARM + [LR] * (T - W),
    ("cosine", 0): [MIN + (LR - MIN) * (1 + math.cos(math.pi * k / T)) / 2 for k in range(T)],
    ("cosine", 1): WARM + [MIN + (LR - MIN) * (1 + math.cos(math.pi * k / (T - W))) / 2 for k in range(T - W)],
}


@pytest.mark.parametrize(("name", "warmup"), RATES)
def test_rate_of_every_update(fresh_detector, name, warmup):
    rates = Rates()
    schedule = {"name": name, "warmup_epochs": warmup, "min_lr": MIN}
    module = make_module(fresh_detector(), schedule=schedule)
    fit(module, make_batches(5), rates, accumulate_grad_batches=2, max_epochs=3)
    assert rates.seen == pytest.approx(RATES[name, warmup], rel=1e-9)


# Ragged vocabularies


@pytest.mark.parametrize("compat", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_padding_changes_nothing(fresh_detector, loss, compat):
    """A batch is the mean over the rows of its items, each row weighing the same; padded captions count nowhere."""
    module = make_module(fresh_detector(), loss, distill={"name": "ce", "weight": 1.0}, compat=compat)
    items = [make_item(1, columns=4), make_item(2, columns=11, objects=3), make_item(3, columns=2)]
    terms, positives = module.losses(collate(items))
    terms.total.backward()
    gradient = module.detector.head.dense0.weight.grad.clone()
    assert gradient.isfinite().all()
    single = [module.losses(collate([item])) for item in items]
    n = torch.tensor([float(count) for _, count in single])
    m = 64 - n
    assert int(n.sum()) == positives

    def mean(values: list[Tensor], weights: Tensor) -> Tensor:
        return (torch.stack(values) * weights).sum() / weights.sum()

    class_ = mean([t.class_ for t, _ in single], n)
    background = mean([t.background for t, _ in single], m)
    distillation = mean([t.distillation for t, _ in single], n)
    for found, wanted in zip((terms.class_, terms.background, terms.distillation), (class_, background, distillation)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    module.zero_grad()
    (class_ + background + distillation).backward()
    torch.testing.assert_close(module.detector.head.dense0.weight.grad, gradient, rtol=1e-4, atol=1e-7)


# Checkpoints


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) in (dict,) and all(type(k) in (str, int) and plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(plain(v) for v in value)
    return value is None or isinstance(value, Tensor) or type(value) in (str, int, float, bool)


@pytest.fixture
def checkpoint(fresh_detector, tmp_path):
    module = make_module(fresh_detector(), schedule={"name": "cosine", "warmup_epochs": 1, "min_lr": 0.0})
    trainer = fit(module, make_batches(2), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", head_of(module)


def test_a_checkpoint_holds_the_layer_and_its_base(fresh_detector, checkpoint):
    path, head = checkpoint
    stored = torch.load(path, weights_only=True)
    assert set(stored["state_dict"]) == {PREFIX + name for name in TRAINABLE}
    assert stored["noctowl"] == {"base": "small owlv2, seed 0", "base_sha256": fresh_detector().content_hash()}
    assert path.stat().st_size < 300_000  # 3 x 15,456 numbers; the detector has 1.8 million
    unusual = {k: v for k, v in stored.items() if not plain(v)}
    assert not unusual
    module = make_module(fresh_detector(), schedule={"name": "cosine", "warmup_epochs": 1, "min_lr": 0.0})
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(make_batches(2), batch_size=None), ckpt_path=path)  # nothing left to do
    assert all(torch.equal(value, head[name]) for name, value in head_of(module).items())
    assert trainer.global_step == 4


def test_a_checkpoint_of_another_base_is_refused(fresh_detector, checkpoint):
    stored = torch.load(checkpoint[0], weights_only=True)
    other = make_module(fresh_detector(seed=1))
    before = head_of(other)
    with pytest.raises(ModelError, match=r"another base model.*small owlv2, seed 1 has"):
        other.on_load_checkpoint(stored)
    assert all(torch.equal(value, before[name]) for name, value in head_of(other).items())


@pytest.mark.parametrize("change", ["missing", "extra", "foreign"])
def test_a_checkpoint_with_other_keys_is_refused(fresh_detector, checkpoint, change):
    stored = torch.load(checkpoint[0], weights_only=True)
    words = r"exactly \['class_head.dense0.bias', 'class_head.dense0.weight'\] are allowed"
    if change == "missing":
        del stored["state_dict"][PREFIX + TRAINABLE[1]]
    elif change == "extra":
        stored["state_dict"][PREFIX + "box_head.dense0.weight"] = torch.zeros(1)
    else:
        del stored["noctowl"]
        words = "does not say which base"
    with pytest.raises(ModelError, match=words):
        make_module(fresh_detector()).on_load_checkpoint(stored)


# Precision


def test_bf16_mixed_is_near_fp32(fresh_detector):
    """The towers run in bf16, what follows in fp32: the first loss differs in the third digit."""

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen.append(float(trainer.callback_metrics["train/total_step"]))

    def run(precision: str) -> list[float]:
        items = [make_item(seed)._replace(tokens=None, patch_boxes=None) for seed in range(4)]
        pixels = torch.randn(4, 3, 96, 96, generator=draw(5))
        batch = collate([item._replace(pixel_values=image) for item, image in zip(items, pixels)])
        losses = Losses()
        module = make_module(fresh_detector())
        fit(module, [batch] * 3, losses, precision=precision)
        assert all(value.dtype == torch.float32 for value in head_of(module).values())
        return losses.seen

    exact, mixed = run("32-true"), run("bf16-mixed")
    assert mixed != exact
    assert mixed == pytest.approx(exact, rel=0.02)
