"""Allocate a method's scores and label them as a result."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import require_result, reserved
from unilinattn.methods.maps import ONE_ROW, gather_rows, map_shape
from unilinattn.methods.options import Layerwise, Options
from unilinattn.methods.selection import key_mask, query_rows
from unilinattn.progress import progress
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

DIMS = ("layer", "batch", "query", "key")


def result_shape(
    layers: Sequence[Layer], target: Target | None, options: Options | None = None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a method's scores: ([layer,] batch, query, key), one query for a target.

    They have a layer axis if `options` are those of a layer-wise method which is neither averaged nor composed.
    """
    batch, queries, keys = map_shape(layers[0])
    shape = (batch, queries if target is None else 1, keys)
    dtype = reduce(torch.promote_types, (layer.output.dtype for layer in layers))
    return ((len(layers), *shape) if options is not None and options.has_layer_axis else shape), dtype


def allocate_scores(
    method: str, layers: Sequence[Layer], target: Target | None, options: Options | None = None
) -> Float[Tensor, "*axes"]:
    """Return zeros of `result_shape`; every method allocates its scores here.

    Raises `MemoryLimitError`, before it allocates, if they are larger than `max_memory`.
    """
    shape, dtype = result_shape(layers, target, options)
    ways = [ONE_ROW] if target is None else ["take fewer sequences or a shorter one"]
    if len(shape) == 4 and len(layers) > 1 and isinstance(options, Layerwise):
        ways.append("for fewer layers with layers=[...]")
    what = f"{method}: the result ({', '.join(DIMS[4 - len(shape) :])})"
    require_result(shape, dtype.itemsize, what, ", ".join(ways))
    return torch.zeros(shape, dtype=dtype, device=layers[0].output.device)


def score_layers(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    options: Layerwise,
    fill: Callable[[Layer, Int[Tensor, "batch row"], Float[Tensor, "batch row key"]], None],
    *,
    whole: bool = False,
) -> Float[Tensor, "*axes"]:
    """Return each layer's scores, or their mean with layers="mean".

    `fill(layer, rows, out)` writes the scores of the query positions `rows` into `out`, which is zero. With `whole` it
    computes all rows of a layer even for a target.
    """
    scores = allocate_scores(method, layers, target, options)
    for at, layer in enumerate(progress(layers, method)):
        wanted = query_rows(trace, layer, target)
        rows = query_rows(trace, layer) if whole else wanted
        part = scores[at] if scores.ndim == 4 else None
        alike = part is not None and (part.device, part.dtype) == (layer.output.device, layer.output.dtype)
        if alike and part is not None and rows.shape[1] == part.shape[1]:
            fill(layer, rows, part)
            continue
        shape = (*rows.shape, scores.shape[-1])
        with reserved(prod(shape) * layer.output.element_size(), f"{method}: the map of {layer.name}", ONE_ROW):
            out = layer.output.new_zeros(shape)
            fill(layer, rows, out)
        out = gather_rows(out, wanted) if rows.shape[1] != wanted.shape[1] else out
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
    extras: dict[str, Sequence[Float[Tensor, "batch row"]]] | None = None,
    decomposition_error: Sequence[float] | None = None,
    stream_error: dict[str, float] | None = None,
) -> Attribution:
    """Label the scores of `score_layers`, or of the product of the layers' maps.

    `extras` have one number for each row of each layer, averaged here for layers="mean"; `decomposition_error` has one
    for each layer, the worst of which is the completeness gap. Composed methods have one of each for a step.
    """
    more = {name: torch.stack([part.to(scores.device) for part in parts]) for name, parts in (extras or {}).items()}
    if options.layers == "mean":
        more = {name: tensor.mean(0) for name, tensor in more.items()}
    if target is not None:
        scores, more = scores.squeeze(-2), {name: tensor.squeeze(-1) for name, tensor in more.items()}
    axes = DIMS if options.has_layer_axis else DIMS[1:]
    gap = None
    if decomposition_error is not None:
        more["decomposition_error"] = torch.tensor(decomposition_error, dtype=torch.float64)
        gap = more["decomposition_error"].max().item()
    return make_result(
        trace,
        method,
        layers,
        scores,
        dims=tuple(axis for axis in axes if target is None or axis != "query"),
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
        options=options.stored(target),
        scope=scope,
        mask=key_mask(trace, layers[0]),
        layers=tuple(layer.name for layer in layers),
        kinds=tuple(layer.kind for layer in layers),
        left_out=tuple(layer.name for layer in trace.layers if layer.opaque),
        model=trace.model,
        versions=trace.versions,
        reconstruction_error=errors,
        warnings=warnings,
        stream_error=stream_error or {},
        completeness_gap=completeness_gap,
        extras=extras or {},
    )
