"""RWKV-6 and RWKV-7 of flash-linear-attention."""

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.call import Call
from unilinattn.architectures.fla_parts import compute, elementwise, heads, masked, padding, unit
from unilinattn.flow import Flow
from unilinattn.mixers import ExclusiveBonus, LowRankUpdate
from unilinattn.registry import register_architecture

_DECAY = -0.6065306597126334
"""The strongest log-decay of RWKV-7, -exp(-1/2), as the host writes it."""


@register_architecture("fla.layers.rwkv6.RWKV6Attention", name="fla_rwkv6", kind="RWKV-6", extras=2)
def rwkv6(call: Call) -> Flow:
    """RWKV-6 as flash-linear-attention runs it: each token is mixed with the one before it as far as it decides.

    Eagle and Finch (Peng et al., 2024). The mix is frozen with the decays; the bonus stands on the diagonal.
    """
    host, mask = call.host, padding(call)
    x = masked(call.input, mask)
    delta = _previous(x) - x
    low = torch.tanh(compute(call, host.x_proj[0], x, delta)).unflatten(-1, (5, -1))
    spread = call.weight(host.x_proj[2].weight).unflatten(1, (5, -1))
    mixes = (torch.einsum("btnr,hnr->btnh", low, spread) + call.weight(host.x_bias)).unbind(-2)
    to_query, to_decay, to_key, to_value, to_gate = mixes
    query, step, key = (
        heads(compute(call, module, x, mix, delta), host.head_k_dim)
        for module, mix in ((host.r_proj, to_query), (host.w_proj, to_decay), (host.k_proj, to_key))
    )
    flow = Flow(call.input).scale(mask, role="input").shift(to_value)
    flow.matrix(call.weight(host.v_proj.linear.weight), role="input").scale(mask, role="input")
    flow.core(ExclusiveBonus(query, key, -torch.exp(step), call.weight(host.bonus)))
    norm = host.g_norm
    flow.layer_norm(call.cast(norm.weight), call.cast(norm.bias), norm.eps, groups=norm.num_groups)
    flow.gate(elementwise(call, host.gate_fn)(compute(call, host.g_proj, x, to_gate, delta)))
    return flow.matrix(call.weight(host.o_proj.weight), role="output")


@register_architecture("fla.layers.rwkv7.RWKV7Attention", name="fla_rwkv7", kind="RWKV-7", observes=True)
def rwkv7(call: Call) -> Flow:
    """RWKV-7 as flash-linear-attention runs it: a decayed memory that also moves what it holds under one key.

    Peng et al., 2025. All layers but the first mix their values with the first layer's, which come in by a port of
    their own, `values`. The bonus is added after the group norm.
    """
    host, mask, weight = call.host, padding(call), call.weight
    x = masked(call.input, mask)
    delta = _previous(x) - x
    mixed = {name: x + delta * weight(getattr(host, f"x_{name}")) for name in "rwkvag"}
    query, key = compute(call, host.r_proj, mixed["r"]), compute(call, host.k_proj, mixed["k"])
    decay = _DECAY * torch.sigmoid(compute(call, host.w_lora, mixed["w"]))
    rate = torch.sigmoid(compute(call, host.a_lora, mixed["a"]))
    erased = heads(key * weight(host.k_k), host.head_dim)
    # The host's fused path takes its kernel's unit vectors, the other one torch's.
    erased = unit(erased) if host.fuse_norm else functional.normalize(erased, dim=-1)
    key = key + key * (rate - 1) * weight(host.k_a)
    query, key, rate, decay = (heads(side, host.head_dim) for side in (query, key, rate, decay))

    flow = Flow(call.input).scale(mask, role="input").shift(weight(host.x_v))
    flow.matrix(weight(host.v_proj.weight), role="input")
    if host.layer_idx != 0:
        mix = torch.sigmoid(compute(call, host.v_lora, mixed["v"]))
        first = Flow(weight(call.arguments["v_first"]), port="values").scale(mix, role="input")
        flow.scale(1 - mix, role="input").merge(first)
    flow.scale(mask, role="input")
    norm, bonus = host.g_norm, (query * key * weight(host.r_k)).sum(-1)
    read = flow.fork().core(LowRankUpdate(query, key, decay, -erased, erased * rate))
    read.layer_norm(call.cast(norm.weight), call.cast(norm.bias), norm.eps, groups=norm.num_groups)
    flow.join(read, flow.fork().scale(bonus, role="skip"), role="core")
    flow.gate(compute(call, host.g_lora, mixed["g"]))
    return flow.matrix(weight(host.o_proj.weight), role="output")


def _previous(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 1, -1))
