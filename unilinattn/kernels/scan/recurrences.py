"""The definitions of the other memories, token by token in float64: the references of the fast implementations."""

import torch
from jaxtyping import Float
from torch import Tensor


def delta_rule(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    strength: Float[Tensor, "batch length head"],
    log_decay: Float[Tensor, "batch length head staten"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Run S' = exp(g_t) S_{t-1}, S_t = S' - b k (k^T S') + b k v^T, y_t = S_t^T q_t (Gated DeltaNet)."""
    query, key, strength, log_decay, value = (t.double() for t in (query, key, strength, log_decay, value))
    memory = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        memory = log_decay[:, t].exp()[..., None] * memory
        stored = torch.einsum("bhn,bhnp->bhp", key[:, t], memory)
        change = strength[:, t, :, None] * (value[:, t] - stored)
        memory = memory + key[:, t, ..., None] * change.unsqueeze(-2)
        outputs.append(torch.einsum("bhn,bhnp->bhp", query[:, t], memory))
    return torch.stack(outputs, dim=1)


def delta_product(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length step head state"],
    strength: Float[Tensor, "batch length step head"],
    log_decay: Float[Tensor, "batch length head"],
    value: Float[Tensor, "batch length step head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Decay once per token, apply each of its delta updates, and read after the last (DeltaProduct)."""
    query, key, strength, log_decay, value = (t.double() for t in (query, key, strength, log_decay, value))
    memory = value.new_zeros(value.shape[0], value.shape[3], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        memory = log_decay[:, t].exp()[..., None, None] * memory
        for s in range(value.shape[2]):
            stored = torch.einsum("bhn,bhnp->bhp", key[:, t, s], memory)
            change = strength[:, t, s, :, None] * (value[:, t, s] - stored)
            memory = memory + key[:, t, s, ..., None] * change.unsqueeze(-2)
        outputs.append(torch.einsum("bhn,bhnp->bhp", query[:, t], memory))
    return torch.stack(outputs, dim=1)


def low_rank_update(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head staten"],
    a: Float[Tensor, "batch length head state"],
    b: Float[Tensor, "batch length head state"],
    bonus: Float[Tensor, "head state"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Run S_t = diag(exp(g_t)) S_{t-1} + b (a^T S_{t-1}) + k v^T, y_t = S_t^T q_t + (q . rho k) v_t (RWKV-7)."""
    query, key, log_decay, a, b, bonus, value = (t.double() for t in (query, key, log_decay, a, b, bonus, value))
    memory = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        stored = torch.einsum("bhn,bhnp->bhp", a[:, t], memory)
        memory = log_decay[:, t].exp()[..., None] * memory + b[:, t, ..., None] * stored.unsqueeze(-2)
        memory = memory + key[:, t, ..., None] * value[:, t, :, None]
        bonus_output = (query[:, t] * bonus * key[:, t]).sum(-1, keepdim=True) * value[:, t]
        outputs.append(torch.einsum("bhn,bhnp->bhp", query[:, t], memory) + bonus_output)
    return torch.stack(outputs, dim=1)


def exclusive_bonus(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head state"],
    bonus: Float[Tensor, "head state"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Read y_t = (S_{t-1} + diag(u) k v^T)^T q_t, then run S_t = diag(exp(g_t)) S_{t-1} + k v^T (RWKV-6)."""
    query, key, log_decay, bonus, value = (t.double() for t in (query, key, log_decay, bonus, value))
    memory = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        new = key[:, t, ..., None] * value[:, t, :, None]
        outputs.append(torch.einsum("bhn,bhnp->bhp", query[:, t], memory + bonus[..., None] * new))
        memory = log_decay[:, t].exp()[..., None] * memory + new
    return torch.stack(outputs, dim=1)


def normalized_exponential(
    key: Float[Tensor, "batch length head"],
    log_decay: Float[Tensor, " head"],
    bonus: Float[Tensor, " head"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Divide decayed sums of exp(k) v by those of exp(k), the token itself weighing exp(k + u) (RWKV-4)."""
    key, log_decay, bonus, value = (t.double() for t in (key, log_decay, bonus, value))
    above, below = torch.zeros_like(value[:, 0]), torch.zeros_like(key[:, 0])
    peak = torch.full_like(key[:, 0], -torch.inf)
    outputs = []
    for t in range(value.shape[1]):
        own_key = key[:, t] + bonus
        top = torch.maximum(peak, own_key)
        old, new = (peak - top).exp(), (own_key - top).exp()
        outputs.append((old[..., None] * above + new[..., None] * value[:, t]) / (old * below + new)[..., None])
        top = torch.maximum(peak + log_decay, key[:, t])
        old, new = (peak + log_decay - top).exp(), (key[:, t] - top).exp()
        above, below, peak = old[..., None] * above + new[..., None] * value[:, t], old * below + new, top
    return torch.stack(outputs, dim=1)


def mlstm(
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length head state"],
    log_forget: Float[Tensor, "batch length head"],
    log_input: Float[Tensor, "batch length head"],
    eps: float,
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Run C_t = f C + i k v^T, n_t = f n + i k, y_t = C^T q / (max(abs(n . q), exp(-m)) + eps) (xLSTM)."""
    query, key, log_forget, log_input, value = (t.double() for t in (query, key, log_forget, log_input, value))
    memory = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    norm, peak = memory[..., 0], torch.zeros_like(log_input[:, 0])
    outputs = []
    for t in range(value.shape[1]):
        top = torch.maximum(peak + log_forget[:, t], log_input[:, t])
        forget, enter = (peak + log_forget[:, t] - top).exp(), (log_input[:, t] - top).exp()
        entering = enter[..., None] * key[:, t]
        memory = forget[..., None, None] * memory + entering[..., None] * value[:, t, :, None]
        norm, peak = forget[..., None] * norm + entering, top
        total = (norm * query[:, t]).sum(-1).abs()
        read = torch.einsum("bhn,bhnp->bhp", query[:, t], memory)
        outputs.append(read / (torch.maximum(total, (-peak).exp()) + eps)[..., None])
    return torch.stack(outputs, dim=1)
