"""`noctowl check`: reads a whole data root and says what is in it and what is wrong, before anything is trained on it.

One column per annotation file, one row per figure; the exit code tells whether anything makes the data unusable: a file
that cannot be read, an image that is missing, damaged or of another size than its boxes. Everything else is reported.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from noctowl.data.fgovd import TOKEN_LIMIT, processable, read_fgovd, subset_counts
from noctowl.data.files import annotation_files, find_annotations, find_file, find_images, what_is_there
from noctowl.data.images import ImageError, load_image, resolve_image
from noctowl.data.masks import boxes_off_their_masks
from noctowl.data.records import Annotations
from noctowl.errors import DataError
from noctowl.text import clip_tokenizer, token_lengths

N_NEGATIVES = tuple(range(11))
SHOWN_PROBLEMS = 20
ABSENT = "–"
FATAL_KINDS = ("missing", "corrupt", "size")

Key = tuple[str, int, int]  # file name, width, height


@dataclass
class FileReport:
    """One annotation file. `subsets`: N -> images, objects, captions that the 16-token rule keeps (`processable`)."""

    path: str
    name: str
    error: str | None = None
    images: int = 0
    objects: int = 0
    vocabularies: int = 0  # = positive captions, each counted once per image
    negatives: dict[str, int | float] = field(default_factory=dict)  # min, mean, max per vocabulary
    tokens: dict[str, int] = field(default_factory=dict)  # longest caption, captions over the limit
    counts: dict[str, int] = field(default_factory=dict)  # mended or odd entries, see read_fgovd
    subsets: dict[int, dict[str, Any]] = field(default_factory=dict)
    image_files: dict[str, int] = field(default_factory=dict)  # found, missing, corrupt, size, exif_*; empty: not read


@dataclass
class Configured:
    """A file that training would read. `asked`: its key was given on the command line, so that absence is fatal."""

    key: str
    path: str
    found: bool
    asked: bool

    def __str__(self) -> str:
        if self.found:
            return f"{self.key}: {self.path} found"
        return (
            f"{self.key}: {self.path} is missing: training would stop there. Set {self.key} to one of the files above."
        )


@dataclass
class CheckReport:
    """All files. `problems` holds one line for each fatal finding and for each image whose orientation is a guess."""

    files: list[FileReport]
    problems: list[str]
    configured: list[Configured] = field(default_factory=list)

    @property
    def fatal(self) -> bool:
        """Something makes the data unusable."""
        lacking = any(file.asked and not file.found for file in self.configured)
        return lacking or any(f.error or any(f.image_files.get(kind) for kind in FATAL_KINDS) for f in self.files)

    def to_json(self) -> dict[str, Any]:
        """JSON-able; keyed by the file's path below the annotations' folder."""
        return {
            "fatal": self.fatal,
            "files": {file.path: {k: v for k, v in asdict(file).items() if k != "path"} for file in self.files},
            "problems": self.problems,
            "configured": {c.key: {"path": c.path, "found": c.found, "asked": c.asked} for c in self.configured},
        }

    def print(self, console: Console | None = None) -> None:
        """The table, then the problems."""
        console = console or Console()
        if not console.is_terminal:
            console.width = max(console.width, 40 + 22 * len(self.files))  # a log is not folded
        table = Table(
            title="kept at N: images/objects/positive captions with N negatives that fit the token limit",
            title_justify="left",
            caption="tokens of OWL's CLIP tokenizer; model=tiny has a smaller one and drops more",
            caption_justify="left",
        )
        table.add_column("", no_wrap=True)
        for file in self.files:
            folder, _, stem = file.path.removesuffix(".json").rpartition("/")
            table.add_column(f"{file.name}\n{folder}\n{stem}", justify="right", overflow="fold")
        columns = [_column(file) for file in self.files]
        for label in columns[0]:
            cells = [column[label] for column in columns]
            if set(cells) != {ABSENT}:
                table.add_row(label, *cells)
        console.print(table)
        for problem in self.problems[:SHOWN_PROBLEMS]:
            console.print(f"- {problem}", markup=False, highlight=False, soft_wrap=True)
        if len(self.problems) > SHOWN_PROBLEMS:
            console.print(f"… and {len(self.problems) - SHOWN_PROBLEMS} more (--json lists all).")
        for one in self.configured:
            console.print(f"- {one}", markup=False, highlight=False, soft_wrap=True)
        console.print("FATAL: this data cannot be used as it is." if self.fatal else "Nothing fatal.")


def _column(file: FileReport) -> dict[str, str]:
    """Label -> cell of one file; every file has the same labels."""
    counts, images, tokens = file.counts, file.image_files, file.tokens

    def number(values: dict[str, Any], key: str) -> str:
        return f"{values[key]:,}" if key in values else ABSENT

    cells = {
        "readable": "no" if file.error else "yes",
        "images": f"{file.images:,}",
        "objects": f"{file.objects:,}",
        "vocabularies (positive captions)": f"{file.vocabularies:,}",
        "negatives: min / mean / max": "{min:.0f} / {mean:.1f} / {max:.0f}".format(**file.negatives)
        if file.negatives
        else ABSENT,
        "longest caption, tokens": number(tokens, "longest"),
        f"captions over {TOKEN_LIMIT} tokens": number(tokens, "over_limit"),
    }
    for n in N_NEGATIVES:
        kept = file.subsets.get(n)
        cells[f"kept at N = {n}"] = "{images}/{objects}/{positive_captions}".format(**kept) if kept else ABSENT
    for label, key in (
        ("boxes clipped", "clipped"),
        ("boxes without area, dropped", "dropped_zero_area"),
        ("duplicate captions in a vocabulary", "duplicate_captions_in_vocabulary"),
        ("negatives equal to the positive", "negatives_equal_to_positive"),
        ("objects with differing negatives", "differing_negatives"),
        ("captions with stray blanks", "stray_blanks"),
        ("images without objects", "images_without_objects"),
        ("objects with a mask", "masks"),
        ("boxes > 2 px off their mask", "boxes_off_their_masks"),
        ("masks that cannot be read", "damaged_masks"),
    ):
        cells[label] = number(counts, key)
    for label, key in (
        ("image files found", "found"),
        ("image files missing", "missing"),
        ("image files corrupt", "corrupt"),
        ("image files of another size", "size"),
        ("EXIF: turned upright to fit", "exif_upright"),
        ("EXIF: ignored, stored size fits", "exif_stored"),
        ("EXIF: both fit, taken as stored", "exif_ambiguous"),
    ):
        cells[label] = number(images, key)
    return cells


def check(
    *,
    files: Iterable[str | Path],
    images: str | Path | None,
    root: str | Path | None = None,
    workers: int | None = None,
) -> CheckReport:
    """Read every annotation file and, unless `images` is None, every image that they name (each once).

    `root`: paths in the report are relative to it. `workers`: threads that read images (default: the cores, at most 8).
    """
    reports: list[FileReport] = []
    needed: list[list[Key]] = []
    problems: list[str] = []
    tokenizer = clip_tokenizer()
    for path in map(Path, files):
        shown = path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else str(path)
        try:
            annotations = read_fgovd(path)
        except DataError as error:
            reports.append(FileReport(path=shown, name=path.stem, error=str(error)))
            needed.append([])
            problems.append(str(error))
            continue
        texts = annotations.captions[:]
        reports.append(_describe(annotations, token_lengths(tokenizer, texts), shown))
        sizes = annotations.image_sizes.tolist()
        needed.append([(name, w, h) for name, (w, h) in zip(annotations.image_files, sizes)])
    if images is not None:
        states = _read_images(Path(images), sorted({key for keys in needed for key in keys}), workers)
        for report, keys in zip(reports, needed):
            report.image_files = _count_images([states[key][0] for key in keys])
        problems += [message for _, message in states.values() if message]
    return CheckReport(files=reports, problems=problems)


def _describe(annotations: Annotations, lengths: np.ndarray, shown: str) -> FileReport:
    negatives = annotations.n_negatives
    subsets = {}
    for n in N_NEGATIVES:
        subset = subset_counts(annotations, processable(annotations, lengths, n), n)
        subsets[n] = {key: subset[key] for key in ("images", "objects", "positive_captions")}
    return FileReport(
        path=shown,
        name=annotations.name,
        images=len(annotations.image_ids),
        objects=len(annotations.object_ids),
        vocabularies=len(annotations),
        negatives={"min": int(negatives.min()), "mean": float(negatives.mean()), "max": int(negatives.max())},
        tokens={"longest": int(lengths.max()), "over_limit": int((lengths > TOKEN_LIMIT).sum())},
        counts={**annotations.counts, **boxes_off_their_masks(annotations.path)},
        subsets=subsets,
    )


def _read_images(root: Path, keys: Sequence[Key], workers: int | None) -> dict[Key, tuple[str, str]]:
    """Key -> (state, message); threads, because decoders release the interpreter's lock."""
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(keys, pool.map(lambda key: _read_image(root, key), keys)))


