"""From a command line to a checked, plain configuration: the only file that knows Hydra.

Hydra stops at the first unknown key or group. Here every override is looked at before Hydra composes, unknown keys are
let through into the tree, and the schema then reports all of them together, each with the file (or the command line)
that it came from.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from noctowl.config import EvaluateConfig, TrainConfig, check
from noctowl.errors import ConfigError
from noctowl.validation import Problem, did_you_mean, raise_for

SCHEMAS = {"train": TrainConfig, "evaluate": EvaluateConfig}
VERSION_BASE = "1.3"
Tree = dict[str, Any]
Job = tuple[Tree, list[str]]  # a checked configuration, and the overrides that made it
Launch = Callable[[Callable[[int], None], Path], None]  # runs a function on every job's number; folder of the sweep


def conf_dir() -> Path:
    """The configuration tree: inside an installed package, else beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def compose(entry: str, overrides: Sequence[str]) -> Tree:
    """One checked configuration.

    Args:
        entry: "train" or "evaluate".
        overrides: as on the command line, without sweeps: "loss=triplet", "loss.margin=0.2".

    Returns:
        A plain nested dict, interpolations resolved.

    Raises:
        ConfigError: lists every problem with key, origin, what was found and what is allowed.
    """
    parsed, problems = _parse(overrides)
    wrong, usable = _check_groups(parsed)
    tree, copies = _compose(entry, usable)
    found = check(tree, SCHEMAS[entry])
    keys = {problem.key for problem in found}
    problems += wrong + [p for p in found if copies.get(p.key) not in keys]  # told once, where the value was given
    raise_for(problems, _origin(entry, parsed, overrides))
    return tree


def merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Two lists of overrides as one: a key of the second takes the place of the same key of the first."""
    later = {_key(text) for text in second}
    return [text for text in first if _key(text) not in later] + list(second)


def word(key: str, value: str) -> str:
    """An override with a text in it, whatever its characters."""
    return key + '="' + value.replace('"', '\\"') + '"'


def _key(override: str) -> str:
    return override.split("=")[0].lstrip("+~")


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, in the order in which Hydra's basic sweeper runs them.

    The parameters of a sweep file (`hydra.sweeper.params` of an experiment) come first.
    """
    parsed, problems = _parse(overrides)
    raise_for(problems, lambda _: "command line")
    experiment = next((o.value() for o in parsed if o.key_or_group == "experiment"), None)
    params = _node(conf_dir() / f"experiment/{experiment}.yaml", "hydra.sweeper.params") or {}
    parsed = _parse([f"{key}={value}" for key, value in params.items()])[0] + parsed
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(job) for batch in batches for job in batch]


def dispatch(
    entry: str, argv: Sequence[str], task: Callable[[list[Job], Launch | None], None], *, alone: bool = False
) -> None:
    """Run `task` on the jobs of the command line: one, or all of a sweep (-m).

    All jobs are checked before the first one starts. With a launcher of Hydra's (hydra/launcher=…), `task` is also
    given the way to run a function on each job's number where that launcher wants it. For a sweeper of Hydra's, and for
    --help, --cfg and the like, Hydra runs the show, and `task` gets one job at a time.

    `alone`: `task` can start a job of a sweep as a program of its own, so that it may have several devices.
    """
    flags = [a for a in argv if a.startswith("-")]
    overrides = [a for a in argv if not a.startswith("-")]
    if not flags:
        task([(compose(entry, overrides), list(overrides))], None)
        return
    launcher, sweeper = (any(o.startswith(f"hydra/{kind}") for o in overrides) for kind in ("launcher", "sweeper"))
    if set(flags) <= {"-m", "--multirun"}:
        checked = _check_sweep(
            entry, jobs([o for o in overrides if not o.startswith("hydra")]), alone=alone and not (launcher or sweeper)
        )
        if not sweeper:
            task(checked, partial(_spread, entry, argv) if launcher else None)
            return
    _hydra(entry, argv, lambda cfg: task([(_plain(cfg), list(HydraConfig.get().overrides.task))], None))


def _spread(entry: str, argv: Sequence[str], job: Callable[[int], None], folder: Path) -> None:
    words = [a for a in argv if not a.startswith("-")]  # Hydra wants its overrides in one row
    words.append(word("hydra.sweep.dir", str(folder)))
    _hydra(entry, ["--multirun", *words], lambda _: job(HydraConfig.get().job.num))


def _hydra(entry: str, argv: Sequence[str], job: Callable[[DictConfig], None]) -> None:
    wrapped = hydra_main(version_base=VERSION_BASE, config_path=str(conf_dir().resolve()), config_name=entry)(job)
    saved, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        wrapped()
    except HydraException as error:
        raise ConfigError(f"{error}\nSee `python {entry}.py --help` for groups and keys.") from error
    finally:
        sys.argv = saved


