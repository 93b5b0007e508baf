"""The definition of the streamed reduction, from the whole map in float64: what every faster form is tested against."""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.naive import reduced_map

Phi = Literal["keep", "clamp", "abs"]
"""What happens to each number of the map before rows are summed: nothing, its positive part, or its size."""


def phi_of(phi: Phi, value: Tensor) -> Tensor:
    """Apply one of the three, elementwise."""
    return {"keep": lambda t: t, "clamp": lambda t: t.clamp_min(0), "abs": torch.abs}[phi](value)


def streamed(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
    left: Float[Tensor, "batch length head"],
    taps: Mapping[int, Float[Tensor, "batch length head"]],
    row: Float[Tensor, "batch length"],
    weight: Float[Tensor, "batch length"],
    phi: Phi,
) -> Float[Tensor, "batch length"]:
    """Fill out_j = sum_i row_i phi(weight_i m_ij), m the reduced map."""
    total = weight.double().unsqueeze(-1) * reduced_map(query, key, log_decay, left, taps)
    return (row.double().unsqueeze(-1) * phi_of(phi, total)).sum(1)