def _read_image(root: Path, key: Key) -> tuple[str, str]:
    name, width, height = key
    path = resolve_image(root, name)
    try:
        turn = load_image(path, expected_size=(width, height)).turn
    except ImageError as error:
        return error.kind, str(error)
    if turn == "ambiguous":
        return (
            turn,
            f"{path}: EXIF asks for a turn that keeps {width} x {height}; taken as stored, as COCO's boxes are.",
        )
    return turn, ""


def _count_images(states: Sequence[str]) -> dict[str, int]:
    counted = Counter(states)
    found = len(states) - counted["missing"]
    exif = {f"exif_{turn}": counted[turn] for turn in ("upright", "stored", "ambiguous")}
    return {"found": found, **{kind: counted[kind] for kind in FATAL_KINDS}, **exif}


def check_data(
    root: str | Path,
    images: str | Path | None = None,
    annotations: str | Path | None = None,
    files: Sequence[str] | None = None,
    skip_images: bool = False,
    as_json: bool = False,
    configured: Mapping[str, str] | None = None,
    asked: Collection[str] = (),
) -> int:
    """Check a data root and print the report; 0 where nothing is fatal, 1 otherwise.

    `files`: names below the annotations' folder (default: all of training_sets, validation_sets and benchmarks).
    `configured`: key -> file that training would read ("data.train_file", …); those in `asked` must be there.
    Raises DataError where root, images or annotations cannot be found at all.
    """
    folder = find_annotations(root, annotations)
    paths = annotation_files(folder) if files is None else [find_file(folder, name) for name in files]
    if not paths:
        raise DataError(
            f"{folder}: no annotation files to check.{what_is_there(folder)} Name them, or set data.annotations."
        )
    report = check(files=paths, images=None if skip_images else find_images(root, images), root=folder)
    for key, name in (configured or {}).items():
        path = folder / name
        report.configured.append(Configured(key, str(path), path.is_file(), key in asked))
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        report.print()
    return int(report.fatal)