def _check_sweep(entry: str, sweep: list[list[str]], *, alone: bool) -> list[Job]:
    """`alone`: see `dispatch`."""
    lines: dict[str, None] = {}  # the same problem in many jobs is told once
    checked = []
    for overrides in sweep:
        try:
            tree = compose(entry, overrides)
        except ConfigError as error:
            lines.update(dict.fromkeys(str(error).splitlines()[1:]))
            continue
        if tree["trainer"]["devices"] > 1 and not (alone and tree["trainer"]["num_nodes"] == 1):
            text = "  trainer.devices: found {devices} (x {num_nodes} nodes); a sweep job with several devices re-runs"
            text += " the whole sweep in each of its processes; allowed: 1 with a launcher or sweeper of Hydra's, under"
            text += " torchrun or SLURM, and with several nodes; start each job by itself, without -m"
            lines[text.format(**tree["trainer"])] = None
        checked.append((tree, overrides))
    for folder, count in Counter(tree["run_dir"] for tree, _ in checked if tree["run_dir"] is not None).items():
        if count > 1:
            text = f"  run_dir: found {folder} for {count} jobs of the sweep; allowed: a folder for each"
            lines[f"{text}; leave it out, and each job gets one below <output_dir>/<name>"] = None
    if lines:
        raise ConfigError("\n".join([f"{len(lines)} problem(s) in the configuration of the sweep:", *lines]))
    return checked


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parsed: list[Override] = []
    wrong: list[Problem] = []
    for text in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            hint = str(error).splitlines()[0]
            if set(" '\"()") & set(text.partition("=")[2]):
                hint += """; a value with blanks, quotes or parentheses is quoted twice: 'data.root="/a b (c)"'"""
            wrong.append(Problem(text, "an override that cannot be read", "key=value", hint))
    return parsed, wrong


def _check_groups(overrides: list[Override]) -> tuple[list[Problem], list[str]]:
    """Problems of group choices, and the overrides that Hydra can compose (the schema judges new keys)."""
    problems, usable = [], []
    groups = sorted(p.name for p in conf_dir().iterdir() if p.is_dir())
    for override in overrides:
        key, text = override.key_or_group, str(override.input_line)
        if key.startswith("hydra"):
            usable.append(text)
        elif key in groups:
            folder = conf_dir() / key
            choices = sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))
            value = override.value()
            if value in choices or (value is None and key == "experiment"):
                usable.append(text.lstrip("+"))
            else:
                problems.append(Problem(key, repr(value), ", ".join(choices), did_you_mean(str(value), choices)))
        else:
            usable.append(text if text[0] in "+~" else f"++{text}")
    return problems, usable


def _compose(entry: str, overrides: Sequence[str]) -> tuple[Tree, dict[str, str]]:
    """The configuration, and the keys that are copies of others: {"optimizer.lr": "model.recipe.lr"}."""
    try:
        with initialize_config_dir(version_base=VERSION_BASE, config_dir=str(conf_dir().resolve())):
            cfg = hydra_compose(config_name=entry, overrides=list(overrides))
            return _plain(cfg), dict(_copies(OmegaConf.to_container(cfg)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"The configuration cannot be composed: {error}") from error


def _copies(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        whole = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if whole:
            yield f"{path}{key}", whole[1]
        yield from _copies(value, f"{path}{key}.")


def _plain(cfg: DictConfig) -> Tree:
    tree = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(tree, dict)  # the top level of a Hydra configuration is a mapping
    return {str(key): value for key, value in tree.items() if key != "hydra"}


def _origin(entry: str, overrides: list[Override], words: Sequence[str]) -> Callable[[str], str]:
    """Where a key's value came from: the command line, the experiment's file, its group's file, or the main file."""
    given = {o.key_or_group: o.value() for o in overrides}

    def of(key: str) -> str:
        if key in words or any(key == k or key.startswith(f"{k}.") for k in given if k == key or not _is_group(k)):
            return "command line"
        files = [f"experiment/{given['experiment']}.yaml"] if given.get("experiment") else []
        group = key.split(".")[0]
        if _is_group(group):
            choice = given.get(group) or _default_choice(entry, group)
            files.append(f"{group}/{choice}.yaml")
        for file in files:
            if file.startswith("experiment") and _node(conf_dir() / file, key) is None:
                continue
            return f"conf/{file}"
        return f"conf/{entry}.yaml"

    return of


def _is_group(key: str) -> bool:
    return (conf_dir() / key).is_dir()


def _default_choice(entry: str, group: str) -> str | None:
    defaults = yaml.safe_load((conf_dir() / f"{entry}.yaml").read_text())["defaults"]
    return next((item[group] for item in defaults if isinstance(item, dict) and group in item), None)


def _node(file: Path, key: str) -> Any:
    """What a YAML file says at a dotted key; None where it says nothing."""
    node = yaml.safe_load(file.read_text()) if file.is_file() else None
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node
