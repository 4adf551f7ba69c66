"""Where figures go: metrics.csv always; Weights & Biases or TensorBoard beside it where asked for."""

import csv
import io
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from PIL import Image
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from noctowl.errors import ConfigError
from noctowl.runfolder import process_rank, write_text

log = logging.getLogger(__name__)
WANDB_ID = "wandb_id.txt"  # in the run folder: a continued run writes into the same W&B run
FIRST = ("epoch", "step")


class MetricsCsv(Logger):
    """metrics.csv: a row per call, appended at once; a new column rewrites the file, whole or not at all.

    Args:
        path: the file.
        rows: those that a continued run keeps of it; None for a new run.
    """

    def __init__(self, path: Path, rows: Sequence[Mapping[str, str]] | None = None):
        super().__init__()
        self.path = path
        self.rows = [dict(row) for row in rows or ()]
        self.columns: list[str] = []
        if self.rows and process_rank() == 0:
            self._rewrite()

    @property
    def name(self) -> str:
        """Lightning asks for one."""
        return "metrics"

    @property
    def version(self) -> str:
        """Lightning asks for one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The run folder has its own config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row."""
        row = {name: str(float(value)) if name != "epoch" else str(int(value)) for name, value in metrics.items()}
        row["step"] = "" if step is None else str(step)
        self.rows.append(row)
        if set(row) <= set(self.columns):
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(row)
        else:
            self._rewrite()

    def _rewrite(self) -> None:
        names = {name for row in self.rows for name in row}
        self.columns = [*FIRST, *sorted(names - set(FIRST))]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self.path, text.getvalue())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv without their empty cells; a last row that was cut off by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [{k: v for k, v in row.items() if v} for row in csv.DictReader(io.StringIO(complete, newline=""))]


def make_loggers(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    name: str,
    config: Mapping[str, Any],
    kept: Sequence[Mapping[str, str]] | None = None,
    group: str | None = None,
) -> list[Logger]:
    """metrics.csv in the run folder, and the logger that was asked for.

    Args:
        settings: name ("csv", "wandb", "tensorboard") and, for W&B, project, entity, group, tags.
        name: readable and unique.
        config: of the run; becomes flat in W&B.
        kept: rows of metrics.csv that a continued run keeps.
        group: of the sweep that the run belongs to; where W&B's group is not given.
    """
    loggers: list[Logger] = [MetricsCsv(folder / "metrics.csv", kept)]
    if settings["name"] == "wandb":
        loggers.append(_wandb(folder, settings, name=name, config=config, group=group))
    if settings["name"] == "tensorboard":
        try:
            loggers.append(TensorBoardLogger(str(folder), name="", version="tensorboard"))
        except ModuleNotFoundError as error:
            raise ConfigError("logger=tensorboard needs a package: pip install 'noctowl[tensorboard]'") from error
    return loggers


def _wandb(
    folder: Path, settings: Mapping[str, Any], *, name: str, config: Mapping[str, Any], group: str | None
) -> WandbLogger:
    reason = _why_offline(os.environ)
    offline = reason is not None
    if offline:
        log.warning("%s: W&B writes offline; upload later with `wandb sync %s/wandb/offline-*`", reason, folder)
    file = folder / WANDB_ID
    known = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    logger = WandbLogger(
        project=settings["project"],
        entity=settings["entity"],
        group=settings["group"] or group or str(config["name"]),
        tags=settings["tags"],
        job_type="train",
        name=name,
        id=known,
        resume="allow",
        reinit="create_new",  # heads that train side by side have a run each
        save_dir=str(folder),
        mode="offline" if offline else None,  # Lightning's own `offline` stays behind in the environment
        config=flat(config),
    )
    define_metrics(logger)
    if known is None and process_rank() == 0:
        write_text(file, f"{logger.experiment.id}\n")
    return logger


def define_metrics(logger: WandbLogger) -> None:
    """Best values go into the summary; nothing is ever logged at a step of its own, the axis is Lightning's counter."""
    run = logger.experiment  # WandbLogger itself makes trainer/global_step the axis of everything
    for pattern, best in (("val/*", "max"), ("val/rank_*", "min"), ("test/*", "last")):
        run.define_metric(pattern, step_metric="trainer/global_step", summary=best)


def flat(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{start}{key}.") if isinstance(value, Mapping) else {f"{start}{key}": value})
    return found


def finish_wandb(loggers: Sequence[Logger], *, failed: bool = False) -> None:
    """Ends the Weights & Biases run of a job, if it has one that is open."""
    for logger in _of_wandb(loggers):
        logger.experiment.finish(exit_code=1 if failed else 0)


def log_pictures(
    loggers: Sequence[Logger], name: str, pictures: Sequence[Image.Image], captions: Sequence[str]
) -> None:
    """Pictures (RGB) as JPEGs under one name in the W&B run, where there is one; W&B wants them of one size."""
    size = max(p.width for p in pictures), max(p.height for p in pictures)
    padded = [Image.new("RGB", size, "white") for _ in pictures]
    for sheet, picture in zip(padded, pictures):
        sheet.paste(picture, (0, 0))
    for logger in _of_wandb(loggers):
        logger.log_image(name, padded, caption=list(captions), file_type=["jpg"] * len(padded))


def has_wandb(loggers: Sequence[Logger]) -> bool:
    """Whether `log_pictures` has anywhere to log to."""
    return bool(_of_wandb(loggers))


def _of_wandb(loggers: Sequence[Logger]) -> list[WandbLogger]:
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]


def _why_offline(environment: Mapping[str, str]) -> str | None:
    """Why W&B cannot be reached: it is told so, there is no key, or its host does not answer; None where it can be."""
    if environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={environment['WANDB_MODE']}"
    if not environment.get("WANDB_API_KEY"):
        return "no WANDB_API_KEY"
    host = urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=3).close()
    except OSError as error:
        return f"{host.hostname} does not answer ({error})"
    return None
