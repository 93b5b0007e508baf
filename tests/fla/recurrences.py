"""Token-by-token recurrences of the layers of flash-linear-attention, from their papers.

Every function takes one sequence without padding, as two streams (token, channel). The deciding stream determines
queries, keys, decays, strengths, gates, slopes and norms; the carried stream is the input of the frozen layer. With the
same stream twice the result is the output of the layer.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.fla.delta_recurrences import (
    chosen,
    comba,
    convolve,
    deltanet,
    gated_deltanet,
    gated_deltaproduct,
    kda,
    rms,
    share,
    way,
)
from tests.fla.rwkv_recurrences import rwkv6, rwkv6_channel, rwkv7, rwkv7_channel
from unilinattn.tracing.layer import Layer


def gated_memory(query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor) -> Tensor:
    """S = exp(g) S + k v^T; y = S^T q, each (token, head, ...): gated linear attention."""
    state = torch.zeros(*key.shape[1:], value.shape[-1], dtype=value.dtype)
    outputs = []
    for q, k, g, v in zip(query, key, log_decay, value, strict=True):
        state = torch.exp(g)[..., None] * state + k[..., None] * v[:, None, :]
        outputs.append(torch.einsum("hn,hnp->hp", q, state))
    return torch.stack(outputs)


def featured(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of GLA and RetNet, rotated if the layer rotates them; keys repeated for all heads."""
    feature = torch.relu if module.feature_map_fn is not None else lambda side: side
    activation = "silu" if module.use_short_conv else "none"
    sides = (feature(way(module, n, x, x, activation).unflatten(-1, (-1, module.head_k_dim))) for n in "qk")
    query, key = (rotate(module.rotary, s) if hasattr(module, "rotary") else s for s in sides)
    return query / math.sqrt(module.head_k_dim), share(key, module.num_kv_groups)


def rotate(rotary: nn.Module, x: Tensor) -> Tensor:
    """Rotate each pair (n, n + half) by position times base^(-2n / dim)."""
    half = rotary.dim // 2
    speed = 1 / rotary.base ** (torch.arange(0, rotary.dim, 2).double() / rotary.dim)
    angle = torch.outer(torch.arange(len(x)).double(), speed)
    turn = torch.complex(angle.cos().double(), angle.sin().double())[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def shared_values(module: nn.Module, deciding: Tensor, carried: Tensor) -> list[Tensor]:
    """The values of both streams, each head repeated for its group of queries."""
    activation = "silu" if getattr(module, "use_short_conv", False) else "none"
    values = (way(module, "v", deciding, stream, activation) for stream in (deciding, carried))
    return [share(value.unflatten(-1, (-1, module.head_v_dim)), module.num_kv_groups) for value in values]


def gate_of(module: nn.Module, x: Tensor) -> Tensor | float:
    if not module.use_output_gate:
        return 1.0
    function = getattr(module, "gate_fn", None)
    if isinstance(function, nn.Module):
        return function(module.g_proj(x))
    return chosen(function)(module.g_proj(x))


def normed_by_head(module: nn.Module, x: Tensor, decides: Tensor, carries: Tensor) -> Tensor:
    norm = module.g_norm_swish_gate if module.fuse_norm_and_gate else module.g_norm
    weight = 1 if norm.weight is None else norm.weight
    normed = carries / rms(decides, norm.eps) * weight
    return module.o_proj(normed.flatten(1) * gate_of(module, x))


def gla(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Yang, Wang, Shen, Panda and Kim, ICML 2024."""
    query, key = featured(module, deciding)
    forget = torch.sigmoid(module.gk_proj(deciding)).log() / module.gate_logit_normalizer
    forget = forget if module.clamp_min is None else forget.clamp(min=module.clamp_min)
    decay = share(forget.unflatten(-1, (-1, module.head_k_dim)), module.num_kv_groups)
    values = shared_values(module, deciding, carried)
    return normed_by_head(module, deciding, *(gated_memory(query, key, decay, v) for v in values))


def retnet(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Sun et al., 2023."""
    query, key = featured(module, deciding)
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(module.num_heads).double()))
    decay = decay[None, :, None].expand(len(query), -1, 1)
    values = shared_values(module, deciding, carried)
    return normed_by_head(module, deciding, *(gated_memory(query, key, decay, v) for v in values))


