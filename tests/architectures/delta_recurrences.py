"""Token-by-token recurrences of the delta rule of each host; see `recurrences`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.architectures.recurrences import act, convolve, host_mask
from unilinattn.tracing.layer import Layer


def delta_rule(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """Gated delta rule (Yang, Kautz and Hatamizadeh, 2025, Eq. 10) and KDA (Kimi Linear, 2025, Eq. 1), frozen.

    The deciding stream determines queries, keys, strengths, decays, slopes, norm and gate; see `recurrences`.
    """
    project = PROJECTIONS[type(module).__name__]
    # The first version of one host has separate convolutions for queries, keys and values.
    first = [module.q_conv1d, module.k_conv1d, module.v_conv1d] if hasattr(module, "v_conv1d") else [module.conv1d]
    kernel = torch.cat([conv.weight for conv in first]).squeeze(1)
    # Older versions use SiLU regardless of the configuration.
    activation = "silu" if hasattr(module, "causal_conv1d_fn") else getattr(module, "activation", "silu")
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    decided, carries, outputs, memories = [], [], [], None
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        query, key, value, strength, log_decay, gate = project(module, deciding[:, t] * real)
        decided.append(torch.cat([query, key, value], dim=-1))
        carries.append(torch.cat([query, key, project(module, carried[:, t] * real)[2]], dim=-1))
        convolved = convolve(kernel, None, decided)
        sizes = [query.shape[-1], key.shape[-1], value.shape[-1]]
        q, k, u = act(activation, convolved, convolved).split(sizes, dim=-1)
        v = act(activation, convolved, convolve(kernel, None, carries)).split(sizes, dim=-1)[2]
        heads = strength.shape[-1]
        state = log_decay.shape[-1] if log_decay.ndim == 3 else module.head_k_dim
        q, k = (x.unflatten(-1, (-1, state)) for x in (q, k))
        # Consecutive value heads have the same query and key.
        serves = [head * q.shape[1] // heads for head in range(heads)]
        q, k = (x[:, serves] / (x[:, serves].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        decay = torch.exp(log_decay if log_decay.ndim == 3 else log_decay[..., None])[..., None]
        reads = []
        memories = memories or [torch.zeros(*k.shape, value.shape[-1] // heads, dtype=k.dtype) for _ in "12"]
        for which, stream in enumerate((u, v)):
            memory = memories[which] * decay
            read = (memory * k[..., None]).sum(-2)
            correction = strength[..., None] * (stream.unflatten(-1, (heads, -1)) - read)
            memories[which] = memory + k[..., None] * correction[..., None, :]
            reads.append((memories[which] * q[..., None]).sum(-2) / state**0.5)
        rms = (reads[0].pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        normed = (norm.weight * reads[1] / rms).flatten(1)
        outputs.append((module.out_proj if hasattr(module, "out_proj") else module.o_proj)(normed * gate))
    return torch.stack(outputs, dim=1)


def head_decay(module: nn.Module, step: Tensor) -> Tensor:
    return -module.A_log.exp() * functional.softplus(step + module.dt_bias)


def qwen3_next(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(x)[:, None], module.in_proj_ba(x)[:, None])
    query, key, value, gate, strength, step = (part.flatten(1) for part in parts)
    return query, key, value, torch.sigmoid(strength), head_decay(module, step), functional.silu(gate)


def qwen3_5(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    query, key, value = module.in_proj_qkv(x).split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    strength, step = torch.sigmoid(module.in_proj_b(x)), module.in_proj_a(x)
    return query, key, value, strength, head_decay(module, step), functional.silu(module.in_proj_z(x))


def olmo_hybrid(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    strength = torch.sigmoid(module.b_proj(x)) * (1 + module.allow_neg_eigval)
    gate = functional.silu(module.g_proj(x))
    return (*separate(module, x), strength, head_decay(module, module.a_proj(x)), gate)


def kimi_linear(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    forget = module.forget_gate
    step = (forget.f_b_proj(forget.f_a_proj(x)) + forget.dt_bias).unflatten(-1, (module.num_heads, -1))
    rate = forget.A_log.exp().view(-1, 1)
    bound = getattr(forget, "safe_gate_lower_bound", None)
    log_decay = -rate * functional.softplus(step) if bound is None else bound * torch.sigmoid(rate * step)
    gate = torch.sigmoid(module.g_b_proj(module.g_a_proj(x)))
    return (*separate(module, x), torch.sigmoid(module.b_proj(x)), log_decay, gate)


def bailing_hybrid(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    forget = module.forget_gate
    step = (forget.f_proj(x) + forget.dt_bias).unflatten(-1, (module.num_heads, -1))
    rate = forget.A_log.exp().view(-1, 1)
    bounded = forget.lower_bound * torch.sigmoid(rate * step)
    log_decay = bounded if forget.safe_gate else -rate * functional.softplus(step)
    return (*separate(module, x), torch.sigmoid(module.b_proj(x)), log_decay, torch.sigmoid(module.g_proj(x)))


def separate(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return module.q_proj(x), module.k_proj(x), module.v_proj(x)


PROJECTIONS: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, ...]]] = {
    "Qwen3NextGatedDeltaNet": qwen3_next,
    "Qwen3_5GatedDeltaNet": qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": qwen3_5,
    "OlmoHybridGatedDeltaNet": olmo_hybrid,
    "KimiLinearDeltaAttention": kimi_linear,
    "Glm5NextTextLinearAttention": kimi_linear,
    "BailingHybridDeltaAttention": bailing_hybrid,
}
"""Query, key, value, strength, log-decay and output gate of one token, from each host's projections."""

ARCHITECTURES = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_delta")
"""The adapters of these hosts."""


def frozen(module: nn.Module, layer: Layer, carried: Tensor) -> Tensor:
    """Run a layer's recurrence in float64, frozen on its input in a trace."""
    mask = torch.ones(layer.input.shape[:2], dtype=torch.bool) if layer.mask is None else layer.mask
    # The hosts ignore the mask of a single token.
    mask = host_mask(module, mask) if mask.shape[1] > 1 else torch.ones_like(mask)
    with torch.no_grad():
        return delta_rule(module, layer.input.double(), carried.double(), mask)
