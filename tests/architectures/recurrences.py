"""Token-by-token recurrences of Mamba, Mamba-2, their variants and S4D from their papers, without operators.

Every function runs two streams through a layer. The deciding stream determines step sizes, keys, queries, gates, slopes
and norms; the carried stream is the input of the frozen layer. With the same stream twice the result is the output of
the layer.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.tracing.layer import Layer

MASKING = "apply_mask_to_padding_states"


def convolve(kernel: Tensor, bias: Tensor | None, past: list[Tensor]) -> Tensor:
    """One step of a causal convolution, `past` from the first token to the current one; kernel (channel, tap)."""
    total = torch.zeros_like(past[-1]) if bias is None else bias.expand_as(past[-1])
    for lag in range(min(kernel.shape[1], len(past))):
        total = total + kernel[:, -1 - lag] * past[-1 - lag]
    return total


def masks_by_function(module: nn.Module) -> bool:
    """Whether a host masks with a function of its module; older versions of some hosts mask elsewhere."""
    return hasattr(sys.modules[type(module).__module__], MASKING)


def host_mask(module: nn.Module, mask: Tensor) -> Tensor:
    """The mask that the host applies: older versions skip the mask of a single sequence."""
    if not masks_by_function(module):
        return mask
    return getattr(sys.modules[type(module).__module__], MASKING)(torch.ones(*mask.shape, 1), mask)[..., 0] == 1


def act(name: str, deciding: Tensor, carried: Tensor) -> Tensor:
    """The chord of the activation at the deciding stream times the carried stream: x sigmoid(x), x Phi(x)."""
    chord = {"silu": torch.sigmoid, "gelu": torch.special.ndtr}[name]
    return chord(deciding) * carried


def s6(
    module: nn.Module,
    deciding: Tensor,
    carried: Tensor,
    mask: Tensor,
    *,
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
    select: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """S6 token by token (HMA ACL Eq. 3 and 6-9); between a short convolution and a gate.

    `project` returns value and gate of a token, `select` step, key and query of a convolved token, each
    (batch, channel) or (batch, channel, state).
    """
    kernel, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    rate = -torch.exp(module.A_log).reshape(kernel.shape[0], -1)
    skip = module.D.flatten()
    state = torch.zeros(deciding.shape[0], *rate.shape, dtype=deciding.dtype)
    decided, carries, outputs = [], [], []
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        enters, leaves = (real, 1) if masks_by_function(module) else (1, real)
        branch, gate = project(deciding[:, t] * enters)
        decided.append(branch * leaves)
        carries.append(project(carried[:, t] * enters)[0] * leaves)
        convolved = convolve(kernel, bias, decided)
        u = act(module.activation, convolved, convolved) * real
        v = act(module.activation, convolved, convolve(kernel, bias, carries)) * real
        delta, key, query = select(u)
        state = torch.exp(delta[..., None] * rate) * state + (delta * v)[..., None] * key
        read = (state * query).sum(-1) + skip * v
        name = "silu" if masks_by_function(module) else module.activation
        outputs.append(module.out_proj(read * act(name, gate, gate)))
    return torch.stack(outputs, dim=1)


def mamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, key, query = module.x_proj(u).split(sizes, dim=-1)
        return functional.softplus(module.dt_proj(step)), key[:, None], query[:, None]

    return s6(module, deciding, carried, mask, project=lambda x: module.in_proj(x).chunk(2, dim=-1), select=select)


def mamba2(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """SSD with one decay per head, keys and queries of groups of heads, and a gated norm (LaTIM Eq. 13-14, 24)."""
    kernel, conv_bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    inner, heads, groups, size = module.intermediate_size, module.num_heads, module.n_groups, module.ssm_state_size
    # Versions without that function limit step sizes only from below.
    low, high = module.time_step_limit if masks_by_function(module) else (module.time_step_min, float("inf"))
    rate = -torch.exp(module.A_log)
    state = torch.zeros(deciding.shape[0], heads, inner // heads, size, dtype=deciding.dtype)
    # Consecutive heads belong to one group.
    group = [head * groups // heads for head in range(heads)]
    decided, carries, outputs = [], [], []
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        gate, branch, step = module.in_proj(deciding[:, t] * real).split([inner, module.conv_dim, heads], dim=-1)
        decided.append(branch)
        carries.append(module.in_proj(carried[:, t] * real).split([inner, module.conv_dim, heads], dim=-1)[1])
        convolved = convolve(kernel, conv_bias, decided)
        u = act(module.activation, convolved, convolved) * real
        v = (act(module.activation, convolved, convolve(kernel, conv_bias, carries)) * real)[:, :inner]
        key, query = (part.unflatten(-1, (groups, size))[:, group] for part in u[:, inner:].chunk(2, dim=-1))
        delta = functional.softplus(step + module.dt_bias).clamp(low, high)
        outputs.append((gate, key, query, delta, u[:, :inner], v))
    mixed = {}
    for name, of in (("deciding", 4), ("carried", 5)):
        memory, reads = state, []
        for gate, key, query, delta, *streams in outputs:
            x = streams[of - 4].unflatten(-1, (heads, -1))
            written = (delta[..., None] * x)[..., None] * key[:, :, None, :]
            memory = torch.exp(delta * rate)[..., None, None] * memory + written
            read = (memory * query[:, :, None, :]).sum(-1) + module.D[:, None] * x
            reads.append(read.flatten(1) * functional.silu(gate))
        mixed[name] = torch.stack(reads, dim=1)
    # Older versions have a norm without groups.
    groups = inner // getattr(module.norm, "group_size", inner)
    square = mixed["deciding"].unflatten(-1, (groups, -1)).pow(2).mean(-1, keepdim=True)
    scale = torch.rsqrt(square + module.norm.variance_epsilon)
    normed = (mixed["carried"].unflatten(-1, (groups, -1)) * scale).flatten(-2)
    return module.out_proj(module.norm.weight * normed)


def s4d(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """A diagonal state space with zero-order hold, stepped as a recurrence (HMA ACL Eq. 3-4), GELU, gated output."""
    parts = module.kernel
    dt = torch.exp(parts.log_dt)[:, None]
    poles = torch.complex(-torch.exp(parts.log_A_real), parts.A_imag)
    decay, write, read = torch.exp(dt * poles), (torch.exp(dt * poles) - 1) / poles, torch.view_as_complex(parts.C)
    states = [torch.zeros(deciding.shape[0], *poles.shape, dtype=poles.dtype) for _ in range(2)]
    weight, bias = module.output_linear[0].weight.squeeze(-1), module.output_linear[0].bias
    outputs = []
    for t in range(deciding.shape[1]):
        reads = []
        for k, stream in enumerate((deciding, carried)):
            states[k] = decay * states[k] + write * stream[:, t, :, None]
            # Only one pole of each conjugate pair is stored.
            reads.append(2 * (states[k] * read).sum(-1).real + module.D * stream[:, t])
        decides = functional.linear(act("gelu", reads[0], reads[0]), weight, bias).chunk(2, dim=-1)[1]
        carries = functional.linear(act("gelu", *reads), weight, bias).chunk(2, dim=-1)[0]
        outputs.append(carries * torch.sigmoid(decides))
    return torch.stack(outputs, dim=1)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def falcon_mamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 with step, key and query normalised, without weights."""

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, key, query = (rms(part, module.rms_eps) for part in module.x_proj(u).split(sizes, dim=-1))
        return functional.softplus(module.dt_proj(step)), key[:, None], query[:, None]

    return s6(module, deciding, carried, mask, project=lambda x: module.in_proj(x).chunk(2, dim=-1), select=select)


def jamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 with step, key and query normalised with weights."""
    norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = zip(module.x_proj(u).split(sizes, dim=-1), norms, strict=True)
        step, key, query = (rms(part, norm.variance_epsilon) * norm.weight for part, norm in parts)
        return functional.softplus(module.dt_proj(step)), key[:, None], query[:, None]

    return s6(module, deciding, carried, mask, project=lambda x: module.in_proj(x).chunk(2, dim=-1), select=select)


def zamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 per head, with step, key and query from the channels of the head; values and gates alternate."""
    rank, size, width = module.time_step_rank, module.ssm_state_size, module.mamba_head_dim

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        deltas, keys, queries = [], [], []
        for head in range(module.n_mamba_heads):
            branch = u[:, head * width : (head + 1) * width]
            step, key, query = (branch @ module.x_proj_weight[head].T).split([rank, size, size], dim=-1)
            step = step @ module.dt_proj_weight[head].T + module.dt_proj_bias[head]
            deltas.append(functional.softplus(step))
            keys += [key] * width
            queries += [query] * width
        return torch.cat(deltas, dim=1), torch.stack(keys, dim=1), torch.stack(queries, dim=1)

    def project(x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = module.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return value, gate

    return s6(module, deciding, carried, mask, project=project, select=select)


def falcon_h1(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """SSD with multipliers, and the norm before the gate, after it, or nowhere (LaTIM Eq. 13-14 and 24)."""
    kernel, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    inner, heads, groups, size = module.intermediate_size, module.num_heads, module.n_groups, module.ssm_state_size
    rate = -torch.exp(module.A_log)
    memories = [torch.zeros(len(deciding), heads, inner // heads, size, dtype=deciding.dtype) for _ in range(2)]
    pasts: list[list[Tensor]] = [[], []]
    group = [head * groups // heads for head in range(heads)]
    outputs = []
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        projected = [
            module.in_proj(x[:, t] * real * module.ssm_in_multiplier) * module.mup_vector[0, 0]
            for x in (deciding, carried)
        ]
        gate, _, step = projected[0].split([inner, module.conv_dim, heads], dim=-1)
        gate = functional.silu(gate)
        for past, whole in zip(pasts, projected, strict=True):
            past.append(whole[:, inner : inner + module.conv_dim])
        convolved = [convolve(kernel, bias, past) for past in pasts]
        streams = [act(module.activation, convolved[0], x) * real for x in convolved]
        key, query = (x.unflatten(-1, (groups, size))[:, group] for x in streams[0][:, inner:].chunk(2, dim=-1))
        delta = functional.softplus(step + module.dt_bias).clamp(*module.time_step_limit)
        reads = []
        for k, stream in enumerate(streams):
            x = stream[:, :inner].unflatten(-1, (heads, -1))
            written = (delta[..., None] * x)[..., None] * key[:, :, None]
            memories[k] = torch.exp(delta * rate)[..., None, None] * memories[k] + written
            reads.append(((memories[k] * query[:, :, None]).sum(-1) + module.D[:, None] * x).flatten(1))
        if not module.mamba_rms_norm:
            outputs.append(module.out_proj(reads[1] * gate))
            continue
        before = module.norm.norm_before_gate
        decides = (reads[0] if before else reads[0] * gate).unflatten(-1, (groups, -1))
        scale = (decides.pow(2).mean(-1, keepdim=True) + module.norm.variance_epsilon).rsqrt()
        # Gate and norm are frozen factors, so their order does not matter to the carried stream.
        normed = (reads[1].unflatten(-1, (groups, -1)) * scale).flatten(1) * module.norm.weight * gate
        outputs.append(module.out_proj(normed))
    return torch.stack(outputs, dim=1)


RECURRENCES = {
    "mamba": mamba,
    "mamba2": mamba2,
    "mamba2_floor": mamba2,
    "s4d": s4d,
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
    "zamba": zamba,
    "falcon_h1": falcon_h1,
}
"""The recurrence of each adapter."""


def frozen(module: nn.Module, layer: Layer, carried: Tensor) -> Tensor:
    """Run a layer's recurrence in float64, frozen on its input in a trace."""
    mask = torch.ones(layer.input.shape[:2], dtype=torch.bool) if layer.mask is None else layer.mask
    with torch.no_grad():
        return RECURRENCES[layer.architecture](module, layer.input.double(), carried.double(), host_mask(module, mask))
