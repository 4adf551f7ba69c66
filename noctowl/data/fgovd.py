"""Reads annotation files in the format of FG-OVD and applies the 16-token rule.

The format is COCO's with one more key, `neg_category_ids` of each annotation: the categories (captions) that the
object's positive caption must be told from. Legend: I images, K captions, V vocabularies, A objects, N negatives.
"""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from noctowl.data.files import ALIASES, what_is_there
from noctowl.data.records import Annotations, Strings, relative_path
from noctowl.errors import DataError

TOKEN_LIMIT = 16  # tokens that OWL-ViT and OWLv2 read, start and end included

Short = Literal["drop", "keep"]


def read_fgovd(path: str | Path) -> Annotations:
    """Read one FG-OVD file.

    Mended and counted in `counts`: stray blanks in captions, boxes that reach outside the image, boxes without area
    (dropped), objects of one vocabulary with differing negatives (the first object's are used), captions that occur
    twice in a vocabulary (kept). Segmentations, areas and other keys are ignored: the area is that of the box.

    Raises:
        DataError: unreadable or truncated file, missing keys, unknown or duplicate ids, damaged boxes, paths that leave
            the images' folder, nothing left to use. The message names the file and the entry.
    """
    path = Path(path)
    data, digest = _load(path)
    images, categories = _by_id(data, "images", path), _by_id(data, "categories", path)
    _by_id(data, "annotations", path)
    image_row = {key: row for row, key in enumerate(images)}
    category_row = {key: row for row, key in enumerate(categories)}
    raw_captions = [_caption(entry, path) for entry in categories.values()]
    captions = [" ".join(caption.split()) for caption in raw_captions]
    sizes = np.array([_size(entry, path) for entry in images.values()], np.int32).reshape(-1, 2)

    counts: Counter[str] = Counter(
        images=len(images),
        captions=len(captions),
        annotations=len(data["annotations"]),
        stray_blanks=sum(a != b for a, b in zip(raw_captions, captions)),
    )
    counts.update(dict.fromkeys(("clipped", "dropped_zero_area", "differing_negatives"), 0))
    groups: dict[tuple[int, str], list[int]] = {}  # (image row, positive caption) -> rows of its vocabulary
    members: list[tuple[int, int, list[float]]] = []  # vocabulary, annotation id, box
    index: dict[tuple[int, str], int] = {}
    for entry in data["annotations"]:
        where = f"{path}, annotation {entry['id']}"
        row = _row(entry.get("image_id"), "image_id", image_row, where)
        positive = _row(entry.get("category_id"), "category_id", category_row, where)
        columns = [positive, *_negatives(entry, category_row, where)]
        if entry.get("iscrowd"):
            raise DataError(
                f"{where}: iscrowd is {entry['iscrowd']!r}; FG-OVD files have no crowd regions. Remove the entry."
            )
        box = _box(entry, sizes[row], where, counts)
        if box is None:
            continue
        key = (row, captions[positive])
        if not key[1]:
            raise DataError(
                f"{where}: category {entry['category_id']} is an empty caption. Give it a text or remove it."
            )
        known = groups.setdefault(key, columns)
        counts["differing_negatives"] += known[1:] != columns[1:]
        members.append((index.setdefault(key, len(index)), entry["id"], box))
    if not members:
        raise DataError(
            f"{path}: no object is left: the list 'annotations' is empty or every box lies outside its image. At "
            "least one annotation with an area is needed; look at the file's producer."
        )
    return _pack(path, digest, images, categories, captions, sizes, groups, members, counts)


