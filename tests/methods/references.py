"""Attention maps and contributions of each layer by plain loops over tokens, from the formulas of the papers.

The library's operators are not used: each reference reads the host's parameters, its input, and its attention weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def recurrent_shares(
    alpha: Tensor, skip: Tensor, x: Tensor, kernel: Tensor, mask: Tensor, out: Callable[[int, Tensor], Tensor], f
) -> Tensor:
    """T_i(x_j) of a Mamba block: x_j enters the convolution's output at m, which token i reads (LaTIM Eq. 19-22).

    alpha: (batch, channel, query, key); x: projected input (batch, token, channel); kernel: (channel, tap) by lag;
    f(m, tap): the activation applied to one tap of the output at m; out(i, u): gate, norm and output projection.
    """
    length = x.shape[1]
    rows = []
    for i in range(length):
        row = []
        for j in range(length):
            total = torch.zeros_like(x[:, 0])
            for lag in range(kernel.shape[1]):
                m = j + lag
                if m > i:
                    break
                read = alpha[:, :, i, m] + (skip if m == i else 0)
                total = total + read * f(m, kernel[:, lag] * x[:, j]) * mask[:, m, None]
            row.append(out(i, total))
        rows.append(torch.stack(row, dim=1))
    return torch.stack(rows, dim=1)


def recurrent_bias(alpha: Tensor, skip: Tensor, levels: Tensor, mask: Tensor, out) -> Tensor:
    """The contribution of the convolution's bias to each output; `levels`: the bias at each m after the activation."""
    length = alpha.shape[-1]
    rows = []
    for i in range(length):
        total = torch.zeros_like(levels[:, 0])
        for m in range(i + 1):
            total = total + (alpha[:, :, i, m] + (skip if m == i else 0)) * levels[:, m] * mask[:, m, None]
        rows.append(out(i, total))
    return torch.stack(rows, dim=1)


