"""Token-by-token recurrences of the reference models from their papers, with a deciding and a carried stream.

See `recurrences` for the streams. Layers without a recurrence (implicit filters) are sums over past tokens, as in their
papers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.architectures.recurrences import act, convolve
from tests.models.checks import pairs, unroll
from unilinattn.tracing.layer import Layer


def vim(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Two S6 with one gate, the second on the reversed sequence (Zhu et al., 2024, Algorithm 1)."""
    ahead = _s6(module, "", module.A_log, deciding, carried)
    back = _s6(module, "_b", module.A_b_log, deciding.flip(1), carried.flip(1)).flip(1)
    both = (ahead + back) * functional.silu(module.in_proj(deciding).chunk(2, dim=-1)[1])
    return module.out_proj(both / 2 if module.divide_out else both)


def _s6(module: nn.Module, suffix: str, log_rate: Tensor, deciding: Tensor, carried: Tensor) -> Tensor:
    conv, x_proj, dt_proj, skip = (getattr(module, name + suffix) for name in ("conv1d", "x_proj", "dt_proj", "D"))
    kernel, rate = conv.weight.squeeze(1), -torch.exp(log_rate)
    state = torch.zeros(len(deciding), *rate.shape, dtype=deciding.dtype)
    decided, carries, outputs = [], [], []
    for token, other in zip(deciding.unbind(1), carried.unbind(1), strict=True):
        decided.append(module.in_proj(token).chunk(2, dim=-1)[0])
        carries.append(module.in_proj(other).chunk(2, dim=-1)[0])
        convolved = convolve(kernel, conv.bias, decided)
        u, v = act("silu", convolved, convolved), act("silu", convolved, convolve(kernel, conv.bias, carries))
        step, key, query = x_proj(u).split([module.dt_rank, module.d_state, module.d_state], dim=-1)
        delta = functional.softplus(dt_proj(step))
        state = torch.exp(delta[..., None] * rate) * state + (delta * v)[..., None] * key[:, None, :]
        outputs.append((state * query[:, None, :]).sum(-1) + skip * v)
    return torch.stack(outputs, dim=1)


