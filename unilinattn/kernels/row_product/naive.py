"""The definition of the row product, from the whole map in float64: the reference of the fast implementations."""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.naive import reduced_map

Sign = Literal["keep", "clamp", "abs"]
"""Function applied to each entry of the map before rows are summed: identity, positive part, or absolute value."""


def apply_sign(sign: Sign, value: Tensor) -> Tensor:
    """Apply `sign` elementwise."""
    return {"keep": lambda t: t, "clamp": lambda t: t.clamp_min(0), "abs": torch.abs}[sign](value)


def row_product(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
    left: Float[Tensor, "batch length head"],
    taps: Mapping[int, Float[Tensor, "batch length head"]],
    row: Float[Tensor, "batch length"],
    weight: Float[Tensor, "batch length"],
    sign: Sign,
) -> Float[Tensor, "batch length"]:
    """Fill out_j = sum_i row_i sign(weight_i m_ij), m the reduced map."""
    total = weight.double().unsqueeze(-1) * reduced_map(query, key, log_decay, left, taps)
    return (row.double().unsqueeze(-1) * apply_sign(sign, total)).sum(1)
