"""Hybrids, models with layers of several kinds: their record in the coverage, and their page."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.markers import table
from unilinattn.tracing.trace import Trace

_HEAD = r"""# Hybrids

Models that mix layers of several kinds, as a trace lists them: small random configurations of the real classes, the
layers in order of execution, with the error $\lVert \mathrm{op}(x) - y \rVert / \lVert y \rVert$ of each. Layers of one
step are added to the stream together. Blocks of experts and MLPs in between mix no tokens and are no layers.

This page is written by `python -m tools.coverage` with the [table of coverage](coverage.md).
"""
_HEADS = ("step", "layer", "class", "kind", "float32 error", "float64 error")


def listed(runs: Mapping[str, Trace]) -> dict[str, dict[str, Any]] | None:
    """Return the layers of a hybrid by name, in order, with their errors in each run; None for a single kind."""
    first = next(iter(runs.values()))
    if len({layer.kind for layer in first.layers}) < 2:
        return None
    steps = {layer.name: number for number, step in enumerate(first.steps, 1) for layer in step.layers}
    return {
        layer.name: {
            "step": steps[layer.name],
            "class": type(layer.module).__qualname__,
            "kind": layer.kind,
            **{how: float(f"{run.layers[k].operator.reconstruction_error():.1e}") for how, run in runs.items()},
        }
        for k, layer in enumerate(first.layers)
    }


def page(environments: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the page: for each model its first recorded configuration, with the newest version that ran it.

    `environments`: the record's environments with their runs, newest version first.
    """
    lines, seen = [_HEAD], set()
    for environment, runs in environments:
        for name, run in runs.items():
            if "hybrid" not in run or run["model"] in seen:
                continue
            seen.add(run["model"])
            configuration = f"{name.partition('/')[2]} ({run['batch']} x {run['length']})"
            lines += [f"## {run['model']}", "", f"With {environment}; configuration: {configuration}.", ""]
            rows = []
            for layer, entry in run["hybrid"].items():
                errors = (f"{entry[how]:.0e}" if how in entry else "not run" for how in ("float32", "float64"))
                rows.append((entry["step"], f"`{layer}`", entry["class"], entry["kind"], *errors))
            lines += [table(_HEADS, rows), ""]
    return "\n".join(lines)
