"""last.ckpt of a run, so that it survives being stopped; and the check that all processes run the same thing.

A run stopped by SIGTERM writes last.ckpt after the optimiser step that it is in, and ends with exit code 143. It is
continued at the very next batch. A run that is killed is continued from the end of its last finished epoch.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from torch import distributed

from noctowl.errors import ConfigError

STOPPED = 128 + signal.SIGTERM  # 143, as shells have it


def stop(*_: Any) -> None:
    """Handler of SIGTERM outside of training: files half written are taken away, then exit code 143."""
    sys.exit(STOPPED)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the program by `stop`; in the main thread, which is the only one that can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


class Checkpoint(pl.Callback):
    """Writes checkpoints/last.ckpt; must be the last of the callbacks, since it keeps the state of the others.

    The file is replaced whole. What an epoch leaves is put in place once the epoch's figures are in metrics.csv: a
    run that is killed in between repeats the epoch, and loses nothing.
    """

    def __init__(self, path: Path):
        self.path = path
        self._next = path.with_name(f".{path.name}.next")
        self._steps = 0
        self._asked = self._leaving = False
        self._former: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on SIGTERM waits for a step to end."""
        self._steps = trainer.global_step
        process = os.getpid()

        def ask(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:
                stop()  # a worker of the loader, which has inherited this
            self._asked = True

        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, ask)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Keep the state if a stop was asked of any process, and the optimiser has just made a step."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if self._stopping(trainer):
            self._write(trainer)
            self._leaving = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Stop once the step's figures are in metrics.csv too."""
        if self._leaving:
            self._commit(trainer)
            stop()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last epoch's figures are written: its state counts."""
        self._commit(trainer)
        if self._leaving:
            stop()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After validation and selection."""
        self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The state of the last epoch counts; and what was asked in the meantime is done."""
        self._commit(trainer)
        self._release()
        if self._leaving or self._stopping(trainer):
            stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Signals are handled as before."""
        self._release()

    def _stopping(self, trainer: pl.Trainer) -> bool:
        if trainer.world_size == 1:
            return self._asked
        return bool(trainer.strategy.reduce_boolean_decision(self._asked, all=False))

    def _write(self, trainer: pl.Trainer) -> None:
        self._next.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(self._next)  # every process calls this, the first one writes

    def _commit(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and self._next.is_file():
            self._next.replace(self.path)

    def _release(self) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)
            self._former = None


class SameEverywhere(pl.Callback):
    """All processes were started with the same configuration, or none trains."""

    def __init__(self, fingerprint: str):
        self.fingerprint = fingerprint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raises ConfigError in every process if they differ, so that none waits for another."""
        if trainer.world_size == 1:
            return
        found: list[Any] = [None] * trainer.world_size
        distributed.all_gather_object(found, self.fingerprint)
        differing = [rank for rank, other in enumerate(found) if other != found[0]]
        if differing:
            raise ConfigError(
                f"processes {differing} have another configuration than process 0 (hashes {sorted(set(found))}): "
                "start all of them with the same command, without values that are drawn anew in each"
            )
