"""All benchmarks of one evaluation: planned together, predicted in one pass over the images, scored by one scorer.

`Suite.predict` needs a model; `score_all` needs only annotations and predictions. The training callback, `evaluate.py`
and the tests all go through these two.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from noctowl.data.fgovd import Short, read_fgovd
from noctowl.data.records import Annotations
from noctowl.errors import DataError
from noctowl.eval import fgovd, lvis
from noctowl.eval.coarse import Coarse, Protocol
from noctowl.eval.controls import shuffled_rows
from noctowl.eval.evidence import SHUFFLED, Asked, Collector, Language
from noctowl.eval.inference import Benchmark, plan, predict
from noctowl.eval.outcome import Outcome
from noctowl.features import ImageSet, Stored, TextBank, chunks, encode
from noctowl.model import OwlDetector

log = logging.getLogger(__name__)
KEYS = ("benchmark.n_negatives", "benchmark.short_vocabularies")  # what asks for N
ATTRIBUTES = ("color", "material", "pattern", "transparency")


def default_negatives(name: str) -> tuple[int, ...]:
    """N of the published tables: 5 for the difficulty benchmarks, 2 for those of one attribute type."""
    return (2,) if name in ATTRIBUTES else (5,)


@dataclass
class Suite:
    """What is to be evaluated, planned once for any number of heads of the same base model."""

    benchmarks: dict[str, Benchmark]
    images: ImageSet
    bank: TextBank
    top: int
    coarse: Coarse | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    asked: Asked | None = None  # controls, intervals and analyses beside the figures; None: figures only
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # text-only controls, the same for every head

    @classmethod
    def build(
        cls,
        files: Mapping[str, Path],
        *,
        n_negatives: Mapping[str, Sequence[int]],
        images: ImageSet,
        bank: TextBank,
        short_vocabularies: Short = "drop",
        top: int = 100,
        settings: Mapping[str, Any] | None = None,
        keys: tuple[str, str] = KEYS,
    ) -> "Suite":
        """Read the annotation files and encode the captions that any of them needs.

        `keys`: see `usable_negatives`. Raises DataError for damaged files, and where no vocabulary of a file has as
        many negatives as any N asks for.
        """
        benchmarks = {}
        for name, path in files.items():
            annotations = read_fgovd(path)
            benchmarks[name] = plan(
                annotations,
                n_negatives=usable_negatives(annotations, n_negatives[name], short_vocabularies, keys=keys),
                bank=bank,
                images=images,
                short_vocabularies=short_vocabularies,
            )
        return cls(benchmarks, images, bank, top, settings=dict(settings or {}))

    def add_coarse(self, path: Path, *, protocol: Protocol, nms_iou: float | None = None) -> None:
        """Score the classes of an LVIS-format file in the same pass; see `noctowl.eval.coarse`."""
        self.coarse = Coarse.build(path, protocol=protocol, nms_iou=nms_iou, images=self.images, bank=self.bank)

    @property
    def annotations(self) -> dict[str, Annotations | lvis.LvisAnnotations]:
        """The files by name; the coarse one is "lvis"."""
        files: dict[str, Annotations | lvis.LvisAnnotations] = {n: b.annotations for n, b in self.benchmarks.items()}
        return files if self.coarse is None else {**files, "lvis": self.coarse.annotations}

    @property
    def image_rows(self) -> list[int]:
        """Distinct images that have to be seen."""
        used = [b.image_rows[b.image_rows >= 0] for b in self.benchmarks.values()]
        if self.coarse is not None:
            used.append(self.coarse.image_rows)
        return np.unique(np.concatenate(used)).tolist() if used else []

    def predict(
        self,
        detector: OwlDetector,
        exchange: Path,
        *,
        batch_size: int,
        num_workers: int,
        device: torch.device,
        stored: Stored | None = None,
        autocast: torch.dtype | None = None,
    ) -> Outcome:
        """One pass over the images, shared between the processes there are.

        `stored` holds features of all images of the set; without it images are read and encoded. Several processes
        exchange their parts through files in the folder `exchange`; every process gets the whole outcome.
        """
        state = PartialState(cpu=device.type == "cpu")
        rows = self.image_rows[state.process_index :: state.num_processes]  # none where images are few
        if stored is None:
            features = encode(
                detector,
                self.images,
                rows,
                batch_size=batch_size,
                num_workers=num_workers,
                device=device,
                autocast=autocast,
            )
        else:
            features = chunks(stored, rows, batch_size)
        outcome = predict(
            detector,
            self.benchmarks | self.shuffled,
            features,
            images=self.images,
            embeddings=self.bank.embeddings,
            top=self.top,
            settings=self.settings,
            coarse=self.coarse,
        )
        live = stored is None
        outcome.counters |= {"image_forwards": len(rows) if live else 0, "store_hits": 0 if live else len(rows)}
        if state.num_processes == 1:
            return outcome
        outcome.save(exchange / f"part{state.process_index}")
        state.wait_for_everyone()
        parts = [Outcome.load(exchange / f"part{rank}") for rank in range(state.num_processes)]
        state.wait_for_everyone()
        shutil.rmtree(exchange / f"part{state.process_index}")
        return Outcome.merge(parts)

    @property
    def shuffled(self) -> dict[str, Benchmark]:
        """Every benchmark with its images exchanged, where that control is asked for; one image has no other."""
        if self.asked is None or "shuffled" not in self.asked.controls:
            return {}
        several = {name: b for name, b in self.benchmarks.items() if (b.image_rows >= 0).sum() > 1}
        return {
            f"{name}{SHUFFLED}": replace(b, image_rows=shuffled_rows(b.image_rows, seed=self.asked.seed))
            for name, b in several.items()
        }

    def score(
        self, outcome: Outcome, conventions: Mapping[str, Any], *, detector: OwlDetector | None = None
    ) -> dict[str, Any]:
        """`score_all` on this suite's files; with what `asked` says where the `detector` is given that predicted."""
        files = {name: b.annotations for name, b in self.benchmarks.items()}
        coarse = None if self.coarse is None else self.coarse.annotations
        language = None
        if detector is not None and self.asked is not None:
            language = Language(self._embed, detector.head.dense0.bias.detach().float().cpu().numpy())
        return score_all(
            files,
            outcome,
            conventions,
            lengths=self.lengths,
            coarse=coarse,
            asked=None if detector is None else self.asked,
            language=language,
            cache=self.cache,
        )

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        rows = self.bank.rows(texts)  # first: the bank may grow
        return self.bank.embeddings[torch.from_numpy(rows)].numpy()

    @property
    def lengths(self) -> dict[str, np.ndarray | None]:
        """Token counts of each file's captions [K]; None where the token rule is off."""
        return {name: benchmark.lengths for name, benchmark in self.benchmarks.items()}


