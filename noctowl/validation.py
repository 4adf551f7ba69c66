"""Checks a plain dict against a tree of dataclasses and reports every problem, not the first.

A group whose choices differ in their keys (loss, distill, logger) is a union of dataclasses told apart by `name`.
"""

import difflib
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from noctowl.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for `Annotated`: at least `ge`, above `gt`, at most `le`, below `lt`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a finite value lies inside."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        signs = {">=": self.ge, ">": self.gt, "<=": self.le, "<": self.lt}
        found = [f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None]
        return " " + " and ".join(found) if found else ""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration: the key, what was found there and what is allowed."""

    key: str
    found: str
    allowed: str
    hint: str = ""

    def line(self, origin: Callable[[str], str]) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"  {self.key} ({origin(self.key)}): found {self.found}; allowed: {self.allowed}{hint}"


def did_you_mean(word: str, words: list[str]) -> str:
    """A suggestion for a misspelt word, empty when nothing is near."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def raise_for(problems: list[Problem], origin: Callable[[str], str]) -> None:
    """Raise one ConfigError that names every problem; nothing when there is none."""
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration:"
        raise ConfigError("\n".join([count, *(p.line(origin) for p in problems)]))


def check_node(node: Any, schema: type, path: str) -> list[Problem]:
    """Problems of one group of keys and of all below it; `path` is its dotted name, "" for the top."""
    if not isinstance(node, Mapping):
        return [Problem(path, repr(node), "a group of keys: " + ", ".join(f.name for f in fields(schema)))]
    hints = get_type_hints(schema, include_extras=True)
    dotted = f"{path}." if path else ""
    problems = [
        Problem(dotted + str(key), "an unknown key", ", ".join(hints), did_you_mean(str(key), list(hints)))
        for key in node
        if key not in hints
    ]
    for key, hint in hints.items():
        bare, bounds = _unwrap(hint)
        if key not in node:
            problems.append(Problem(dotted + key, "nothing", _describe(bare, bounds)))
        else:
            problems += _check_value(node[key], bare, bounds, dotted + key)
    return problems


def _unwrap(hint: Any) -> tuple[Any, Range]:
    """`Annotated[float, Range(gt=0)]` -> float and its bounds."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1]
    return hint, Range()


def _check_value(value: Any, hint: Any, bounds: Range, path: str) -> list[Problem]:
    options = _options(hint)
    classes = [o for o in options if is_dataclass(o)]
    if classes:
        return check_node(value, _choose(value, classes), path)
    if any(_fits(value, option, bounds) for option in options):
        return []
    words = [str(w) for o in options for a in (o, *get_args(o)) if get_origin(a) is Literal for w in get_args(a)]
    wrong = [v for v in value if str(v) not in words] if isinstance(value, list) else [value]
    hint_text = did_you_mean(str(wrong[0]), words) if words and wrong else ""
    return [Problem(path, repr(value), _describe(hint, bounds), hint_text)]


def _choose(value: Any, classes: list[Any]) -> Any:
    """The member of a union that `name` points to; else the one whose keys differ least."""
    if not isinstance(value, Mapping):
        return classes[0]
    for schema in classes:
        hint = get_type_hints(schema).get("name")
        if get_origin(hint) is Literal and value.get("name") in get_args(hint):
            return schema
    return min(classes, key=lambda schema: len(set(value) ^ {f.name for f in fields(schema)}))


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, option: Any, bounds: Range) -> bool:
    if option is type(None):
        return value is None
    if get_origin(option) is Literal:
        return value in get_args(option) and not isinstance(value, bool)
    if get_origin(option) is list:
        return isinstance(value, list | tuple) and all(_fits(v, get_args(option)[0], bounds) for v in value)
    if option in (int, float):
        kinds = (int, float) if option is float else int
        return isinstance(value, kinds) and not isinstance(value, bool) and bounds.holds(value)
    return isinstance(value, option)


def _describe(hint: Any, bounds: Range) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    parts = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            parts.append(", ".join(map(str, get_args(option))))
        elif get_origin(option) is list:
            parts.append(f"a list of {_describe(get_args(option)[0], bounds)}")
        elif is_dataclass(option):
            parts.append("keys " + ", ".join(f.name for f in fields(option)))
        else:
            parts.append(words[option] + (str(bounds) if option in (int, float) else ""))
    return " or ".join(parts)