def convolved(x: Tensor, conv: nn.Conv1d, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return the causal convolution's output, computed token by token, its kernel by lag, and its bias."""
    kernel, bias = conv.weight[part, 0].flip(-1), conv.bias[part]
    rows = []
    for i in range(x.shape[1]):
        total = bias.expand(x.shape[0], -1)
        for lag in range(min(kernel.shape[1], i + 1)):
            total = total + kernel[:, lag] * x[:, i - lag]
        rows.append(total)
    return torch.stack(rows, dim=1), kernel, bias


def recurrent(alpha: Tensor, core: Tensor, skip: Tensor, x, convolution, mask: Tensor, out) -> dict[str, Tensor]:
    """Assemble the reference of a Mamba block, exact and with f = SiLU."""
    conv_output, kernel, bias = convolution
    slope = torch.sigmoid(conv_output)
    return {
        "alpha": core,
        "shares": recurrent_shares(alpha, skip, x, kernel, mask, out, lambda m, tap: slope[:, m] * tap),
        "bias": recurrent_bias(alpha, skip, slope * bias, mask, out),
        "split_shares": recurrent_shares(alpha, skip, x, kernel, mask, out, lambda m, tap: functional.silu(tap)),
        "split_bias": recurrent_bias(alpha, skip, functional.silu(bias).expand_as(slope), mask, out),
    }


def mamba_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """S6: alpha_ij = C_i (prod_{k=j+1..i} exp(delta_k A)) delta_j B_j, one head per channel (HMA ACL Eq. 6-8, 14)."""
    mask = real.double()
    projected, gate = (mixer.in_proj(x * mask[..., None])).chunk(2, dim=-1)
    convolution = convolved(projected, mixer.conv1d)
    u = functional.silu(convolution[0]) * mask[..., None]
    step, key, query = mixer.x_proj(u).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    delta = functional.softplus(mixer.dt_proj(step))
    rate = -torch.exp(mixer.A_log)
    batch, length, channels = delta.shape
    alpha = torch.zeros(batch, channels, length, length, dtype=x.dtype)
    for i in range(length):
        for j in range(i + 1):
            decay = torch.ones(batch, channels, key.shape[-1], dtype=x.dtype)
            for k in range(j + 1, i + 1):
                decay = decay * torch.exp(delta[:, k, :, None] * rate)
            written = delta[:, j, :, None] * key[:, j, None, :]
            alpha[:, :, i, j] = (query[:, i, None, :] * decay * written).sum(-1)

    def out(i: int, v: Tensor) -> Tensor:
        return (functional.silu(gate[:, i]) * v) @ mixer.out_proj.weight.T

    return recurrent(alpha, alpha, mixer.D, projected, convolution, mask, out)


def mamba2_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """SSD: alpha_ij = (C_i . B_j) exp(sum_{j < k <= i} delta_k A) delta_j per head (LaTIM Eq. 13-14)."""
    mask = real.double()
    inner, heads, groups = mixer.intermediate_size, mixer.num_heads, mixer.n_groups
    gate, xbc, step = mixer.in_proj(x * mask[..., None]).split([inner, mixer.conv_dim, heads], dim=-1)
    every = convolved(xbc, mixer.conv1d)
    key, query = (functional.silu(every[0]) * mask[..., None])[..., inner:].chunk(2, dim=-1)
    delta = functional.softplus(step + mixer.dt_bias).clamp(*mixer.time_step_limit)
    rate = -torch.exp(mixer.A_log)
    batch, length, state = x.shape[0], x.shape[1], mixer.ssm_state_size
    alpha = torch.zeros(batch, heads, length, length, dtype=x.dtype)
    for h in range(heads):
        group = slice((h * groups // heads) * state, (h * groups // heads + 1) * state)
        for i in range(length):
            for j in range(i + 1):
                decay = torch.exp(rate[h] * delta[:, j + 1 : i + 1, h].sum(1))
                alpha[:, h, i, j] = (query[:, i, group] * key[:, j, group]).sum(-1) * decay * delta[:, j, h]
    wide = alpha.repeat_interleave(inner // heads, dim=1)
    skip = mixer.D.repeat_interleave(inner // heads)
    convolution = convolved(xbc[..., :inner], mixer.conv1d, slice(inner))
    u = functional.silu(convolution[0]) * mask[..., None]
    mixed = torch.einsum("beij,bje->bie", wide, u) + skip * u
    gated = (functional.silu(gate) * mixed).unflatten(2, (groups, -1))
    scale = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + mixer.norm.variance_epsilon).expand_as(gated).flatten(2)

    def out(i: int, v: Tensor) -> Tensor:
        return (mixer.norm.weight * scale[:, i] * functional.silu(gate[:, i]) * v) @ mixer.out_proj.weight.T

    return recurrent(wide, alpha, skip, xbc[..., :inner], convolution, mask, out)


def s4d_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """S4D: alpha_ij = K[i - j], then GELU and a gated projection, with frozen slope and gate."""
    length = x.shape[1]
    kernel = mixer.kernel(length)
    alpha = torch.zeros(x.shape[0], x.shape[2], length, length, dtype=x.dtype)
    for i in range(length):
        for j in range(i + 1):
            alpha[:, :, i, j] = kernel[:, i - j]
    mixed = torch.einsum("beij,bje->bie", alpha, x) + mixer.D * x
    slope = 0.5 * (1 + torch.erf(mixed / 2**0.5))
    weight, bias = mixer.output_linear[0].weight.squeeze(-1), mixer.output_linear[0].bias
    carry, other = weight.chunk(2)
    gate = torch.sigmoid(functional.gelu(mixed) @ other.T + bias.chunk(2)[1])
    shares = torch.zeros(x.shape[0], length, length, x.shape[2], dtype=x.dtype)
    for i in range(length):
        for j in range(length):
            read = alpha[:, :, i, j] + (mixer.D if i == j else 0)
            shares[:, i, j] = gate[:, i] * ((slope[:, i] * read * x[:, j]) @ carry.T)
    return {"alpha": alpha, "shares": shares, "bias": gate * bias.chunk(2)[0]}


def attention_shares(alpha: Tensor, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """T_i(x_j) = sum_h W_o^h alpha^h_ij W_v^h x_j (LaTIM Eq. 4, without the residual)."""
    heads, length = alpha.shape[1], x.shape[1]
    width = out.shape[1] // heads
    shares = torch.zeros(*alpha.shape[:1], length, length, out.shape[0], dtype=x.dtype)
    for h in range(heads):
        kv = h * into.shape[0] // (heads * width)
        path = out[:, h * width : (h + 1) * width] @ into[kv * width : (kv + 1) * width]
        for i in range(length):
            for j in range(length):
                shares[:, i, j] += alpha[:, h, i, j, None] * (x[:, j] @ path.T)
    return shares


def llama_reference(mixer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Softmax attention with grouped values and projections without bias."""
    shares = attention_shares(weights, x, mixer.v_proj.weight, mixer.o_proj.weight)
    return {"alpha": weights, "shares": shares, "bias": torch.zeros_like(x)}


def gpt2_reference(mixer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Softmax attention with one matrix for queries, keys and values; the value bias passes through W_o."""
    into, offset = mixer.c_attn.weight.T[-x.shape[2] :], mixer.c_attn.bias[-x.shape[2] :]
    out = mixer.c_proj.weight.T
    bias = weights.sum(-1).repeat_interleave(x.shape[2] // weights.shape[1], dim=1).transpose(1, 2) * offset
    return {
        "alpha": weights,
        "shares": attention_shares(weights, x, into, out),
        "bias": bias @ out.T + mixer.c_proj.bias,
    }


def delta_map(mixer: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    """Gated delta rule of Qwen3-Next: alpha_ij is the coefficient of value j in what query i reads from the memory.

    The memory S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T is linear in the values, so it is kept as the
    coefficients of every token's value (Yang, Kautz and Hatamizadeh, 2025, Eq. 10).
    """
    mask = real.double()[..., None]
    groups, heads, size = mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim
    sizes = [size] * 2 + [mixer.value_dim // groups] * 2
    projected = mixer.in_proj_qkvz(x * mask).unflatten(-1, (groups, -1)).split(sizes, -1)
    strength, step = mixer.in_proj_ba(x * mask).unflatten(-1, (groups, -1)).chunk(2, -1)
    convolution = mixer.conv1d.weight[:, 0].flip(-1)
    mixed = torch.cat([part.flatten(2) for part in projected[:3]], -1)
    rows = []
    for i in range(x.shape[1]):
        taps = range(min(convolution.shape[1], i + 1))
        rows.append(functional.silu(sum(convolution[:, lag] * mixed[:, i - lag] for lag in taps)))
    query, key, _ = torch.stack(rows, 1).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    query, key = (
        (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // groups, 2)
        for part in (query.unflatten(-1, (groups, -1)), key.unflatten(-1, (groups, -1)))
    )
    beta = torch.sigmoid(strength.flatten(2))
    decay = torch.exp(-torch.exp(mixer.A_log) * functional.softplus(step.flatten(2) + mixer.dt_bias))
    length = x.shape[1]
    memory, rows = torch.zeros(x.shape[0], heads, length, size, dtype=x.dtype), []
    for t in range(length):
        memory = decay[:, t, :, None, None] * memory
        written = torch.eye(length, dtype=x.dtype)[t] - torch.einsum("bhjn,bhn->bhj", memory, key[:, t])
        memory = memory + (beta[:, t, :, None] * written)[..., None] * key[:, t, :, None]
        rows.append(torch.einsum("bhjn,bhn->bhj", memory, query[:, t] * size**-0.5))
    return torch.stack(rows, 2)


def recurrence_reference(
    recurrence: Callable[..., Tensor], alpha: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]:
    """Return the reference of a token-by-token recurrence with a deciding and a carried stream, and of its map.

    T_i(x_j) is the output at i for a carried stream of only x_j, less the output without a carried stream.
    """

    def reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
        bias = recurrence(mixer, x, torch.zeros_like(x), real)
        shares = []
        for j in range(x.shape[1]):
            one = torch.zeros_like(x)
            one[:, j] = x[:, j]
            shares.append(recurrence(mixer, x, one, real) - bias)
        return {"alpha": alpha(mixer, x, real), "shares": torch.stack(shares, dim=2), "bias": bias}

    return reference
