"""Token-by-token recurrences of the delta-rule family of flash-linear-attention, and shared parts of all layers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def convolve(module: nn.Module, x: Tensor) -> Tensor:
    """A causal convolution of each channel, the last tap on the current token."""
    kernel, total = module.weight.squeeze(1), []
    for t in range(len(x)):
        lags = range(min(kernel.shape[1], t + 1))
        total.append(sum(kernel[:, -1 - lag] * x[t - lag] for lag in lags))
    bias = 0 if module.bias is None else module.bias
    return torch.stack(total) + bias


def way(module: nn.Module, name: str, deciding: Tensor, carried: Tensor, activation: str = "silu") -> Tensor:
    """The path into queries, keys or values: projection, convolution, and SiLU's chord at the deciding stream."""
    projection = getattr(module, f"{name}_proj")
    decides, carries = projection(deciding), projection(carried)
    if getattr(module, "use_short_conv", False):
        convolution = getattr(module, f"{name}_conv1d")
        decides, carries = convolve(convolution, decides), convolve(convolution, carries)
    return torch.sigmoid(decides) * carries if activation == "silu" else carries


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms(x: Tensor, eps: float) -> Tensor:
    return torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def share(x: Tensor, count: int) -> Tensor:
    """Repeat each head (token, head, ...) for consecutive heads."""
    return torch.repeat_interleave(x, count, dim=1)


def delta_rule(query: Tensor, key: Tensor, strength: Tensor, log_decay: Tensor, value: Tensor) -> Tensor:
    """S' = exp(g) S; S = S' + b k (v - S'^T k)^T; y = S^T q, each (token, head, ...)."""
    state = torch.zeros(*key.shape[1:], value.shape[-1], dtype=value.dtype)
    outputs = []
    for q, k, b, g, v in zip(query, key, strength, log_decay, value, strict=True):
        state = torch.exp(g)[..., None] * state
        read = torch.einsum("hn,hnp->hp", k, state)
        state = state + torch.einsum("hn,hp->hnp", b[:, None] * k, v - read)
        outputs.append(torch.einsum("hn,hnp->hp", q, state))
    return torch.stack(outputs)


def closed(module: nn.Module, norm: nn.Module, x: Tensor, decides: Tensor, carries: Tensor, gated: bool) -> Tensor:
    """The norm over each head, the output gate, the output projection."""
    weight = 1 if norm.weight is None else norm.weight
    normed = carries / rms(decides, norm.eps) * weight
    if gated:
        gate = module.g_proj(x).view_as(normed)
        normed = normed * (torch.sigmoid(gate) if norm.activation == "sigmoid" else functional.silu(gate))
    return module.o_proj(normed.flatten(1))


def head_decay(module: nn.Module, x: Tensor) -> Tensor:
    return -torch.exp(module.A_log) * functional.softplus(module.a_proj(x) + module.dt_bias)


