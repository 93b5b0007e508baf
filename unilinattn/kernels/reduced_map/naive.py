"""The definition of the reduced map, pair by pair in float64: the reference of the fast implementations."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.naive import decay_map


def reduced_map(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
    left: Float[Tensor, "batch length head"],
    taps: Mapping[int, Float[Tensor, "batch length head"]],
) -> Float[Tensor, "batch query key"]:
    """Fill m_ij = sum_h left_ih sum_lag alpha_h[i, j + lag] tap_lag[j + lag, h], alpha the decayed map.

    With left and the tap of lag 0 equal to one, divided by the heads, it is the mean of the maps of HMA ACL Eq. 14-16;
    with the taps of a convolution it is `unified`'s (Zimerman, Ali and Wolf, ICLR 2025).
    """
    alpha = decay_map(query, key, log_decay)
    total = alpha.new_zeros(alpha.shape[0], *alpha.shape[2:])
    length = alpha.shape[-1]
    for lag, tap in taps.items():
        for j in range(length - lag):
            weighted = left.double() * alpha[:, :, :, j + lag].transpose(1, 2) * tap.double()[:, j + lag, None]
            total[:, :, j] += weighted.sum(-1)
    return total