def _pack(
    path: Path,
    digest: str,
    images: dict[int, dict[str, Any]],
    categories: dict[int, dict[str, Any]],
    captions: list[str],
    sizes: npt.NDArray[np.int32],
    groups: dict[tuple[int, str], list[int]],
    members: list[tuple[int, int, list[float]]],
    counts: Counter[str],
) -> Annotations:
    """Flat arrays from the parsed entries; objects are sorted by vocabulary, in file order inside one."""
    members.sort(key=lambda member: member[0])
    boxes = np.array([member[2] for member in members], np.float64)  # [A, 4]
    vocabularies = list(groups.values())
    texts = [[captions[column] for column in columns] for columns in vocabularies]
    counts["objects"] = len(members)
    counts["vocabularies"] = len(vocabularies)
    counts["duplicate_captions_in_vocabulary"] = sum(len(text) - len(set(text)) for text in texts)
    counts["negatives_equal_to_positive"] = sum(text[1:].count(text[0]) for text in texts)
    counts["images_without_objects"] = len(images) - len({row for row, _ in groups})
    return Annotations(
        name=ALIASES.get(path.stem, path.stem),
        path=path,
        sha256=digest,
        image_ids=np.fromiter(images, np.int64, len(images)),
        image_files=Strings(_image_file(entry, path) for entry in images.values()),
        image_sizes=sizes,
        category_ids=np.fromiter(categories, np.int64, len(categories)),
        captions=Strings(captions),
        vocab_image=np.array([row for row, _ in groups], np.int32),
        vocab_offsets=np.cumsum([0, *map(len, vocabularies)], dtype=np.int64),
        vocab_columns=np.array([column for columns in vocabularies for column in columns], np.int32),
        object_vocab=np.array([member[0] for member in members], np.int32),
        object_ids=np.array([member[1] for member in members], np.int64),
        object_boxes=boxes,
        object_area=(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
        counts=dict(counts),
    )


def _load(path: Path) -> tuple[dict[str, Any], str]:
    """The parsed file and the SHA-256 of its bytes."""
    if not path.is_file():
        raise DataError(
            f"{path}: the annotation file is missing.{what_is_there(path.parent)} Check data.root and the file's name."
        )
    content = path.read_bytes()
    if not content.strip():
        raise DataError(f"{path}: the annotation file is empty (0 bytes of content). Download or write it again.")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not valid JSON ({error}); the file is truncated or of another kind ({len(content)} bytes). "
            "Allowed is an FG-OVD (COCO-style) JSON file. Download or write it again."
        ) from error
    keys = ("images", "annotations", "categories")
    found = sorted(data) if isinstance(data, dict) else type(data).__name__
    missing = [key for key in keys if not isinstance(data, dict) or not isinstance(data.get(key), list)]
    if missing:
        raise DataError(
            f"{path}: missing top-level list(s) {missing}; found {found}, needed {list(keys)}. Is it an FG-OVD file?"
        )
    return data, hashlib.sha256(content).hexdigest()


def _by_id(data: dict[str, Any], key: str, path: Path) -> dict[int, dict[str, Any]]:
    """Entries of a top-level list by their id, in file order; ids are integers and unique."""
    entries: dict[int, dict[str, Any]] = {}
    for position, entry in enumerate(data[key]):
        number = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(number, int) or isinstance(number, bool):
            raise DataError(f"{path}: {key}[{position}] has the id {number!r}; every entry needs an integer 'id'.")
        if number in entries:
            raise DataError(
                f"{path}: duplicate id {number} in '{key}' (again at position {position}). Ids must be unique."
            )
        entries[number] = entry
    return entries


def _row(value: Any, key: str, rows: dict[int, int], where: str) -> int:
    what = "image" if key == "image_id" else "category"
    if not isinstance(value, int) or value not in rows:
        raise DataError(
            f"{where}: unknown {what} id {value!r} in '{key}'; the file's {len(rows)} {what} ids do not hold it. "
            f"Add the {what} or remove the annotation."
        )
    return rows[value]


def _negatives(entry: dict[str, Any], rows: dict[int, int], where: str) -> list[int]:
    negatives = entry.get("neg_category_ids") or []
    if not isinstance(negatives, list):
        raise DataError(
            f"{where}: neg_category_ids is {negatives!r}; allowed is a list of category ids, which may be empty."
        )
    return [_row(value, "neg_category_ids", rows, where) for value in negatives]


def _caption(entry: dict[str, Any], path: Path) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise DataError(f"{path}, category {entry['id']}: 'name' is {name!r}; it must be the caption, a text.")
    return name


def _size(entry: dict[str, Any], path: Path) -> tuple[int, int]:
    size = (entry.get("width"), entry.get("height"))
    if not all(isinstance(side, int) and not isinstance(side, bool) and 0 < side < 2**31 for side in size):
        raise DataError(
            f"{path}, image {entry['id']}: width x height is {size[0]!r} x {size[1]!r}; positive integers are needed."
        )
    return size  # type: ignore[return-value]


