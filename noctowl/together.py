"""Several heads of one sweep on one reading of the data: each batch is read, and each image encoded, once for all.

The result of every head equals that of its own run: same batches in the same order, an optimiser and a schedule of its
own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

from noctowl.data.batch import Batch
from noctowl.errors import NoctowlError
from noctowl.module import NoctOWL


def prefix(index: int) -> str:
    """What the names of one head's figures begin with."""
    return f"head{index}/"


class Together(pl.LightningModule):
    """Trains heads whose detectors share their frozen parts (`OwlDetector.fork`).

    Args:
        heads: one module per job.
        accumulate: batches per optimiser step; optimisers are stepped here, not by Lightning.

    Attributes:
        updates: optimiser steps of each head so far.
        failed: error by index of the heads that could not go on; the others do.
    """

    def __init__(self, heads: Sequence[NoctOWL], *, accumulate: int):
        super().__init__()
        self.automatic_optimization = False
        self.heads = nn.ModuleList(heads)
        self.accumulate = accumulate
        self.failed: dict[int, NoctowlError] = {}
        self._schedules: list[Any] = []
        self.updates = 0
        for index, head in enumerate(heads):
            head.report = partial(self._report, index)  # type: ignore[method-assign]

    def _report(self, index: int, values: Mapping[str, Any], **options: Any) -> None:
        self.log_dict({prefix(index) + name: value for name, value in values.items()}, **options)

    def head(self, index: int) -> NoctOWL:
        """One of the modules."""
        head = self.heads[index]
        assert isinstance(head, NoctOWL)
        return head

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """The same batch for every head; a step of every optimiser where a window is full."""
        tokens, boxes, _ = self.head(0).features(batch)
        batch = replace(batch, pixel_values=None, tokens=tokens, patch_boxes=boxes)
        n_batches = int(self.trainer.num_training_batches)
        full = (batch_idx + 1) % self.accumulate == 0 or batch_idx + 1 == n_batches
        optimizers = self.optimizers(use_pl_optimizer=True)
        self.updates += full
        for index, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            if index not in self.failed:
                try:
                    self._step(index, optimizer, batch, batch_idx, n_batches, full=full)
                except NoctowlError as error:
                    self.failed[index] = error

    def _step(self, index: int, optimizer: Any, batch: Batch, batch_idx: int, n_batches: int, *, full: bool) -> None:
        head = self.head(index)
        loss: Tensor = head.scaled_loss(batch, batch_idx, accumulate=self.accumulate, n_batches=n_batches)
        self.manual_backward(loss / self.accumulate)
        if not full:
            return
        head.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if self._schedules[index] is not None:
            self._schedules[index].step_update(num_updates=self.updates)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimiser per head; the schedules are stepped with them."""
        epochs = int(self.trainer.max_epochs or 1)
        batches = int(self.trainer.estimated_stepping_batches) // epochs  # Lightning takes every batch for a step here
        updates = -(-batches // self.accumulate)
        made = [self.head(i).make_optimizer(epochs=epochs, updates_per_epoch=updates) for i in range(len(self.heads))]
        self._schedules = [schedule for _, schedule in made]
        return [optimizer for optimizer, _ in made]


class ForHead(pl.Callback):
    """Hands one head of several to a callback that knows a single one; nothing after that head has failed."""

    def __init__(self, callback: pl.Callback, index: int):
        self.callback, self.index = callback, index

    def _forward(self, hook: str, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        assert isinstance(module, Together)
        if self.index in module.failed:
            return
        try:
            getattr(self.callback, hook)(trainer, module.head(self.index), *rest)
        except NoctowlError as error:
            module.failed[self.index] = error

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forwarded."""
        self._forward("on_fit_start", trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forwarded."""
        self._forward("on_train_start", trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        """Forwarded."""
        self._forward("on_train_batch_end", trainer, pl_module, *rest)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forwarded."""
        self._forward("on_train_epoch_end", trainer, pl_module)


class SplitLogger(Logger):
    """Sends the figures of each head to that head's own loggers, and common ones (time, epoch) to all."""

    def __init__(self, loggers: Sequence[Sequence[Logger]]):
        super().__init__()
        self.loggers = loggers

    @property
    def name(self) -> str:
        """Lightning asks for one."""
        return "heads"

    @property
    def version(self) -> str:
        """Lightning asks for one."""
        return ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Each run folder has its own config.yaml."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Split by prefix."""
        common = {name: value for name, value in metrics.items() if not name.startswith("head")}
        for index, own in enumerate(self.loggers):
            mine = {k.removeprefix(prefix(index)): v for k, v in metrics.items() if k.startswith(prefix(index))}
            for logger in own:
                logger.log_metrics({**common, **mine}, step)

    def save(self) -> None:
        """Forwarded."""
        for logger in (logger for own in self.loggers for logger in own):
            logger.save()

    def finalize(self, status: str) -> None:
        """Forwarded."""
        for logger in (logger for own in self.loggers for logger in own):
            logger.finalize(status)
