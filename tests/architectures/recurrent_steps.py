"""Token-by-token recurrences of RWKV-4, RG-LRU, mLSTM, lightning attention and LFM2 from their papers.

As in `recurrences`, the deciding stream determines keys, decays, gates and norms, and the carried stream is the input
of the frozen layer.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.architectures.recurrences import convolve, host_mask
from unilinattn.tracing.layer import Layer


@dataclass
class Streams:
    """The two inputs of a layer (batch, length, channel), the mask of real tokens, and the positions."""

    deciding: Tensor
    carried: Tensor
    mask: Tensor
    positions: Tensor

    @property
    def length(self) -> int:
        return self.deciding.shape[1]


def rwkv4(layer: nn.Module, x: Streams) -> Tensor:
    """Token shift, decaying sums of exp(k) v and exp(k) with decay exp(-exp(w)), a bonus u, receptance (Eq. 11-16)."""

    def mixed(stream: Tensor, t: int, mix: Tensor) -> Tensor:
        last = stream[:, t - 1] if t else torch.zeros_like(stream[:, 0])
        return mix[0, 0] * stream[:, t] + (1 - mix[0, 0]) * last

    above = below = torch.zeros(1, layer.attention_hidden_size, dtype=x.deciding.dtype)
    fading = torch.exp(-torch.exp(layer.time_decay))
    rescaled = layer.output.weight
    if layer.config.rescale_every > 0:
        rescaled = rescaled / 2 ** (layer.layer_id // layer.config.rescale_every)
    outputs = []
    for t in range(x.length):
        weight = torch.exp(layer.key(mixed(x.deciding, t, layer.time_mix_key)))
        value = layer.value(mixed(x.carried, t, layer.time_mix_value))
        projected_value = torch.exp(layer.time_first) * weight
        read = (above + projected_value * value) / (below + projected_value)
        above, below = fading * above + weight * value, fading * below + weight
        receptance = torch.sigmoid(layer.receptance(mixed(x.deciding, t, layer.time_mix_receptance)))
        outputs.append((receptance * read) @ rescaled.T)
    return torch.stack(outputs, dim=1)


def rwkv4_channel(layer: nn.Module, x: Streams) -> Tensor:
    """W_v max(W_k k', 0)^2 gated by receptance, k' and r' mixed from a token and the previous one (Eq. 17-19)."""

    def mixed(stream: Tensor, t: int, mix: Tensor) -> Tensor:
        last = stream[:, t - 1] if t else torch.zeros_like(stream[:, 0])
        return mix[0, 0] * stream[:, t] + (1 - mix[0, 0]) * last

    rescaled = layer.value.weight
    if layer.config.rescale_every > 0:
        rescaled = rescaled / 2 ** (layer.layer_id // layer.config.rescale_every)
    outputs = []
    for t in range(x.length):
        slope = layer.key(mixed(x.deciding, t, layer.time_mix_key)).clamp_min(0)
        hidden = slope * layer.key(mixed(x.carried, t, layer.time_mix_key))
        receptance = torch.sigmoid(layer.receptance(mixed(x.deciding, t, layer.time_mix_receptance)))
        outputs.append(receptance * (hidden @ rescaled.T))
    return torch.stack(outputs, dim=1)


def griffin(layer: nn.Module, x: Streams) -> Tensor:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t with a_t = sigmoid(Lambda)^(8 r_t), reset at position 0."""
    unit, kernel = layer.rg_lru, layer.conv_1d.weight.squeeze(1)

    def gate(weight: Tensor, bias: Tensor, u: Tensor) -> Tensor:
        parts = [part @ w + b for part, w, b in zip(u.chunk(len(weight), dim=-1), weight, bias, strict=True)]
        return torch.sigmoid(torch.cat(parts, dim=-1))

    # The host's parameter is the negative of the paper's Lambda.
    keep = torch.sigmoid(-unit.recurrent_param)
    state = torch.zeros(1, layer.lru_width, dtype=x.deciding.dtype)
    decided, carries, outputs = [], [], []
    for t in range(x.length):
        decided.append(layer.linear_x(x.deciding[:, t]))
        carries.append(layer.linear_x(x.carried[:, t]))
        u, v = (convolve(kernel, layer.conv_1d.bias, past) for past in (decided, carries))
        decay = keep ** (8 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias, u))
        entering = gate(unit.input_gate_weight, unit.input_gate_bias, u) * v
        continues = decay * state + torch.sqrt(1 - decay**2) * entering
        state = torch.where((x.positions[:, t] == 0)[:, None], entering, continues)
        outputs.append(layer.linear_out(state * layer.act_fn(layer.linear_y(x.deciding[:, t]))))
    return torch.stack(outputs, dim=1)


def xlstm(layer: nn.Module, x: Streams) -> Tensor:
    """C_t = f C + i k v^T, n_t = f n + i k, y = C^T q / max(abs(n . q), 1), then a LayerNorm per head (Eq. 19-27).

    In the unstabilised form, where the host's eps becomes exp(m) eps added to max(abs(n . q), 1).
    """
    config, heads, norm = layer.config, layer.config.num_heads, layer.multihead_norm
    cap = config.gate_soft_cap

    def projected(stream: Tensor) -> list[Tensor]:
        if config.weight_mode == "fused":
            sizes = [layer.qk_dim, layer.qk_dim, layer.v_dim, layer.v_dim]
            gates = layer.ifgate_preact(stream).chunk(2, dim=-1)
            return [*layer.qkv_opreact(stream).split(sizes, dim=-1), *gates]
        parts = (layer.q, layer.k, layer.v, layer.ogate_preact, layer.igate_preact, layer.fgate_preact)
        return [part(stream) for part in parts]

    weight, peak = 0.0, torch.zeros(1, heads, dtype=x.deciding.dtype)
    memories = {"deciding": 0.0, "carried": 0.0}
    reads, gates = {name: [] for name in memories}, []
    for t in range(x.length):
        query, key, projected_value, gate, enter, forget = projected(x.deciding[:, t])
        values = {"deciding": projected_value, "carried": projected(x.carried[:, t])[2]}
        query, key = (part.unflatten(-1, (heads, -1)) for part in (query, key))
        query = query / math.sqrt(query.shape[-1])
        enter, forget = (cap * torch.tanh(part / cap) for part in (enter, forget))
        peak = torch.maximum(peak + torch.log(torch.sigmoid(forget)), enter)
        enter, forget = torch.exp(enter)[..., None], torch.sigmoid(forget)[..., None]
        weight = forget * weight + enter * key
        size = torch.clamp((weight * query).sum(-1).abs(), min=1) + torch.exp(peak) * config.eps
        for name, value in values.items():
            written = (enter * key)[..., None] * value.unflatten(-1, (heads, 1, -1))
            memories[name] = forget[..., None] * memories[name] + written
            reads[name].append((memories[name] * query[..., None]).sum(-2) / size[..., None])
        gates.append(torch.sigmoid(gate))
    deciding, carried = (torch.stack(part, dim=1) for part in reads.values())
    deviation = torch.sqrt(deciding.var(-1, unbiased=False, keepdim=True) + norm.eps)
    normed = ((carried - carried.mean(-1, keepdim=True)) / deviation).flatten(2) * norm.weight
    normed = normed if norm.bias is None else normed + norm.bias
    return layer.out_proj(torch.stack(gates, dim=1) * normed)


def minimax(layer: nn.Module, x: Streams) -> Tensor:
    """S_t = exp(-slope) S_{t-1} + k v^T, y = S^T q, an RMS norm over all heads, a sigmoid gate (Lightning, Eq. 1-3)."""
    heads, size = layer.num_attention_heads, layer.head_dim
    base = 2 ** (-8 / heads)
    place = 1 - layer.layer_idx / (layer.num_hidden_layers - 1 + 1e-5) + 1e-5
    fading = torch.tensor([math.exp(-(base ** (head + 1)) * place) for head in range(heads)], dtype=x.deciding.dtype)
    states = {"deciding": 0.0, "carried": 0.0}
    outputs = []
    for t in range(x.length):
        real = x.mask[:, t, None, None].to(x.deciding.dtype)
        before = layer.qkv_proj(x.deciding[:, t]).unflatten(-1, (heads, 3 * size))
        carried = layer.qkv_proj(x.carried[:, t]).unflatten(-1, (heads, 3 * size))[..., 2 * size :]
        query, key, value = (layer.act_fn(before) * real).split(size, dim=-1)
        # The chord of an activation with f(0) = 0 at the deciding stream, which is never zero in a random draw.
        chord = layer.act_fn(before[..., 2 * size :]) / before[..., 2 * size :]
        read = {}
        for name, v in (("deciding", value), ("carried", chord * carried * real)):
            states[name] = fading[:, None, None] * states[name] + key[..., None] * v[..., None, :]
            read[name] = (states[name] * query[..., None]).sum(-2).flatten(1)
        square = read["deciding"].pow(2).mean(-1, keepdim=True)
        normed = layer.norm.weight * read["carried"] / torch.sqrt(square + layer.norm.variance_epsilon)
        outputs.append(layer.out_proj(torch.sigmoid(layer.output_gate(x.deciding[:, t])) * normed))
    return torch.stack(outputs, dim=1)


def lfm2(layer: nn.Module, x: Streams) -> Tensor:
    """C * conv(B * x), where B, C and x are projections of real tokens."""
    past, outputs = [], []
    for t in range(x.length):
        real = x.mask[:, t, None].to(x.deciding.dtype)
        enter, leave, _ = layer.in_proj(x.deciding[:, t] * real).chunk(3, dim=-1)
        past.append(enter * layer.in_proj(x.carried[:, t] * real).chunk(3, dim=-1)[2])
        outputs.append(layer.out_proj(leave * convolve(layer.conv.weight.squeeze(1), layer.conv.bias, past)))
    return torch.stack(outputs, dim=1)


STEPS = {
    "rwkv4": rwkv4,
    "rwkv4_channel": rwkv4_channel,
    "griffin": griffin,
    "xlstm": xlstm,
    "minimax": minimax,
    "lfm2": lfm2,
}
"""The recurrence of each adapter."""


def frozen(module: nn.Module, layer: Layer, carried: Tensor, positions: Tensor | None = None) -> Tensor:
    """Run a layer's recurrence in float64, frozen on its input in a trace; `positions` count real tokens by default."""
    batch, length = layer.input.shape[:2]
    mask = torch.ones(batch, length, dtype=torch.bool) if layer.mask is None else layer.mask
    positions = (mask.cumsum(1) - 1).clamp_min(0) if positions is None else positions
    with torch.no_grad():
        streams = Streams(layer.input.double(), carried.double(), host_mask(module, mask), positions.expand(batch, -1))
        return STEPS[layer.architecture](module, streams)
