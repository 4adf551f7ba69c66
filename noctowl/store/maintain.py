"""Looking after stores: `verify`, `info`, `prune`. Each returns plain data; `tables.py` prints them."""

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from noctowl.errors import DataError
from noctowl.store.claims import STALE, Claims, idle_seconds, live_claims
from noctowl.store.folder import META, FeatureStore
from noctowl.store.shards import (
    Damaged,
    Problem,
    ShardIndex,
    bad_rows,
    header_sha256,
    read_index,
    recover_index,
    sync_folder,
    without_bad_rows,
    write_index,
)
from noctowl.store.texts import TEXTS, TextStore, being_written, leftover_texts, mend_texts, text_facts


def mend(store: FeatureStore, *, full: bool, repair: bool, living: Collection[str] = ()) -> list[Problem]:
    """Find what is wrong and, with `repair`, take away just that; good shards and good rows stay.

    full: read every byte and compare sha256; otherwise sizes and indexes only. living: builders at work, whose files
    are left alone.
    """
    problems: list[Problem] = []
    folder = store.folder
    for path in sorted(folder.glob("shard-*.json")):
        if _builder(path) not in living:
            problems += _check_index(store, path, full=full, repair=repair)
    for path in sorted(folder.glob("shard-*.safetensors")):
        if not path.with_suffix(".json").exists() and _builder(path) not in living:
            problems += _check_orphan(store, path, repair=repair)
    for path in _leftovers(folder, living):
        problems.append(Problem(path.name, "leftover", "of a build that died", 0, "removed"))
        if repair:
            path.unlink(missing_ok=True)
    if repair and problems:
        sync_folder(folder)
    return problems


def _check_index(store: FeatureStore, path: Path, *, full: bool, repair: bool) -> list[Problem]:
    try:
        index = read_index(path, store.spec)
        if not full:
            return []
        return _check_rows(store, index, repair=repair)
    except Damaged as error:
        problem, shard = error, path.with_suffix(".safetensors")
    if problem.kind == "foreign":
        return [Problem(path.name, "foreign", str(problem), 0, "left, never read: move it to its own store")]
    if problem.kind == "index" and shard.exists():
        if repair:
            path.unlink()
        return [Problem(path.name, "index", str(problem), 0, "removed"), *_check_orphan(store, shard, repair=repair)]
    if repair:
        path.unlink(missing_ok=True)
        shard.unlink(missing_ok=True)
    return [Problem(path.name, problem.kind, str(problem), _count(path), "removed")]


def _check_rows(store: FeatureStore, index: ShardIndex, *, repair: bool) -> list[Problem]:
    """Header and every row of a shard whose size is right."""
    shard = store.folder / f"{index.name}.safetensors"
    if header_sha256(shard, index.data_start) != index.header_sha256:
        if repair:
            shard.with_suffix(".json").unlink()
            shard.unlink()
        return [Problem(shard.name, "header", "its header was changed", len(index.entries), "removed")]
    bad = bad_rows(store.folder, index, store.spec)
    if not bad:
        return []
    action = f"{len(bad)} rows struck from the index, {len(index.entries) - len(bad)} kept"
    try:
        left = without_bad_rows(index, bad)
        if repair:
            write_index(store.folder, left)
    except Damaged:
        action = "removed"
        if repair:
            shard.with_suffix(".json").unlink()
            shard.unlink()
    return [Problem(shard.name, "checksum", f"rows {[entry.row for entry in bad]}", len(bad), action)]


def _check_orphan(store: FeatureStore, shard: Path, *, repair: bool) -> list[Problem]:
    """A shard without index: its own header has the list, and every row is checked."""
    try:
        index = recover_index(shard, store.spec)
    except Damaged as problem:
        if problem.kind == "foreign":
            return [Problem(shard.name, "foreign", str(problem), 0, "left, never read: move it to its own store")]
        if repair:
            shard.unlink(missing_ok=True)
        return [Problem(shard.name, problem.kind, str(problem), 0, "removed")]
    if repair:
        write_index(store.folder, index)
    lost = index.count - len(index.entries)
    return [Problem(shard.name, "no index", f"{len(index.entries)} good rows", lost, "index written again")]


def _leftovers(folder: Path, living: Collection[str]) -> list[Path]:
    """Files that were being written when their process died: of shards by builder, small ones by their age."""
    shards = [path for path in folder.glob(".shard-*.part") if _builder(path) not in living]
    small = [p for pattern in (".meta.json.*.part", "claims/.*.part") for p in folder.glob(pattern)]
    return sorted([*shards, *(path for path in small if idle_seconds(path) > STALE)])


def _count(path: Path) -> int:
    """Images that an index names, as far as that can be said."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return len(json.loads(path.read_bytes())["index"]["entries"])
    return 0


def _builder(path: Path) -> str:
    """The builder that a shard, index or leftover is named after."""
    return path.name.lstrip(".").split("-")[1]


def stores(root: str | Path) -> Iterator[FeatureStore | TextStore]:
    """All stores below a root, those of images first. Raises DataError if there is no such folder, or for a damaged
    meta.json."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Give the folder that features were built in (features.root).")
    for meta in sorted(root.glob(f"*/{META}")):
        yield FeatureStore.open(meta.parent)
    for meta in sorted(root.glob(f"{TEXTS}/*/{META}")):
        yield TextStore.open(meta.parent)


