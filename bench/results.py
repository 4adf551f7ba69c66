"""bench/RESULTS.md: one section per benchmark, each rewritten by the benchmark that owns it."""

import os
import platform
from pathlib import Path

from noctowl.runfolder import versions, write_text

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = "# Results\n\nEach section is written by the program it names. Ratios are taken within one run on one machine.\n"


def machine() -> str:
    """What the figures were measured on, without naming the machine."""
    found = versions()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "numpy") if name in found)
    return f"{platform.machine()}, {cores} cores, Python {found['python']}, {packages}"


def write_section(name: str, text: str) -> None:
    """Replace (or append) the section `name`, leaving the others as they are."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else HEAD
    section = f"{start}\n{text.strip()}\n\nMeasured on: {machine()}.\n{stop}\n"
    if start in old:
        before, rest = old.split(start, 1)
        old = before + section + rest.split(stop + "\n", 1)[1]
    else:
        old = old.rstrip("\n") + "\n\n" + section
    write_text(RESULTS, old)
