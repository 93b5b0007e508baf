"""Token-by-token recurrences of RWKV-6 and RWKV-7 in flash-linear-attention."""

import math

import torch
from torch import Tensor, nn

from tests.fla.delta_recurrences import chosen, rms, unit


def group_norm(decides: Tensor, carries: Tensor, eps: float) -> Tensor:
    """Centre each head and divide it by the standard deviation of the deciding stream (token, head, channel)."""
    spread = decides - decides.mean(-1, keepdim=True)
    return (carries - carries.mean(-1, keepdim=True)) / rms(spread, eps)


def before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def rwkv6(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Eagle and Finch (Peng et al., 2024): data-dependent token shift, one decay per coordinate, a bonus."""
    x, delta = deciding, before(deciding) - deciding
    first, _, last = module.x_proj
    low = torch.tanh(first.linear(x + delta * first.mu)).chunk(5, dim=-1)
    spread = last.weight.chunk(5, dim=1)
    mixes = {n: low[i] @ spread[i].T + module.x_bias[i] for i, n in enumerate("rwkvg")}
    size = module.head_k_dim
    query, step, key = (
        getattr(module, f"{n}_proj").linear(x + delta * mixes[n]).unflatten(-1, (-1, size)) for n in "rwk"
    )
    decay = torch.exp(-torch.exp(step))
    reads = []
    for stream in (deciding, carried):
        mixed = stream + (before(stream) - stream) * mixes["v"]
        values = module.v_proj.linear(mixed).unflatten(-1, (-1, module.head_v_dim))
        state, outputs = torch.zeros(module.num_heads, size, module.head_v_dim, dtype=stream.dtype), []
        for t in range(len(stream)):
            written = key[t][..., None] * values[t][:, None, :]
            outputs.append(torch.einsum("hn,hnp->hp", query[t], state + module.bonus[..., None] * written))
            state = decay[t][..., None] * state + written
        reads.append(torch.stack(outputs))
    norm = module.g_norm
    normed = group_norm(*reads, norm.eps).flatten(1)
    normed = normed if norm.weight is None else normed * norm.weight + norm.bias
    return module.o_proj(normed * chosen(module.gate_fn)(module.g_proj.linear(x + delta * mixes["g"])))


def rwkv6_channel(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """An MLP on the shifted token with receptance; the slope of its squared ReLU is frozen."""
    gate = module.receptance.linear(deciding + (before(deciding) - deciding) * module.receptance.mu)
    key = [module.key.linear(x + (before(x) - x) * module.key.mu) for x in (deciding, carried)]
    return torch.sigmoid(gate) * module.value(key[0].clamp_min(0) * key[1])


def rwkv7_channel(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """The same MLP without receptance (Peng et al., 2025)."""
    key = [module.key(x + (before(x) - x) * module.x_k) for x in (deciding, carried)]
    return module.value(key[0].clamp_min(0) * key[1])


def rwkv7(module: nn.Module, deciding: Tensor, carried: Tensor, first: Tensor, carried_first: Tensor) -> Tensor:
    """Peng et al., 2025: S = diag(w) S - kk (kk a)^T S + k v^T, with values mixed with those of the first layer."""
    x, delta = deciding, before(deciding) - deciding
    mixed = {n: x + delta * getattr(module, f"x_{n}")[0] for n in "rwkvag"}
    size = module.head_dim
    query, key = module.r_proj(mixed["r"]), module.k_proj(mixed["k"])
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(module.w_lora(mixed["w"])))
    rate = torch.sigmoid(module.a_lora(mixed["a"]))
    erased = (key * module.k_k).unflatten(-1, (-1, size))
    length = erased.norm(dim=-1, keepdim=True)
    erased = unit(erased) if module.fuse_norm else erased / length
    key = key * (1 + (rate - 1) * module.k_a)
    query, key, decay, rate = (side.unflatten(-1, (-1, size)) for side in (query, key, decay, rate))
    bonus = (query * key * module.r_k).sum(-1, keepdim=True)
    reads, current = [], None
    for stream, other in ((deciding, first), (carried, carried_first)):
        values = module.v_proj(stream + (before(stream) - stream) * module.x_v[0])
        if module.layer_idx != 0:
            mix = torch.sigmoid(module.v_lora(mixed["v"]))
            values = (1 - mix) * values + mix * other
        current = values.unflatten(-1, (-1, module.head_v_dim))
        state, outputs = torch.zeros(module.num_heads, size, module.head_v_dim, dtype=stream.dtype), []
        for t in range(len(stream)):
            removed = torch.einsum("hn,hnp->hp", erased[t], state)
            state = decay[t][..., None] * state - (erased[t] * rate[t])[..., None] * removed[:, None]
            state = state + key[t][..., None] * current[t][:, None]
            outputs.append(torch.einsum("hn,hnp->hp", query[t], state))
        reads.append(torch.stack(outputs))
    normed = group_norm(*reads, module.g_norm.eps).flatten(1) * module.g_norm.weight + module.g_norm.bias
    return module.o_proj((normed + (bonus * current).flatten(1)) * module.g_lora(mixed["g"]))
