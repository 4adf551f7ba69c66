"""FG-OVD in miniature: the rendered world (noctowl/data/world.py) as files in exactly the published formats.

  images/train2017/*.png, images/val2017/*.png
  annotations/training_sets/1_attributes.json      weak-set policy: one object per caption; one substituted attribute
  annotations/validation_sets/1_attributes.json
  annotations/benchmarks/*.json                     the eight benchmarks, over one set of test images
  annotations/lvis/coarse_{val,test}.json           LVIS format; every class is annotated exhaustively
  manifest.json                                     settings and sha256

Test objects of combinations that no training shows carry `"held_out": true` in their annotation.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from noctowl.data.render import CLASSES, Thing
from noctowl.data.world import (
    BENCHMARK_RULES,
    COARSE_TEST,
    COARSE_VAL,
    FREQUENCY,
    TEST,
    TRAIN,
    VAL,
    Split,
    held_out,
    scene,
    vocabularies,
)
from noctowl.errors import DataError

WORLD_VERSION = 2  # raise it whenever the same settings give other files
MANIFEST = "manifest.json"
LIMITS = {"seed": (0, 2**31), "size": (48, 1024), "n_train": (1, 10**5), "n_val": (1, 10**5), "n_test": (1, 10**5)}


@dataclass(frozen=True)
class SyntheticSettings:
    """What decides every byte of the annotations; numbers of images, and their side in pixels."""

    seed: int = 0
    n_train: int = 1500
    n_val: int = 250
    n_test: int = 500
    size: int = 96

    def check(self) -> None:
        """Raises DataError, with every value out of range in one message."""
        found = asdict(self)
        wrong = [
            f"{key} is {found[key]}, allowed is {low} to {high - 1}"
            for key, (low, high) in LIMITS.items()
            if not low <= found[key] < high
        ]
        if wrong:
            raise DataError(f"synthetic data: {'; '.join(wrong)}")


def image_id(split: Split, index: int) -> int:
    """Ids of different splits never meet."""
    return split.code * 100_000 + index + 1


def image_record(split: Split, index: int, size: int) -> dict[str, Any]:
    name = f"{split.folder}/{image_id(split, index):012d}.png"
    return {
        "id": image_id(split, index),
        "width": size,
        "height": size,
        "file_name": name,
        "coco_url": f"synthetic://{name}",
    }


def _category(number: int, name: str, frequency: str, count: int, images: int) -> dict[str, Any]:
    text = {"id": number, "name": name, "synset": "", "synonyms": [], "def": "", "frequency": frequency}
    return {**text, "instance_count": count, "image_count": images}


def _annotation(number: int, image: int, thing: Thing, category: int) -> dict[str, Any]:
    box = [float(value) for value in thing.box]
    return {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3]}


def fine_grained_file(
    split: Split, scenes: Sequence[Sequence[Thing]], rule: int | str, *, seed: int, size: int
) -> dict[str, Any]:
    """One FG-OVD annotation file. Inside a vocabulary the category ids are shuffled, so that an id tells nothing."""
    rng = np.random.default_rng([seed, split.code, 2**20])
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    categories: list[dict[str, Any]] = []
    for index, things in enumerate(scenes):
        record = image_record(split, index, size)
        positives, negatives = [], []
        for members, texts in vocabularies(split, index, things, rule, seed=seed, size=size, train=split is TRAIN):
            ids = (1 + len(categories) + rng.permutation(len(texts))).tolist()
            categories += [
                _category(number, text, "f", len(members) * (k == 0), int(k == 0))
                for k, (number, text) in sorted(enumerate(zip(ids, texts)), key=lambda pair: pair[1][0])
            ]
            for thing in members:
                entry = _annotation(len(annotations) + 1, record["id"], thing, ids[0])
                entry["neg_category_ids"] = ids[1:]
                if held_out(thing.cls, thing.colour):
                    entry["held_out"] = True
                annotations.append(entry)
            positives.append(ids[0])
            negatives += ids[1:]
        if positives:
            images.append({**record, "neg_category_ids": negatives, "not_exhaustive_category_ids": positives})
    return {"images": images, "annotations": annotations, "categories": categories}


def coarse_file(split: Split, scenes: Sequence[Sequence[Thing]], *, size: int) -> dict[str, Any]:
    """One LVIS-format file over class names; all classes that an image does not show are negatives of it."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    counts, seen = np.zeros(len(CLASSES), dtype=int), np.zeros(len(CLASSES), dtype=int)
    for index, things in enumerate(scenes):
        present = {thing.cls for thing in things}
        absent = [cls + 1 for cls in range(len(CLASSES)) if cls not in present]
        images.append(
            {**image_record(split, index, size), "neg_category_ids": absent, "not_exhaustive_category_ids": []}
        )
        for thing in things:
            entry = _annotation(len(annotations) + 1, image_id(split, index), thing, thing.cls + 1)
            if held_out(thing.cls, thing.colour):
                entry["held_out"] = True
            annotations.append(entry)
            counts[thing.cls] += 1
        seen[list(present)] += 1
    categories = [
        _category(cls + 1, name, FREQUENCY[cls], int(counts[cls]), int(seen[cls])) for cls, name in enumerate(CLASSES)
    ]
    return {"images": images, "annotations": annotations, "categories": categories}