def verify(root: str | Path, keys: Sequence[str] | None = None, *, repair: bool = False) -> list[dict[str, Any]]:
    """Check every byte of the stores below `root` (or those with the given keys, or beginnings of keys).

    Returns one dict per store: "kind" ("images" or "texts"), "key", the number of these by the name of the kind,
    "shards", "problems" (dicts of `Problem`), "repaired". With `repair` what is wrong is taken away, so that the next
    build or run computes just that. Raises DataError for an unknown key.
    """
    reports = []
    for store in _chosen(root, keys):
        if isinstance(store, TextStore):
            problems = mend_texts(store, repair=repair)
            facts = text_facts(store)
            report = {name: facts[name] for name in ("kind", "key", "texts", "shards")}
        else:
            if repair:
                with Claims(store.folder) as claims, claims.lock():
                    problems = mend(store, full=True, repair=True, living=set(claims.others()))
            else:
                problems = mend(store, full=True, repair=False, living=_living(store))
            indexes = store.indexes()
            images = len({entry.identity for index in indexes for entry in index.entries})
            report = {"kind": "images", "key": store.spec.key, "images": images, "shards": len(indexes)}
        reports.append({**report, "problems": [problem._asdict() for problem in problems], "repaired": repair})
    return reports


def info(root: str | Path, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """What is stored, one dict per store; "kind" is "images" or "texts".

    Of images: key, base, dtype, resolution, images, duplicates, shards, bytes, builders at work, patches of an image
    (the mean where a sample is kept, of so many background patches as "background" says), and "error": the largest
    error of similarities that was measured while building (see `accuracy.similarity_error`). Of texts: see
    `texts.text_facts`.
    """
    return [text_facts(s) if isinstance(s, TextStore) else _image_facts(s) for s in _chosen(root, keys)]


def _image_facts(store: FeatureStore) -> dict[str, Any]:
    spec, indexes = store.spec, store.indexes()
    names = [entry.identity for index in indexes for entry in index.entries]
    mean = sum(index.units for index in indexes) / (sum(index.count for index in indexes) or 1)
    errors = [index.facts["error"] for index in indexes if "error" in index.facts]
    return {
        "kind": "images",
        "key": spec.key,
        "base": str(json.loads((store.folder / META).read_bytes()).get("base", "")),
        "base_sha256": spec.base_sha256,
        "dtype": spec.dtype,
        "arithmetic": spec.arithmetic,
        "resolution": spec.processor.get("size"),
        "images": len(set(names)),
        "duplicates": len(names) - len(set(names)),
        "shards": len(indexes),
        "bytes": sum(path.stat().st_size for path in store.folder.glob("shard-*")),
        "bytes_per_image": round(mean * spec.unit_bytes) if indexes else spec.bytes_per_image,
        "background": None if spec.sample is None else spec.sample["background"],
        "patches": spec.patches if spec.sample is None else mean,
        "builders": len(_living(store)),
        "error": {name: max(error[name] for error in errors) for name in ("cosine", "bound")} if errors else None,
        "error_images": len(errors),
    }


def prune(root: str | Path, keep: Sequence[str] | None, *, dry_run: bool = True) -> list[dict[str, Any]]:
    """Remove all stores, of images and of texts, but those with the keys in `keep` (None keeps all), and what processes
    that died left in the others.

    Returns what was or (dry run, the default) would be removed: "path", "bytes", "why", "removed". Stores that are
    being written to are left. Raises DataError for a key that is not there: nothing is removed then.
    """
    every = list(stores(root))
    kept = every if keep is None else _chosen(root, keep)
    kept_keys = {_key(store) for store in kept}
    found: list[dict[str, Any]] = []
    for store in every:
        if isinstance(store, TextStore):
            busy, leftovers = being_written(store), leftover_texts(store)
        else:
            living = _living(store)
            busy, leftovers = bool(living), _leftovers(store.folder, living)
        size = sum(p.stat().st_size for p in store.folder.rglob("*") if p.is_file())
        if _key(store) in kept_keys:
            for path in leftovers:
                found.append({"path": path, "bytes": path.stat().st_size, "why": "left by a build that died"})
        elif busy:
            found.append({"path": store.folder, "bytes": size, "why": "not kept, but being built", "removed": False})
        else:
            found.append({"path": store.folder, "bytes": size, "why": "not kept"})
    for item in found:
        item["removed"] = item.get("removed", True) and not dry_run
        if item["removed"]:
            _remove(item["path"])
        item["path"] = str(item["path"])
    return found


def _remove(path: Path) -> None:
    """A leftover file, or a store: out of the way by one rename first, so that nobody sees half of it."""
    if path.is_file():
        path.unlink()
        return
    doomed = path.with_name(f".{path.name}.{os.getpid()}.removed")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _chosen(root: str | Path, keys: Sequence[str] | None) -> list[FeatureStore | TextStore]:
    every = list(stores(root))
    if keys is None:
        return every
    chosen = []
    for key in keys:
        fitting = [store for store in every if key and _key(store).startswith(key)]
        if len(fitting) != 1:
            have = ", ".join(_key(store)[:12] for store in every) or "none"
            raise DataError(f"{root}: {len(fitting)} stores have a key that begins with {key!r}; there are: {have}.")
        chosen += fitting
    return chosen


def _key(store: FeatureStore | TextStore) -> str:
    return store.key if isinstance(store, TextStore) else store.spec.key


def _living(store: FeatureStore) -> set[str]:
    """Builders at work, by looking only."""
    return set(live_claims(store.folder / "claims", time.time(), remove=False))