def s4(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """x' = A x + B u, y = Re C x with a dense A = diag - p p*, by the bilinear transform (Gu et al., 2022, Eq. 3)."""
    poles, low_rank, inputs, outputs, dt = module.layer.kernel.system()
    matrix = torch.diag_embed(poles) - low_rank[:, :, None] * low_rank.conj()[:, None]
    identity, half = torch.eye(matrix.shape[-1], dtype=matrix.dtype), dt[:, :, None] / 2 * matrix
    step = torch.linalg.solve(identity - half, identity + half)
    write = torch.linalg.solve(identity - half, (dt * inputs)[..., None])[..., 0]

    def convolved(stream: Tensor) -> Tensor:
        state, reads = torch.zeros(len(stream), *write.shape, dtype=write.dtype), []
        for token in stream.unbind(1):
            state = (step @ state[..., None])[..., 0] + write * token[..., None]
            reads.append((outputs * state).sum(-1).real + module.layer.D[0] * token)
        return torch.stack(reads, dim=1)

    decided, carries = convolved(deciding), convolved(carried)
    gate = module.output_linear[0](act("gelu", decided, decided)).chunk(2, dim=-1)[1]
    return module.output_linear[0](act("gelu", decided, carries)).chunk(2, dim=-1)[0] * torch.sigmoid(gate)


def dss(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """A diagonal state space, in its softmax form or by zero-order hold (Gupta et al., 2022, Proposition 1)."""
    kernel, length = module.kernel, deciding.shape[1]
    dt, weights = torch.exp(kernel.log_dt), pairs(kernel.W)[0]
    if kernel.version == "exp":
        poles = torch.complex(-torch.exp(kernel.Lambda_log_neg_re), kernel.Lambda_im)
        step = torch.complex(dt[:, :1] * poles.real, dt[:, 1:] * poles.imag)
        read = weights * (torch.exp(step) - 1) / poles
        start = torch.zeros_like(step)
    else:
        poles = pairs(kernel.Lambda)
        step = torch.complex(dt[:, :1] * poles.real, dt[:, 1:] * poles.imag)
        start = torch.where(poles.real > 0, -(length - 1) * step, 0)
        total = sum(torch.exp(step * tap + start) for tap in range(length))
        # The authors' bounded reciprocal of (e^{step L} - 1) Lambda = total (e^step - 1) Lambda.
        shrinking = torch.where(poles.real > 0, -step, step)
        size = ((torch.exp(shrinking * length) - 1) * poles).abs() ** 2
        read = weights / poles / total * size / (size + kernel.epsilon)

    def convolved(stream: Tensor) -> Tensor:
        states = unroll(torch.exp(step), torch.exp(start) * stream[..., None])
        return (read * states).sum(-1).real + module.D[0] * stream

    return module.output_linear(act("gelu", convolved(deciding), convolved(carried)))


def s5(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """One state space over all channels, by zero-order hold or bilinear (Smith et al., 2023, Eq. 2 and 6)."""
    seq = module.seq
    poles, step = torch.complex(seq.Lambda_re, seq.Lambda_im), torch.exp(seq.log_step[:, 0])
    if seq.clip_eigs:
        poles = torch.complex(seq.Lambda_re.clamp(max=-1e-4), seq.Lambda_im)
    if seq.discretization == "zoh":
        decay, gain = torch.exp(step * poles), (torch.exp(step * poles) - 1) / poles
    else:
        inverse = 1 / (1 - step / 2 * poles)
        decay, gain = inverse * (1 + step / 2 * poles), inverse * step

    def mixed(stream: Tensor) -> Tensor:
        states = unroll(decay, (stream + 0j) @ (gain[:, None] * pairs(seq.B)).T)
        return (2 if seq.conj_sym else 1) * (states @ pairs(seq.C).T).real + seq.D * stream

    branch = mixed(deciding)
    chord = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (branch + 0.044715 * branch**3)))
    return chord * mixed(carried) * torch.sigmoid(module.out2(chord * branch))


def gss(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """GELU, a norm, a diagonal state space with unit step, and a wide gate (Mehta et al., 2022, Section 3.2)."""
    dss, norm = module.dss, module.dss.norm
    poles = torch.complex(-torch.exp(dss.Lambda_real), torch.exp(dss.Lambda_imag))
    chord = torch.special.ndtr(module.to_v[0](deciding))
    branch, other = (chord * module.to_v[0](stream) for stream in (deciding, carried))
    deviation = torch.sqrt(branch.var(-1, unbiased=False, keepdim=True) + norm.eps)
    u = norm.weight * (other - other.mean(-1, keepdim=True)) / deviation + norm.bias
    states = unroll(torch.exp(poles), (torch.exp(poles) - 1) / poles * u[..., None])
    read = (torch.complex(dss.C_real, dss.C_imag) * states).sum(-1).real + dss.param_D * u
    return module.to_out(module.to_gate(read) * module.to_u(deciding))


def h3(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """Shifted keys times values through a diagonal state space, read by queries (Fu et al., 2023, Algorithm 1)."""
    shift, kernel = module.ssm_k_kernel["kernel"], module.kernel["kernel"]
    dt = torch.exp(kernel.log_dt)[:, None]
    half = dt / 2 * torch.complex(-torch.exp(kernel.inv_A_real), kernel.A_imag)
    step, write = (1 + half) / (1 - half), dt / (1 - half) * pairs(kernel.B)
    register = torch.zeros(len(deciding), *shift.B.shape, dtype=deciding.dtype)
    size = (module.num_heads, module.head_dim, module.head_dim, write.shape[1])
    state = torch.zeros(len(deciding), *size, dtype=write.dtype)
    outputs = []
    for token, other in zip(deciding.unbind(1), carried.unbind(1), strict=True):
        key = module.k_proj(token)
        register = functional.pad(register[..., :-1], (1, 0)) + shift.B * key[..., None]
        key = (shift.C[0] * register).sum(-1) + module.ssm_k_D * key
        query, key, value = (
            part.unflatten(-1, (module.num_heads, -1)) for part in (module.q_proj(token), key, module.v_proj(other))
        )
        product = key[..., :, None] * value[..., None, :]
        state = step[:, None, None] * state + write[:, None, None] * product[..., None]
        memory = 2 * (pairs(kernel.C)[0][:, None, None] * state).sum(-1).real + module.D[:, None, None] * product
        read = (query[..., :, None] * memory).sum(-2)
        outputs.append(module.output_linear(read.transpose(1, 2).flatten(1)))
    return torch.stack(outputs, dim=1)


def hyena(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """x_1 (h_1 * (x_2 (h_2 * ... (x_N v)))), each convolution a sum over past tokens (Poli et al., 2023, Def. 3.1)."""
    width, branch, other = module.d_model, _shortly(module, deciding), _shortly(module, carried)
    value = other[..., -width:]
    gates = branch[..., :-width].unflatten(-1, (module.order, width)).unbind(2)
    filters = module.filter_fn(deciding.shape[1]).unflatten(0, (width, module.order - 1))
    skips = module.filter_fn.bias.unflatten(0, (width, module.order - 1))
    for n in range(module.order - 1):
        value = gates[module.order - 1 - n] * value
        value = _summed(filters[:, n], value) + skips[:, n] * value
    return module.out_proj(gates[0] * value)


def multi_hyena(module: nn.Module, deciding: Tensor, carried: Tensor) -> Tensor:
    """q_i sum_j h_{i-j} k_j v_j per head, a sum over past tokens (Massaroli et al., 2023, Section 4)."""
    heads, branch, other = module.num_heads, _shortly(module, deciding), _shortly(module, carried)
    query, key, _ = (part.unflatten(-1, (heads, -1)) for part in branch.chunk(3, dim=-1))
    value = other.chunk(3, dim=-1)[2].unflatten(-1, (heads, -1))
    product = key[..., :, None] * value[..., None, :]
    size = product[0, 0, 0].numel()
    taps = module.filter_fn(deciding.shape[1]).repeat_interleave(size, dim=0)
    memory = _summed(taps, product.flatten(2)).unflatten(2, product.shape[2:])
    memory = memory + module.filter_fn.bias[:, None, None] * product
    return module.out_proj((query[..., :, None] * memory).sum(-2).flatten(2))


def _shortly(module: nn.Module, stream: Tensor) -> Tensor:
    """The projections of a stream after the short convolution."""
    kernel, past, outputs = module.short_filter.weight.squeeze(1), [], []
    for token in stream.unbind(1):
        past.append(module.in_proj(token))
        outputs.append(convolve(kernel, module.short_filter.bias, past))
    return torch.stack(outputs, dim=1)


def _summed(taps: Tensor, stream: Tensor) -> Tensor:
    """The sum over past tokens of each channel; tap t applies to the token t steps back."""
    past: list[Tensor] = []
    outputs = []
    for token in stream.unbind(1):
        past.append(token)
        outputs.append(convolve(taps.flip(1), None, past))
    return torch.stack(outputs, dim=1)


RECURRENCES = {
    "vim": vim,
    "s4": s4,
    "dss": dss,
    "s5": s5,
    "gss": gss,
    "h3": h3,
    "hyena": hyena,
    "multi-hyena": multi_hyena,
}
"""The recurrence, or the defining sum, of each adapter of a reference model."""


def frozen(module: nn.Module, layer: Layer, carried: Tensor) -> Tensor:
    """Run a layer's recurrence in float64, frozen on its input in a trace."""
    with torch.no_grad():
        return RECURRENCES[layer.architecture](module, layer.input.double(), carried.double())
