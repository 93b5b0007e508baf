"""`alti`: how much closer each token's share brings a row to its output, the residual stream included."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import reserved
from unilinattn.methods.costs import estimated
from unilinattn.methods.latim import residual_of, stream_errors
from unilinattn.methods.maps import ONE_ROW, blank_padding, gather_rows, map_bytes, map_shape, sum_on_first
from unilinattn.methods.options import Activation, Layerwise
from unilinattn.methods.results import allocate_scores, make_result, score_layers, to_result
from unilinattn.methods.selection import composable_steps, only_port, query_rows, stackable_layers
from unilinattn.methods.vectors import contribution_tiles, shares_cost
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class AltiOptions(Layerwise):
    """Options of `alti`."""

    activation: Activation = Field(
        "exact", description="'exact' freezes the activation's slope; the others are LaTIM's f (LaTIM Eq. 19)"
    )
    residual: bool = Field(
        True, description="whether y_i and T_ii include the residual stream; False: y_i is the output"
    )
    rollout: bool = Field(False, description="compose the layers, P_n ... P_1, instead of returning a layer axis")

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.rollout and not self.residual:
            raise ValueError("rollout=True composes the layers along the residual stream, which residual=False drops")
        if self.rollout and self.layers == "mean":
            raise ValueError("rollout=True composes the layers, so layers='mean' has nothing left to average")
        return self


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `alti`: tiles of vectors, or the vectors of a few rows; with rollout=True also two maps."""
    chosen = AltiOptions.of("alti", options)
    layers = stackable_layers(trace, "alti", chosen.layers)
    for layer in layers:
        residual_of(layer, "alti")
    step_of: dict[str, tuple[Layer, ...]] = {layer.name: (layer,) for layer in layers}
    held = 0
    if chosen.rollout:
        steps = composable_steps(trace, "alti", layers)
        step_of = {layer.name: step for step in steps for layer in step}
        held = (2 if target is None else 1) * map_bytes(layers[0])

    def of(layer: Layer) -> tuple[int, int]:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or chosen.rollout else 1
        apart = batch * rows * keys * layer.output.element_size() if chosen.layers == "mean" else 0
        size, operations = shares_cost(step_of[layer.name], rows, exact=chosen.activation == "exact")
        product = batch * queries * keys * (queries if target is None else 1) if chosen.rollout else 0
        return apart + size, operations // len(step_of[layer.name]) + product

    return estimated("alti", layers, target, None if chosen.rollout else chosen, of, held=held)


@register_method("alti", options=AltiOptions, cost=cost)
def alti(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """ALTI: C_ij proportional to [||y_i||_1 - ||y_i - T_i(x_j)||_1]^+, rows that sum to 1 (LaTIM Eq. 6).

    y_i is the residual stream plus the layer's output, biases included; T_ii includes the stream. With
    residual=False y_i is the output and T_ii has no stream. A row in which every entry is clipped is one-hot on its
    own token.

    Scores: (layer, batch, query, key), without `query` for a target. With rollout=True the steps are composed,
    P_n ... P_1, without a further identity, and there is no layer axis; layers that run in parallel then share a row:
    y_i is the stream plus all their outputs. `stream_error` of the result is the error of stream plus outputs against
    the host's next stream, by layer.

    Options: `AltiOptions`. Raises `OptionError` for an unknown option or value, `UncoveredError` for a layer whose
    residual stream is unknown and for layers that cannot be stacked or composed, and `StreamError` if stream and
    output do not add up.
    """
    chosen = AltiOptions.of("alti", options)
    layers = stackable_layers(trace, "alti", chosen.layers)
    errors = stream_errors(trace, layers, "alti") if chosen.residual else None
    if not chosen.rollout:

        def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
            mixing(out, trace, (layer,), rows, chosen)

        scores = score_layers(trace, "alti", layers, target, chosen, fill)
        return to_result(
            trace, "alti", layers, scores, options=chosen, target=target, scope="layer", stream_error=errors
        )
    rows = query_rows(trace, layers[0], target)
    rho = allocate_scores("alti", layers, target).scatter_(2, rows.unsqueeze(-1), 1.0)
    steps = composable_steps(trace, "alti", layers)
    size = map_bytes(layers[0])
    with reserved(size + rho.numel() * rho.element_size(), "alti: the map of a step and its product", ONE_ROW):
        for step in progress(steps if target is None else steps[::-1], "alti"):
            share = step[0].output.new_zeros(map_shape(step[0]))
            mixing(share, trace, step, query_rows(trace, step[0]), chosen)
            share = share.to(rho)
            rho = share @ rho if target is None else rho @ share
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(trace, "alti", layers, rho, options=chosen, target=target, scope="layer", stream_error=errors)


def mixing(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    together: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    options: AltiOptions,
) -> None:
    """Write rows of P of one step into `out`, which is zero: each real token's share of y_i, rows summing to 1."""
    first = together[0]
    stream = residual_of(first, "alti") if options.residual else _no_stream(first)
    output = sum_on_first([stream, *(layer.multiplier * layer.output for layer in together)])
    factors = [layer.multiplier for layer in together]
    # A pair without a tile has T_i(x_j) = 0 and a score of 0.
    for tile in contribution_tiles(together, factors, rows, options.activation):
        positions = rows[:, tile.rows]
        extra, reference = gather_rows(stream, positions), gather_rows(output, positions)
        out[:, tile.rows, tile.cols] = tile.norms("alti", extra=extra, reference=reference)
    out.clamp_min_(0)
    blank_padding(out, trace, first, rows)
    total = out.sum(-1, keepdim=True)
    out.div_(total.masked_fill(total == 0, 1))
    # A row in which every entry is clipped is one-hot on its own token; a row of padding stays zero.
    out.scatter_add_(2, rows.unsqueeze(-1), (total == 0).to(out))
    blank_padding(out, trace, first, rows)


def _no_stream(layer: Layer) -> Float[Tensor, "batch query out"]:
    if (ports := only_port(layer).ports) != ("x",):
        raise UncoveredError(
            f"alti: {layer.name} takes its keys from {ports[0]!r}, so a row's own token is not among them; use "
            "'latim', or layers=[...] without this layer."
        )
    return torch.zeros_like(layer.output)
