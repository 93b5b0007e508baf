"""Delta rules of flash-linear-attention: DeltaNet, Gated DeltaNet, KDA, gated delta product and Comba."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_parts import (
    compute,
    elementwise,
    gated_norm,
    head_norm,
    heads,
    masked,
    output,
    project,
    unit,
    unpadded,
)
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.mixers import DeltaRule, LowRankUpdate, Substep
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


@register_architecture(
    "fla.layers.gated_deltanet.GatedDeltaNet", name="fla_gated_deltanet", kind="gated DeltaNet", extra_outputs=2
)
def gated_deltanet(call: Call) -> Flow:
    """Gated delta rule of flash-linear-attention: one decay per value head; value heads share queries and keys.

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are frozen unit vectors; the values carry.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (unit(heads(_projected(call, x, name), host.head_k_dim)) for name in "qk")
    strength = _strength(call, x, doubled=host.allow_neg_eigval)
    core = DeltaRule(query * host.head_k_dim**-0.5, key, strength, _head_decay(call, x))
    return _closed(call, _carried(call, mask).core(core), x, mask, gated=host.use_gate)


@register_architecture("fla.layers.delta_net.DeltaNet", name="fla_deltanet", kind="DeltaNet", extra_outputs=2)
def deltanet(call: Call) -> Flow:
    """Delta rule of flash-linear-attention, without decay.

    Yang, Wang, Zhang, Shen and Kim, NeurIPS 2024. Queries and keys pass an activation and are normalised to L2 norm
    1 or L1 norm 1.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (_feature(call, x, name) for name in "qk")
    strength = torch.sigmoid(compute(call, host.b_proj, x)) if host.use_beta else torch.ones_like(query[..., 0])
    core = DeltaRule(query * host.head_k_dim**-0.5, key, strength * (2 if host.allow_neg_eigval else 1))
    return _closed(call, _carried(call, mask).core(core), x, mask, gated=host.use_gate)


@register_architecture(
    "fla.layers.kda.KimiDeltaAttention", name="fla_kda", kind="Kimi delta attention (KDA)", extra_outputs=2
)
def kda(call: Call) -> Flow:
    """Kimi delta attention of flash-linear-attention: one decay per key coordinate, and a sigmoid output gate.

    Kimi Linear, 2025. With a lower bound the log-decay is the bound times a sigmoid, otherwise minus a softplus.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (unit(heads(_projected(call, x, name), host.head_k_dim)) for name in "qk")
    step = heads(compute(call, host.f_proj, x) + call.tensor(host.dt_bias), host.head_k_dim)
    rate, bound = torch.exp(call.tensor(host.A_log)).unsqueeze(-1), host.lower_bound
    decay = -rate * functional.softplus(step) if bound is None else bound * torch.sigmoid(rate * step)
    strength = _strength(call, x, doubled=host.allow_neg_eigval)
    core = DeltaRule(query * host.head_k_dim**-0.5, key, strength, decay)
    return _closed(call, _carried(call, mask).core(core), x, mask, gated=True)


@register_architecture(
    "fla.layers.gated_deltaproduct.GatedDeltaProduct",
    name="fla_gated_deltaproduct",
    kind="gated delta product",
    extra_outputs=2,
)
def gated_deltaproduct(call: Call) -> Flow:
    """Gated delta product of flash-linear-attention: several delta rule steps per token, each with separate values.

    DeltaProduct (Siems et al., NeurIPS 2025). A token decays the memory before its first step and reads it after its
    last. The layer is the sum of one chain per step.
    """
    host, mask, count = call.host, unpadded(call), call.host.num_householder
    x = masked(call.input, mask)
    query = unit(heads(_projected(call, x, "q"), host.head_k_dim))
    key = unit(_in_steps(heads(_projected(call, x, "k"), host.head_k_dim), count))
    strength = _in_steps(_strength(call, x, doubled=host.allow_neg_eigval).unsqueeze(-1), count).squeeze(-1)
    decay = None
    if host.use_forget_gate:
        no_decay = torch.zeros_like(strength.unflatten(1, (-1, count))[:, :, 1:])
        decay = torch.cat([_head_decay(call, x).unsqueeze(2), no_decay], dim=2).flatten(1, 2)
    read = (query * host.head_k_dim**-0.5).repeat_interleave(count, dim=1)
    expanded = DeltaRule(read, key, strength, decay)

    flow = Flow(call.input).scale(mask, role="input")
    steps = []
    for step in range(count):
        value = project(call, flow.fork(), "v", mask, rows=partial(_part, count, step))
        steps.append(_activated(call, value).core(Substep(expanded, count, step)))
    return _closed(call, flow.join(*steps, role="core"), x, mask, gated=host.use_output_gate)


