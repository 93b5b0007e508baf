"""The definition of a decayed memory, token by token in float64: the reference of the fast implementations."""

import torch
from jaxtyping import Float
from torch import Tensor


def decay_scan(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Run S_t = exp(g_t) S_{t-1} + k_t v_t^T and read y_t = S_t^T q_t, one token at a time (HMA ACL Eq. 3, 8)."""
    query, key, log_decay, value = (t.double() for t in (query, key, log_decay, value))
    batch, length, heads, state = query.shape
    memory = value.new_zeros(batch, heads, state, value.shape[-1])
    outputs = []
    for t in range(length):
        memory = log_decay[:, t].exp()[..., None] * memory + key[:, t, ..., None] * value[:, t, :, None]
        outputs.append((query[:, t, ..., None] * memory).sum(-2))
    return torch.stack(outputs, dim=1)


def decay_map(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
) -> Float[Tensor, "batch head query key"]:
    """Fill alpha_ij = sum_n q_in (prod_{j < m <= i} exp(g_mn)) k_jn pair by pair (HMA ACL Eq. 14-16)."""
    query, key, log_decay = (t.double() for t in (query, key, log_decay))
    batch, length, heads, _ = query.shape
    alpha = query.new_zeros(batch, heads, length, length)
    for i in range(length):
        for j in range(i + 1):
            decay = log_decay[:, j + 1 : i + 1].exp().prod(dim=1)
            alpha[:, :, i, j] = (query[:, i] * decay * key[:, j]).sum(-1)
    return alpha
