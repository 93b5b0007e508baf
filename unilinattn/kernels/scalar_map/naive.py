"""The definition of the reduced map of scalar decays, pair by pair in float64: the reference of the fast forms."""

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.reduced_map.naive import reduced_map
from unilinattn.kernels.scan.memories import Scalar


def scalar_map(
    memory: Scalar, left: Float[Tensor, "batch length channel"], taps: Taps
) -> Float[Tensor, "batch query key"]:
    """Fill m_ij = sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c], with one decay per head.

    alpha_h[i, j] = (q_i . k_j) exp(G_ih - G_jh) scale_jh; a head serves consecutive channels (LaTIM Eq. 13).
    """
    query, key, log_decay, key_scale = memory
    channels = left.shape[2]
    query, key = (repeat_groups(factor, channels, 2) for factor in (query, key))
    decay, scale = (repeat_groups(factor, channels).unsqueeze(-1) for factor in (log_decay, key_scale))
    return reduced_map(query, key * scale, decay.expand_as(key), left, taps)
