"""Blocks of self-contained HTML: functions that return HTML text, and the page that they form.

No block needs another file, a network or a library: scores are embedded, and one inline script draws the boards; their
tables also work without it. Each block escapes its plain text; only arguments called `blocks`, `body`, `first` or
`sections` are HTML.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from unilinattn.viz.colours import DIVERGING, OUTLINE, SEQUENTIAL

SCRIPTS = ("elements.js", "maps.js", "legend.js", "reader.js", "downloads.js", "layers.js", "toolbar.js", "page.js")
"""Parts of the page's script; the last starts the boards."""


def page(title: str, sections: Iterable[tuple[str, str]], *, lead: str = "", first: str = "") -> str:
    """Return a complete HTML document of (heading, body) sections, whose bodies are blocks of this module.

    `lead`: plain text under the title. `first`: blocks above the sections. Three or more sections get links below the
    title.
    """
    entries = list(sections)
    links = "".join(f'<a href="#part-{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(entries))
    navigation = f'<nav aria-label="Sections">{links}</nav>' if len(entries) > 2 else ""
    intro = paragraph(lead) if lead else ""
    head = f"<header><h1>{escape(title)}</h1>{intro}{navigation}</header>"
    body = [f'<section id="part-{i}"><h2>{escape(h)}</h2>{b}</section>' for i, (h, b) in enumerate(entries)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title></head><body class="ula-page">{fragment(head, first, *body)}</body></html>\n'
    )


def fragment(*blocks: str) -> str:
    """Return blocks with their style and script, for a notebook or another page."""
    scripts = "\n".join(_asset(name) for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{scripts}\n}})();'
    return f'<div class="ula"><style>{_style()}</style>{"".join(blocks)}<script>{script}</script></div>'


def warning(text: str) -> str:
    """Return plain text as a warning."""
    return f'<p class="ula-warning"><b>WARNING</b> {escape(text)}</p>'


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def group(heading: str, *blocks: str, note: str = "") -> str:
    """Return blocks under a third-level heading, followed by a faint note."""
    faint = f" <small>{escape(note)}</small>" if note else ""
    return f"<h3>{escape(heading)}{faint}</h3>{''.join(blocks)}"


def details(summary: str, *blocks: str) -> str:
    """Return blocks folded under a line of text."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(blocks)}</details>"


def facts(entries: Mapping[str, object]) -> str:
    """Return names and values side by side; empty values are omitted."""
    texts = {name: str(value) for name, value in entries.items() if value is not None and str(value)}
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in texts.items())
    return f'<dl class="ula-facts">{items}</dl>'


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    strong: Collection[tuple[int, int]] = (),
) -> str:
    """Return a table with right-aligned numbers: floats have three decimals, those below 1e-3 an exponent.

    `strong`: (row, column) of the cells to emphasise, such as the best of each column.
    """
    lines = [list(row) for row in rows]
    numeric = {j for j in range(len(header)) if any(_is_number(line[j]) for line in lines)}
    head = "".join(f"<th{_classes(num=j in numeric)}>{escape(name)}</th>" for j, name in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_classes(num=j in numeric, strong=(i, j) in strong)}>{escape(cell_text(cell))}</td>"
            for j, cell in enumerate(line)
        )
        + "</tr>"
        for i, line in enumerate(lines)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="ula-wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def cell_text(cell: object) -> str:
    """Return the text of a table's cell, of numbers with three digits; 0 stands for exactly zero."""
    if not isinstance(cell, float):
        return str(cell)
    if cell == 0:
        return "0"
    return f"{cell:.3f}" if abs(cell) >= 1e-3 else f"{cell:.1e}"


def _classes(**names: bool) -> str:
    on = " ".join(name for name, applies in names.items() if applies)
    return f' class="{on}"' if on else ""


@cache
def _asset(name: str) -> str:
    return files("unilinattn.viz").joinpath(name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    def colours(theme: str) -> str:
        ramps = {"sequential": SEQUENTIAL, "diverging": DIVERGING}
        stops = "".join(f"--{name}:{','.join(ramp[theme])};" for name, ramp in ramps.items())
        return f"{{{stops}--expected:{OUTLINE[theme]}}}"

    dark = f"@media (prefers-color-scheme:dark){{.ula:not([data-print]){colours('dark')}}}"
    return f"{_asset('page.css')}.ula{colours('light')}{dark}"
