"""Self-contained HTML from results: blocks that return HTML text, and the pages and fragments made of them.

No block needs another file, a network or a library: pictures are embedded, and one small inline script shows the
values under the pointer; without it all else still stands. Plain text is escaped by the block that takes it; only
arguments called `blocks`, `body` or `sections` are taken as HTML.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from jaxtyping import Bool
from torch import Tensor

from unilinattn.attribution import Attribution, Comparison, count_kinds
from unilinattn.viz.drawing import heatmap, strip
from unilinattn.viz.panels import DIVERGING, OUTLINE, SEQUENTIAL, Panel, panels

__all__ = [
    "attribution",
    "attribution_page",
    "comparison",
    "comparison_page",
    "details",
    "facts",
    "fragment",
    "grid",
    "group",
    "heatmap",
    "legend",
    "page",
    "paragraph",
    "strip",
    "table",
]


def page(title: str, sections: Iterable[tuple[str, str]], *, lead: str = "") -> str:
    """Return a whole HTML document out of (heading, body) sections, whose bodies are blocks of this module.

    `lead` is plain text under the title. More than two sections get links at the top.
    """
    parts = list(sections)
    links = "".join(f'<a href="#part-{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(parts))
    navigation = f"<nav>{links}</nav>" if len(parts) > 2 else ""
    intro = paragraph(lead) if lead else ""
    head = f"<header><h1>{escape(title)}</h1>{intro}{navigation}</header>"
    body = [f'<section id="part-{i}"><h2>{escape(h)}</h2>{b}</section>' for i, (h, b) in enumerate(parts)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title></head><body class="ula-page">{fragment(head, *body)}</body></html>\n'
    )


def fragment(*blocks: str) -> str:
    """Return blocks with the style and script that they need, to stand in a notebook or inside another page."""
    return f'<div class="ula"><style>{_style()}</style>{"".join(blocks)}<script>{_asset("page.js")}</script></div>'


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def group(heading: str, *blocks: str, note: str = "") -> str:
    """Return blocks under a smaller heading, with a faint note beside it."""
    faint = f" <small>{escape(note)}</small>" if note else ""
    return f"<h3>{escape(heading)}{faint}</h3>{''.join(blocks)}"


def grid(*blocks: str) -> str:
    """Return blocks side by side, as many as fit the window."""
    return f'<div class="ula-grid">{"".join(blocks)}</div>'


def details(summary: str, *blocks: str) -> str:
    """Return blocks folded away behind a line of text."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(blocks)}</details>"


def facts(entries: Mapping[str, object]) -> str:
    """Return names and values side by side; empty values are left out."""
    kept = {name: str(value) for name, value in entries.items() if value is not None and str(value)}
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in kept.items())
    return f'<dl class="ula-facts">{items}</dl>'


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    strong: Collection[tuple[int, int]] = (),
) -> str:
    """Return a table: numbers aligned right, floats to three decimals or, where tiny, as powers of ten.

    `strong`: (row, column) of the cells to stress, such as the best of each column.
    """
    lines = [list(row) for row in rows]
    numeric = {j for j in range(len(header)) if any(_is_number(line[j]) for line in lines)}
    head = "".join(f"<th{_classes(num=j in numeric)}>{escape(name)}</th>" for j, name in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_classes(num=j in numeric, strong=(i, j) in strong)}>{escape(_cell(cell))}</td>"
            for j, cell in enumerate(line)
        )
        + "</tr>"
        for i, line in enumerate(lines)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="ula-wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(*, signed: bool, expected: bool, strips: bool = False) -> str:
    """Return the key to the colours of heat maps, or of strips, and to the outline if there is one."""
    shares = (-1, -0.25, 0, 0.25, 1) if signed else (0, 0.1, 0.25, 0.5, 1)
    marks = []
    for share in shares:
        place = (1 if share >= 0 else -1) * abs(share) ** 0.5
        marks.append(f'<span style="left:{100 * ((place + 1) / 2 if signed else place):.4g}%">{share:.0%}</span>')
    ramp = ("diverging" if signed else "sequential") + ("-strip" if strips else "")
    outlined = '<div><span class="box"></span>expected</div>' if expected else ""
    return (
        f'<div class="ula-legend"><div class="scale"><div class="ramp" style="background:var(--{ramp})"></div>'
        f'<div class="marks">{"".join(marks)}</div></div>'
        f"<div>share of the largest score in each picture</div>{outlined}</div>"
    )


