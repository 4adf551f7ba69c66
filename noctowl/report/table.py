"""A table that can be written as CSV, LaTeX, Markdown and HTML. Cells are text, numbers, or figures with bounds."""

import csv
import html
import io
from dataclasses import dataclass
from typing import TypeAlias

ABSENT = "–"
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: "\\" + c for c in "&%$#_{}"
}


@dataclass(frozen=True)
class Figure:
    """A value with optional bounds, shown with `digits` decimals after multiplication by `scale` (100: percent)."""

    value: float
    bounds: tuple[float, float] | None = None
    scale: float = 1.0
    digits: int = 1

    def __str__(self) -> str:
        text = self._shown(self.value)
        if self.bounds is None:
            return text
        low, high = map(self._shown, self.bounds)
        return f"{text} ({low}–{high})"

    def _shown(self, value: float) -> str:
        shown = f"{value * self.scale:.{self.digits}f}"
        return shown if float(shown) else shown.lstrip("-")  # no -0.0


Cell: TypeAlias = str | int | float | Figure | None


@dataclass(frozen=True)
class Table:
    """`key` is its file name and anchor; `note` stands below it; `columns` and each of `rows` are of one length."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def csv(self) -> str:
        """One line a row; a figure with bounds is three columns: value, low, high. Plain numbers, not percent."""
        wide = [any(isinstance(r[i], Figure) and r[i].bounds for r in self.rows) for i in range(len(self.columns))]  # type: ignore[union-attr]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        names = [[c, f"{c} low", f"{c} high"] if w else [c] for c, w in zip(self.columns, wide)]
        writer.writerow([name for group in names for name in group])
        for row in self.rows:
            cells: list[object] = []
            for cell, w in zip(row, wide):
                cells.append(_plain(cell))
                if w:
                    bounds = cell.bounds if isinstance(cell, Figure) else None
                    cells += [_number(b) for b in bounds] if bounds else ["", ""]
            writer.writerow(cells)
        return file.getvalue()

    def latex(self) -> str:
        """A booktabs tabular with caption; text is escaped."""
        kinds = "".join("l" if self._is_text(i) else "r" for i in range(len(self.columns)))
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(self.title)}}}", rf"\begin{{tabular}}{{{kinds}}}"]
        lines += [r"\toprule", " & ".join(map(_tex, self.columns)) + r" \\", r"\midrule"]
        lines += [" & ".join(_tex(_text(cell)) for cell in row) + r" \\" for row in self.rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def markdown(self) -> str:
        """A pipe table with its title above and its note below."""
        rule = ["---" if self._is_text(i) else "--:" for i in range(len(self.columns))]
        rows = [self.columns, tuple(rule), *(tuple(map(_text, row)) for row in self.rows)]
        body = "\n".join("| " + " | ".join(_md(cell) for cell in row) + " |" for row in rows)
        return f"**{_md(self.title)}**\n\n{body}\n" + (f"\n{_md(self.note)}\n" if self.note else "")

    def html(self) -> str:
        """Sortable: every cell carries the value that it is sorted by."""
        e = html.escape
        head = "".join(
            f'<th scope="col"{"" if self._is_text(i) else CLASS} tabindex="0">{e(c)}</th>'
            for i, c in enumerate(self.columns)
        )
        body = "\n".join("<tr>" + "".join(map(_td, row)) + "</tr>" for row in self.rows)
        note = f'<p class="note">{e(self.note)}</p>' if self.note else ""
        return (
            f'<div class="wide"><table id="{e(self.key)}"><caption>{e(self.title)}</caption><thead><tr>{head}</tr>'
            f"</thead><tbody>\n{body}\n</tbody></table></div>{note}"
        )

    def _is_text(self, column: int) -> bool:
        return all(isinstance(row[column], str | None) for row in self.rows)


CLASS = ' class="n"'


def _td(cell: Cell) -> str:
    text = html.escape(_text(cell))
    if isinstance(cell, str):
        return f"<td>{text}</td>"
    value = cell.value if isinstance(cell, Figure) else cell
    return f'<td class="n" data-v="{"" if value is None else value}">{text}</td>'


def _text(cell: Cell) -> str:
    if cell is None:
        return ABSENT
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    return f"{value:.6g}"


def _plain(cell: Cell) -> object:
    if cell is None:
        return ""
    return _number(cell.value) if isinstance(cell, Figure) else cell


def _tex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in text).replace("–", "--")


def _md(text: str) -> str:
    """Nothing in a caption or path is markup."""
    escaped = "".join("\\" + c if c in "\\|*_`[]" else c for c in text)
    return escaped.replace("<", "&lt;").replace("\n", " ")