def _write_images(root: Path, split: Split, count: int, settings: SyntheticSettings, digest: Any) -> list[list[Thing]]:
    (root / "images" / split.folder).mkdir(parents=True, exist_ok=True)
    scenes = []
    for index in range(count):
        pixels, things, _ = scene(split, index, seed=settings.seed, size=settings.size)
        name = image_record(split, index, settings.size)["file_name"]
        Image.fromarray(pixels).save(root / "images" / name, compress_level=1)
        digest.update(pixels.tobytes())
        scenes.append(things)
    return scenes


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(root: Path, settings: SyntheticSettings) -> None:
    digest = hashlib.sha256()
    sizes = {TRAIN: settings.n_train, VAL: settings.n_val, TEST: settings.n_test}
    sizes |= {COARSE_VAL: settings.n_val, COARSE_TEST: settings.n_test}
    scenes = {split: _write_images(root, split, count, settings, digest) for split, count in sizes.items()}
    common = {"seed": settings.seed, "size": settings.size}
    files = {
        "training_sets/1_attributes.json": fine_grained_file(TRAIN, scenes[TRAIN], 1, **common),
        "validation_sets/1_attributes.json": fine_grained_file(VAL, scenes[VAL], 1, **common),
        "lvis/coarse_val.json": coarse_file(COARSE_VAL, scenes[COARSE_VAL], size=settings.size),
        "lvis/coarse_test.json": coarse_file(COARSE_TEST, scenes[COARSE_TEST], size=settings.size),
    }
    for stem, rule in BENCHMARK_RULES.items():
        files[f"benchmarks/{stem}.json"] = fine_grained_file(TEST, scenes[TEST], rule, **common)
    for name, content in files.items():
        path = root / "annotations" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    manifest = {
        "what": "noctowl synthetic data",
        "version": WORLD_VERSION,
        "settings": asdict(settings),
        "n_images": sum(sizes.values()),
        "sha256_pixels": digest.hexdigest(),
        "sha256": {f"annotations/{name}": _sha256(root / "annotations" / name) for name in sorted(files)},
    }
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def check_synthetic(root: Path, settings: SyntheticSettings) -> None:
    """Raises DataError unless `root` is this world, of these settings, with unchanged annotations and no image lost."""
    path = root / MANIFEST
    if not path.is_file():
        raise DataError(f"{root}: no {MANIFEST}, so not written by noctowl; choose an empty or new folder")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = (manifest["version"], manifest["settings"])
        expected_hashes, n_images = dict(manifest["sha256"]), int(manifest["n_images"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: unreadable ({error!r}); delete {root} and write it again") from error
    if found != (WORLD_VERSION, asdict(settings)):
        raise DataError(
            f"{path}: holds version {found[0]} with settings {found[1]}, asked for version {WORLD_VERSION} with "
            f"{asdict(settings)}; choose another folder"
        )
    damaged = [n for n, sha in expected_hashes.items() if not (root / n).is_file() or _sha256(root / n) != sha]
    present = sum(1 for _ in (root / "images").glob("*2017/*.png"))
    if damaged or present != n_images:
        raise DataError(
            f"{root}: changed since it was written (annotation files {damaged}; {present} of {n_images} images); "
            "delete it and write it again"
        )


def write_synthetic(
    out: str | Path, *, seed: int = 0, n_train: int = 1500, n_val: int = 250, n_test: int = 500, size: int = 96
) -> Path:
    """Writes images/, annotations/ and manifest.json under `out`, all at once or not at all; returns `out`.

    A folder that already holds exactly this world is checked and kept. Raises DataError for values out of range and
    for a folder that holds anything else.
    """
    settings = SyntheticSettings(seed=seed, n_train=n_train, n_val=n_val, n_test=n_test, size=size)
    settings.check()
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        check_synthetic(target, settings)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    try:
        _build(partial, settings)
        try:
            partial.replace(target)
        except OSError:  # another process was faster
            check_synthetic(target, settings)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def synthetic_root(cache_dir: str | Path, settings: SyntheticSettings | None = None) -> Path:
    """The cached world of these settings, written if it is absent; safe when several processes ask at once."""
    settings = settings or SyntheticSettings()
    key = json.dumps([WORLD_VERSION, asdict(settings)], sort_keys=True)
    folder = Path(cache_dir) / f"synthetic-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return write_synthetic(folder, **asdict(settings))