def _part(count: int, step: int, rows: Tensor) -> Tensor:
    return rows.chunk(count)[step]


@register_architecture("fla.layers.comba.Comba", name="fla_comba", kind="Comba", extra_outputs=2)
def comba(call: Call) -> Flow:
    """Comba of flash-linear-attention: a separate key p_t reads the erased value, before the decay.

    Hu et al., 2025: S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - S_{t-1}^T p_t)^T, read with the query minus D p_t.
    """
    host, mask = call.host, unpadded(call)
    x = masked(call.input, mask)
    query, key = (heads(_projected(call, x, name), host.head_k_dim) for name in "qk")
    erase = key * torch.sigmoid(call.tensor(host.decay)).unsqueeze(-1) if host.use_inner_decay else key
    if host.use_output_correction:
        query = query - call.tensor(host.D).unsqueeze(-1) * erase
    write = unit(key).repeat_interleave(host.num_v_heads // host.num_heads, dim=2)
    write = write * _strength(call, x, doubled=False).unsqueeze(-1)
    query = unit(query) * host.head_k_dim**-0.5
    core = LowRankUpdate(query, write, _head_decay(call, x), unit(erase), -write)
    return _closed(call, _carried(call, mask).core(core), x, mask, gated=host.use_output_gate)


def _activated(call: Call, flow: Flow) -> Flow:
    """Append SiLU if the layer has no short convolution, which would have applied it."""
    return flow if call.host.use_short_conv else flow.activation("silu")


def _projected(call: Call, x: Tensor, name: str) -> Tensor:
    return _activated(call, project(call, Flow(x), name)).value


def _feature(call: Call, x: Tensor, name: str) -> Tensor:
    """Return DeltaNet's queries or keys after the configured activation and norm.

    Raises `UncoveredError` if the activation or the norm is unknown.
    """
    activation, norm = call.host.qk_activation, call.host.qk_norm
    if activation == "silu":
        x = _projected(call, x, name)
    else:
        x = project(call, Flow(x), name).value
        x = x if activation == "identity" else elementwise(call, activation)(x)
    x = heads(x, call.host.head_k_dim)
    if norm not in ("l2", "sum"):
        raise UncoveredError(f"{call.name}: qk_norm={norm!r} is not covered; accepted are 'l2' and 'sum'.")
    return unit(x) if norm == "l2" else functional.normalize(x, p=1, dim=-1, eps=1e-6)


def _strength(call: Call, x: Tensor, *, doubled: bool) -> Tensor:
    """Return the share of the value stored under a key that a step replaces: up to 1, or 2 if `doubled`.

    Strengths above 1 give the transition negative eigenvalues.
    """
    return torch.sigmoid(compute(call, call.host.b_proj, x)) * (2 if doubled else 1)


def _head_decay(call: Call, x: Tensor) -> Tensor:
    rate = torch.exp(call.tensor(call.host.A_log))
    return -rate * functional.softplus(compute(call, call.host.a_proj, x) + call.tensor(call.host.dt_bias))


def _in_steps(x: Tensor, count: int) -> Tensor:
    """Move the steps of each token from the head axis to the time axis: (batch, length * count, head, state)."""
    return x.unflatten(2, (count, -1)).flatten(1, 2)


def _carried(call: Call, mask: Tensor | None) -> Flow:
    return _activated(call, project(call, Flow(call.input).scale(mask, role="input"), "v", mask))


def _closed(call: Call, flow: Flow, x: Tensor, mask: Tensor | None, *, gated: bool) -> Flow:
    """Append the norm over each head, the output gate if `gated`, and the output projection."""
    norm = call.host.o_norm
    if gated:
        gated_norm(call, flow, norm, compute(call, call.host.g_proj, x))
    else:
        head_norm(call, flow, norm)
    return output(call, flow, mask)
