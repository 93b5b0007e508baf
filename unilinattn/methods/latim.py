"""`latim`: the size of what each token adds to each output, as vectors through the whole layer."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.errors import UncoveredError
from unilinattn.methods.maps import picked, treated
from unilinattn.methods.options import LatimOptions
from unilinattn.methods.results import stacked
from unilinattn.methods.selection import only_port, query_rows, real_pairs, stackable_layers
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace

SHARE_BUDGET = 1 << 22
"""Numbers that the vectors T_i(x_j) at hand may hold together: what bounds the memory of `latim` and `alti`."""


@register_method("latim")
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
    maps, biases, errors = [], [], []
    for layer in layers:
        wanted = query_rows(trace, layer, target)
        # The map's own minimum and maximum need the whole of it.
        rows = query_rows(trace, layer) if chosen.normalize == "min-max" else wanted
        scores, bias, error = _layer(trace, layer, rows, chosen)
        maps.append(picked(scores, wanted) if rows is not wanted else scores)
        biases.append(bias.gather(1, wanted) if rows is not wanted else bias)
        errors.append(error)
    return stacked(
        trace,
        "latim",
        layers,
        maps,
        options=chosen,
        target=target,
        scope="layer",
        extras={"bias": biases} if chosen.bias == "column" else None,
        decomposition_error=errors,
    )


def row_blocks(layers: Sequence[Layer], rows: Int[Tensor, "batch row"]) -> Sequence[Int[Tensor, "batch block"]]:
    """Split rows into blocks whose vectors T_i(x_j) stay within the budget in each of the layers."""
    size = 1
    for layer in layers:
        op = only_port(layer)
        batch, keys, width = op.inputs[op.ports[0]].shape
        size = max(size, batch * keys * max(width, layer.output.shape[-1]))
    return rows.split(max(1, SHARE_BUDGET // size), dim=1)


def add_to_own(
    shares: Float[Tensor, "batch row key out"],
    rows: Int[Tensor, "batch row"],
    vectors: Float[Tensor, "batch row out"],
) -> None:
    """Add a vector to each row's T_ii, in place."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    row = torch.arange(rows.shape[1], device=rows.device)
    shares[batch, row, rows] += vectors


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


def _layer(
    trace: Trace, layer: Layer, rows: Int[Tensor, "batch row"], options: LatimOptions
) -> tuple[Float[Tensor, "batch row key"], Float[Tensor, "batch row"], float]:
    """Return the scores of a layer, the norms of its bias and its decomposition error."""
    op = only_port(layer)
    if options.bias == "query" and op.ports != ("x",):
        raise UncoveredError(
            f"latim: {layer.name} takes its keys from {op.ports[0]!r}, so no key is the query's own; use bias='column'."
        )
    bias = op.activation_bias(options.activation)
    norms, sums = [], []
    for block in row_blocks((layer,), rows):
        shares = op.contributions(block, activation=options.activation)
        sums.append(shares.sum(2))
        if options.residual:
            shares = layer.multiplier * shares
            add_to_own(shares, block, picked(residual_of(layer, "latim"), block))
        if options.bias == "query":
            add_to_own(shares, block, picked(bias, block))
        norms.append(torch.linalg.vector_norm(shares, ord=options.p, dim=-1))
    real = real_pairs(trace, layer, rows)
    scores = treated(torch.cat(norms, dim=1), real, rows, discard=options.discard, normalize=options.normalize)
    kept = real.any(-1)
    own, output = picked(bias, rows) * kept.unsqueeze(-1), picked(layer.output, rows) * kept.unsqueeze(-1)
    missed = (torch.cat(sums, dim=1) * kept.unsqueeze(-1) + own - output).flatten(1).norm(dim=1)
    size = output.flatten(1).norm(dim=1).clamp_min(torch.finfo(output.dtype).tiny)
    return scores, torch.linalg.vector_norm(own, ord=options.p, dim=-1), float((missed / size).max())
