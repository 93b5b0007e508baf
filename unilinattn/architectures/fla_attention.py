"""Softmax attention of flash-linear-attention: plain, and with a forget gate."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_parts import compute, head_norm, heads, linear, output, rotated, shared, unpadded
from unilinattn.call import Call
from unilinattn.mixers import Dense
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


@register_architecture("fla.layers.attn.Attention", name="fla_attention", kind="softmax attention", extra_outputs=2)
def attention(call: Call) -> Flow:
    """Softmax attention of flash-linear-attention, run by flash-attn: rotary, causal, optionally with a window.

    HMA ACL Eq. 1. Query heads may share keys and values.
    """
    host, mask = call.host, unpadded(call)
    query, key = (heads(compute(call, getattr(host, f"{name}_proj"), call.input), host.head_dim) for name in "qk")
    if host.qk_norm:
        query, key = (
            head_norm(call, Flow(side.flatten(2)), norm, side.shape[2] * side.shape[3]).value.view_as(side)
            for side, norm in ((query, host.q_norm), (key, host.k_norm))
        )
    query, key = (rotated(call, side, mask) for side in (query, key))
    weights = _weights(call, query, key, mask, window=host.window_size)
    return output(call, _values(call).core(Dense(weights)), mask)


@register_architecture(
    "fla.layers.forgetting_attn.ForgettingAttention",
    name="fla_forgetting_attention",
    kind="forgetting attention",
    extra_outputs=2,
)
def forgetting_attention(call: Call) -> Flow:
    """Forgetting attention of flash-linear-attention: a forget gate lowers old scores; no position embedding.

    Forgetting Transformer (Lin et al., ICLR 2025). The host applies its window only to cached keys, so none is applied.
    """
    host, mask, x = call.host, unpadded(call), call.input
    query, key = (compute(call, getattr(host, f"{name}_proj"), x) for name in "qk")
    if host.qk_norm:
        query, key = (
            Flow(side).rms_norm(call.tensor(norm.weight), norm.eps, groups=norm.num_groups).value
            for side, norm in ((query, host.q_norm), (key, host.k_norm))
        )
    query, key = heads(query, host.head_dim), heads(key, host.head_dim)
    forget = functional.logsigmoid(compute(call, host.f_proj, x))
    forget = forget if mask is None else forget * mask
    # In float32 the difference of two sums over thousands of tokens would cancel to few digits.
    total = forget.double().cumsum(1).transpose(1, 2)
    fading = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(x.dtype)
    flow = _values(call).core(Dense(_weights(call, query, key, mask, fading=fading)))
    if host.use_output_gate:
        flow.gate(torch.sigmoid(compute(call, host.g_proj, x)))
    return output(call, flow, mask)


def _weights(
    call: Call,
    query: Float[Tensor, "batch length head state"],
    key: Float[Tensor, "batch length group state"],
    mask: Tensor | None,
    *,
    fading: Float[Tensor, "batch head length length"] | float = 0.0,
    window: int | None = None,
) -> Float[Tensor, "batch head length length"]:
    """Return the causal softmax weights over real keys; the rows of padded queries are arbitrary."""
    key = key.repeat_interleave(call.host.num_kv_groups, dim=2)
    scores = torch.einsum("bihn,bjhn->bhij", query, key) * call.host.head_dim**-0.5 + fading
    position = torch.arange(query.shape[1], device=query.device)
    distance = position[:, None] - position
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    if mask is not None:
        # A padded query attends to itself, so that its softmax is defined.
        hidden = hidden | ((mask[:, None, None, :, 0] == 0) & (distance != 0))
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)


def _values(call: Call) -> Flow:
    """Project the input to the values, each head repeated for the query heads that share it."""
    return linear(call, Flow(call.input), "v", rows=shared(call.host.head_dim, call.host.num_kv_groups))
