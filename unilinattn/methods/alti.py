"""`alti`: how much closer each token's share brings a row to its output, the residual stream included."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.memory import reserved
from unilinattn.methods.costs import Estimate, estimated
from unilinattn.methods.latim import residual_of
from unilinattn.methods.maps import ONE_ROW, added, blank_padding, map_bytes, map_shape, picked
from unilinattn.methods.options import AltiOptions
from unilinattn.methods.results import filled, labelled, room, stacked
from unilinattn.methods.selection import composable_steps, query_rows, stackable_layers
from unilinattn.methods.vectors import share_tiles, shares_cost
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return what `alti` takes: tiles of vectors, or those of a few rows; composed, a map and a product beside."""
    chosen = AltiOptions.of("alti", options)
    layers = stackable_layers(trace, "alti", chosen.layers)
    together: dict[str, tuple[Layer, ...]] = {layer.name: (layer,) for layer in layers}
    held = 0
    if chosen.rollout:
        steps = composable_steps(trace, "alti", layers)
        together = {layer.name: step for step in steps for layer in step}
        held = (2 if target is None else 1) * map_bytes(layers[0])

    def of(layer: Layer) -> tuple[int, int]:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or chosen.rollout else 1
        apart = batch * rows * keys * layer.output.element_size() if chosen.layers == "mean" else 0
        size, operations = shares_cost(together[layer.name], rows, exact=chosen.activation == "exact")
        product = batch * queries * keys * (queries if target is None else 1) if chosen.rollout else 0
        return apart + size, operations // len(together[layer.name]) + product

    return estimated("alti", layers, target, None if chosen.rollout else chosen, of, held=held)


@register_method("alti", cost=cost)
def alti(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """ALTI: C_ij proportional to [||y_i||_1 - ||y_i - T_i(x_j)||_1]^+, rows that sum to 1 (LaTIM Eq. 6).

    y_i is the residual stream plus the layer's output, biases included; T_ii includes the stream. A row in which
    everything is clipped is one-hot on its own token. Scores: (layer, batch, query, key), without `query` for a
    target. With rollout=True the steps are composed, P_n ... P_1, without a further identity, and the layer axis
    goes; layers that run in parallel then share a row: y_i is the stream plus all their outputs.

    Options: `AltiOptions`. Raises `OptionError` for options that do not exist, `UncoveredError` for a layer whose
    residual stream is not known, and where layers cannot be stacked or composed.
    """
    chosen = AltiOptions.of("alti", options)
    layers = stackable_layers(trace, "alti", chosen.layers)
    if not chosen.rollout:

        def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
            mixing(out, trace, (layer,), rows, chosen.activation)

        scores = filled(trace, "alti", layers, target, chosen, fill)
        return stacked(trace, "alti", layers, scores, options=chosen, target=target, scope="layer")
    rows = query_rows(trace, layers[0], target)
    rho = room("alti", layers, target).scatter_(2, rows.unsqueeze(-1), 1.0)
    steps = composable_steps(trace, "alti", layers)
    size = map_bytes(layers[0])
    with reserved(size + rho.numel() * rho.element_size(), "alti: the map of a step and its product", ONE_ROW):
        for together in progress(steps if target is None else steps[::-1], "alti"):
            share = together[0].output.new_zeros(map_shape(together[0]))
            mixing(share, trace, together, query_rows(trace, together[0]), chosen.activation)
            share = share.to(rho)
            rho = share @ rho if target is None else rho @ share
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return labelled(trace, "alti", layers, rho, options=chosen, target=target, scope="layer")


def mixing(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    together: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    activation: str,
) -> None:
    """Write P of one step at selected rows into zeros: what each real token is to stream plus layers; rows sum to 1."""
    first = together[0]
    stream = residual_of(first, "alti")
    output = added([stream, *(layer.multiplier * layer.output for layer in together)])
    factors = [layer.multiplier for layer in together]
    # A pair without a tile adds nothing, so it brings no row closer to its output.
    for tile in share_tiles(together, factors, rows, activation):
        own = rows[:, tile.rows]
        own_stream, own_output = picked(stream, own), picked(output, own)
        out[:, tile.rows, tile.cols] = tile.norms("alti", extra=own_stream, reference=own_output)
    out.clamp_min_(0)
    blank_padding(out, trace, first, rows)
    total = out.sum(-1, keepdim=True)
    out.div_(total.masked_fill(total == 0, 1))
    # A row in which everything is clipped is one-hot on its own token; one of padding stays empty.
    out.scatter_add_(2, rows.unsqueeze(-1), (total == 0).to(out))
    blank_padding(out, trace, first, rows)
