"""RWKV-6 and RWKV-7 of flash-linear-attention: time mixing, and channel mixing, which also reads the previous token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_parts import compute, elementwise, function_name, heads, masked, padding, unit
from unilinattn.call import Call
from unilinattn.mixers import ExclusiveBonus, LowRankUpdate, Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture

_DECAY = -0.6065306597126334
"""The strongest log-decay of RWKV-7, -exp(-1/2), as the host writes it."""

_SLOPES = {"gelu": "gelu_pytorch_tanh", "sqrelu": "relu2"}
"""Activation names of the host whose names in `Flow.activation` differ."""


@register_architecture("fla.layers.rwkv6.RWKV6Attention", name="fla_rwkv6", kind="RWKV-6", extra_outputs=2)
def rwkv6(call: Call) -> Flow:
    """RWKV-6's time mixing in flash-linear-attention: a token shift whose ratio depends on the token.

    Eagle and Finch (Peng et al., 2024). The shift's ratio and the decays are frozen; the bonus stands on the diagonal.
    """
    host, mask = call.host, padding(call)
    x = masked(call.input, mask)
    delta = _previous(x) - x
    low = torch.tanh(compute(call, host.x_proj[0], x, delta)).unflatten(-1, (5, -1))
    expansion = call.tensor(host.x_proj[2].weight).unflatten(1, (5, -1))
    mixes = (torch.einsum("btnr,hnr->btnh", low, expansion) + call.tensor(host.x_bias)).unbind(-2)
    to_query, to_decay, to_key, to_value, to_gate = mixes
    query, step, key = (
        heads(compute(call, module, x, mix, delta), host.head_k_dim)
        for module, mix in ((host.r_proj, to_query), (host.w_proj, to_decay), (host.k_proj, to_key))
    )
    flow = Flow(call.input).scale(mask, role="input").shift(to_value)
    flow.matrix(call.stored(host.v_proj.linear.weight), role="input").scale(mask, role="input")
    flow.core(ExclusiveBonus(query, key, -torch.exp(step), call.tensor(host.bonus)))
    norm = host.g_norm
    flow.layer_norm(*call.affine(norm), eps=norm.eps, groups=norm.num_groups)
    flow.gate(elementwise(call, host.gate_fn)(compute(call, host.g_proj, x, to_gate, delta)))
    return flow.matrix(call.stored(host.o_proj.weight), role="output")


def _first_values(module: Any, arguments: Mapping[str, Any]) -> Tensor:
    """Return the values of the first layer, which every RWKV-7 layer passes on."""
    values: Tensor
    if module.layer_idx != 0:
        values = arguments["v_first"]
        return values
    x, mask = arguments["hidden_states"], arguments.get("attention_mask")
    x = x if mask is None else x * mask[:, -x.shape[1] :, None]
    values = module.v_proj(x + (_previous(x) - x) * module.x_v)
    return values


@register_architecture(
    "fla.layers.rwkv7.RWKV7Attention",
    name="fla_rwkv7",
    kind="RWKV-7",
    needs_capture=True,
    shared_values=_first_values,
)
def rwkv7(call: Call) -> Flow:
    """RWKV-7's time mixing in flash-linear-attention: a decayed memory with a generalised delta rule.

    Peng et al., 2025. Every layer after the first mixes its values with the first layer's, which enter at the separate
    port `values`. The bonus is added after the group norm.
    """
    host, mask, tensor = call.host, padding(call), call.tensor
    x = masked(call.input, mask)
    delta = _previous(x) - x
    mixed = {name: x + delta * tensor(getattr(host, f"x_{name}")) for name in "rwkvag"}
    query, key = compute(call, host.r_proj, mixed["r"]), compute(call, host.k_proj, mixed["k"])
    decay = _DECAY * torch.sigmoid(compute(call, host.w_lora, mixed["w"]))
    rate = torch.sigmoid(compute(call, host.a_lora, mixed["a"]))
    erased = heads(key * tensor(host.k_k), host.head_dim)
    # The host's fused path normalises by its kernel, the other by torch, with another epsilon.
    erased = unit(erased) if host.fuse_norm else functional.normalize(erased, dim=-1)
    key = key + key * (rate - 1) * tensor(host.k_a)
    query, key, rate, decay = (heads(side, host.head_dim) for side in (query, key, rate, decay))

    flow = Flow(call.input).scale(mask, role="input").shift(tensor(host.x_v))
    flow.matrix(call.stored(host.v_proj.weight), role="input")
    if host.layer_idx != 0:
        mix = torch.sigmoid(compute(call, host.v_lora, mixed["v"]))
        first = Flow(tensor(call.arguments["v_first"]), port="values").scale(mix, role="input")
        flow.scale(1 - mix, role="input").merge(first)
    flow.scale(mask, role="input")
    norm, bonus = host.g_norm, (query * key * tensor(host.r_k)).sum(-1)
    read = flow.fork().core(LowRankUpdate(query, key, decay, -erased, erased * rate))
    read.layer_norm(*call.affine(norm), eps=norm.eps, groups=norm.num_groups)
    flow.join(read, flow.fork().scale(bonus, role="skip"), role="core")
    flow.gate(compute(call, host.g_lora, mixed["g"]))
    return flow.matrix(call.stored(host.o_proj.weight), role="output")


@register_architecture(
    "fla.models.rwkv6.modeling_rwkv6.RWKV6FeedForward",
    name="fla_rwkv6_channel",
    kind="RWKV-6 channel mixing (token shift)",
    extra_outputs=1,
)
def rwkv6_channel(call: Call) -> Flow:
    """RWKV-6's channel mixing in flash-linear-attention: a token shift, which is the core, an MLP and receptance.

    Eagle and Finch (Peng et al., 2024). The activation's slope and the receptance are frozen.
    """
    mask = _channel_padding(call)
    x, receptance = masked(call.input, mask), call.host.receptance
    gate = torch.sigmoid(compute(call, receptance, x, _previous(x) - x))
    return _channel_mixing(call, mask, call.host.key.mu, call.host.key.linear.weight).gate(gate)


@register_architecture(
    "fla.models.rwkv7.modeling_rwkv7.RWKV7FeedForward",
    name="fla_rwkv7_channel",
    kind="RWKV-7 channel mixing (token shift)",
    extra_outputs=1,
)
def rwkv7_channel(call: Call) -> Flow:
    """RWKV-7's channel mixing in flash-linear-attention: a token shift, which is the core, and an MLP.

    Peng et al., 2025. The activation's slope is frozen.
    """
    return _channel_mixing(call, _channel_padding(call), call.host.x_k, call.host.key.weight)


def _channel_padding(call: Call) -> Tensor | None:
    call.refuse("state")
    return padding(call)


def _channel_mixing(call: Call, mask: Tensor | None, mix: Tensor, key: Tensor) -> Flow:
    """Build the token shift and the MLP; both matrices follow the core, so `unified` is the token shift too."""
    host, (batch, length), mix = call.host, call.input.shape[:2], call.tensor(mix)
    flow = Flow(call.input).scale(mask, role="input")
    flow.core(Toeplitz(torch.stack([1 - mix, mix], dim=-1), batch=batch, length=length))
    name = function_name(host.act_fn)
    flow.matrix(call.stored(key), role="output").activation(_SLOPES.get(name, name))
    return flow.matrix(call.stored(host.value.weight), role="output")


def _previous(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 1, -1))
