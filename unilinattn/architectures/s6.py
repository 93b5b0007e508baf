"""The core of S6, shared by every adapter of Mamba-1 and its relatives."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.call import Call
from unilinattn.mixers import DiagonalDecay


def s6_core(
    call: Call,
    delta: Float[Tensor, "batch length channel"],
    key: Float[Tensor, "batch length head state"],
    query: Float[Tensor, "batch length head state"],
    log_rate: Float[Tensor, "*channel state"],
) -> DiagonalDecay:
    """Return S6 with step sizes delta, keys B, queries C and decays exp(-delta exp(A_log)) (HMA ACL Eq. 6-9).

    `log_rate` is A_log.
    """
    rate = -torch.exp(call.tensor(log_rate)).flatten(0, -2)
    return DiagonalDecay(query, key, delta.unsqueeze(-1), key_scale=delta, rate=rate)
