"""The performance page of the docs and its plot, written from the recorded figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cases import GROWTH, MAPS, OPERATIONS
from benchmarks.machine import versions_of
from tools.markers import replace_section

Figures = Mapping[str, Any]
"""The record of one run: the machine, the checks, and one row per case."""

PLOTS = {"cpu": "performance.png", "cuda": "performance-gpu.png"}
"""File name of the plot of each device."""

NAMES = {
    "map": "channel-mean map",
    "rollout": "last-token rollout",
    "adjoint": "adjoint scan",
    "attribution": "attribution, one target",
    "gradient": "gradients of one target",
    "logit": "shares in one logit",
    "next logit": "shares in a further logit",
    "latim": "LaTIM l2, all pairs",
    "alti": "ALTI, all pairs",
    "contributions": "contributions to one row",
}
"""Names of the operations on the page."""

STRUCTURES = {"mamba": "Mamba-1", "mamba2": "Mamba-2", "softmax": "softmax", "s4d": "S4D", "delta rule": "delta rule"}

RIVALS = {
    "floor": "floor",
    "host": "the host's forward",
    "forward": "our forward",
    "copy": "copy",
    "calls": "as many calls",
    "exponentials": "exponentials",
    "steps": "all steps",
    "half": "itself at half the length",
    "map": "channel-mean map",
}

MEMORY_GOALS = {("map", 4096): 1 << 30, ("latim", 512): 256 << 20}
"""Largest desired extra memory of an operation, in bytes."""

MEMORY_LENGTHS = (512, 1024, 2048, 4096)

LINES = {
    "map": ("#1b6ca8", "plain map"),
    "latim": ("#c2410c", "plain latim"),
    "gradient": ("#6d28a8", "plain gradient"),
    "attribution": ("#0f8f7e", None),
    "contributions": ("#8a6d00", None),
    "rollout": ("#be185d", None),
}
"""Colour of each operation in the plot, and its plain definition."""

INK, FAINT = "#1c1f2b", "#737a8c"


def stored(figures: Figures) -> str:
    """Return figures as JSON with one line per row."""
    head = json.dumps({key: value for key, value in figures.items() if key not in ("checks", "rows")}, indent=2)
    lists = [
        f'  "{key}": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in figures[key]) + "\n  ]"
        for key in ("checks", "rows")
        if key in figures
    ]
    return head.removesuffix("\n}") + ",\n" + ",\n".join(lists) + "\n}\n"


def recorded(folder: Path) -> list[Figures]:
    """Read the recorded figures of a folder, those of the CPU first."""
    paths = (folder / f"{device}.json" for device in ("cpu", "cuda"))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def limited(folder: Path) -> str:
    """Return the comparisons of the run that is limited to AVX2, beside those of the same machine without a limit."""
    narrow, wide = (json.loads((folder / f"{name}.json").read_text()) for name in ("avx2", "cpu"))
    ratios = {(*_case(row), rival): ratio(row, rival) for row in wide["rows"] for rival in row["rivals"]}
    rows = [row for row in narrow["rows"] if row["goals"]]
    lines = [
        (
            NAMES[row["operation"]],
            STRUCTURES[row["structure"]],
            str(row["length"]),
            RIVALS[rival],
            f"{ratios[*_case(row), rival]:.2f}",
            f"**{ratio(row, rival):.2f}**",
            *_judged(ratio(row, rival), goal),
        )
        for row in _in_order(rows)
        for rival, goal in row["goals"].items()
    ]
    machine, worst = narrow["machine"], max(check["error"] for check in narrow["checks"])
    text = (
        f"{machine['cpu']}; {machine['cores']} cores, {_threads(machine)}; {versions_of(machine)}. The largest "
        f"relative error of an operation against its definition was {worst:.0e}.\n\n"
    )
    header = ("operation", "layer", "L", "reference", "ratio with all instructions", "ratio with AVX2", "goal", "met")
    return text + table(header, lines)


def section(runs: Sequence[Figures]) -> str:
    """Return the tables of all runs in Markdown."""
    return "\n\n".join(_run(figures) for figures in runs)


def write(runs: Sequence[Figures], template: Path, folder: Path) -> None:
    """Write the tables into the page, and a plot of each run into the same folder."""
    (folder / "performance.md").write_text(replace_section(template.read_text(), "performance", section(runs)))
    for figures in runs:
        plot(figures).savefig(folder / PLOTS[figures["device"]], dpi=150, metadata={"Software": None})


def long_runs(folder: Path) -> str:
    """Return a table of the recorded runs of `benchmarks.million_tokens`."""
    header = ("model", "tokens", "trace", "prefix error", "rollout", "error of the row sum", "peak of the process")
    rows = []
    for path in sorted(folder.glob("million-*.json")):
        record = json.loads(path.read_text())
        stages = {stage["stage"]: stage for stage in record["stages"]}
        prefix = max(stage["prefix_error"] for stage in record["stages"] if "prefix_error" in stage)
        rollout = stages["rollout of the last token"]
        rows.append(
            (
                f"{STRUCTURES[record['model']]}, {record['layers']} layers, d = {record['width']}"
                + (", in pieces" if record.get("in_pieces") else ""),
                f"{record['length']:,}",
                f"{stages['trace']['seconds']:.0f} s",
                f"{prefix:.0e}",
                f"{rollout['seconds']:.0f} s",
                f"{stages['identity']['relative_difference']:.0e}",
                f"{rollout['peak_gib']:.1f} GiB",
            )
        )
    return table(header, rows)


def ratio(row: Figures, rival: str) -> float:
    """Return the operation's median time divided by the rival's."""
    return median(row["seconds"]) / median(row["rivals"][rival])


def _run(figures: Figures) -> str:
    machine = figures["machine"]
    host = machine.get("gpu") or machine["cpu"]
    title = f"### {'On a GPU' if figures['device'] == 'cuda' else 'On a CPU'}"
    where = f"{host}; {machine['cores']} cores, {_threads(machine)}, {machine['memory']} of memory"
    rounds = sorted({len(row["seconds"]) for row in figures["rows"] if row["rivals"]})
    counts = " to ".join(str(n) for n in ([rounds[0], rounds[-1]] if len(rounds) > 1 else rounds))
    worst = max(check["error"] for check in figures["checks"])
    text = (
        f"{where}; {versions_of(machine)}; float32. Medians of {counts} rounds, with the fastest and the slowest in "
        f"parentheses. The largest relative error of an operation against its definition was {worst:.0e}."
    )
    # The plot of the CPU is at the head of the page.
    picture = [] if figures["device"] == "cpu" else [f"![Time and extra memory against length]({PLOTS['cuda']})"]
    return "\n\n".join([title, text, *picture, _comparisons(figures), _growth(figures), _memory(figures)])


def _case(row: Figures) -> tuple[str, str, int]:
    return row["operation"], row["structure"], row["length"]


def _in_order(rows: Sequence[Figures]) -> list[Figures]:
    """Sort rows by operation, structure and length, in the order of the page."""
    order = {name: at for at, name in enumerate(OPERATIONS)}
    kinds = {name: at for at, name in enumerate(MAPS)}
    return sorted(rows, key=lambda row: (order[row["operation"]], kinds[row["structure"]], row["length"]))


def _comparisons(figures: Figures) -> str:
    # Comparisons with half the length are in the table of `_growth`.
    rows = _in_order([row for row in figures["rows"] if row["rivals"] and "half" not in row["rivals"]])
    lines = [
        (
            NAMES[row["operation"]],
            STRUCTURES[row["structure"]],
            str(row["length"]),
            _spread(row["seconds"]),
            RIVALS[rival],
            _spread(times),
            f"**{ratio(row, rival):.2f}**",
            *_judged(ratio(row, rival), row["goals"].get(rival)),
            f"{row['calls']:,}" if "calls" in row else "",
        )
        for row in rows
        for rival, times in row["rivals"].items()
    ]
    header = ("operation", "layer", "L", "time", "reference", "reference time", "ratio", "goal", "met", "calls")
    return table(header, lines)


def _growth(figures: Figures) -> str:
    rows = sorted(_rows(figures, "rollout"), key=lambda row: row["length"])
    first = max(row["length"] for row in rows) // (GROWTH[-1] // GROWTH[0])
    lines = []
    for row in (row for row in rows if row["length"] >= first):
        half = row["rivals"].get("half")
        grown = ("", "", "", "")
        if half is not None:
            growth = ratio(row, "half")
            grown = (_spread(half), f"**{growth:.2f}**", *_judged(growth, row["goals"].get("half")))
        each = f"{row['memory']['counted'] / row['length'] / 1024:.1f} KiB"
        lines.append((str(row["length"]), _spread(row["seconds"]), *grown, *_bytes(row["memory"]), each))
    header = (
        "L",
        "time",
        "time at L / 2",
        "ratio",
        "goal",
        "met",
        "tensors counted",
        "growth of the process",
        "per token",
    )
    words = "Last-token rollout through one Mamba-1 layer, by length, interleaved with half of the length:\n\n"
    return words + table(header, lines)


def _memory(figures: Figures) -> str:
    present = {row["length"] for row in figures["rows"]}
    # Quick runs use other lengths.
    lengths = [n for n in MEMORY_LENGTHS if n in present] or sorted(present)[:4]
    lines = []
    for operation, name in NAMES.items():
        by_length = {row["length"]: row for row in _rows(figures, operation)}
        cells = []
        for length in lengths:
            row = by_length.get(length)
            goal = MEMORY_GOALS.get((operation, length))
            cell = "" if row is None else " / ".join(filter(None, _bytes(row["memory"])))
            if row is not None and goal is not None:
                met = max(value or 0 for value in row["memory"].values()) <= goal
                cell += f" (goal {in_bytes(goal)}: {'met' if met else 'not met'})"
            cells.append(cell)
        if any(cells):
            lines.append((name, *cells))
    words = "Extra memory of one Mamba-1 layer, tensors counted / growth of the process:\n\n"
    return words + table(("operation", *(f"L = {length}" for length in lengths)), lines)


def _rows(figures: Figures, operation: str) -> list[Figures]:
    return [row for row in figures["rows"] if (row["operation"], row["structure"]) == (operation, "mamba")]


def _threads(machine: Mapping[str, Any]) -> str:
    return f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"


def _judged(value: float, goal: float | None) -> tuple[str, str]:
    return ("", "") if goal is None else (f"<= {goal:g}", "yes" if value <= goal else "no")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _spread(seconds: Sequence[float]) -> str:
    scale, unit = (1, "s") if median(seconds) >= 1 else (1000, "ms")
    low, middle, high = (_digits(scale * s) for s in (min(seconds), median(seconds), max(seconds)))
    return f"{middle} {unit} ({low} to {high})"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _bytes(memory: Mapping[str, int | None]) -> tuple[str, str]:
    counted, resident = memory["counted"], memory["resident"]
    return in_bytes(counted or 0), "" if resident is None else in_bytes(resident)


def in_bytes(size: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.{1 if size < 100 << 20 else 0}f} MiB"


def plot(figures: Figures) -> Figure:
    """Plot time and extra memory of one Mamba-1 layer against length, for each operation and its plain definition."""
    figure = Figure(figsize=(11.5, 5.0), layout="constrained")
    panels = {
        "time, seconds": lambda row: median(row["seconds"]),
        "extra memory, MiB": lambda row: row["memory"]["counted"] / 2**20,
    }
    for axes, (label, value) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for operation, (colour, definition) in LINES.items():
            _draw(axes, _rows(figures, operation), value, colour, "-", NAMES[operation])
            if definition is not None:
                _draw(axes, _rows(figures, definition), value, colour, (0, (2, 1.6)), None)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({row["length"] for row in figures["rows"]})
        ticks = [2**n for n in range(4, 17, 2) if lengths[0] <= 2**n <= lengths[-1]]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens", color=INK)
        axes.set_title(label, loc="left", color=INK, fontsize=11, fontweight="bold")
        axes.grid(color="#e6e8ee", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=FAINT, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color("#c9cdd8")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    (dashed,) = figure.axes[0].plot([], [], color=FAINT, linestyle=(0, (2, 1.6)), linewidth=2)
    names = [*labels, "its plain definition"]
    figure.legend([*handles, dashed], names, loc="outside lower center", ncol=4, frameon=False, fontsize=9.5)
    machine = figures["machine"]
    host = machine.get("gpu") or f"{machine['cpu'].split(',')[0]}, {_threads(machine)}"
    figure.suptitle(
        f"One Mamba-1 layer, {figures['settings']['inner']} channels, on {host}",
        x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold",
    )  # fmt: skip
    return figure


def _draw(axes: Any, rows: Sequence[Figures], value: Any, colour: str, style: Any, name: str | None) -> None:
    points = sorted((row["length"], value(row)) for row in rows)
    points = [(x, y) for x, y in points if y > 0]
    if points:
        x, y = zip(*points, strict=True)
        # Attribution takes as much memory as the map: its line covers the map's.
        width = 4 if name == NAMES["map"] else 2
        axes.plot(x, y, color=colour, linestyle=style, linewidth=width, marker="o", markersize=3.5, label=name)
