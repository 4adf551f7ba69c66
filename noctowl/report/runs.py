"""Runs as a report sees them: results, configuration, evidence, a short name, and what has to be said about them."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noctowl.data.files import BENCHMARKS
from noctowl.errors import DataError
from noctowl.runfolder import read_config, read_results

# Objects of each benchmark as published (FG-OVD paper and journal extension, table of the data set).
PUBLISHED_OBJECTS = {
    "hard": 3545,
    "medium": 2968,
    "easy": 1299,
    "trivial": 3545,
    "color": 3119,
    "material": 3193,
    "pattern": 467,
    "transparency": 409,
}
LVIS_CLASSES, LVIS_IMAGES = 1203, 19809  # LVIS v1 val
SIDES = {"owlvit-base": 768, "owlvit-large": 840, "owlv2-base": 960, "owlv2-large": 1008}  # of the published models
FEW = 20  # images below which a bootstrap over them is not to be trusted
PUBLISHED_N = {"pattern": 2, "transparency": 2, "color": 2, "material": 2}  # 5 for the others


@dataclass
class Run:
    """One finished run. `signature`: settings that must be alike for figures to share a column."""

    folder: Path
    results: dict[str, Any]
    config: dict[str, Any]
    evidence: dict[str, Any]  # tables by benchmark and N; empty where the run wrote none
    label: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        return self.results["metrics"]

    @property
    def side(self) -> tuple[int, ...] | None:
        """Height and width of the model's image; None for predictions of an unknown model."""
        size = self.results["provenance"].get("processor", {}).get("size")
        return tuple(size) if size else None

    @property
    def signature(self) -> dict[str, Any]:
        settings, processor = self.results["settings"], self.results["provenance"].get("processor", {})
        keys = ("ground_truth", "short_vocabularies", "nms_iou", "top", "published_median")
        policy = settings.get("data", {}).get("token_policy")
        frame = {"image": self.side and "x".join(map(str, self.side)), "frame": processor.get("frame")}
        pad = {"pad_value": processor.get("pad_value")}
        return {key: settings.get(key) for key in keys} | {"token_policy": policy} | frame | pad

    @property
    def cases(self) -> list[tuple[str, int]]:
        """(benchmark, N) that were scored, in the order of the papers."""
        found = {tuple(key.split("/")[1:3]) for key in self.metrics if key.startswith("fgovd/")}
        order = list(BENCHMARKS)
        place = {name: i for i, name in enumerate(order)}
        return sorted(((b, int(n[1:])) for b, n in found), key=lambda c: (place.get(c[0], len(order)), c[0], c[1]))

    def file_of(self, benchmark: str) -> str:
        """Hash of the annotation file, as far as it is known."""
        return self.results["provenance"].get("annotations", {}).get(benchmark, {}).get("sha256", "")

    @property
    def group(self) -> str:
        """Equal for runs that differ in their seed only."""
        config = {k: v for k, v in self.config.items() if k not in ("seed", "name", "output_dir", "run_dir", "report")}
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises DataError for a folder without results, for results of another version, damaged ones, and for none."""
    if not folders:
        raise DataError("no run is given; pass one or more run folders")
    runs = []
    for given in dict.fromkeys(folders):
        folder = given.parent if given.name == "results.json" else given
        if not folder.is_dir():
            raise DataError(f"{given}: no such run folder. Pass the folder that a run printed, with its results.json.")
        results = read_results(folder / "results.json")
        missing = [key for key in ("metrics", "settings", "counts", "provenance") if key not in results]
        if missing:
            raise DataError(f"{folder / 'results.json'}: {', '.join(missing)} missing. Evaluate the run again.")
        runs.append(Run(folder, results, read_config(folder), _evidence(folder)))
    _name(runs)
    for run in runs:
        run.warnings = list(warnings_of(run))
    return runs


def _evidence(folder: Path) -> dict[str, Any]:
    path = folder / "predictions" / "evidence.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON ({error}). Evaluate the run again.") from error


def _name(runs: Sequence[Run]) -> None:
    """The shortest of name, loss and distillation, and seed that tells the runs apart; numbered where none does."""

    def parts(run: Run) -> list[str]:
        config = run.config
        loss, distill = config.get("loss", {}).get("name"), config.get("distill", {})
        words = [str(config.get("name", run.folder.name)).split("/")[-1]]
        kind = [loss, distill.get("name"), f"x{distill['weight']:g}" if distill.get("weight", 1) != 1 else None]
        words.append(" ".join(word for word in kind if word))
        return [*words, f"seed {config.get('seed')}"]

    words = [parts(run) for run in runs]
    chosen = [[w[0]] for w in words]
    for position in (1, 2):
        count = Counter(map(tuple, chosen))
        if max(count.values(), default=1) > 1 and len({w[position] for w in words}) > 1:
            chosen = [[*c, w[position]] if w[position] else c for c, w in zip(chosen, words)]
    seen: Counter[str] = Counter()
    for run, own in zip(runs, chosen):
        label = ", ".join(own)
        seen[label] += 1
        run.label = label if seen[label] == 1 else f"{label} #{seen[label]}"


def warnings_of(run: Run):
    """What keeps the figures of a run from being those of the papers, one sentence each."""
    settings, counts, provenance = run.results["settings"], run.results["counts"], run.results["provenance"]
    benchmarks = dict.fromkeys(b for b, _ in run.cases)
    if not run.metrics:
        yield "there are no figures: the run was made with test=false, or no object could be scored"
    fewer = []
    for b in benchmarks:
        found, published = counts.get(f"fgovd/{b}", {}).get("objects"), PUBLISHED_OBJECTS.get(b)
        if found is not None and published is not None and found < published:
            fewer.append(f"{b} {found} of {published}")
    if fewer:
        yield f"fewer objects than in the published set: {', '.join(fewer)}"
    few = {f"{b} N={n}": counts.get(f"fgovd/{b}", {}).get(f"n{n}", {}).get("images", FEW) for b, n in run.cases}
    if any(images < FEW for images in few.values()):
        found = ", ".join(f"{name} {images}" for name, images in few.items() if images < FEW)
        yield f"few images ({found}): intervals over so few are too narrow"
    strange = [f"{b} N={n}" for b, n in run.cases if n != PUBLISHED_N.get(b, 5)]
    if strange and not all((b, PUBLISHED_N.get(b, 5)) in run.cases for b in benchmarks):
        yield f"other numbers of negatives than in the published tables: {', '.join(strange)}"
    yield from _base_warnings(run)
    if settings.get("ground_truth") == "masked":
        yield "ground truth is masked: published figures are unmasked, which are lower"
    if settings.get("short_vocabularies") == "keep":
        yield "vocabularies with fewer than N negatives were kept: published figures leave them out"
    policy = settings.get("data", {}).get("token_policy")
    if policy == "truncate":
        yield "captions over the token limit were cut: published figures leave them out"
    if settings.get("published_median"):
        yield "the median rank is the published one, an element beyond the middle"
    coarse = counts.get("lvis")
    if coarse and not is_lvis(run):
        yield (
            f"coarse figures are of {coarse['classes']} classes in {coarse['images']} images, not of LVIS v1 val: "
            "no published figure is comparable"
        )
    if run.cases and not run.evidence:
        yield "no controls and analyses were saved: evaluate again with this version for them"
    if run.metrics and not run.results.get("intervals"):
        yield "no intervals were computed (benchmark.intervals=0)"
    if any("local changes" in line for line in provenance.get("code", [])):
        yield "the code had changes that are in no commit"


def _base_warnings(run: Run):
    base = str(run.results["provenance"].get("base", ""))
    family = next((name for name in SIDES if name in base), None)
    if not base:
        yield "the model is not known: saved predictions were scored"
    elif family is None:
        yield f"the base model is {base}, none of the published ones (OWL-ViT or OWLv2, B/16 or L/14)"
    elif run.side and run.side != (SIDES[family],) * 2:
        yield f"the image side is {run.side[0]}, that of the published {family} is {SIDES[family]}"
    if family is None and run.side and run.side[0] not in SIDES.values():
        yield f"the image side is {run.side[0]} pixels, published models have {', '.join(map(str, SIDES.values()))}"


def is_lvis(run: Run) -> bool:
    """Coarse figures are of LVIS v1 val."""
    coarse = run.results["counts"].get("lvis", {})
    return coarse.get("classes") == LVIS_CLASSES and coarse.get("images", 0) >= LVIS_IMAGES


def comparable(run: Run, benchmark: str) -> bool:
    """The published figures of a benchmark may stand in one column with this run's: same objects and conventions."""
    settings = run.results["settings"]
    whole = run.results["counts"].get(f"fgovd/{benchmark}", {}).get("objects") == PUBLISHED_OBJECTS.get(benchmark)
    rules = (settings.get("ground_truth"), settings.get("short_vocabularies")) == ("unmasked", "drop")
    return whole and rules and settings.get("data", {}).get("token_policy") == "drop"
