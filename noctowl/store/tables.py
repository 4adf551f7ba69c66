"""What `verify`, `info` and `prune` found, on the screen."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

ABSENT = "–"


def print_verify(reports: Sequence[Mapping[str, Any]], console: Console | None = None) -> int:
    """One line per problem. Returns the exit code: 1 if anything is wrong and was not repaired."""
    console = console or Console()
    table = _table("feature stores, every byte checked", ("store", "file", "problem", "lost", "action"))
    for report in reports:
        for problem in report["problems"]:
            action = problem["action"] if report["repaired"] else f"with --repair: {problem['action']}"
            kind = f"{problem['kind']}: {problem['detail']}" if problem["kind"] == "checksum" else problem["kind"]
            table.add_row(report["key"][:12], problem["file"], kind, str(problem["images"]), action)
    if table.row_count:
        console.print(table)
    for report in reports:
        count = len(report["problems"])
        end = "all good" if not count else _many(count, "problem") + (", repaired" if report["repaired"] else "")
        stored = f"{report[report['kind']]} {report['kind']}"
        console.print(f"{report['key'][:12]}: {stored} in {_many(report['shards'], 'shard')}, {end}")
    return int(any(report["problems"] and not report["repaired"] for report in reports))


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def print_info(reports: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """One line per store, those of texts in a table of their own; the error is that of similarities, under random
    queries and at most."""
    console = console or Console()
    columns = ("store", "dtype", "side", "patches", "images", "shards", "GB", "MB/im.", "error", "at most", "base")
    table = _table("feature stores", columns)
    for r in (report for report in reports if report["kind"] == "images"):
        error = [f"{r['error'][name]:.1e}" if r["error"] else ABSENT for name in ("cosine", "bound")]
        images = f"{r['images']}" + (f" (+{r['duplicates']} twice)" if r["duplicates"] else "")
        amount = f"{r['bytes'] / 1e9:.2f}", f"{r['bytes_per_image'] / 1e6:.2f}"
        side = str(r["resolution"][0]) if r["resolution"] else ABSENT
        patches = f"{r['patches']:.0f}" if r["background"] is None else f"{r['patches']:.0f} (k={r['background']})"
        table.add_row(r["key"][:8], r["dtype"], side, patches, images, str(r["shards"]), *amount, *error, _base(r))
    if table.row_count or not reports:
        console.print(table)
    shelves = _table("text embeddings", ("store", "width", "texts", "shards", "MB", "base"))
    for r in (report for report in reports if report["kind"] == "texts"):
        texts = f"{r['texts']}" + (f" (+{r['duplicates']} twice)" if r["duplicates"] else "")
        shelves.add_row(r["key"][:8], str(r["width"]), texts, str(r["shards"]), f"{r['bytes'] / 1e6:.2f}", _base(r))
    if shelves.row_count:
        console.print(shelves)


def _base(report: Mapping[str, Any]) -> str:
    """Last part of a folder or hub name."""
    return str(report["base"]).rstrip("/").split("/")[-1]


def print_prune(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """What was or would be removed."""
    console = console or Console()
    table = _table("features prune", ("path", "GB", "why", "removed"))
    for item in found:
        table.add_row(item["path"], f"{item['bytes'] / 1e9:.2f}", item["why"], "yes" if item["removed"] else "no")
    console.print(table if found else "nothing to remove")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("error", "at most", "store", "MB/im."))
    return table
