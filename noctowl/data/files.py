"""Where a data root keeps its files, in the layout that FG-OVD and COCO 2017 are published in.

    root/images/{train2017,val2017}/*.jpg     or train2017/ and val2017/ directly below root
    root/annotations/{training_sets,validation_sets,benchmarks}/*.json     or these three directly below root

Every error lists what is there.
"""

from pathlib import Path

from noctowl.errors import DataError

# Published file names of the eight benchmarks (FG-OVD paper, Table 1; "Normal" there is Medium here).
BENCHMARKS = {
    "hard": "1_attributes",
    "medium": "2_attributes",
    "easy": "3_attributes",
    "trivial": "shuffle_negatives",
    "color": "color",
    "material": "material",
    "pattern": "pattern",
    "transparency": "transparency",
}
ALIASES = {stem: alias for alias, stem in BENCHMARKS.items()}
TRAIN_FILE = "training_sets/1_attributes.json"
VAL_FILE = "validation_sets/1_attributes.json"
SETS = ("training_sets", "validation_sets", "benchmarks")


def find_annotations(root: str | Path, override: str | Path | None = None) -> Path:
    """The folder that holds training_sets/, validation_sets/ and benchmarks/: `root/annotations`, or `root` itself.

    `override` (data.annotations) is taken below `root` unless it is absolute.
    """
    root = _root(root)
    if override is not None:
        folder = root / override
        if not folder.is_dir():
            raise DataError(
                f"data.annotations: the folder {folder} is missing.{what_is_there(root)} Correct data.annotations."
            )
        return folder
    for folder in (root / "annotations", root):
        if any((folder / name).is_dir() for name in SETS):
            return folder
    raise DataError(
        f"data.root: {root} holds no annotations; looked for annotations/ with one of {list(SETS)}."
        f"{what_is_there(root)} Set data.annotations to the folder that has them."
    )


def find_images(root: str | Path, override: str | Path | None = None) -> Path:
    """The folder that the image files are relative to: `root/images`, or `root` where train2017/ or val2017/ lie in it.

    `override` (data.images) is taken below `root` unless it is absolute.
    """
    root = _root(root)
    if override is not None:
        folder = root / override
        if not folder.is_dir():
            raise DataError(
                f"data.images: the folder {folder} is missing. Set data.images to the folder that holds the images."
            )
        return folder
    if (root / "images").is_dir():
        return root / "images"
    if (root / "train2017").is_dir() or (root / "val2017").is_dir():
        return root
    raise DataError(
        f"data.root: {root} holds no images; looked for images/, train2017/ and val2017/, found "
        f"{sorted(p.name for p in root.iterdir())[:20]}. Put COCO 2017 there or set data.images."
    )


def find_file(annotations: str | Path, name: str | Path) -> Path:
    """The annotation file `name` below the annotations' folder, or absolute (data.train_file, data.coarse_file, …)."""
    path = Path(annotations) / name
    if not path.is_file():
        raise DataError(
            f"{path}: the annotation file is missing.{what_is_there(Path(annotations))} "
            "Set the key that names it (data.train_file, data.val_file, data.coarse_file, …) to one of them."
        )
    return path


def find_benchmarks(annotations: str | Path, names: list[str] | None = None) -> dict[str, Path]:
    """Benchmark alias -> file, in the order of BENCHMARKS; `names` (alias or stem) asks for some, None for all."""
    folder = Path(annotations) / "benchmarks"
    present = {
        alias: folder / f"{stem}.json" for alias, stem in BENCHMARKS.items() if (folder / f"{stem}.json").is_file()
    }
    wanted = list(present) if names is None else [ALIASES.get(name, name) for name in names]
    missing = [name for name in wanted if name not in present]
    if missing or not wanted:
        raise DataError(
            f"{folder}: no file for the benchmark(s) {missing or list(BENCHMARKS)}; known are {BENCHMARKS}."
            f"{what_is_there(Path(annotations))} Download them or ask for those that are there."
        )
    return {name: present[name] for name in wanted}


def annotation_files(folder: str | Path) -> list[Path]:
    """Every annotation file of the three set folders below `folder`, sorted."""
    return sorted(path for name in SETS for path in (Path(folder) / name).glob("*.json"))


def _root(root: str | Path) -> Path:
    root = Path(root)
    if not root.is_dir():
        raise DataError(
            f"data.root: the folder {root} is missing. Set data.root to the folder with images/ and annotations/."
        )
    return root


def what_is_there(folder: Path) -> str:
    """ " There is: …" for messages: JSON files at most two folders below `folder`."""
    if not folder.is_dir():
        return f" The folder {folder} does not exist."
    found = sorted(
        {
            p.relative_to(folder).as_posix()
            for pattern in ("*.json", "*/*.json", "*/*/*.json")
            for p in folder.glob(pattern)
        }
    )
    return (
        f" Annotation files there: {', '.join(found[:40])}."
        if found
        else f" No annotation files (*.json) below {folder}."
    )
