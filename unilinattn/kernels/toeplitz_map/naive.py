"""The definition of the reduced map of convolutions, pair by pair in float64: the reference of the fast forms."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.dense import Taps


def toeplitz_map(
    kernel: Float[Tensor, "head tap"],
    left: Float[Tensor, "batch length channel"],
    taps: Taps,
    query: Float[Tensor, "batch length head rank"],
    key: Float[Tensor, "batch length head rank"],
) -> Float[Tensor, "batch query key"]:
    """Fill m_ij = sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c], alpha[i, j] = K[i - j] (q_i . k_j).

    K is 0 before its first and after its last tap; a head serves consecutive channels. Queries and keys of one give the
    matrix of a convolution (HMA ACL Eq. 4); with the taps of another one it is `unified`'s (Zimerman, Ali and Wolf,
    ICLR 2025).
    """
    batch, length, channels = left.shape
    weights = kernel.double().repeat_interleave(channels // len(kernel), dim=0)
    total = torch.zeros(batch, length, length, dtype=torch.float64, device=kernel.device)
    for lag, tap in taps.items():
        for j in range(length - lag):
            for i in range(j + lag, min(length, j + lag + kernel.shape[1])):
                scores = (query[:, i].double() * key[:, j + lag].double()).sum(-1)
                each = left[:, i].double() * weights[:, i - j - lag] * tap[:, j + lag].double()
                total[:, i, j] += (each.unflatten(1, (len(kernel), -1)) * scores.unsqueeze(-1)).sum((1, 2))
    return total
