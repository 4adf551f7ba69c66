"""What one pass over the images gave, as one thing that can be saved, loaded and merged between processes."""

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noctowl.errors import DataError
from noctowl.eval.ap import Detections
from noctowl.eval.predictions import Predictions, merge
from noctowl.runfolder import atomic, write_json

COARSE_FILE, LENGTHS_FILE = "coarse.npz", "token_lengths.npz"


@dataclass
class Outcome:
    """What one pass gave: predictions of each benchmark, coarse detections if asked for, how often the towers ran."""

    predictions: dict[str, Predictions]
    coarse: Detections | None
    counters: dict[str, int]
    coarse_settings: dict[str, Any] = field(default_factory=dict)  # JSON: protocol and file of the coarse detections

    def save(self, folder: Path) -> None:
        """One file per benchmark, coarse.npz and counters.json."""
        for name, part in self.predictions.items():
            part.save(folder / f"{name}.npz")
        if self.coarse is not None:
            with atomic(folder / COARSE_FILE) as file:
                np.savez(file, **vars(self.coarse), settings=np.array(json.dumps(self.coarse_settings)))
        write_json(folder / "counters.json", self.counters)

    @classmethod
    def load(cls, folder: Path) -> "Outcome":
        """What `save` wrote. Raises DataError for a folder without predictions or with damaged ones."""
        files = sorted(p for p in folder.glob("*.npz") if p.name not in (COARSE_FILE, LENGTHS_FILE))
        if not files and not (folder / COARSE_FILE).is_file():
            raise DataError(f"{folder} holds no predictions (*.npz). Pass a run folder, or its predictions/.")
        coarse, settings = load_coarse(folder) if (folder / COARSE_FILE).is_file() else (None, {})
        path = folder / "counters.json"
        try:
            counters = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise DataError(f"{path}: not readable as JSON ({error}). Predict again.") from error
        return cls({path.stem: Predictions.load(path) for path in files}, coarse, counters, settings)

    @classmethod
    def merge(cls, parts: Sequence["Outcome"]) -> "Outcome":
        """The parts of several processes, duplicates removed by key."""
        coarse = [part.coarse for part in parts if part.coarse is not None]
        return cls(
            {name: merge([part.predictions[name] for part in parts]) for name in parts[0].predictions},
            Detections.concatenate(coarse) if coarse else None,
            {key: sum(part.counters[key] for part in parts) for key in parts[0].counters},
            parts[0].coarse_settings,
        )


def load_coarse(folder: Path) -> tuple[Detections, dict[str, Any]]:
    """Coarse detections of `Outcome.save` and their settings. Raises DataError where they are absent or damaged."""
    arrays = _load(folder / COARSE_FILE)
    try:
        coarse = Detections(*(arrays[name] for name in ("image", "label", "boxes", "scores")))
        return coarse, json.loads(str(arrays["settings"]))
    except (KeyError, ValueError) as error:
        raise DataError(f"{folder / COARSE_FILE}: no coarse detections ({error}). Predict again.") from error


def save_lengths(folder: Path, lengths: Mapping[str, np.ndarray | None]) -> None:
    """Token counts beside the predictions, so that these can be scored again without the model's tokenizer."""
    with atomic(folder / LENGTHS_FILE) as file:
        np.savez(file, **{name: value for name, value in lengths.items() if value is not None})  # type: ignore[arg-type]


def load_lengths(folder: Path) -> dict[str, np.ndarray]:
    """What `save_lengths` wrote. Raises DataError if it is absent."""
    path = folder / LENGTHS_FILE
    if not path.is_file():
        raise DataError(f"{path} is missing: predictions are scored with the token counts written beside them")
    return _load(path)


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated, or no file of arrays ({error}). Predict again.") from error
