"""Allocate a method's scores and label them as a result."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import require_result, reserved
from unilinattn.methods.heads import HeadAxis
from unilinattn.methods.maps import ONE_ROW, map_shape
from unilinattn.methods.selection import key_mask, key_sinks, query_rows
from unilinattn.options.base import Options
from unilinattn.options.bases import Layerwise
from unilinattn.progress import progress
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def result_shape(
    layers: Sequence[Layer], target: Target | None, options: Options | None = None, heads: HeadAxis | None = None
) -> tuple[dict[str, int], torch.dtype]:
    """Return the axes and dtype of a method's scores: ([layer,] batch, [head,] query, key), one query for a target.

    They have a layer axis if `options` are those of a layer-wise method which is neither averaged nor composed, and a
    head axis if `heads` are given.
    """
    batch, queries, keys = map_shape(layers[0])
    dtype = reduce(torch.promote_types, (layer.output.dtype for layer in layers))
    sizes = {"layer": len(layers)} if options is not None and options.has_layer_axis else {}
    sizes["batch"] = batch
    if heads is not None:
        sizes["head"] = len(heads.heads)
    return {**sizes, "query": queries if target is None else 1, "key": keys}, dtype


def allocate_scores(
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    options: Options | None = None,
    heads: HeadAxis | None = None,
) -> Float[Tensor, "*axes"]:
    """Return zeros of `result_shape`; every method allocates its scores here.

    Raises `MemoryLimitError`, before it allocates, if they are larger than `max_memory`.
    """
    sizes, dtype = result_shape(layers, target, options, heads)
    shape = tuple(sizes.values())
    ways = [ONE_ROW] if target is None else ["take fewer sequences or a shorter one"]
    if "layer" in sizes and len(layers) > 1 and isinstance(options, Layerwise):
        ways.append("for fewer layers with layers=[...]")
    if "head" in sizes and sizes["head"] > 1:
        ways.append("for fewer heads with heads=[...]")
    what = f"{method}: the result ({', '.join(sizes)})"
    require_result(shape, dtype.itemsize, what, ", ".join(ways))
    return torch.zeros(shape, dtype=dtype, device=layers[0].output.device)


def score_layers(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    options: Layerwise,
    fill: Callable[[Layer, Int[Tensor, "batch row"], Float[Tensor, "batch *head row key"]], None],
    *,
    heads: HeadAxis | None = None,
    whole: bool = False,
) -> Float[Tensor, "*axes"]:
    """Return each layer's scores, or their mean with layers="mean".

    `fill(layer, rows, out)` writes the scores of the query positions `rows` into `out`, which is zero and has a head
    axis for `heads`. With `whole` it computes all rows of a layer even for a target.
    """
    scores = allocate_scores(method, layers, target, options, heads)
    for at, layer in enumerate(progress(layers, method)):
        wanted = query_rows(trace, layer, target)
        rows = query_rows(trace, layer) if whole else wanted
        part = scores[at] if options.has_layer_axis else None
        alike = part is not None and (part.device, part.dtype) == (layer.output.device, layer.output.dtype)
        if alike and part is not None and rows.shape[1] == part.shape[-2]:
            fill(layer, rows, part)
            continue
        shape = (len(rows), *([] if heads is None else [len(heads.heads)]), rows.shape[1], scores.shape[-1])
        with reserved(prod(shape) * layer.output.element_size(), f"{method}: the map of {layer.name}", ONE_ROW):
            out = layer.output.new_zeros(shape)
            fill(layer, rows, out)
        if rows.shape[1] != wanted.shape[1]:
            index = wanted.unsqueeze(-1) if heads is None else wanted[:, None, :, None]
            out = torch.take_along_dim(out, index, -2)
        if part is None:
            scores.add_(out.to(scores), alpha=1 / len(layers))
        else:
            part.copy_(out)
    return scores


def to_result(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    scores: Float[Tensor, "*axes"],
    *,
    options: Layerwise,
    target: Target | None,
    scope: str,
    heads: HeadAxis | None = None,
    extras: dict[str, Sequence[Float[Tensor, "batch row"]]] | None = None,
    scale: dict[str, Tensor] | None = None,
    decomposition_error: Sequence[float] | None = None,
    stream_error: dict[str, float] | None = None,
) -> Attribution:
    """Label the scores of `score_layers`, or of the product of the layers' maps.

    `extras` have one number for each row of each layer, averaged here for layers="mean"; `decomposition_error` has one
    for each layer, the worst of which is the completeness gap. Composed methods have one of each for a step, and
    `scale`, the extras of a scaled product.
    """
    more = {name: torch.stack([part.to(scores.device) for part in parts]) for name, parts in (extras or {}).items()}
    if options.layers == "mean":
        more = {name: tensor.mean(0) for name, tensor in more.items()}
    if target is not None:
        scores, more = scores.squeeze(-2), {name: tensor.squeeze(-1) for name, tensor in more.items()}
    more |= scale or {}
    sizes, _ = result_shape(layers, target, options, heads)
    gap = None
    if decomposition_error is not None:
        more["decomposition_error"] = torch.tensor(decomposition_error, dtype=torch.float64)
        gap = more["decomposition_error"].max().item()
    return make_result(
        trace,
        method,
        layers,
        scores,
        dims=tuple(axis for axis in sizes if target is None or axis != "query"),
        heads=heads,
        options=options,
        target=target,
        scope=scope,
        extras=more,
        completeness_gap=gap,
        stream_error=stream_error,
    )


def make_result(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    scores: Float[Tensor, "*axes"],
    *,
    options: Options,
    target: Target | None,
    scope: str | None,
    dims: tuple[str, ...] | None = None,
    heads: HeadAxis | None = None,
    extras: dict[str, Tensor] | None = None,
    completeness_gap: float | None = None,
    stream_error: dict[str, float] | None = None,
    warnings: tuple[str, ...] = (),
) -> Attribution:
    """Return a result of scores with labels, options and errors.

    `dims` are by default (batch, query, key), without "query" for a target. Layers whose adapter covers only their core
    have no reconstruction error.
    """
    errors = {}
    for layer in layers:
        try:
            errors[layer.name] = layer.reconstruction_error()
        except UncoveredError:
            continue
    return Attribution(
        scores=scores,
        dims=dims or ("batch", *(("query",) if target is None else ()), "key"),
        method=method,
        options=stored_options(options, target),
        scope=scope,
        mask=key_mask(trace, layers[0]),
        sinks=key_sinks(trace, layers[0]),
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
        extras=extras or {},
    )


def stored_options(options: Options, target: Target | None) -> dict[str, Any]:
    """Return the options and the target as plain Python values, for the result."""
    plain = torch.as_tensor(target).tolist() if target is not None else None
    return {**options.model_dump(), "target": plain}
