"""The section of the performance page on whole models, written from the recorded figures."""

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.machine import versions_of
from benchmarks.page import in_bytes, table
from benchmarks.published import SHAPES

NAMES = {
    "trace": "`trace`",
    "operators": "operators",
    **{name: f"`{name}`" for name in ("raw", "rollout", "latim", "alti", "attribution", "contribution")},
    **{name: f"`{name}`" for name in ("logit", "lrp", "alti_logit")},
    **{f"{name}-all": f"`{name}`, all queries" for name in ("raw", "rollout", "latim", "alti")},
}
"""Names of the calls on the page, in its order."""

GOALS = {"rollout": 0.6, "latim": 1.0, "alti": 1.0, "attribution": 3.0}
"""Largest desired time of a call relative to the host's forward."""

ONLY_MAMBA = {"rollout": 0.3}
"""Goals of models whose layers are all Mamba-1, where they differ."""

ATTRIBUTION_BYTES = 1 << 30
"""Largest desired memory of `attribution`."""

FLOOR_GOAL = 1.3
"""Largest desired time of `latim` for all queries relative to its floor."""

Run = Mapping[str, Any]
Row = Mapping[str, Any]


def stored(runs: Sequence[Run]) -> str:
    """Return runs as JSON with one line per row."""
    texts = []
    for run in runs:
        lists = (
            f'      "{key}": [\n' + ",\n".join(f"        {json.dumps(row)}" for row in run[key]) + "\n      ]"
            for key in ("checks", "rows")
        )
        texts.append("    {\n" + f'      "machine": {json.dumps(run["machine"])},\n' + ",\n".join(lists) + "\n    }")
    return '{\n  "runs": [\n' + ",\n".join(texts) + "\n  ]\n}\n"


def section(runs: Sequence[Run]) -> str:
    """Return a paragraph for each machine and a table for each of its models."""
    return "\n\n".join(part for run in runs for part in _run(run))


def _run(run: Run) -> list[str]:
    machine = run["machine"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    worst = max(check["error"] for check in run["checks"])
    layers = max((row["error"] for row in run["rows"] if row["call"] == "operators" and "error" in row), default=None)
    where = f"{machine['cpu']}; {threads}, {machine['memory']} of memory; {versions_of(machine)}"
    text = (
        f"{where}; float32. Largest relative error of a method on a narrow model {worst:.0e}"
        f"{'' if layers is None else f', of a layer {layers:.0e}'}."
    )
    models = [name for name in SHAPES if any(row["model"] == name for row in run["rows"])]
    return [text, *(_model(name, [row for row in run["rows"] if row["model"] == name]) for name in models)]


def _model(name: str, rows: Sequence[Row]) -> str:
    lengths = sorted({row["length"] for row in rows})
    at = {(row["call"], row["length"]): row for row in rows}
    hosts = {length: at["host", length] for length in lengths}
    lines = [("the host's forward", "", *(_absolute(hosts[length]) for length in lengths))]
    for call, label in NAMES.items():
        if not any((call, length) in at for length in lengths):
            continue
        goal = _goal(name, call)
        cells = (_relative(at.get((call, length)), hosts[length], goal, call) for length in lengths)
        lines.append((label, _words(goal, call), *cells))
        if call == "latim-all":
            against = (_against_floor(at.get((call, length))) for length in lengths)
            lines.append(("relative to its floor", f"<= {FLOOR_GOAL:g}", *against))
    return table((name, "goal", *(f"L = {length}" for length in lengths)), lines)


def _goal(model: str, call: str) -> float | None:
    goals = {**GOALS, **ONLY_MAMBA} if set(SHAPES[model].layers) == {"mamba"} else GOALS
    return goals.get(call)


def _words(goal: float | None, call: str) -> str:
    if goal is None:
        return ""
    return f"<= {goal:g}" + (f", {in_bytes(ATTRIBUTION_BYTES)}" if call == "attribution" else "")


def _absolute(row: Row) -> str:
    return f"{_seconds(median(row['seconds']))}, {_rest(row)}"


def _relative(row: Row | None, host: Row, goal: float | None, call: str) -> str:
    if row is None:
        return ""
    if "predicted" in row:
        seconds, size = row["predicted"]["seconds"], in_bytes(row["predicted"]["bytes"])
        # The time follows from that of a shorter length, if there is one.
        return f"not run: {_seconds(seconds)}, {size}" if seconds else f"not run: {size}"
    ratio = median(row["seconds"]) / median(host["seconds"])
    again = f" / {median(row['again']) / median(host['seconds']):.2f}" if "again" in row else ""
    missed = goal is not None and ratio > goal
    missed |= call == "attribution" and row["peak"] > ATTRIBUTION_BYTES
    return f"{_emphasised(f'{ratio:.2f}', missed)}{again}, {_rest(row)}"


def _against_floor(row: Row | None) -> str:
    if row is None or "floor" not in row:
        return ""
    floor = median(row["floor"])
    ratio = median(row["seconds"]) / floor
    again = f" / {median(row['again']) / floor:.2f}" if "again" in row else ""
    return _emphasised(f"{ratio:.2f}", ratio > FLOOR_GOAL) + again


def _emphasised(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _rest(row: Row) -> str:
    calls = row["calls"]
    return f"{in_bytes(row['peak'])}, {calls if calls < 1000 else f'{calls / 1000:.0f}k'}"


def _seconds(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2g} s"