def gated_deltanet(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Yang, Kautz and Hatamizadeh, ICLR 2025."""
    size, count = module.head_k_dim, module.num_v_heads // module.num_heads
    query, key = (share(unit(way(module, n, deciding, deciding).unflatten(-1, (-1, size))), count) for n in "qk")
    strength = torch.sigmoid(module.b_proj(deciding)) * (2 if module.allow_neg_eigval else 1)
    decay = head_decay(module, deciding)[..., None]
    streams = (way(module, "v", deciding, s).unflatten(-1, (-1, module.head_v_dim)) for s in (deciding, carried))
    reads = (delta_rule(query / math.sqrt(size), key, strength, decay, value) for value in streams)
    return closed(module, module.o_norm, deciding, *reads, gated=module.use_gate)


def deltanet(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Yang, Wang, Zhang, Shen and Kim, NeurIPS 2024."""
    feature = {"silu": lambda x: x, "relu": torch.relu, "elu": lambda x: functional.elu(x) + 1}[module.qk_activation]
    sides = []
    for name in "qk":
        side = feature(way(module, name, deciding, deciding, module.qk_activation))
        side = side.unflatten(-1, (-1, module.head_k_dim))
        sides.append(unit(side) if module.qk_norm == "l2" else side / side.abs().sum(-1, keepdim=True))
    query, key = sides
    ones = torch.ones_like(query[..., 0])
    strength = torch.sigmoid(module.b_proj(deciding)) if module.use_beta else ones
    strength = strength * (2 if module.allow_neg_eigval else 1)
    streams = (way(module, "v", deciding, s).unflatten(-1, (-1, module.head_v_dim)) for s in (deciding, carried))
    decay = torch.zeros_like(ones)[..., None]
    reads = (delta_rule(query / math.sqrt(module.head_k_dim), key, strength, decay, value) for value in streams)
    return closed(module, module.o_norm, deciding, *reads, gated=module.use_gate)


def kda(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Kimi Linear, 2025: one decay per coordinate of the keys."""
    size, count = module.head_k_dim, module.num_v_heads // module.num_heads
    query, key = (share(unit(way(module, n, deciding, deciding).unflatten(-1, (-1, size))), count) for n in "qk")
    strength = torch.sigmoid(module.b_proj(deciding)) * (2 if module.allow_neg_eigval else 1)
    step = (module.f_proj(deciding) + module.dt_bias).unflatten(-1, (-1, size))
    rate = torch.exp(module.A_log)[:, None]
    decay = -rate * functional.softplus(step)
    if module.lower_bound is not None:
        decay = module.lower_bound * torch.sigmoid(rate * step)
    streams = (way(module, "v", deciding, s).unflatten(-1, (-1, module.head_v_dim)) for s in (deciding, carried))
    reads = (delta_rule(query / math.sqrt(size), key, strength, decay, value) for value in streams)
    return closed(module, module.o_norm, deciding, *reads, gated=True)


def gated_deltaproduct(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """DeltaProduct (Siems et al., NeurIPS 2025): a decay, several delta steps, and one read per token."""
    size, steps = module.head_k_dim, module.num_householder
    count = module.num_v_heads // module.num_heads
    query = share(unit(way(module, "q", deciding, deciding).unflatten(-1, (-1, size))), count) / math.sqrt(size)
    keys = unit(way(module, "k", deciding, deciding).unflatten(-1, (steps, module.num_heads, size)))
    strengths = torch.sigmoid(module.b_proj(deciding)).unflatten(-1, (steps, -1))
    strengths = strengths * (2 if module.allow_neg_eigval else 1)
    decays = torch.ones(len(deciding), module.num_v_heads)
    if module.use_forget_gate:
        decays = torch.exp(head_decay(module, deciding))
    reads = []
    for stream in (deciding, carried):
        values = way(module, "v", deciding, stream).unflatten(-1, (steps, module.num_v_heads, module.head_v_dim))
        state = torch.zeros(module.num_v_heads, size, module.head_v_dim, dtype=stream.dtype)
        outputs = []
        for t in range(len(stream)):
            state = decays[t, :, None, None] * state
            for n in range(steps):
                k = torch.repeat_interleave(keys[t, n], count, dim=0)
                change = values[t, n] - torch.einsum("hn,hnp->hp", k, state)
                state = state + torch.einsum("hn,hp->hnp", strengths[t, n][:, None] * k, change)
            outputs.append(torch.einsum("hn,hnp->hp", query[t], state))
        reads.append(torch.stack(outputs))
    return closed(module, module.o_norm, deciding, *reads, gated=module.use_output_gate)


def comba(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Hu et al., 2025: the erase key reads the memory before the decay of the current token."""
    size, count = module.head_k_dim, module.num_v_heads // module.num_heads
    query, key = (way(module, n, deciding, deciding).unflatten(-1, (-1, size)) for n in "qk")
    erase = torch.sigmoid(module.decay)[:, None] * key if module.use_inner_decay else key
    if module.use_output_correction:
        query = query - module.D[:, None] * erase
    query, key, erase = (share(unit(x), count) for x in (query, key, erase))
    strength = torch.sigmoid(module.b_proj(deciding))
    decays = torch.exp(head_decay(module, deciding))
    reads = []
    for stream in (deciding, carried):
        values = way(module, "v", deciding, stream).unflatten(-1, (-1, module.head_v_dim))
        state = torch.zeros(module.num_v_heads, size, module.head_v_dim, dtype=stream.dtype)
        outputs = []
        for t in range(len(stream)):
            change = strength[t][:, None] * (values[t] - torch.einsum("hn,hnp->hp", erase[t], state))
            state = decays[t, :, None, None] * state + torch.einsum("hn,hp->hnp", key[t], change)
            outputs.append(torch.einsum("hn,hnp->hp", query[t] / math.sqrt(size), state))
        reads.append(torch.stack(outputs))
    return closed(module, module.o_norm, deciding, *reads, gated=module.use_output_gate)


def chosen(function: object) -> object:
    """The activation of a gate, which the host stores as a kernel: sigmoid or SiLU."""
    kernel = getattr(getattr(function, "__self__", None), "__name__", "")
    return torch.sigmoid if kernel == "SigmoidFunction" else functional.silu
