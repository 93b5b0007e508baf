"""`latim`: the size of what each token adds to each output, as vectors through the whole layer."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.errors import UncoveredError
from unilinattn.methods.costs import Estimate, estimated
from unilinattn.methods.maps import map_shape, picked, treat, treatment_bytes
from unilinattn.methods.options import LatimOptions
from unilinattn.methods.results import filled, stacked
from unilinattn.methods.selection import only_port, query_rows, stackable_layers
from unilinattn.methods.vectors import share_tiles, shares_cost
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return what `latim` takes: tiles of vectors, or the vectors of a few rows."""
    chosen = LatimOptions.of("latim", options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    extremes, width = chosen.normalize == "min-max", layers[0].output.element_size()

    def of(layer: Layer) -> tuple[int, int]:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or extremes else 1
        apart = batch * rows * keys * layer.output.element_size() if chosen.layers == "mean" or target else 0
        size, operations = shares_cost((layer,), rows, exact=chosen.activation == "exact")
        treatment = treatment_bytes((batch, rows, keys), layer.output.element_size(), chosen.discard)
        return apart + max(size, treatment), operations

    batch, queries, _ = map_shape(layers[0])
    biases = batch * (queries if target is None else 1) * (1 if chosen.layers == "mean" else len(layers))
    extras = 8 * len(layers) + (width * biases if chosen.bias == "column" else 0)
    return estimated("latim", layers, target, chosen, of, extras=extras)


@register_method("latim", cost=cost)
def latim(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """LaTIM: C_ij = ||T_i(x_j)||_p, the size of what token j adds to output i (LaTIM Eq. 5, Table 1).

    T_i(x_j) is exact unless `activation` chooses one of the paper's splits of the activation over the convolution's
    taps. Scores: (layer, batch, query, key), without `query` for a target. Where a module contains its own residual
    that is part of T_ii whatever `residual` says.

    Extras: "bias", the norm of the bias at each query (with bias="column"), and "decomposition_error" of each layer:
    ||sum_j T_i(x_j) + bias_i - y_i|| / ||y_i|| over the computed real rows, the worst sequence (LaTIM Table 4); the
    worst layer's is the completeness gap.

    Options: `LatimOptions`. Raises `OptionError` for options that do not exist, `UncoveredError` for layers that
    cannot be stacked, that have no activation to split, or whose residual stream is not known.
    """
    chosen = LatimOptions.of("latim", options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    biases: list[Tensor] = []
    errors: list[float] = []

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        bias, error = _fill(out, trace, layer, rows, chosen)
        wanted = query_rows(trace, layer, target)
        biases.append(bias.gather(1, wanted) if rows.shape[1] != wanted.shape[1] else bias)
        errors.append(error)

    # The map's own minimum and maximum need the whole of it.
    scores = filled(trace, "latim", layers, target, chosen, fill, whole=chosen.normalize == "min-max")
    return stacked(
        trace,
        "latim",
        layers,
        scores,
        options=chosen,
        target=target,
        scope="layer",
        extras={"bias": biases} if chosen.bias == "column" else None,
        decomposition_error=errors,
    )


def residual_of(layer: Layer, method: str) -> Float[Tensor, "batch query out"]:
    """Return what the host adds to a layer's output; raise `UncoveredError` where the trace saw no such stream."""
    if layer.residual is None:
        raise UncoveredError(
            f"{method} needs what the host adds to the output of {layer.name}, and the trace found no stream that is "
            "added to it as it is. Use 'latim' with residual=False, or layers=[...] without this layer."
        )
    if only_port(layer).ports != ("x",):
        raise UncoveredError(
            f"{method}: {layer.name} takes its keys from {layer.operator.ports[0]!r}, so the residual stream is no "
            "share of any key; use 'latim' with residual=False, or layers=[...] without this layer."
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
            f"latim: {layer.name} takes its keys from {op.ports[0]!r}, so no key is the query's own; use bias='column'."
        )
    bias = picked(op.activation_bias(options.activation), rows)
    factor, extra = 1.0, bias if options.bias == "query" else None
    if options.residual:
        factor, stream = layer.multiplier, picked(residual_of(layer, "latim"), rows)
        extra = stream if extra is None else stream + factor * extra
    sums = layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for tile in share_tiles((layer,), (factor,), rows, options.activation):
        sums[:, tile.rows] += tile.total()
        own = None if extra is None else extra[:, tile.rows]
        out[:, tile.rows, tile.cols] = tile.norms(options.p, extra=own)
    treat(out, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    kept = torch.ones_like(rows, dtype=torch.bool) if layer.mask is None else layer.mask.gather(1, rows)
    own, output = bias * kept.unsqueeze(-1), picked(layer.output, rows) * kept.unsqueeze(-1)
    missed = (sums * kept.unsqueeze(-1) + factor * (own - output)).flatten(1).norm(dim=1)
    size = (factor * output).flatten(1).norm(dim=1).clamp_min(torch.finfo(output.dtype).tiny)
    return torch.linalg.vector_norm(own, ord=options.p, dim=-1), float((missed / size).max())
