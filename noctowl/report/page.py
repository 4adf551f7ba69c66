"""Report as data, and its two forms: one self-contained HTML file, and Markdown with files beside it."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from noctowl.report.gallery import Picture
from noctowl.report.table import Table

# Nothing is fetched, whatever a caption or path holds.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #8886}nav a{margin-right:1em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:1rem 0 .3rem}
caption{text-align:left;font-weight:600;padding:.3rem 0}
th,td{padding:.2rem .6rem;border-bottom:1px solid #8884;text-align:left;vertical-align:top}
th{cursor:pointer;white-space:nowrap;border-bottom:2px solid #8888}.n{text-align:right;white-space:nowrap}
th[aria-sort=ascending]::after{content:" \\2191"}th[aria-sort=descending]::after{content:" \\2193"}
tbody tr:hover{background:#8882}.note{font-size:.8rem;opacity:.75;margin:0 0 1.2rem}
.warn{border-left:4px solid #c8752d;padding:.2rem 1rem;background:#c8752d18}
figure{margin:1rem 0;display:inline-block;vertical-align:top;max-width:100%}img{max-width:100%;background:#fff}
figcaption{font-size:.8rem;max-width:48rem}.shots figure{width:min(30rem,100%);margin-right:1rem}
"""
SCRIPT = """
document.querySelectorAll("th").forEach(function(th){
  function sort(){
    var row=th.parentNode, i=Array.prototype.indexOf.call(row.children,th), body=th.closest("table").tBodies[0];
    var up=th.getAttribute("aria-sort")!=="ascending";
    Array.prototype.forEach.call(row.children,function(o){o.removeAttribute("aria-sort")});
    th.setAttribute("aria-sort",up?"ascending":"descending");
    var rows=Array.prototype.slice.call(body.rows);
    function key(r){
      var c=r.cells[i], v=c.dataset.v;
      return v===undefined?c.textContent:v===""?null:Number(v);
    }
    rows.sort(function(a,b){
      var x=key(a),y=key(b);
      if(x===null||y===null)return (x===null)-(y===null);
      var d=typeof x==="number"&&typeof y==="number"?x-y:String(x).localeCompare(String(y));
      return up?d:-d;
    });
    rows.forEach(function(r){body.appendChild(r)});
  }
  th.addEventListener("click",sort);
  th.addEventListener("keydown",function(e){if(e.key==="Enter"||e.key===" "){e.preventDefault();sort()}});
});
"""


@dataclass(frozen=True)
class Plot:
    key: str  # file name
    text: str  # what it shows, also for those who cannot see it
    png: bytes


@dataclass(frozen=True)
class Gallery:
    key: str
    title: str
    pictures: tuple[Picture, ...]


Part: TypeAlias = Table | Plot | Gallery | str


@dataclass
class Section:
    title: str
    parts: list[Part] = field(default_factory=list)


@dataclass
class Report:
    title: str
    summary: str
    warnings: list[str]
    sections: list[Section]

    def tables(self) -> list[Table]:
        return [part for section in self.sections for part in section.parts if isinstance(part, Table)]

    def files(self) -> dict[str, bytes]:
        """Plots and pictures by file name: what the Markdown refers to."""
        parts: Sequence[Part] = [part for section in self.sections for part in section.parts]
        found = {f"{part.key}.png": part.png for part in parts if isinstance(part, Plot)}
        for part in parts:
            if isinstance(part, Gallery):
                found |= {f"{part.key}-{i}.jpg": p.jpeg for i, p in enumerate(part.pictures)}
        return found


def to_html(report: Report) -> str:
    """One file: style, script, plots and pictures inside; everything that comes from data is escaped."""
    e = html.escape
    links = " ".join(f'<a href="#s{i}">{e(s.title)}</a>' for i, s in enumerate(report.sections))
    warnings = "".join(f"<li>{e(text)}</li>" for text in report.warnings)
    body = "\n".join(
        f'<section><h2 id="s{i}">{e(section.title)}</h2>\n' + "\n".join(map(_html, section.parts)) + "</section>"
        for i, section in enumerate(report.sections)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{e(report.title)}</title><style>{STYLE}</style></head><body>\n<h1>{e(report.title)}</h1>"
        f"<p>{e(report.summary)}</p>"
        + (f'<div class="warn"><p><b>Read with care</b></p><ul>{warnings}</ul></div>' if warnings else "")
        + f"<nav>{links}</nav>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )


def _html(part: Part) -> str:
    e = html.escape
    if isinstance(part, str):
        return f"<p>{e(part)}</p>"
    if isinstance(part, Table):
        return part.html()
    if isinstance(part, Plot):
        return _image("png", part.png, part.text, f"<figcaption>{e(part.text)}</figcaption>")
    shots = "".join(
        _image("jpeg", p.jpeg, _said(p), f"<figcaption><b>{p.kind}</b> · {e(_said(p))}</figcaption>")
        for p in part.pictures
    )
    return f'<h3>{e(part.title)}</h3><div class="shots">{shots}</div>'


def _image(kind: str, content: bytes, text: str, caption: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<figure><img src="data:image/{kind};base64,{data}" alt="{html.escape(text)}">{caption}</figure>'


def _said(picture: Picture) -> str:
    return f"{picture.benchmark} · true: {picture.truth} · predicted: {picture.predicted}"


def to_markdown(report: Report, beside: str) -> str:
    """Text with pipe tables; plots and pictures are files in the folder `beside` it."""
    lines = [f"# {report.title}", "", report.summary, ""]
    if report.warnings:
        lines += ["**Read with care**", "", *(f"- {_line(text)}" for text in report.warnings), ""]
    for section in report.sections:
        lines += [f"## {section.title}", ""]
        for part in section.parts:
            if isinstance(part, str):
                lines += [_line(part), ""]
            elif isinstance(part, Table):
                lines += [part.markdown(), ""]
            elif isinstance(part, Plot):
                lines += [f"![{_line(part.text)}]({beside}/{part.key}.png)", "", _line(part.text), ""]
            else:
                lines += [f"### {part.title}", ""]
                for i, p in enumerate(part.pictures):
                    lines += [f"![{p.kind}]({beside}/{part.key}-{i}.jpg)", "", f"{p.kind}: {_line(_said(p))}", ""]
    return "\n".join(lines)


def _line(text: str) -> str:
    """On one line, and no markup."""
    return "".join("\\" + c if c in "\\*_`[]" else c for c in text.replace("\n", " ")).replace("<", "&lt;")