def usable_negatives(
    annotations: Annotations, n_negatives: Sequence[int], short: Short, *, keys: tuple[str, str] = KEYS
) -> tuple[int, ...]:
    """The N that some vocabulary of the file has negatives for; the others are left out and told.

    `keys`: the settings that ask for N and that keep short vocabularies. Raises DataError where no N is left.
    """
    most = int(annotations.n_negatives.max(initial=0))
    usable = tuple(n for n in n_negatives if n <= most or short == "keep")
    if not usable:
        raise DataError(
            f"{annotations.path}: N = {min(n_negatives)} negatives asked, no vocabulary has more than {most}. "
            f"Allowed: {keys[0]} up to {most}, or {keys[1]}=keep."
        )
    if len(usable) < len(n_negatives):
        beyond = sorted(set(n_negatives) - set(usable))
        log.warning("%s: no vocabulary has more than %s negatives; N = %s left out", annotations.path, most, beyond)
    return usable


def score_all(
    annotations: Mapping[str, Annotations],
    outcome: Outcome,
    conventions: Mapping[str, Any],
    *,
    lengths: Mapping[str, np.ndarray | None],
    coarse: lvis.LvisAnnotations | None = None,
    n_negatives: Sequence[int] | None = None,
    asked: Asked | None = None,
    language: Language | None = None,
    cache: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Figures of every benchmark and N, under both ground-truth conventions.

    Args:
        conventions: keyword arguments of `noctowl.eval.fgovd.score`; its `ground_truth` is the one whose figures stand
            at "fgovd/<name>/n<N>/map", the other's stand at "fgovd/<name>/n<N>/<other>/map".
        lengths: token counts of the captions of each file, None where the token rule is off.
        coarse: the LVIS-format file of the coarse detections.
        n_negatives: None for all N that the predictions were made for.
        asked, language, cache: what is wanted beside the figures, see `noctowl.eval.evidence`; None: nothing.

    Returns:
        {"metrics": flat, "counts": by benchmark and N, "ranks": by benchmark, N and annotation id, "coarse": protocol
        and file of the coarse detections, empty without any}; and with `asked` {"intervals": key of a metric or
        control -> [low, high], "controls": flat, "evidence": tables by benchmark and N}

    Raises DataError for predictions that were made for another version of a file.
    """
    metrics: dict[str, float] = {}
    counts: dict[str, Any] = {}
    ranks: dict[str, Any] = {}
    first = conventions["ground_truth"]
    other = "masked" if first == "unmasked" else "unmasked"
    swapped = {k.removesuffix(SHUFFLED): p for k, p in outcome.predictions.items() if k.endswith(SHUFFLED)}
    median = bool(conventions.get("published_median", False))
    beside = None if asked is None else Collector(asked, first, median, language, swapped, cache)
    for name, predictions in outcome.predictions.items():
        if name.endswith(SHUFFLED):
            continue
        file = annotations[name]
        _check_version(name, predictions.settings.get("annotations_sha256"), file.path, file.sha256)
        for convention in (first, other):
            options = {**conventions, "ground_truth": convention}
            result = fgovd.score(
                file, predictions, n_negatives=n_negatives or predictions.n_negatives, lengths=lengths[name], **options
            )
            if beside is not None:
                beside.add(name, file, predictions, result["cases"], convention)
            for key, value in result["metrics"].items():
                n, figure = key.split("/")
                if convention == first:
                    metrics[f"fgovd/{name}/{n}/{figure}"] = value
                elif figure.startswith(("map", "mar")):
                    metrics[f"fgovd/{name}/{n}/{convention}/{figure}"] = value
            if convention == first:
                ranks[name] = result["ranks"]
            for n, values in result["counts"].items():
                entry = counts.setdefault(f"fgovd/{name}", dict(file.counts)).setdefault(n, {})
                truth = ("objects_scored", "objects_forced_missed")
                entry.update({k: v for k, v in values.items() if k not in truth})
                entry[convention] = {k: values[k] for k in truth}
    if coarse is not None and outcome.coarse is not None:
        _check_version("coarse", outcome.coarse_settings.get("sha256"), coarse.path, coarse.sha256)
        matched = lvis.match_classes(outcome.coarse, coarse)
        scores = lvis.score_classes(matched)
        metrics.update({f"lvis/{key}": value for key, value in lvis.figures(scores, coarse).items()})
        counts["lvis"] = {"images": len(coarse.image_ids), "classes": len(coarse.category_ids)}
        counts["lvis"] |= {"objects": len(coarse.objects.image), "detections": len(outcome.coarse.image)}
        if beside is not None:
            counts["lvis"]["interval_resamples"] = beside.add_coarse(matched, scores, outcome.coarse, coarse)
    scored = {"metrics": metrics, "counts": counts, "ranks": ranks, "coarse": outcome.coarse_settings}
    return scored if beside is None else scored | beside.result()


def _check_version(name: str, found: str | None, path: Path, sha256: str) -> None:
    if found != sha256:
        raise DataError(
            f"{name}: the predictions were made for another version of {path} (sha256 {found}, the file has "
            f"{sha256}). Predict again, or point data.root to the file they were made for."
        )