def attribution(
    result: Attribution, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return a result's labels, its layers with their errors, and a picture a layer of the chosen sequences.

    `expected` is outlined: (batch, query, key), or (batch, key) where there is no query axis.

    Errors: `InputError` if `batch` or `expected` do not fit.
    """
    return _about(result) + _pictures(result, batch, expected)


def attribution_page(
    result: Attribution, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return `attribution` as a whole HTML document.

    Errors: `InputError` if `batch` or `expected` do not fit.
    """
    title = f"{result.method} of {result.model}" if result.model else result.method
    sections = [("About", _about(result)), ("Scores", _pictures(result, batch, expected))]
    return page(title, sections)


def comparison(
    results: Comparison, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return a comparison as blocks: a table of all results, then the pictures model by model, layer by layer.

    `expected` (batch, query, key) is outlined in every result with a query axis.

    Errors: `InputError` if `batch` or `expected` do not fit.
    """
    parts = _comparison_parts(results, batch, expected)
    return "".join(f"<section><h2>{escape(heading)}</h2>{body}</section>" for heading, body in parts)


def comparison_page(
    results: Comparison, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return `comparison` as a whole HTML document.

    Errors: `InputError` if `batch` or `expected` do not fit.
    """
    return page(f"Comparison of {', '.join(results)}", _comparison_parts(results, batch, expected))


def _about(result: Attribution) -> str:
    blocks = [facts(_facts(result))]
    if result.layers:
        kinds = result.kinds or ("",) * len(result.layers)
        rows = [
            (name, kind, result.reconstruction_error.get(name, "not recorded"))
            for name, kind in zip(result.layers, kinds, strict=True)
        ]
        layers = table(("layer", "mixer", "reconstruction error"), rows)
        blocks.append(layers if len(rows) <= 6 else details(f"{len(rows)} layers and their errors", layers))
    return "".join(blocks)


def _facts(result: Attribution) -> dict[str, object]:
    worst, gap = result.worst_error, result.completeness_gap
    return {
        "model": result.model,
        "method": result.method,
        "scope": result.scope,
        "options": _pairs(result.options),
        "scores": ", ".join(f"{name} {size}" for name, size in result.sizes.items()),
        "left out (no adapter knows them)": ", ".join(result.left_out) or None,
        "worst reconstruction error": None if worst is None else f"{worst[1]:.1e} ({worst[0]})",
        "completeness gap": None if gap is None else f"{gap:.1e}",
        "versions": _pairs(result.versions),
    }


def _pictures(result: Attribution, batch: int | Sequence[int], expected: Tensor | None) -> str:
    chosen = [batch] if isinstance(batch, int) else list(batch)
    drawn = {index: panels(result, batch=index, expected=expected) for index in chosen}
    signed = any(panel.signed for made in drawn.values() for panel in made)
    strips = all(panel.kind == "strip" for made in drawn.values() for panel in made)
    blocks = [legend(signed=signed, expected=expected is not None, strips=strips)]
    total = result.sizes.get("batch", 1)
    for index, made in drawn.items():
        maps = grid(*(_picture(panel, signed) for panel in made))
        blocks.append(group(f"Sequence {index % total}", maps, note=f"of {total}") if total > 1 else maps)
    return "".join(blocks)


def _picture(panel: Panel, signed: bool, title: str = "") -> str:
    title = title or panel.title
    notes = [panel.mixer, *panel.notes]
    if panel.kind == "strip" and panel.column_tokens is not None:
        wanted = None if panel.expected is None else panel.expected[0]
        return strip(panel.values[0], panel.column_tokens, title=title, notes=notes, expected=wanted)
    return heatmap(
        panel.values,
        title=title,
        notes=notes,
        row_tokens=panel.row_tokens,
        column_tokens=panel.column_tokens,
        expected=panel.expected,
        signed=signed,
        names=("patch row", "patch column") if panel.kind == "image" else ("query", "key"),
    )


def _comparison_parts(
    results: Comparison, batch: int | Sequence[int], expected: Tensor | None
) -> list[tuple[str, str]]:
    chosen = [batch] if isinstance(batch, int) else list(batch)
    rows = [
        (
            model,
            count_kinds(result.kinds),
            method,
            result.scope or "",
            _pairs(result.options),
            "not recorded" if result.worst_error is None else result.worst_error[1],
        )
        for model, method, result in results.results()
    ]
    header = ("model", "mixers", "method", "scope", "options", "worst reconstruction error")
    versions = {name: v for _, _, result in results.results() for name, v in result.versions.items()}
    drawn: dict[str, list[tuple[str, int, tuple[Panel, ...]]]] = {model: [] for model in results}
    for model, method, result in results.results():
        pattern = expected if "query" in result.dims else None
        drawn[model] += [(method, index, panels(result, batch=index, expected=pattern)) for index in chosen]
    every = [panel for made in drawn.values() for *_, some in made for panel in some]
    signed = any(panel.signed for panel in every)
    overview = facts({"versions": _pairs(versions)}) + table(header, rows)
    outlined = any(panel.expected is not None for panel in every)
    strips = all(panel.kind == "strip" for panel in every)
    overview += legend(signed=signed, expected=outlined, strips=strips)
    parts = [("Overview", overview)]
    for model, made in drawn.items():
        sequences = {index: [entry for entry in made if entry[1] == index] for index in chosen}
        maps = {
            index: grid(
                *(_picture(panel, signed, f"{method}: {panel.title}") for method, _, some in entries for panel in some)
            )
            for index, entries in sequences.items()
        }
        parts.append((model, "".join(group(f"Sequence {i}", m) if len(maps) > 1 else m for i, m in maps.items())))
    return parts


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if cell == 0 or abs(cell) >= 1e-3 else f"{cell:.1e}"
    return str(cell)


def _classes(**names: bool) -> str:
    on = " ".join(name for name, chosen in names.items() if chosen)
    return f' class="{on}"' if on else ""


@cache
def _asset(name: str) -> str:
    return files("unilinattn.viz").joinpath(name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    def colours(theme: str) -> str:
        ramps = {"sequential": SEQUENTIAL, "diverging": DIVERGING}
        scales = "".join(f"--{name}:linear-gradient(90deg,{','.join(r[theme])});" for name, r in ramps.items())
        return f".ula{{{scales}--expected:{OUTLINE[theme]}}}"

    dark = f"@media (prefers-color-scheme:dark){{{colours('dark')}}}"
    return _asset("page.css") + colours("light") + dark
