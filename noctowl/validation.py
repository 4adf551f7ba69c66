"""Checks a plain dict against a tree of dataclasses and reports every problem, not the first.

A group whose choices differ in their keys (loss, distill, logger) is a union of dataclasses told apart by `name`.
"""

import difflib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from noctowl.errors import ConfigError


def ranged(
    *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> Any:
    """A required number with bounds: at least `ge`, above `gt`, at most `le`, below `lt`."""
    return field(metadata={"ge": ge, "gt": gt, "le": le, "lt": lt})


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
    if not isinstance(node, Mapping):
        return [Problem(path, repr(node), "a group of keys: " + ", ".join(f.name for f in fields(schema)))]
    hints, known = get_type_hints(schema), {f.name: f for f in fields(schema)}
    dotted = f"{path}." if path else ""
    problems = [
        Problem(dotted + str(key), "an unknown key", ", ".join(known), did_you_mean(str(key), list(known)))
        for key in node
        if key not in known
    ]
    for key, spec in known.items():
        if key not in node:
            if spec.default is MISSING:
                problems.append(Problem(dotted + key, "nothing", _describe(hints[key], spec.metadata)))
        else:
            problems += _check_value(node[key], hints[key], spec.metadata, dotted + key)
    return problems


def _check_value(value: Any, hint: Any, meta: Mapping[str, Any], path: str) -> list[Problem]:
    options = _options(hint)
    classes = [o for o in options if is_dataclass(o)]
    if classes:
        return check_node(value, _choose(value, classes), path)
    if any(_fits(value, option, meta) for option in options):
        return []
    allowed = _describe(hint, meta)
    words = [str(w) for o in options for a in (o, *get_args(o)) if get_origin(a) is Literal for w in get_args(a)]
    wrong = [v for v in value if str(v) not in words] if isinstance(value, list) else [value]
    return [Problem(path, repr(value), allowed, did_you_mean(str(wrong[0]), words) if words and wrong else "")]


def _choose(value: Any, classes: list[type]) -> type:
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


def _fits(value: Any, option: Any, meta: Mapping[str, Any]) -> bool:
    if option is type(None):
        return value is None
    if get_origin(option) is Literal:
        return value in get_args(option) and not isinstance(value, bool)
    if get_origin(option) is list:
        return isinstance(value, list | tuple) and all(_fits(v, get_args(option)[0], meta) for v in value)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value, meta)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool) and _in_range(value, meta)
    return isinstance(value, option)


def _in_range(value: float, meta: Mapping[str, Any]) -> bool:
    ge, gt, le, lt = (meta.get(k) for k in ("ge", "gt", "le", "lt"))
    return (
        abs(value) != float("inf")
        and value == value  # not NaN
        and (ge is None or value >= ge)
        and (gt is None or value > gt)
        and (le is None or value <= le)
        and (lt is None or value < lt)
    )


def _describe(hint: Any, meta: Mapping[str, Any]) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    parts = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            parts.append(", ".join(map(str, get_args(option))))
        elif get_origin(option) is list:
            parts.append(f"a list of {_describe(get_args(option)[0], meta)}")
        elif is_dataclass(option):
            parts.append("keys " + ", ".join(f.name for f in fields(option)))
        else:
            parts.append(words[option] + (_bounds(meta) if option in (int, float) else ""))
    return " or ".join(parts)


def _bounds(meta: Mapping[str, Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {meta[key]:g}" for key, sign in signs.items() if meta.get(key) is not None]
    return " " + " and ".join(found) if found else ""
