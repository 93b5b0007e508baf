"""`alti`: how much closer each token's share brings a row to its output, the residual stream included."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.kernels.contribution_norms.tiled import reduced_vectors
from unilinattn.methods.latim import add_to_own, residual_of, share_tiles
from unilinattn.methods.maps import added, picked, unit_rows
from unilinattn.methods.options import AltiOptions
from unilinattn.methods.results import labelled, stacked
from unilinattn.methods.selection import composable_steps, only_port, query_rows, real_pairs, stackable_layers
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace


@register_method("alti")
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
        maps = [
            mixing(trace, (layer,), query_rows(trace, layer, target), chosen.activation)
            for layer in progress(layers, "alti")
        ]
        return stacked(trace, "alti", layers, maps, options=chosen, target=target, scope="layer")
    rows = query_rows(trace, layers[0], target)
    rho = unit_rows(rows, layers[0])
    steps = composable_steps(trace, "alti", layers)
    for together in progress(steps if target is None else steps[::-1], "alti"):
        share = mixing(trace, together, query_rows(trace, together[0]), chosen.activation).to(rho)
        rho = share @ rho if target is None else rho @ share
    rho = rho.masked_fill(~real_pairs(trace, layers[0], rows), 0)
    rho = rho if target is None else rho.squeeze(1)
    return labelled(trace, "alti", layers, rho, options=chosen, target=target, scope="layer")


def mixing(
    trace: Trace, together: Sequence[Layer], rows: Int[Tensor, "batch row"], activation: str
) -> Float[Tensor, "batch row key"]:
    """Return P of one step at selected rows: what each real token is to stream plus layers; rows sum to 1."""
    first = together[0]
    stream = residual_of(first, "alti")
    output = added([stream, *(layer.multiplier * layer.output for layer in together)])
    factors = [layer.multiplier for layer in together]
    keys = only_port(first).inputs["x"].shape[1]
    # A pair without a tile adds nothing, so it brings no row closer to its output.
    gain = output.new_zeros(*rows.shape, keys)
    for part, cols, tile in share_tiles(together, factors, rows, activation):
        own = rows[:, part]
        shares = add_to_own(tile, own, cols, picked(stream, own))
        gain[:, part, cols] = reduced_vectors(shares, "alti", picked(output, own))
    real = real_pairs(trace, first, rows)
    gain = gain.clamp_min(0).masked_fill(~real, 0)
    total = gain.sum(-1, keepdim=True)
    share = torch.where(total > 0, gain / total.masked_fill(total == 0, 1), unit_rows(rows, first))
    return share.masked_fill(~real, 0)
