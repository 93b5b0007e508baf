"""Rows of attention maps as distributions over their keys, by absolute values."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.scoring.selection import query_rows, real_pairs
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace


def row_distributions(
    scores: Float[Tensor, "*batch row key"], valid: Bool[Tensor, "*batch row key"], name: str
) -> Float[Tensor, "*batch row key"]:
    """Return p_ij = |a_ij| / sum_j |a_ij| over the valid keys, in float64; rows without a valid key are zero.

    Hidden attention has signs and rows that sum to anything, so absolute values are the one normalisation that is
    defined for every map. Raises `InputError` for a row that is zero at all valid keys, with the `name` of the map.
    """
    size = scores.double().abs().masked_fill(~valid, 0)
    total = size.sum(-1, keepdim=True)
    empty = (total == 0) & valid.any(-1, keepdim=True)
    if bool(empty.any()):
        index = tuple(empty.squeeze(-1).nonzero()[0].tolist())
        raise InputError(f"{name} has a row of zeros, which is no distribution over keys: index {index}.")
    return size / total.masked_fill(total == 0, 1)


def candidate_keys(trace: Trace, layer: Layer, rows: slice, causal: bool) -> Bool[Tensor, "batch row key"]:
    """Return the keys that each of some rows may weight: real ones, and in a causal map no later ones.

    Rows with fewer than two such keys have none, because their weights are a single number.
    """
    positions = query_rows(trace, layer)[:, rows]
    valid = real_pairs(trace, layer, positions)
    if causal:
        valid = valid & (torch.arange(valid.shape[-1], device=valid.device) <= positions.unsqueeze(-1))
    return valid & (valid.sum(-1, keepdim=True) > 1)
