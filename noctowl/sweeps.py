"""sweep.json: the jobs of a sweep, where each ran and how it ended, so that a sweep survives its jobs and itself."""

import json
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from noctowl.errors import DataError
from noctowl.plots import Point, tradeoff
from noctowl.runfolder import make_folder, read_results, write_json
from noctowl.selection import COARSE, FINE

FILE = "sweep.json"


class Sweep:
    """The record of a sweep; every change is written at once, whole or not at all.

    Args:
        folder: <output_dir>/<name>/sweep-<time+unique>.
        jobs: {"overrides", "status": pending | running | finished | failed, "folder", "error"} each.
    """

    def __init__(self, folder: Path, jobs: list[dict[str, Any]]):
        self.folder, self.jobs = folder, jobs

    @classmethod
    def begin(cls, parent: Path, jobs: Sequence[Sequence[str]]) -> "Sweep":
        """A new sweep below `parent`, in a folder of its own."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        folder = parent / f"sweep-{stamp}-{secrets.token_hex(3)}"
        make_folder(folder, "output_dir")
        entries = [{"overrides": list(job), "status": "pending", "folder": None, "error": None} for job in jobs]
        sweep = cls(folder, entries)
        sweep.save()
        return sweep

    @classmethod
    def open(cls, folder: Path) -> "Sweep":
        """An earlier sweep. Raises DataError if the folder holds none."""
        path = folder / FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            jobs = [
                {
                    "overrides": [str(word) for word in job["overrides"]],
                    "status": str(job["status"]),
                    "folder": job["folder"],
                    "error": job["error"],
                }
                for job in stored["jobs"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"resume_sweep: {path} is missing or damaged ({error}). Pass the folder that the sweep printed."
            ) from error
        return cls(folder, jobs)

    def save(self) -> None:
        """Write sweep.json."""
        write_json(self.folder / FILE, {"version": 1, "jobs": self.jobs})

    def mark(self, overrides: Sequence[str], status: str, *, folder: Path | None = None, error: str = "") -> None:
        """Note what became of the job with these overrides."""
        job = next(job for job in self.jobs if job["overrides"] == list(overrides))
        job["status"], job["error"] = status, error or None
        if folder is not None:
            job["folder"] = str(folder)
        self.save()

    def pending(self) -> list[list[str]]:
        """Overrides of the jobs that have not finished; those that failed or were stopped are tried again."""
        return [job["overrides"] for job in self.jobs if job["status"] != "finished"]

    def plot(self) -> Path | None:
        """tradeoff.png over all finished jobs: validation figures of their selected heads; None without coarse ones."""
        points: list[Point] = []
        common = set.intersection(*(set(job["overrides"]) for job in self.jobs)) if self.jobs else set()
        for job in self.jobs:
            if job["status"] != "finished":
                continue
            chosen = read_results(Path(job["folder"]) / "results.json")["counts"]["selection"]
            entries = {entry["epoch"]: entry for entry in chosen["history"]}
            best, before = entries.get(chosen["epoch"], {}), entries.get(-1, {})
            if COARSE in before and not points:
                points.append(Point("pretrained", [before[FINE]], [before[COARSE]]))
            if COARSE in best:
                label = " ".join(word for word in job["overrides"] if word not in common)
                points.append(Point(label or "job", [best[FINE]], [best[COARSE]]))
        if len(points) < 2:
            return None
        path = self.folder / "tradeoff.png"
        return tradeoff(points, path, x_label="validation mAP", y_label="coarse validation AP", start="pretrained")
