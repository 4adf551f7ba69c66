"""The folder of a run: made once, never shared, every file written whole or not at all.

<run>/ config.yaml  overrides.yaml  env.txt  metrics.csv  results.json  predictions/  checkpoints/  export/
"""

import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import IO, Any

import yaml
from torch import distributed

from noctowl.errors import ConfigError, DataError, NoctowlError

RUN_DIR_VARIABLE = "NOCTOWL_RUN_DIR"  # how the processes of one run find the folder that the first one made
PACKAGES = (
    "noctowl",
    "torch",
    "torchvision",
    "transformers",
    "pytorch-lightning",
    "timm",
    "accelerate",
    "numpy",
    "pillow",
)
RESULTS_VERSION = 1
SETTINGS = ("config.yaml", "overrides.yaml", "env.txt")


def process_rank() -> int:
    """Rank of this process in its process group, or else in whatever launched it; 0 when nothing did.

    The group comes first: accelerate sets RANK=0 in processes that Lightning started with LOCAL_RANK alone.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0


def create_run_folder(output_dir: str | Path, name: str, explicit: str | None = None) -> Path:
    """Make the folder of a run: `explicit`, or <output_dir>/<name>/<time+unique>.

    Two runs that start at the same microsecond get different folders. The other processes of the same run get the first
    one's folder through the environment.

    Raises:
        ConfigError: the folder exists and is not empty, or cannot be made; several processes were launched from outside
            without `run_dir`.
    """
    handed_over = os.environ.get(RUN_DIR_VARIABLE)
    if process_rank() > 0:
        if explicit or handed_over:
            return Path(explicit or str(handed_over))
        raise ConfigError(
            "run_dir: several processes were started by a launcher, and each would make a folder of its own; "
            "give all of them the same one: run_dir=outputs/<a new folder>"
        )
    if explicit:
        folder = Path(explicit)
        if _filled(folder):
            raise ConfigError(
                f"run_dir: {folder} exists and is not empty; allowed: a new or empty folder. Nothing was written."
            )
        make_folder(folder, "run_dir", exist_ok=True)
    else:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        folder = Path(output_dir) / name / f"{stamp}-{secrets.token_hex(3)}"
        make_folder(folder, "output_dir")
    return folder


def _filled(folder: Path) -> bool:
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError:
        return False  # what is wrong is told when the folder is made


def make_folder(folder: Path, key: str, *, exist_ok: bool = False) -> None:
    """Raises ConfigError that names `key`, which says where the folder is to be."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise ConfigError(
            f"{key}: the folder {folder} cannot be made ({error.strerror or error}: {error.filename or folder}); "
            f"allowed: a folder below one that exists and can be written to. Set {key} to one, or mend what is there."
        ) from error


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that appears at `path` complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """UTF-8, atomic."""
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Atomic, sorted as given, no NaN."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def write_settings(folder: Path, tree: Mapping[str, Any], overrides: list[str]) -> None:
    """config.yaml, overrides.yaml and env.txt: what it takes to start the run again."""
    write_text(folder / "config.yaml", yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True))
    write_text(folder / "overrides.yaml", yaml.safe_dump(list(overrides), allow_unicode=True))
    head = [f"python {sys.version.split()[0]}", platform.platform(), "command " + " ".join(sys.argv), *git_state()]
    write_text(folder / "env.txt", "\n".join([*head, "", *_installed()]) + "\n")


@cache
def _installed() -> tuple[str, ...]:
    """name==version of every package; read once, for every run of a sweep has the same."""
    found = {f"{d.metadata['Name']}=={d.version}" for d in distributions() if d.metadata["Name"]}
    return tuple(sorted(found, key=str.lower))


@contextmanager
def beginning(folder: Path, tree: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[None]:
    """Writes the settings of a run that begins; where it cannot begin, the folder is taken away again.

    That is: where the body raises a NoctowlError and nothing but the settings is in the folder.
    """
    if process_rank() > 0:
        yield
        return
    write_settings(folder, tree, list(overrides))
    try:
        yield
    except NoctowlError:
        if {path.name for path in folder.iterdir()} <= set(SETTINGS):
            shutil.rmtree(folder)
        raise


def fingerprint(tree: Mapping[str, Any]) -> str:
    """sha256 of a configuration."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def git_state() -> list[str]:
    """Commit of the checkout that the code runs from, and whether it was changed; nothing outside a checkout."""
    here = Path(__file__).parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit or not (here / ".git").exists():
        return []
    return [f"commit {commit}" + (" with local changes" if git("status", "--porcelain", "-uno") else "")]


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def provenance(**facts: Any) -> dict[str, Any]:
    """Where a result comes from: versions, time, commit, and what the caller adds."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"created": now, "versions": versions(), "code": git_state(), **facts}


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml of a run. Raises DataError if it is absent or not a mapping."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise DataError(f"{folder} is not a run folder: {path.name} is missing. Pass the folder that a run printed.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as YAML ({error})") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path}: a mapping of settings is needed, found {type(tree).__name__}")
    return tree


def read_overrides(folder: Path) -> list[str]:
    """overrides.yaml of a run. Raises DataError if it is absent or not a list of words."""
    path = folder / "overrides.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable ({error}): {folder} is not a run folder, or it is damaged") from error
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise DataError(f"{path}: a list of overrides is needed")
    return found


def read_results(path: Path) -> dict[str, Any]:
    """results.json of a run. Raises DataError for a missing, damaged or foreign file and for one of another version."""
    if not path.is_file():
        raise DataError(f"{path} is missing: the run has not finished, or this is not a run folder")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(results, dict) or results.get("version") != RESULTS_VERSION:
        found = results.get("version") if isinstance(results, dict) else type(results).__name__
        raise DataError(f"{path}: version {found!r}; this noctowl reads version {RESULTS_VERSION}")
    return results