def linear_attention(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Katharopoulos, Vyas, Pappas and Fleuret, ICML 2020."""
    query, key = (getattr(module, f"{n}_proj")(deciding).unflatten(-1, (-1, module.head_k_dim)) for n in "qk")
    query, key = module.feature_map_q(query), share(module.feature_map_k(key), module.num_kv_groups)
    query = query / (query.sum(-1, keepdim=True) + 1e-4) if module.norm_q else query
    key = key / (key.sum(-1, keepdim=True) + 1e-4) if module.norm_k else key
    query = query / math.sqrt(query.shape[-1])
    decides, carries = (
        gated_memory(query, key, torch.zeros_like(query), v) for v in shared_values(module, deciding, carried)
    )
    if module.do_feature_map_norm:
        weights = torch.stack([(query[t] * key[: t + 1]).sum((0, 2)) for t in range(len(query))])[..., None] + 1e-10
        decides, carries = decides / weights, carries / weights
    if not isinstance(module.norm, nn.Identity):
        carries = carries / rms(decides, module.norm.eps) * module.norm.weight
    return module.o_proj(carries.flatten(1))


def above(module: nn.Module, forget: Tensor, bound: Tensor | None) -> Tensor:
    """The forget gate, between its lower bound and one; the first layer has no bound."""
    if bound is None or module.layer_idx == 0:
        return torch.sigmoid(forget)
    return bound.double() + (1 - bound.double()) * torch.sigmoid(forget)


def hgrn(module: nn.Module, deciding: Tensor, carried: Tensor, lower_bound: Tensor | None) -> Tensor:
    """Qin, Yang and Zhong, NeurIPS 2023: h = f h + (1 - f) SiLU(i)."""
    forget = above(module, way(module, "f", deciding, deciding, "none"), lower_bound)
    states = []
    for stream in (deciding, carried):
        taken = (1 - forget) * way(module, "i", deciding, stream)
        state, read = torch.zeros_like(taken[0]), []
        for f, i in zip(forget, taken, strict=True):
            state = f * state + i
            read.append(state)
        states.append(torch.stack(read))
    weight = 1 if module.g_norm.weight is None else module.g_norm.weight
    normed = states[1] / rms(states[0], module.g_norm.eps) * weight
    return module.o_proj(normed * functional.silu(module.g_proj(deciding)))


def hgrn2(module: nn.Module, deciding: Tensor, carried: Tensor, lower_bound: Tensor | None) -> Tensor:
    """Qin et al., COLM 2024: keys are 1 - f."""
    size = module.head_f_dim
    query = functional.silu(way(module, "q", deciding, deciding, "none")).unflatten(-1, (-1, size)) / math.sqrt(size)
    forget = above(module, way(module, "f", deciding, deciding, "none"), lower_bound).unflatten(-1, (-1, size))
    values = (way(module, "i", deciding, s, "none").unflatten(-1, (-1, module.head_i_dim)) for s in (deciding, carried))
    reads = (gated_memory(query, 1 - forget, forget.log(), value).flatten(1) for value in values)
    return normed_whole(module, *reads, eps=1e-5)


def normed_whole(module: nn.Module, decides: Tensor, carries: Tensor, *, eps: float, gate: Tensor | None = None):
    """The norm over all heads with the epsilon of fla's kernel, which ignores that of the layer."""
    normed = carries / rms(decides, eps) * (1 if module.g_norm.weight is None else module.g_norm.weight)
    return module.o_proj(normed if gate is None else normed * gate)


def gsa(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Zhang et al., NeurIPS 2024: one key per slot, a softmax over slots, one value per slot."""
    activation = "silu" if module.use_short_conv else "none"
    kind = type(module.feature_map).__name__
    feature = {"SwishFeatureMap": functional.silu, "ReLUFeatureMap": torch.relu}.get(kind, module.feature_map)
    query, key = (
        feature(way(module, n, deciding, deciding, activation).unflatten(-1, (-1, module.head_k_dim))) for n in "qk"
    )
    query = query * (module.head_k_dim**-0.5 if module.scale is None else module.scale)
    forget = torch.sigmoid(module.f_proj(deciding)) ** (1 / module.gate_logit_normalizer)
    forget = forget.unflatten(-1, (-1, module.num_slots))
    key, forget = share(key, module.num_kv_groups), share(forget, module.num_kv_groups)
    keys, scores = torch.zeros(module.num_heads, module.num_slots, module.head_k_dim, dtype=query.dtype), []
    for q, k, f in zip(query, key, forget, strict=True):
        keys = f[..., None] * keys + (1 - f)[..., None] * k[:, None, :]
        scores.append(torch.einsum("hk,hmk->hm", q, keys))
    read = torch.softmax(torch.stack(scores), dim=-1)
    decides, carries = shared_values(module, deciding, carried)
    values = (torch.sigmoid(decides) * stream for stream in (decides, carries))
    reads = [gated_memory(read, 1 - forget, forget.log(), value).flatten(1) for value in values]
    return normed_whole(module, *(torch.sigmoid(reads[0]) * stream for stream in reads), eps=1e-5)


def lightnet(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Qin et al., 2024: per coordinate, a softmax of the keys over the past tokens."""
    size = module.head_f_dim
    query = functional.silu(way(module, "q", deciding, deciding, "none")).unflatten(-1, (-1, size)) / math.sqrt(size)
    logits = way(module, "k", deciding, deciding, "none").unflatten(-1, (-1, size))
    reads = []
    for stream in (deciding, carried):
        values = way(module, "v", deciding, stream, "none").unflatten(-1, (-1, module.head_i_dim))
        outputs = []
        for t in range(len(stream)):
            weights = torch.softmax(logits[: t + 1], dim=0)
            outputs.append(torch.einsum("hn,jhn,jhp->hp", query[t], weights, values[: t + 1]))
        reads.append(torch.stack(outputs).flatten(1))
    return normed_whole(module, *reads, eps=1e-6, gate=functional.silu(module.g_proj(deciding)))


def step_by_step(decay: Tensor, written: Tensor, read: Tensor) -> Tensor:
    """h = decay h + written, y = h . read: a selective state space, channel by channel (token, channel, state)."""
    state, outputs = torch.zeros_like(written[0]), []
    for a, w, c in zip(decay, written, read, strict=True):
        state = a * state + w
        outputs.append((state * c).sum(-1))
    return torch.stack(outputs)


CHORDS = {
    "silu": torch.sigmoid,
    "swish": torch.sigmoid,
    "relu": lambda p: (p > 0).double(),
    "gelu": lambda p: (1 + torch.tanh(math.sqrt(2 / math.pi) * (p + 0.044715 * p**3))) / 2,
}
"""f(p) / p of each activation."""


def mamba(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """S6 between a short convolution and a gate (HMA ACL Eq. 3 and 6-9)."""
    chord, inner = CHORDS[module.activation], module.intermediate_size
    decides, carries = (convolve(module.conv1d, module.in_proj(s)[:, :inner]) for s in (deciding, carried))
    values = [chord(decides) * stream for stream in (decides, carries)]
    sizes = [module.dt_rank, module.ssm_state_size, module.ssm_state_size]
    step, key, query = module.x_proj(values[0]).split(sizes, dim=-1)
    delta = functional.softplus(module.dt_proj(step))[..., None]
    decay = torch.exp(-delta * torch.exp(module.A_log))
    read = step_by_step(decay, delta * key[:, None] * values[1][..., None], query[:, None].expand_as(decay))
    gate = module.in_proj(deciding)[:, inner:]
    return module.out_proj((read + module.D * values[1]) * chord(gate) * gate)


def mamba2(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """SSD with one decay per head (LaTIM Eq. 13-14, 24); head h uses group h modulo the groups, as fla's torch code."""
    chord, inner, size = CHORDS[module.activation], module.intermediate_size, module.ssm_state_size
    parts = [inner, module.conv_dim, module.num_heads]
    gate, branch, step = module.in_proj(deciding).split(parts, dim=-1)
    decides, carries = (
        convolve(module.conv1d, side) for side in (branch, module.in_proj(carried).split(parts, dim=-1)[1])
    )
    sides = [(chord(decides) * stream) for stream in (decides, carries)]
    key, query = (part.unflatten(-1, (-1, size)) for part in sides[0][:, inner:].chunk(2, dim=-1))
    group = [head % module.n_groups for head in range(module.num_heads)]
    delta = functional.softplus(step + module.dt_bias).clamp(*module.dt_limit)
    decay = -torch.exp(module.A_log) * delta
    skip = module.D.view(module.num_heads, -1)
    reads = []
    for side in sides:
        value = side[:, :inner].unflatten(-1, (module.num_heads, -1))
        read = gated_memory(query[:, group], key[:, group] * delta[..., None], decay[..., None], value)
        reads.append((read + skip * value).flatten(1))
    norm = module.norm
    if norm is None:
        return module.out_proj(reads[1] * chord(gate) * gate)
    if not norm.norm_before_gate:
        reads = [read * functional.silu(gate) for read in reads]
    decides, carries = (read.unflatten(-1, (-1, norm.group_size)) for read in reads)
    normed = (carries / rms(decides, norm.eps)).flatten(1) * norm.weight
    return module.out_proj(normed * functional.silu(gate) if norm.norm_before_gate else normed)


def attended(module: nn.Module, scores: Tensor, deciding: Tensor, carried: Tensor, window: int | None) -> Tensor:
    """Causal softmax attention in a window."""
    values = share(module.v_proj(carried).unflatten(-1, (-1, module.head_dim)), module.num_kv_groups)
    outputs = []
    for t in range(len(carried)):
        start = 0 if window is None else max(0, t + 1 - window)
        weights = torch.softmax(scores[:, t, start : t + 1], dim=-1)
        outputs.append(torch.einsum("hj,jhp->hp", weights, values[start : t + 1]).flatten())
    return torch.stack(outputs)


def attention(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """HMA ACL Eq. 1 over rotated queries and keys."""
    sides = []
    for name in "qk":
        side = getattr(module, f"{name}_proj")(deciding).unflatten(-1, (-1, module.head_dim))
        if module.qk_norm:
            norm = getattr(module, f"{name}_norm")
            side = side / rms(side, norm.eps) * norm.weight
        sides.append(rotate(module.rotary, side))
    query, key = sides[0] / math.sqrt(module.head_dim), share(sides[1], module.num_kv_groups)
    scores = torch.einsum("ihn,jhn->hij", query, key)
    return module.o_proj(attended(module, scores, deciding, carried, module.window_size))


def forgetting_attention(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Lin et al., ICLR 2025: scores fade by the forget gates between query and key."""
    sides = []
    for name in "qk":
        side = getattr(module, f"{name}_proj")(deciding).unflatten(-1, (-1, module.head_dim))
        if module.qk_norm:
            norm = getattr(module, f"{name}_norm")
            side = side / rms(side, norm.eps) * norm.weight.view_as(side[0])
        sides.append(side)
    query, key = sides[0] / math.sqrt(module.head_dim), share(sides[1], module.num_kv_groups)
    forget = torch.sigmoid(module.f_proj(deciding))
    scores = torch.einsum("ihn,jhn->hij", query, key)
    for i in range(len(query)):
        for j in range(i):
            scores[:, i, j] += forget[j + 1 : i + 1].log().sum(0)
    read = attended(module, scores, deciding, carried, None)
    return module.o_proj(read * torch.sigmoid(module.g_proj(deciding)) if module.use_output_gate else read)


RECURRENCES = {
    "fla_gated_deltanet": gated_deltanet,
    "fla_deltanet": deltanet,
    "fla_kda": kda,
    "fla_gated_deltaproduct": gated_deltaproduct,
    "fla_comba": comba,
    "fla_gla": gla,
    "fla_retnet": retnet,
    "fla_linear_attention": linear_attention,
    "fla_hgrn": hgrn,
    "fla_hgrn2": hgrn2,
    "fla_gsa": gsa,
    "fla_lightnet": lightnet,
    "fla_mamba": mamba,
    "fla_mamba2": mamba2,
    "fla_rwkv6": rwkv6,
    "fla_rwkv7": rwkv7,
    "fla_rwkv6_channel": rwkv6_channel,
    "fla_rwkv7_channel": rwkv7_channel,
    "fla_attention": attention,
    "fla_forgetting_attention": forgetting_attention,
}
"""The recurrence of each adapter."""

PARAMETERS = {"fla_hgrn": ("lower_bound",), "fla_hgrn2": ("lower_bound",)}
"""Arguments of a layer, in addition to its streams, that determine factors."""


def frozen(module: nn.Module, layer: Layer, carried: dict[str, Tensor]) -> Tensor:
    """Run a layer's recurrence in float64 on the real tokens of every sequence, frozen on a trace; zeros elsewhere.

    `carried`: one stream for each port of the layer.
    """
    module = copy.deepcopy(module).double()
    deciding, inputs = layer.operator.inputs, {}
    for name in PARAMETERS.get(layer.architecture, ()):
        inputs[name] = layer.arguments.get(name)
    real = torch.ones(layer.input.shape[:2], dtype=torch.bool) if layer.mask is None else layer.mask
    result = torch.zeros(layer.output.shape, dtype=torch.float64)
    with torch.no_grad():
        for b, tokens in enumerate(real):
            streams = [s[port][b, tokens].double() for port in carried for s in (deciding, carried)]
            if layer.architecture == "fla_rwkv7" and len(streams) == 2:
                streams += [torch.zeros(0)] * 2
            result[b, tokens] = RECURRENCES[layer.architecture](module, *streams, **inputs)
    return result
