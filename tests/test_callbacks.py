"""Around the steps: the averaged head, the choice of an epoch, the watched loader."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from noctowl.callbacks import DataWait, HeadEma, Selection
from noctowl.export import load_head, read_head
from tests.test_module import fit, head_of, make_batches, make_module


class Weights(pl.Callback):
    """The trained layer after every optimiser step, and after every epoch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.epochs: list[dict[str, torch.Tensor]] = []
        self._seen = 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self.steps.append(head_of(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(head_of(pl_module))


def average_of(start, steps, decay):
    average = {name: value.clone() for name, value in start.items()}
    for weights in steps:
        average = {name: decay * value + (1 - decay) * weights[name] for name, value in average.items()}
    return average


def test_average_of_the_head(fresh_detector):
    """One update per optimiser step: five batches in windows of two are three steps an epoch."""
    module, ema, weights = make_module(fresh_detector()), HeadEma(0.9), Weights()
    start = head_of(module)
    fit(module, make_batches(5), ema, weights, accumulate_grad_batches=2, max_epochs=2)
    assert len(weights.steps) == 6
    wanted = average_of(start, weights.steps, 0.9)
    trained = head_of(module)
    with ema.applied(module):
        for name, value in head_of(module).items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-7)
            assert not torch.equal(value, trained[name])
    assert all(torch.equal(value, trained[name]) for name, value in head_of(module).items())


def test_the_average_survives_a_checkpoint(fresh_detector, tmp_path):
    batches = make_batches(3)
    module, ema, weights = make_module(fresh_detector()), HeadEma(0.5), Weights()
    start = head_of(module)
    trainer = fit(module, batches, ema, weights, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    again, more, later = make_module(fresh_detector()), HeadEma(0.5), Weights()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    resumed = pl.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, callbacks=[more, later], **quiet)
    resumed.fit(again, DataLoader(batches, batch_size=None), ckpt_path=tmp_path / "last.ckpt")
    steps = [step for step in later.steps if step is not None]
    assert resumed.global_step == 6
    wanted = average_of(start, weights.steps + steps[-3:], 0.5)
    with more.applied(again):
        for name, value in head_of(again).items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-7)


def select(fresh_detector, path, figures, *, epochs=4, ema=None, **options):
    """Runs `epochs` epochs whose validation gives `figures` one after the other."""
    series, weights, module = iter(figures), Weights(), make_module(fresh_detector())
    selection = Selection(evaluate=lambda: {"map": next(series)}, path=path, ema=ema, **options)
    fit(module, make_batches(2), *([ema] if ema else []), selection, weights, max_epochs=epochs)
    return selection, weights, module


def kept_head(path, fresh_detector):
    detector = fresh_detector()
    load_head(detector, path)
    return detector.trainable_state()


def test_the_best_epoch_is_kept(fresh_detector, tmp_path):
    path = tmp_path / "checkpoints" / "best.safetensors"
    selection, weights, _ = select(fresh_detector, path, [0.1, 0.3, 0.3, 0.2])
    assert selection.best_epoch == 1  # the earlier one of two equal epochs
    assert [entry["map"] for entry in selection.history] == [0.1, 0.3, 0.3, 0.2]
    assert [entry["epoch"] for entry in selection.history] == [0, 1, 2, 3]
    found = kept_head(path, fresh_detector)
    assert all(torch.equal(value, weights.epochs[1][name]) for name, value in found.items())
    _, metadata = read_head(path)
    assert (metadata["epoch"], metadata["map"]) == ("1", "0.3")


def test_every_few_epochs_and_the_last(fresh_detector, tmp_path):
    selection, _, _ = select(fresh_detector, tmp_path / "best", [0.2, 0.1, 0.4], epochs=5, every_n_epochs=2)
    assert [entry["epoch"] for entry in selection.history] == [1, 3, 4]
    assert selection.best_epoch == 4


def test_never_keeps_the_last(fresh_detector, tmp_path):
    selection, weights, _ = select(fresh_detector, tmp_path / "best", [], epochs=2, every_n_epochs=0)
    assert selection.history == []
    assert selection.best_epoch == 1
    found = kept_head(tmp_path / "best", fresh_detector)
    assert all(torch.equal(value, weights.epochs[1][name]) for name, value in found.items())


def test_published_start_keeps_no_epoch_without_a_hit(fresh_detector, tmp_path):
    selection, _, _ = select(fresh_detector, tmp_path / "best", [0.0, 0.0], epochs=2, start=0.0)
    assert selection.best_epoch is None
    assert not (tmp_path / "best").exists()
    selection, _, _ = select(fresh_detector, tmp_path / "best", [0.0, 0.0], epochs=2)
    assert selection.best_epoch == 0


def test_the_average_is_what_is_kept(fresh_detector, tmp_path):
    ema = HeadEma(0.9)
    _, weights, module = select(fresh_detector, tmp_path / "best", [0.1, 0.2], epochs=2, ema=ema)
    found = kept_head(tmp_path / "best", fresh_detector)
    wanted = average_of(fresh_detector().trainable_state(), weights.steps, 0.9)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-7)
    assert all(torch.equal(value, weights.steps[-1][name]) for name, value in head_of(module).items())


def test_selection_state_goes_into_a_checkpoint(fresh_detector, tmp_path):
    selection, _, _ = select(fresh_detector, tmp_path / "best", [0.1, 0.3], epochs=2)
    other = Selection(evaluate=dict, path=tmp_path / "best")
    other.load_state_dict(selection.state_dict())
    assert (other.best_epoch, other.history) == (1, selection.history)


def test_waiting_for_data_is_measured(fresh_detector, monkeypatch):
    """The clock runs from the end of a batch to the start of the next."""
    clock = iter([0.0, 10.0, 10.5, 11.0, 13.0, 14.0])  # made, epoch, start, end, start, end
    monkeypatch.setattr("noctowl.callbacks.time.perf_counter", lambda: next(clock))
    trainer = fit(make_module(fresh_detector()), make_batches(2), DataWait())
    assert float(trainer.callback_metrics["train/data_wait_epoch"]) == pytest.approx((0.5 + 2.0) / 2)
