"""Reports of finished runs: `write_report(folders)` -> report.html, report.md and a folder of tables and plots.

runs.py reads, sections.py and *comparison.py make tables, graphs.py plots, gallery.py pictures, page.py the two forms.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from noctowl import fonts
from noctowl.report import coarse_comparison, comparison, gallery, graphs, sections
from noctowl.report.page import Gallery, Part, Plot, Report, Section, to_html, to_markdown
from noctowl.report.runs import Run, comparable, load_runs
from noctowl.report.table import Table
from noctowl.runfolder import atomic, write_text

BESIDE = "report"  # folder of tables, plots and pictures, beside report.html and report.md
SHOWN_RUNS = 3  # runs whose pictures and confusions are drawn
MOST_CHARACTERS = 12  # that are named where no font draws them
CONFUSED = ("color", "material", "pattern", "transparency")

__all__ = ["build_report", "load_runs", "write_report"]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """The report of one or more runs; returns the path of report.html.

    out: folder; None: the run's own for one run, report/ here for several. Files there are replaced.
    Raises DataError for a folder that is no finished run, or results of another version.
    """
    runs = load_runs(folders)
    target = out or (runs[0].folder if len(runs) == 1 else Path("report"))
    report = build_report(runs)
    for table in report.tables():
        write_text(target / BESIDE / f"{table.key}.csv", table.csv())
        write_text(target / BESIDE / f"{table.key}.tex", table.latex())
    for name, content in report.files().items():
        with atomic(target / BESIDE / name) as file:
            file.write(content)
    write_text(target / "report.md", to_markdown(report, BESIDE))
    write_text(target / "report.html", to_html(report))
    return target / "report.html"


def build_report(runs: Sequence[Run]) -> Report:
    """All sections; one without content is left out. Runs of unlike settings get tables of their own."""
    groups = sections.by_signature(runs)
    said = [f"{run.label}: {text}" if len(runs) > 1 else text for run in runs for text in run.warnings]
    content, unable = _figures(groups)
    content += [_plots(runs), _evidence(groups, runs), _pictures(runs), _background(runs)]
    names = ", ".join(run.label for run in runs)
    return Report(
        title=f"noctowl: {names}" if len(runs) <= SHOWN_RUNS else f"noctowl: {len(runs)} runs",
        summary=f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {names}. Written {time.strftime('%Y-%m-%d %H:%M')}.",
        warnings=[*sections.unlike(groups), *unable, *_merged(said, runs), *_without_font(content, runs)],
        sections=[section for section in content if section.parts],
    )


def _merged(said: Iterable[str], runs: Sequence[Run]) -> list[str]:
    """A warning that holds for every run is said once."""
    if len(runs) < 2:
        return list(said)
    common = set.intersection(*(set(run.warnings) for run in runs))
    rest = [text for text in said if text.split(": ", 1)[1] not in common and not _is_common(text, runs, common)]
    return [f"all runs: {text}" for text in runs[0].warnings if text in common] + rest


def _is_common(text: str, runs: Sequence[Run], common: set[str]) -> bool:
    return any(text == f"{run.label}: {own}" for run in runs for own in common)


def _figures(groups: Sequence[Sequence[Run]]) -> tuple[list[Section], list[str]]:
    """Headline, coarse figures and comparisons, one table for each group of like settings."""
    headline, compared, unable = Section("Figures"), Section("Comparisons"), []
    for i, group in enumerate(groups):
        tail = "" if len(groups) == 1 else f"-{i + 1}"
        head = sections.headline(group, tail)
        if any(run.cases for run in group):
            headline.parts.append(head)
        _add(headline.parts, sections.coarse(group, tail))
        if any(run.cases for run in group):
            headline.parts.append(sections.details(group, tail))
        for compare in (comparison.comparisons, coarse_comparison.coarse_comparisons):
            table, problems = compare(group, tail)
            _add(compared.parts, table)
            unable += problems
    return [headline, compared], unable


def _plots(runs: Sequence[Run]) -> Section:
    section = Section("Plots")
    drawn = {
        "tradeoff": (graphs.tradeoff(runs), "Fine-grained against coarse figures; bars: 95 % intervals; +: published"),
        "gains": (graphs.gains(runs), "Top-1 of the model; white line: the best control that never sees the image"),
        "n-curves": (graphs.n_curves(runs), "mAP by number of negatives; shaded: 95 % intervals"),
        "words": (graphs.bars(runs, "words"), "Top-1 by words of the caption"),
        "sizes": (graphs.bars(runs, "size"), "Top-1 by size of the object"),
    }
    section.parts += [Plot(key, text, png) for key, (png, text) in drawn.items() if png is not None]
    if len(sections.by_signature(runs)) > 1 and section.parts:
        section.parts.insert(0, "Runs of unlike settings are drawn together here: see the warnings above.")
    if drawn["n-curves"][0] is None and any(run.cases for run in runs):
        section.parts.append("No curve over N: one N was evaluated (benchmark.n_negatives=[1,2,5,10] gives more).")
    return section


def _evidence(groups: Sequence[Sequence[Run]], runs: Sequence[Run]) -> Section:
    section = Section("Controls and analyses")
    for i, group in enumerate(groups):
        tail = "" if len(groups) == 1 else f"-{i + 1}"
        makers = (sections.controls, sections.oracle_maps, sections.gains, sections.breakdown, sections.pearson)
        for make in (*makers, sections.confusions):
            _add(section.parts, make(group, tail))
    for i, run in enumerate(runs[:SHOWN_RUNS]):
        png = graphs.confusion_maps(run, CONFUSED)
        if png is not None:
            text = f"{run.label}: what (down) is taken for what (across); percent of the times offered"
            section.parts.append(Plot(f"confusion-{i + 1}", text, png))
    return section


def _pictures(runs: Sequence[Run]) -> Section:
    section = Section("Worst and best pictures")
    for i, run in enumerate(runs[:SHOWN_RUNS]):
        found, why = gallery.pictures(run)
        if found:
            section.parts.append(Gallery(f"pictures-{i + 1}", run.label, tuple(found)))
        elif run.cases:
            section.parts.append(f"{run.label}: no pictures, as {why}.")
    if section.parts and len(runs) > SHOWN_RUNS:
        section.parts.append(f"Pictures of the first {SHOWN_RUNS} runs.")
    return section


def _without_font(content: Iterable[Section], runs: Sequence[Run]) -> list[str]:
    """Which characters of pictures and plots are drawn as code points, said once."""
    shown = [p for section in content for part in section.parts if isinstance(part, Gallery) for p in part.pictures]
    kinds = [sections.confusion(run, kind) for run in runs[:SHOWN_RUNS] for kind in CONFUSED]
    texts = [run.label for run in runs] + [text for p in shown for text in (p.truth, p.predicted)]
    texts += [value for table in kinds for true, row in table.items() for value in (true, *row)]
    lacking = fonts.missing(texts)
    if not lacking:
        return []
    named = ", ".join(f"{c} (U+{ord(c):04X})" for c in lacking[:MOST_CHARACTERS])
    more = f" and {len(lacking) - MOST_CHARACTERS} more" if len(lacking) > MOST_CHARACTERS else ""
    return [
        f"no font of this machine draws {named}{more}: pictures and plots show code points instead. Install a font "
        "that has them (Debian: fonts-noto-core, fonts-noto-cjk) and write the report again."
    ]


def _background(runs: Sequence[Run]) -> Section:
    parts: list[Part] = [sections.settings(runs), sections.counts(runs), sections.provenance(runs)]
    if not all(comparable(run, b) for run in runs for b, _ in run.cases) or not any(run.cases for run in runs):
        parts.append("The published figures below are for orientation: the runs above are of other objects or rules.")
    return Section("Settings, counts, provenance", [*parts, sections.published_table(), sections.published_boxes()])


def _add(parts: list[Part], table: Table | None) -> None:
    if table is not None:
        parts.append(table)