def _image_file(entry: dict[str, Any], path: Path) -> str:
    """`file_name`, or else the last two components of `coco_url` ("…/val2017/000000000139.jpg")."""
    where = f"{path}, image {entry['id']}"
    name = entry.get("file_name")
    if not name and isinstance(entry.get("coco_url"), str):
        name = "/".join(entry["coco_url"].split("/")[-2:])
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}: neither 'file_name' nor 'coco_url' names the image file. One of them is needed.")
    return relative_path(name, where=where)


def _box(entry: dict[str, Any], size: npt.NDArray[np.int32], where: str, counts: Counter[str]) -> list[float] | None:
    """xyxy clipped to the image, in pixels; None where nothing is left. Counts what was clipped and dropped."""
    bbox = entry.get("bbox")
    numbers = bbox if isinstance(bbox, list) else []
    valid = len(numbers) == 4 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers)
    if not valid or not all(map(math.isfinite, numbers)) or numbers[2] < 0 or numbers[3] < 0:
        raise DataError(
            f"{where}: bad bbox {bbox!r}; allowed are four finite numbers [x, y, width, height] in pixels, width and "
            "height not negative. Correct or remove the annotation."
        )
    x, y, w, h = map(float, numbers)
    wide, high = float(size[0]), float(size[1])
    box = [min(max(x, 0.0), wide), min(max(y, 0.0), high), min(max(x + w, 0.0), wide), min(max(y + h, 0.0), high)]
    if (box[2] - box[0]) * (box[3] - box[1]) <= 0:
        counts["dropped_zero_area"] += 1
        return None
    counts["clipped"] += box != [x, y, x + w, y + h]
    return box


def processable(
    annotations: Annotations, lengths: npt.ArrayLike, n_negatives: int, limit: int = TOKEN_LIMIT, short: Short = "drop"
) -> npt.NDArray[np.bool_]:
    """[V] vocabularies that the detector can be asked with N negatives: every caption it needs fits the token limit.

    `lengths` [K]: tokens of each caption, start and end included. `short`: vocabularies with fewer than N negatives are
    left out ("drop", as published) or asked with what they have ("keep"). At N = 1 this is the "OWL subset" of the
    papers (Table of the OWL subset: positive and first negative fit).
    """
    if n_negatives < 0:
        raise DataError(f"n_negatives is {n_negatives}; allowed is 0 or more.")
    if short not in ("drop", "keep"):
        raise DataError(f"short is {short!r}; allowed are 'drop' and 'keep'.")
    tokens = np.asarray(lengths)
    if tokens.shape != annotations.category_ids.shape:
        raise DataError(
            f"lengths has the shape {tokens.shape}; one per caption is needed, {annotations.category_ids.shape}."
        )
    starts = annotations.vocab_offsets[:-1]
    column = np.arange(len(annotations.vocab_columns)) - np.repeat(starts, np.diff(annotations.vocab_offsets))
    over = (tokens[annotations.vocab_columns] > limit) & (column <= n_negatives)
    fits = ~np.logical_or.reduceat(over, starts)
    return fits & (annotations.n_negatives >= n_negatives) if short == "drop" else fits


def subset_counts(
    annotations: Annotations, kept: npt.NDArray[np.bool_], n_negatives: int = 0, short: Short = "drop"
) -> dict[str, Any]:
    """What a selection of vocabularies (`processable` with the same N and `short`) holds, and what it leaves behind.

    `forced_fn_*`: objects and positive captions that do not fit, in images where something does: the published
    evaluation counts them as misses. Vocabularies that are left out for too few negatives are not among them.
    `annotation_ids_sha1`: of the kept annotation ids, sorted, joined by commas.
    """
    inside = kept[annotations.object_vocab]  # [A]
    asked = annotations.n_negatives >= (n_negatives if short == "drop" else 0)  # [V]
    forced = asked & ~kept & np.isin(annotations.vocab_image, annotations.vocab_image[kept])  # [V]
    ids = ",".join(map(str, np.sort(annotations.object_ids[inside])))
    return {
        "images": len(np.unique(annotations.vocab_image[kept])),
        "objects": int(inside.sum()),
        "positive_captions": int(kept.sum()),
        "neg_per_positive": float(annotations.n_negatives[kept].mean()) if kept.any() else 0.0,
        "forced_fn_objects": int(forced[annotations.object_vocab].sum()),
        "forced_fn_classes": int(forced.sum()),
        "annotation_ids_sha1": hashlib.sha1(ids.encode(), usedforsecurity=False).hexdigest(),
    }
