"""One training run on plain arguments: data to items, module, trainer, best head back in the detector.

`run.py` calls this with what the configuration says; nothing here knows configuration files.
"""

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.loggers import Logger

from noctowl.callbacks import DataWait
from noctowl.checkpoint import Checkpoint
from noctowl.data.datamodule import DataModule, TrainingSet
from noctowl.data.fgovd import Short, processable, read_fgovd
from noctowl.errors import DataError
from noctowl.features import ImageSet, TextBank
from noctowl.model import OwlDetector
from noctowl.module import NoctOWL
from noctowl.text import class_prompt


@dataclass
class TrainingData:
    """Items to train on and what was left out of them."""

    dataset: TrainingSet
    counts: dict[str, int]


def coarse_names(source: str, annotations: Path) -> list[str]:
    """Names for distillation: "lvis_v1", an LVIS-format json (categories by id) or a text file with one name a line.

    Relative paths are tried below the annotations' folder first. Raises DataError where nothing is found.
    """
    if source == "lvis_v1":
        text = resources.files("noctowl").joinpath("data/lvis_v1_names.txt").read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line and not line.startswith("#")]
    path = next((p for p in (annotations / source, Path(source)) if p.is_file()), None)
    if path is None:
        raise DataError(
            f"data.coarse_names: {source!r} is neither lvis_v1 nor a file (looked for {annotations / source}, {source})"
        )
    if path.suffix == ".json":
        try:
            categories = json.loads(path.read_text(encoding="utf-8"))["categories"]
            names = [str(c["name"]) for c in sorted(categories, key=lambda c: c["id"])]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not an LVIS-format file ({type(error).__name__}: {error})") from error
    else:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not names:
        raise DataError(f"{path}: holds no names")
    return names


def training_data(
    file: Path,
    *,
    detector: OwlDetector,
    images: ImageSet,
    bank: TextBank,
    n_negatives: int,
    short_vocabularies: Short,
) -> TrainingData:
    """The vocabularies of a file that can be trained on: token rule over positive and negatives, enough negatives.

    Raises DataError if none is left.
    """
    annotations = read_fgovd(file)
    rows = bank.caption_rows(annotations)
    lengths = bank.lengths[rows] if bank.policy == "drop" else np.zeros(len(rows), np.int64)
    kept = processable(annotations, lengths, n_negatives, detector.text_limit, short_vocabularies)
    counts = {
        **annotations.counts,
        "vocabularies": len(annotations),
        "vocabularies_trained": int(kept.sum()),
        "objects_trained": int(kept[annotations.object_vocab].sum()),
        "captions_over_limit": int((bank.lengths[rows] > detector.text_limit).sum()),
    }
    if not kept.any():
        raise DataError(
            f"{file}: none of its {len(annotations)} vocabularies can be trained on. Longest negative list: "
            f"{int(annotations.n_negatives.max())}, asked: data.n_negatives={n_negatives}; captions over "
            f"{detector.text_limit} tokens: {counts['captions_over_limit']} of {len(rows)} "
            f"(data.token_policy={bank.policy}). Lower n_negatives, or set data.short_vocabularies=keep or "
            "data.token_policy=truncate."
        )
    used = np.unique(annotations.vocab_image[kept])
    image_rows = np.full(len(annotations.image_ids), -1, np.int64)
    image_rows[used] = images.add(annotations.image_files.take(used), annotations.image_sizes[used])
    dataset = TrainingSet(
        annotations, kept, n_negatives, images, image_rows, bank.embeddings, rows, detector.frame, stored=None
    )
    return TrainingData(dataset, counts)


def coarse_queries(bank: TextBank, names: list[str]) -> torch.Tensor:
    """Unit embeddings [K, D] of the prompts of coarse names."""
    rows = bank.prompt_rows([class_prompt(name) for name in names])  # before `embeddings` is read, which it adds to
    return bank.embeddings[torch.from_numpy(rows)]


def fit(
    module: pl.LightningModule,
    data: TrainingData,
    *,
    folder: Path,
    loggers: list[Logger],
    trainer: Mapping[str, Any],
    seed: int,
    callbacks: Sequence[pl.Callback],
    checkpoint: Path | None = None,
) -> pl.Trainer:
    """Train one head (`NoctOWL`) or several at once (`Together`, which accumulates by itself and keeps no last.ckpt).

    Args:
        trainer: accelerator, devices, num_nodes, strategy, precision, batch_size, effective_batch_size, max_epochs,
            num_workers, log_every_n_steps, limit_train_batches, progress.
        checkpoint: continue from here.
    """
    single = isinstance(module, NoctOWL)
    every: list[pl.Callback] = [DataWait(), *callbacks]
    every += [Checkpoint(folder / "checkpoints" / "last.ckpt")] if single else []
    every += [RichProgressBar()] if trainer["progress"] else []
    lightning = pl.Trainer(
        accelerator=trainer["accelerator"],
        devices=trainer["devices"],
        num_nodes=trainer["num_nodes"],
        strategy=trainer["strategy"],
        precision=trainer["precision"],
        max_epochs=trainer["max_epochs"],
        accumulate_grad_batches=accumulation(trainer) if single else 1,
        log_every_n_steps=trainer["log_every_n_steps"],
        limit_train_batches=trainer["limit_train_batches"],
        enable_progress_bar=trainer["progress"],
        enable_checkpointing=False,  # `Checkpoint` is the project's own
        enable_model_summary=False,
        use_distributed_sampler=False,  # `Order` shares the data out
        logger=loggers,
        callbacks=every,
        default_root_dir=str(folder),
    )
    datamodule = DataModule(
        data.dataset, batch_size=trainer["batch_size"], num_workers=trainer["num_workers"], seed=seed
    )
    with _interruptible():
        lightning.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
    return lightning


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C stays a KeyboardInterrupt: Lightning makes it an exit with code 1, and ignores the signal from then on."""
    former = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, former)
        raise KeyboardInterrupt(*error.__context__.args) from None


def accumulation(trainer: Mapping[str, Any]) -> int:
    """Batches per optimiser step of each process."""
    processes = trainer["devices"] * trainer["num_nodes"]
    return int(trainer["effective_batch_size"] // (trainer["batch_size"] * processes))
