"""`latim`: the norm of each token's contribution to each output, a vector through the whole layer."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from unilinattn.errors import StreamError, UncoveredError
from unilinattn.methods.costs import estimated
from unilinattn.methods.maps import gather_rows, map_shape, postprocess_, postprocess_bytes
from unilinattn.methods.options import Activation, Discard, Layerwise, Normalize
from unilinattn.methods.results import score_layers, to_result
from unilinattn.methods.selection import only_port, query_rows, stackable_layers
from unilinattn.methods.vectors import contribution_tiles, shares_cost
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class LatimOptions(Layerwise):
    """Options of `latim`."""

    p: float = Field(2.0, ge=1, description="order of the norm, at least 1; float('inf') for the maximum")
    activation: Activation = Field(
        "exact",
        description="'exact' freezes the activation's slope; the others are LaTIM's f, applied to each tap of the "
        "convolution (LaTIM Eq. 19)",
    )
    bias: Literal["column", "query"] = Field(
        "column", description="'column' returns the bias's norm in extras['bias']; 'query' adds its vector to T_ii"
    )
    residual: bool = Field(
        False, description="whether T_ii includes the residual stream that the host adds outside the module"
    )
    discard: Discard = 0.0
    normalize: Normalize = "none"


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `latim`: tiles of vectors, or the vectors of a few rows."""
    chosen = LatimOptions.of("latim", options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    extremes, width = chosen.normalize == "min-max", layers[0].output.element_size()

    def of(layer: Layer) -> tuple[int, int]:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or extremes else 1
        apart = batch * rows * keys * layer.output.element_size() if chosen.layers == "mean" or target else 0
        size, operations = shares_cost((layer,), rows, exact=chosen.activation == "exact")
        treatment = postprocess_bytes((batch, rows, keys), layer.output.element_size(), chosen.discard)
        return apart + max(size, treatment), operations

    batch, queries, _ = map_shape(layers[0])
    biases = batch * (queries if target is None else 1) * (1 if chosen.layers == "mean" else len(layers))
    extras = 8 * len(layers) + (width * biases if chosen.bias == "column" else 0)
    return estimated("latim", layers, target, chosen, of, extras=extras)


@register_method("latim", options=LatimOptions, cost=cost)
def latim(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """LaTIM: C_ij = ||T_i(x_j)||_p, the norm of token j's contribution to output i (LaTIM Eq. 5, Table 1).

    T_i(x_j) is exact by default; `activation` selects one of the paper's splits of the activation over the
    convolution's taps. Scores: (layer, batch, query, key), without `query` for a target. The residual inside a module
    is part of T_ii whatever `residual` is.

    Extras: "bias", the norm of the bias at each query (with bias="column"), and "decomposition_error" of each layer:
    ||sum_j T_i(x_j) + bias_i - y_i|| / ||y_i|| over the computed real rows, the worst sequence (LaTIM Table 4). The
    completeness gap is that of the worst layer.

    Options: `LatimOptions`. Raises `OptionError` for an unknown option or value, `UncoveredError` for layers that
    cannot be stacked, that have no activation to split, or whose residual stream is unknown, and `StreamError` if
    stream and output do not add up.
    """
    chosen = LatimOptions.of("latim", options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    stream_error = stream_errors(trace, layers, "latim") if chosen.residual else None
    biases: list[Tensor] = []
    errors: list[float] = []

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        bias, error = _fill(out, trace, layer, rows, chosen)
        wanted = query_rows(trace, layer, target)
        biases.append(bias.gather(1, wanted) if rows.shape[1] != wanted.shape[1] else bias)
        errors.append(error)

    # The map's minimum and maximum need the whole map.
    scores = score_layers(trace, "latim", layers, target, chosen, fill, whole=chosen.normalize == "min-max")
    return to_result(
        trace,
        "latim",
        layers,
        scores,
        options=chosen,
        target=target,
        scope="layer",
        extras={"bias": biases} if chosen.bias == "column" else None,
        decomposition_error=errors,
        stream_error=stream_error,
    )


def stream_errors(trace: Trace, layers: Sequence[Layer], method: str) -> dict[str, float]:
    """Return the `stream_error` of each layer's step by the layer's name, without modules that contain their residual.

    Raises `StreamError` if an error exceeds the rounding of the host's dtype.
    """
    errors = {}
    for layer in layers:
        step = next(step for step in trace.steps if any(layer is other for other in step.layers))
        error, allowed = step.stream_error(), step.stream_tolerance()
        if error is None:
            continue
        if not error <= allowed:
            names = " and ".join(other.name for other in step.layers)
            raise StreamError(
                f"{method}: the residual stream and the output of {names} do not add up to the next stream of "
                f"{trace.model}: the relative error is {error:.1e}, and {allowed:.0e} is accepted. The "
                "host may have written into its stream after the layer. Use residual=False for the layer's output "
                "without a stream, or layers=[...] without this layer."
            )
        errors[layer.name] = error
    return errors


def residual_of(layer: Layer, method: str) -> Float[Tensor, "batch query out"]:
    """Return the stream that the host adds to a layer's output; raise `UncoveredError` if the trace found none."""
    if layer.residual is None:
        raise UncoveredError(
            f"{method} needs the stream that the host adds to the output of {layer.name}; {layer.no_residual}. Use "
            "residual=False for the layer's output without a stream, or layers=[...] without this layer."
        )
    if only_port(layer).ports != ("x",):
        raise UncoveredError(
            f"{method}: {layer.name} takes its keys from {layer.operator.ports[0]!r}, so the residual stream belongs "
            "to none of the keys; use 'latim' with residual=False, or layers=[...] without this layer."
        )
    return layer.residual


def _fill(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch row"],
    options: LatimOptions,
) -> tuple[Float[Tensor, "batch row"], float]:
    """Write the scores of a layer; return the norms of its bias and its decomposition error."""
    op = only_port(layer)
    if options.bias == "query" and op.ports != ("x",):
        raise UncoveredError(
            f"latim: {layer.name} takes its keys from {op.ports[0]!r}, so none of the keys is the query's own token; "
            "use bias='column'."
        )
    bias = gather_rows(op.activation_bias(options.activation), rows)
    factor, extra = 1.0, bias if options.bias == "query" else None
    if options.residual:
        factor, stream = layer.multiplier, gather_rows(residual_of(layer, "latim"), rows)
        extra = stream if extra is None else stream + factor * extra
    sums = layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for tile in contribution_tiles((layer,), (factor,), rows, options.activation):
        sums[:, tile.rows] += tile.total()
        shift = None if extra is None else extra[:, tile.rows]
        out[:, tile.rows, tile.cols] = tile.norms(options.p, extra=shift)
    postprocess_(out, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    real = torch.ones_like(rows, dtype=torch.bool) if layer.mask is None else layer.mask.gather(1, rows)
    bias, output = bias * real.unsqueeze(-1), gather_rows(layer.output, rows) * real.unsqueeze(-1)
    missed = (sums * real.unsqueeze(-1) + factor * (bias - output)).flatten(1).norm(dim=1)
    size = (factor * output).flatten(1).norm(dim=1).clamp_min(torch.finfo(output.dtype).tiny)
    return torch.linalg.vector_norm(bias, ord=options.p, dim=-1), float((missed / size).max())
