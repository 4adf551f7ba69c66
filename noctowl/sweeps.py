"""sweep.json: the jobs of a sweep, where each ran and how it ended, so that a sweep survives its jobs and itself."""

import json
import secrets
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from noctowl.errors import DataError, NoctowlError
from noctowl.plots import Point, tradeoff
from noctowl.runfolder import make_folder, read_results, write_json
from noctowl.selection import COARSE, FINE

FILE = "sweep.json"


def brief(error: BaseException) -> str:
    """An error in a line or two, for the screen."""
    return str(error) if isinstance(error, NoctowlError) else f"{type(error).__name__}: {error}"


def told(error: BaseException | None) -> str:
    """An error for sweep.json: its message, or the whole traceback of one that was not foreseen."""
    if error is None or isinstance(error, NoctowlError):
        return str(error or "")
    return "".join(traceback.format_exception(error))


def part(folder: Path, number: int) -> Path:
    """Where a job that a launcher has put elsewhere keeps its part of the record."""
    return folder / f"job{number}.json"


def _job(stored: Any) -> dict[str, Any]:
    return {
        "overrides": [str(word) for word in stored["overrides"]],
        "status": str(stored["status"]),
        "folder": stored["folder"],
        "error": stored["error"],
    }


class Sweep:
    """The record of a sweep; every change is written at once, whole or not at all.

    Args:
        folder: <output_dir>/<name>/sweep-<time+unique>.
        jobs: {"overrides", "status": pending | running | finished | failed, "folder", "error"} each.
        number: of the one job that this process runs, where a launcher has spread them: its part of the record is a
            file of its own, so that no process writes what another one knows better.
    """

    def __init__(self, folder: Path, jobs: list[dict[str, Any]], number: int | None = None):
        self.folder, self.jobs, self.number = folder, jobs, number

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
    def open(cls, folder: Path, number: int | None = None) -> "Sweep":
        """An earlier sweep, with what its spread jobs have written. Raises DataError if the folder holds none."""
        path = folder / FILE
        try:
            jobs = [_job(job) for job in json.loads(path.read_text(encoding="utf-8"))["jobs"]]
            for i in range(len(jobs)):
                path = part(folder, i)
                if path.is_file():
                    jobs[i] = _job(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"resume_sweep: {path} is missing or damaged ({error}). Pass the folder that the sweep printed."
            ) from error
        return cls(folder, jobs, number)

    def save(self) -> None:
        """Write sweep.json, which takes the place of what spread jobs have written; or this job's part of it."""
        if self.number is not None:
            write_json(part(self.folder, self.number), self.jobs[self.number])
            return
        write_json(self.folder / FILE, {"version": 1, "jobs": self.jobs})
        for i in range(len(self.jobs)):
            part(self.folder, i).unlink(missing_ok=True)

    def mark(self, overrides: Sequence[str], status: str, *, folder: Path | None = None, error: str = "") -> None:
        """Note what became of the job with these overrides."""
        found = next(job for job in self.jobs if job["overrides"] == list(overrides))
        job = found if self.number is None else self.jobs[self.number]
        job["status"], job["error"] = status, error or None
        if folder is not None:
            job["folder"] = str(folder)
        self.save()

    def pending(self) -> list[tuple[list[str], Path | None]]:
        """Overrides of the jobs that have not finished, and the folders of those that were stopped while they ran."""
        return [
            (job["overrides"], Path(job["folder"]) if job["status"] == "running" else None)
            for job in self.jobs
            if job["status"] != "finished"
        ]

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
