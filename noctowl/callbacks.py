"""What happens around the steps of training: choosing a checkpoint, averaging the head, watching the loader."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from timm.utils import ModelEmaV3

from noctowl.export import save_head
from noctowl.module import NoctOWL
from noctowl.selection import COARSE, FINE, pick

log = logging.getLogger(__name__)


class HeadEma(pl.Callback):
    """Exponential moving average of the trainable layer (timm); what is evaluated and kept is the average."""

    def __init__(self, decay: float):
        self.decay = decay
        self.average: ModelEmaV3 | None = None
        self._restored: dict[str, Any] = {}
        self._updates = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights that training starts from, or from what a checkpoint held."""
        assert isinstance(pl_module, NoctOWL)
        layer = pl_module.detector.head.dense0
        self.average = ModelEmaV3(layer, decay=self.decay, device=layer.weight.device)
        if self._restored:
            self.average.module.load_state_dict(self._restored)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Steps before a checkpoint are counted from here on only, after `on_fit_start`."""
        self._updates = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """One update per optimiser step, not per accumulated batch."""
        assert isinstance(pl_module, NoctOWL)
        assert self.average is not None
        if trainer.global_step > self._updates:
            self._updates = trainer.global_step
            self.average.update(pl_module.detector.head.dense0)

    @contextmanager
    def applied(self, pl_module: NoctOWL) -> Iterator[None]:
        """The average in place of the trained weights."""
        assert self.average is not None
        layer = pl_module.detector.head.dense0
        trained = {name: value.clone() for name, value in layer.state_dict().items()}
        layer.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            layer.load_state_dict(trained)

    def state_dict(self) -> dict[str, Any]:
        """The average, for resumed runs."""
        return {} if self.average is None else dict(self.average.module.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse; taken up when training starts."""
        self._restored = dict(state_dict)


class Selection(pl.Callback):
    """Evaluates the head every few epochs and keeps the best one as checkpoints/best.safetensors.

    Args:
        evaluate: gives the validation figures of the module as it stands; must be called by all processes.
        path: where the best head goes; the figures that it was chosen by are in the file's metadata.
        rule, max_coarse_loss: see `noctowl.selection.pick`.
        every_n_epochs: 0 = never: the last epoch is kept.
        before_training: evaluate the pretrained head too, as epoch -1; it is a reference, not a candidate.
        start: what the first epoch has to beat. The published code starts at 0, so that an epoch with a validation mAP
            of 0 is never kept and a run of such epochs keeps nothing; here this is -inf unless compat=published.
        ema: evaluate and keep its average.
        loggers: of the run, metrics.csv first: that gets a row of epoch -1. The others, which keep the best of what is
            called val/…, get the pretrained head's figures as pretrained/….
    """

    def __init__(
        self,
        *,
        evaluate: Callable[[], dict[str, float]],
        path: Path,
        rule: str = "published",
        max_coarse_loss: float = 0.0,
        every_n_epochs: int = 1,
        before_training: bool = False,
        start: float = -float("inf"),
        ema: HeadEma | None = None,
        loggers: Sequence[Logger] = (),
    ):
        self.loggers = loggers
        self.evaluate, self.path, self.rule, self.max_coarse_loss = evaluate, path, rule, max_coarse_loss
        self.every_n_epochs, self.before_training, self.start, self.ema = every_n_epochs, before_training, start, ema
        self.best_epoch: int | None = None
        self.history: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The pretrained head's figures, unless the run is continued."""
        if self.before_training and self.every_n_epochs and not self.history:
            figures = self.evaluate()
            self.history.append({"epoch": -1, **figures})
            for i, logger in enumerate(self.loggers):
                names = {f"{'pretrained' if i else 'val'}/{name}": value for name, value in figures.items()}
                logger.log_metrics(names if i else {"epoch": -1, **names}, step=0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate where it is due; keep the head where it is better than all before."""
        assert isinstance(pl_module, NoctOWL)
        epoch = trainer.current_epoch
        if self.ema is None:
            self._step(trainer, pl_module, epoch)
        else:
            with self.ema.applied(pl_module):
                self._step(trainer, pl_module, epoch)

    def _step(self, trainer: pl.Trainer, module: NoctOWL, epoch: int) -> None:
        last = epoch + 1 == trainer.max_epochs
        if not self.every_n_epochs:
            if last:
                self._keep(trainer, module, epoch, {})
            return
        if (epoch + 1) % self.every_n_epochs and not last:
            return
        figures = self.evaluate()
        self.history.append({"epoch": epoch, **figures})
        module.report({f"val/{k}": v for k, v in figures.items()}, on_epoch=True, batch_size=1, sync_dist=True)
        best = pick(self.history, rule=self.rule, max_coarse_loss=self.max_coarse_loss, start=self.start)
        if best == len(self.history) - 1:
            self._keep(trainer, module, epoch, figures)

    def _keep(self, trainer: pl.Trainer, module: NoctOWL, epoch: int, figures: dict[str, float]) -> None:
        self.best_epoch = epoch
        if trainer.is_global_zero:
            facts = {"epoch": str(epoch), "rule": self.rule if figures else "last epoch"}
            facts |= {name: repr(figures[name]) for name in (FINE, COARSE) if name in figures}
            before = next((entry for entry in self.history if entry["epoch"] == -1), {})
            facts |= {f"pretrained_{name}": repr(before[name]) for name in (FINE, COARSE) if name in before}
            save_head(module.detector, self.path, facts)

    def facts(self) -> dict[str, Any]:
        """For results.json; says so loudly where no epoch kept as much coarse knowledge as was asked for."""
        chosen = next((entry for entry in self.history if entry["epoch"] == self.best_epoch), {})
        before = next((entry for entry in self.history if entry["epoch"] == -1), {})
        facts: dict[str, Any] = {"epoch": self.best_epoch, "rule": self.rule, "history": self.history}
        if self.rule == "tradeoff" and chosen:
            loss = before[COARSE] - chosen[COARSE]
            facts |= {"max_coarse_loss": self.max_coarse_loss, "coarse_loss": loss}
            if loss > self.max_coarse_loss:
                log.warning(
                    "no epoch lost at most %.3f coarse AP (selection.max_coarse_loss); epoch %s is kept, which lost "
                    "least: %.3f. Consider more distillation, or a lower rate.",
                    self.max_coarse_loss,
                    self.best_epoch,
                    loss,
                )
        return facts

    def state_dict(self) -> dict[str, Any]:
        """What was found so far, for continued runs."""
        return {"best_epoch": self.best_epoch, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse."""
        self.best_epoch, self.history = state_dict["best_epoch"], state_dict["history"]


class DataWait(pl.Callback):
    """Logs the seconds that a step waits for its batch: the sign of too few workers or a slow disk."""

    def __init__(self) -> None:
        self._ready = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock of the first batch."""
        self._ready = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The batch has come."""
        waited = torch.tensor(time.perf_counter() - self._ready)
        pl_module.log("train/data_wait", waited, on_step=True, on_epoch=True, batch_size=1, sync_dist=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The next one is awaited from here."""
        self._ready = time.perf_counter()
