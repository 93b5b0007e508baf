"""Allocate a method's scores and label them as a result."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import require_result, reserved
from unilinattn.methods.axes import Axes
from unilinattn.methods.heads import HeadAxis
from unilinattn.methods.maps import ONE_ROW, map_shape
from unilinattn.methods.selection import key_mask, key_sinks, query_rows
from unilinattn.options.base import Options
from unilinattn.options.bases import Layerwise
from unilinattn.progress import progress
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Value = TypeVar("Value")


def result_shape(
    options: Options,
    layers: Sequence[Layer],
    target: Target | None,
    heads: HeadAxis | None = None,
    axes: Axes | None = None,
) -> tuple[dict[str, int], torch.dtype]:
    """Return the axes and dtype of a method's scores: ([layer,] batch, [head,] query, key), one query for a target.

    They have a layer axis if the method has one with these options, and a head axis if `heads` are given. Queries and
    keys are those of `axes`, by default those of the first layer.
    """
    batch, queries, keys = map_shape(layers[0]) if axes is None else axes.shape
    dtype = reduce(torch.promote_types, (layer.output.dtype for layer in layers))
    sizes = {"layer": len(layers)} if options.has_layer_axis else {}
    sizes["batch"] = batch
    if heads is not None:
        sizes["head"] = len(heads.heads)
    return {**sizes, "query": queries if target is None else 1, "key": keys}, dtype


def allocate_scores(
    options: Options,
    layers: Sequence[Layer],
    target: Target | None,
    heads: HeadAxis | None = None,
    axes: Axes | None = None,
) -> Float[Tensor, "*axes"]:
    """Return zeros of `result_shape`; every method allocates its scores here.

    Raises `MemoryLimitError`, before it allocates, if they are larger than `max_memory`.
    """
    sizes, dtype = result_shape(options, layers, target, heads, axes)
    shape = tuple(sizes.values())
    ways = [ONE_ROW] if target is None else ["take fewer sequences or a shorter one"]
    if "layer" in sizes and len(layers) > 1 and isinstance(options, Layerwise):
        ways.append("for fewer layers with layers=[...]")
    if "head" in sizes and sizes["head"] > 1:
        ways.append("for fewer heads with heads=[...]")
    require_result(shape, dtype.itemsize, f"{options.name}: the result ({', '.join(sizes)})", ", ".join(ways))
    return torch.zeros(shape, dtype=dtype, device=layers[0].output.device)


def score_layers(
    trace: Trace,
    options: Layerwise,
    layers: Sequence[Layer],
    target: Target | None,
    fill: Callable[[Sequence[Layer], Int[Tensor, "batch row"], Float[Tensor, "batch *head row key"]], object],
    *,
    heads: HeadAxis | None = None,
    whole: bool = False,
) -> Float[Tensor, "*axes"]:
    """Return each layer's scores, or their mean with layers="mean".

    `fill((layer,), rows, out)` writes the scores of the query positions `rows` into `out`, which is zero and has a head
    axis for `heads`. With `whole` it computes all rows of a layer even for a target.
    """
    scores = allocate_scores(options, layers, target, heads)
    for index, layer in enumerate(progress(layers, options.name)):
        wanted = query_rows(trace, layer, target)
        rows = query_rows(trace, layer) if whole else wanted
        slab = scores[index] if options.has_layer_axis else None
        alike = slab is not None and (slab.device, slab.dtype) == (layer.output.device, layer.output.dtype)
        if alike and slab is not None and rows.shape[1] == slab.shape[-2]:
            fill((layer,), rows, slab)
            continue
        shape = (len(rows), *([] if heads is None else [len(heads.heads)]), rows.shape[1], scores.shape[-1])
        with reserved(prod(shape) * layer.output.element_size(), f"{options.name}: the map of {layer.name}", ONE_ROW):
            out = layer.output.new_zeros(shape)
            fill((layer,), rows, out)
        if rows.shape[1] != wanted.shape[1]:
            row = wanted.unsqueeze(-1) if heads is None else wanted[:, None, :, None]
            out = torch.take_along_dim(out, row, -2)
        if slab is None:
            scores.add_(out.to(scores), alpha=1 / len(layers))
        else:
            slab.copy_(out)
    return scores


def to_result(
    trace: Trace,
    options: Layerwise,
    layers: Sequence[Layer],
    scores: Float[Tensor, "*axes"],
    *,
    target: Target | None,
    scope: str,
    heads: HeadAxis | None = None,
    axes: Axes | None = None,
    extras: Mapping[str, Mapping[str, Float[Tensor, "batch row"]]] | None = None,
    scale: dict[str, Tensor] | None = None,
    decomposition_error: Mapping[str, float] | None = None,
    stream_error: dict[str, float] | None = None,
) -> Attribution:
    """Label the scores of `score_layers`, or of the product of the layers' maps.

    By the name of a layer, or of the first layer of a composed step, `extras` have one number for each row, averaged
    here for layers="mean", and `decomposition_error` has one. `scale` are the extras of a scaled product.
    """

    def in_order(by_layer: Mapping[str, Value]) -> list[Value]:
        return [by_layer[layer.name] for layer in layers if layer.name in by_layer]

    stacked = {
        name: torch.stack([rows.to(scores.device) for rows in in_order(by_layer)])
        for name, by_layer in (extras or {}).items()
    }
    if options.layers == "mean":
        stacked = {name: rows.mean(0) for name, rows in stacked.items()}
    return make_result(
        trace,
        options,
        layers,
        scores,
        heads=heads,
        target=target,
        scope=scope,
        axes=axes,
        extras={**stacked, **(scale or {})},
        decomposition_error=None if decomposition_error is None else in_order(decomposition_error),
        stream_error=stream_error,
    )


def make_result(
    trace: Trace,
    options: Options,
    layers: Sequence[Layer],
    scores: Float[Tensor, "*axes"],
    *,
    target: Target | None,
    scope: str | None,
    dims: tuple[str, ...] | None = None,
    heads: HeadAxis | None = None,
    axes: Axes | None = None,
    extras: Mapping[str, Tensor] | None = None,
    decomposition_error: Sequence[float] | None = None,
    completeness_gap: float | None = None,
    stream_error: dict[str, float] | None = None,
    warnings: tuple[str, ...] = (),
) -> Attribution:
    """Return a result of scores with labels, options and errors.

    Queries and keys are those of `axes`, by default those of the first layer. `scores` have the axes of
    `result_shape`, and `extras` the same, or those without key, or without head and key. The result has the axes
    `dims`, by default those of the scores, without query for a target: the query axis of one row is then dropped. The
    worst `decomposition_error` of a layer is the completeness gap. Layers whose adapter covers only their core have no
    reconstruction error.
    """
    if dims is None:
        sizes, _ = result_shape(options, layers, target, heads, axes)
        dims = tuple(axis for axis in sizes if target is None or axis != "query")
    extras = dict(extras or {})
    if len(dims) < scores.ndim:
        extras = {name: rows.squeeze(-2 if rows.shape == scores.shape else -1) for name, rows in extras.items()}
        scores = scores.squeeze(-2)
    if decomposition_error is not None:
        extras["decomposition_error"] = torch.tensor(decomposition_error, dtype=torch.float64, device="cpu")
        completeness_gap = extras["decomposition_error"].max().item()
    errors = {}
    for layer in layers:
        try:
            errors[layer.name] = layer.reconstruction_error()
        except UncoveredError:
            continue
    return Attribution(
        scores=scores,
        dims=dims,
        method=options.name,
        options=stored_options(options, target),
        scope=scope,
        mask=key_mask(trace, layers[0]) if axes is None else axes.mask(),
        sinks=key_sinks(trace, layers[0]) if axes is None else axes.sinks(),
        streams={} if axes is None else axes.names,
        layers=tuple(layer.name for layer in layers),
        kinds=tuple(layer.kind for layer in layers),
        heads=None if heads is None else heads.heads,
        head_kind="head" if heads is None else heads.kind,
        left_out=tuple(layer.name for layer in trace.layers if layer.opaque),
        model=trace.model,
        versions=trace.versions,
        reconstruction_error=errors,
        warnings=(*trace.warnings, *warnings),
        stream_error=stream_error or {},
        completeness_gap=completeness_gap,
        extras=extras,
    )


def stored_options(options: Options, target: Target | None) -> dict[str, Any]:
    """Return the options and the target as plain Python values, for the result."""
    plain = torch.as_tensor(target, device="cpu").tolist() if target is not None else None
    return {**options.model_dump(), "target": plain}
