"""Linear attention of flash-linear-attention whose gates relevance passes: GLA, RetNet, HGRN and gated slots."""

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_parts import (
    Rows,
    compute,
    convolved,
    elementwise,
    gated_norm,
    head_norm,
    heads,
    linear,
    masked,
    output,
    padding,
    project,
    rotated,
    shared,
    unpadded,
)
from unilinattn.call import Call
from unilinattn.mixers import CoreMixer, DiagonalDecay, ScalarDecay
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


@register_architecture(
    "fla.layers.gla.GatedLinearAttention", name="fla_gla", kind="gated linear attention (GLA)", extra_outputs=2
)
def gla(call: Call) -> Flow:
    """Gated linear attention of flash-linear-attention: one decay per key coordinate.

    Yang, Wang, Shen, Panda and Kim, ICML 2024. Query heads may share keys, values and decays.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (_feature(call, heads(project(call, Flow(x), name).value, host.head_k_dim)) for name in "qk")
    decay = functional.logsigmoid(heads(compute(call, host.gk_proj, x), host.head_k_dim)) / host.gate_logit_normalizer
    if host.clamp_min is not None:
        decay = decay.clamp_min(host.clamp_min)
    decay = decay.repeat_interleave(host.num_kv_groups, dim=2)
    return _closed(call, DiagonalDecay(query * host.head_k_dim**-0.5, key, decay), x, mask)


@register_architecture(
    "fla.layers.multiscale_retention.MultiScaleRetention", name="fla_retnet", kind="retention", extra_outputs=2
)
def retnet(call: Call) -> Flow:
    """Multi-scale retention of flash-linear-attention: rotary queries and keys, one fixed decay per head.

    RetNet (Sun et al., 2023). The decays 1 - 2^(-5 - h) are the same for every token.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (_feature(call, heads(project(call, Flow(x), name).value, host.head_k_dim)) for name in "qk")
    query, key = (rotated(call, side, mask) for side in (query, key))
    key = key.repeat_interleave(host.num_kv_groups, dim=2)
    # The host computes its decays in float32 for every dtype.
    exponent = torch.arange(host.num_heads, device=x.device, dtype=torch.float32)
    decay = (1 - 2.0 ** (-5.0 - exponent)).log().to(x.dtype).expand(*x.shape[:2], -1)
    return _closed(call, ScalarDecay(query * host.head_k_dim**-0.5, key, decay), x, mask)


@register_architecture("fla.layers.hgrn.HGRNAttention", name="fla_hgrn", kind="HGRN", extra_outputs=2)
def hgrn(call: Call) -> Flow:
    """Hierarchically gated recurrence of flash-linear-attention: each channel decays by f and adds 1 - f of its input.

    Qin, Yang and Zhong, NeurIPS 2023. The forget gate's lower bound rises from layer to layer.
    """
    host, mask = call.host, padding(call)
    # Short convolutions read masked projections; without them the host masks only the memory's input.
    early = mask if host.use_short_conv else None
    forget, flow = (linear(call, Flow(call.input), name).scale(early, role="input") for name in "fi")
    decay = _forget(call, convolved(call, forget, "f").value)
    ones = torch.ones_like(call.input[..., None, :1])
    core = DiagonalDecay(ones, ones, decay.unsqueeze(-1), key_scale=1 - decay.exp())
    convolved(call, flow, "i").activation("silu").scale(mask, role="act").core(core)
    gated_norm(call, flow, host.g_norm, compute(call, host.g_proj, call.input))
    return output(call, flow, None)


@register_architecture(
    "fla.layers.gsa.GatedSlotAttention", name="fla_gsa", kind="gated slot attention (GSA)", extra_outputs=2
)
def gsa(call: Call) -> Flow:
    """Gated slot attention of flash-linear-attention: a softmax over slots between two gated passes.

    Zhang et al., NeurIPS 2024. The first pass gives each query's weights over slots, which are frozen; the second
    carries the values. SiLU and a norm over all heads, with the kernel's default epsilon, follow.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    feature = elementwise(call, host.feature_map)
    query, key = (feature(heads(project(call, Flow(x), name).value, host.head_k_dim)) for name in "qk")
    decay = functional.logsigmoid(heads(compute(call, host.f_proj, x), host.num_slots)) / host.gate_logit_normalizer
    key, decay = (side.repeat_interleave(host.num_kv_groups, dim=2) for side in (key, decay))
    # Padded tokens write nothing.
    slots = masked(1 - decay.exp(), None if mask is None else mask.unsqueeze(-1))
    scale = host.head_k_dim**-0.5 if host.scale is None else host.scale
    scores = ScalarDecay(query * scale, key, decay.flatten(2)).apply(slots.flatten(2).unsqueeze(-1))
    read = torch.softmax(scores.reshape_as(slots), dim=-1)
    flow = _carried(call, mask).activation("silu").core(DiagonalDecay(read, slots, decay)).activation("silu")
    return output(call, flow.rms_norm(call.tensor(host.g_norm.weight), 1e-5), mask)


def _feature(call: Call, x: Tensor) -> Tensor:
    function = call.host.feature_map_fn
    return x if function is None else elementwise(call, function)(x)


def _forget(call: Call, x: Tensor) -> Tensor:
    """Return the logarithm of the forget gate, which has a lower bound in every layer after the first."""
    bound, decay = call.tensor(call.arguments.get("lower_bound")), functional.logsigmoid(x)
    if bound is None or call.host.layer_idx == 0:
        return decay
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + decay)


def _repeated(call: Call) -> Rows:
    """Return the function that repeats each value head for the query heads that share it."""
    return shared(call.host.head_v_dim, call.host.num_kv_groups)


def _carried(call: Call, mask: Tensor | None) -> Flow:
    return project(call, Flow(call.input).scale(mask, role="input"), "v", mask, rows=_repeated(call))


def _closed(call: Call, core: CoreMixer, x: Tensor, mask: Tensor | None) -> Flow:
    """Build the layer around GLA's or RetNet's core: values, norm over each head, output gate, output projection."""
    host, flow = call.host, _carried(call, mask).core(core)
    gate = compute(call, host.g_proj, x) if host.use_output_gate else None
    if host.fuse_norm_and_gate and gate is not None:
        gated_norm(call, flow, host.g_norm_swish_gate, gate)
    else:
        head_norm(call, flow, host.g_norm)
        if gate is not None:
            flow.gate(elementwise(call, host.gate_fn)(gate))
    return output(call, flow, mask)
