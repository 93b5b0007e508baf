"""Plain forms of flash-linear-attention's fused modules and functions: norms, gates, rotations, the gated MLP.

The package's kernels compute in float32 and round their results, and so do these forms, in float64 for a float64 input.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.registry import register_plain_form
from unilinattn.rules.mixing_functions import register_plain_function

_NORMS = "fla.modules.norm.layernorm"
_GATED_NORMS = "fla.modules.norm.fused_norm_gate"
_ACTIVATIONS = "fla.modules.activations"


@register_plain_form(f"{_NORMS}.RMSNorm", f"{_NORMS}.LayerNorm", f"{_NORMS}.GroupNorm")
def norm(
    module: Any,
    x: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Add the residual stream, if one is given, and normalise each group of channels; with `prenorm` return both."""
    return _normed(module, x, None, residual, prenorm, residual_in_fp32)


@register_plain_form(f"{_GATED_NORMS}.FusedRMSNormGated", f"{_GATED_NORMS}.FusedLayerNormGated")
def gated_norm(
    module: Any,
    x: Tensor,
    g: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Do the same as `norm`, and multiply by an activated gate."""
    return _normed(module, x, g, residual, prenorm, residual_in_fp32)


@register_plain_form("fla.modules.mlp.GatedMLP")
def gated_mlp(module: Any, x: Tensor, **_: Any) -> Tensor:
    """Multiply two projections, one of them activated, and project the product."""
    if module.hidden_act != "swish":
        raise UncoveredError(f"the activation {module.hidden_act!r} of GatedMLP has no plain form; accepted: 'swish'.")
    gate, y = module.gate_proj(x), module.up_proj(x)
    projected: Tensor = module.down_proj(functional.silu(gate) * y)
    return projected


@register_plain_form("fla.modules.norm.layernorm_gated.RMSNormGated")
def gated_group_norm(module: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Normalise each group of channels, with the gate before or after."""
    gate = None if z is None else functional.silu(z)
    x = x if gate is None or module.norm_before_gate else x * gate
    size = module.group_size or x.shape[-1]
    normed = functional.rms_norm(x.unflatten(-1, (-1, size)), (size,), None, module.eps).flatten(-2) * module.weight
    return normed * gate if gate is not None and module.norm_before_gate else normed


@register_plain_form("fla.modules.fused_bitlinear.FusedBitLinear")
def quantised_linear(module: Any, x: Tensor) -> Tensor:
    """Normalise, round to 8 bits and multiply by a weight of three values; the rounding is a frozen factor."""
    normed = functional.rms_norm(x, x.shape[-1:], module.norm.weight, module.norm.eps)
    value = normed.detach()
    step = value.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    # Half a step is rounded away from zero.
    rounded = (value.abs() / step + 0.5).floor() * value.sign() * step
    factor = torch.where(value == 0, 1.0, rounded / torch.where(value == 0, 1.0, value))
    size = module.weight.abs().mean().clamp_min(1e-5)
    weight = (module.weight / size).round().clamp(-1, 1) * size
    return functional.linear(normed * factor, weight, module.bias)


register_plain_function(f"{_ACTIVATIONS}.swish", f"{_ACTIVATIONS}.ops.swish")(functional.silu)
register_plain_function(f"{_ACTIVATIONS}.sigmoid", f"{_ACTIVATIONS}.ops.sigmoid")(torch.sigmoid)


@register_plain_function(f"{_ACTIVATIONS}.ops.fast_gelu_impl")
def gelu(x: Tensor) -> Tensor:
    """Approximate GELU by tanh."""
    return functional.gelu(x, approximate="tanh")


@register_plain_function(f"{_ACTIVATIONS}.sqrelu", f"{_ACTIVATIONS}.ops.sqrelu")
def squared_relu(x: Tensor) -> Tensor:
    """Square the positive part."""
    return functional.relu(x).square()


@register_plain_function(f"{_ACTIVATIONS}.elu_p1", f"{_ACTIVATIONS}.ops.elu_p1")
def elu_plus_one(x: Tensor) -> Tensor:
    """Add one to ELU."""
    return functional.elu(x) + 1


@register_plain_function(f"{_ACTIVATIONS}.logsigmoid", f"{_ACTIVATIONS}.ops.logsigmoid")
def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """Divide the logarithm of the sigmoid by a temperature."""
    return functional.logsigmoid(x) / temperature


@register_plain_function(f"{_ACTIVATIONS}.swiglu", f"{_ACTIVATIONS}.ops.swiglu")
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Multiply by an activated tensor."""
    return functional.silu(x) * y


@register_plain_function("fla.modules.norm.l2norm.l2norm")
def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Divide the last axis by its norm."""
    normed = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return normed if output_dtype is None or x.dtype == torch.float64 else normed.to(output_dtype)


@register_plain_function(f"{_NORMS}.rms_norm_linear")
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
) -> Tensor:
    """Normalise and project."""
    _refuse_streams(residual, prenorm)
    normed = functional.rms_norm(x, x.shape[-1:], norm_weight, eps)
    return functional.linear(normed if norm_bias is None else normed + norm_bias, linear_weight, linear_bias)


@register_plain_function(f"{_GATED_NORMS}.rms_norm_swish_gate_linear")
def rms_norm_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise, multiply by an activated gate and project."""
    _refuse_streams(residual, prenorm)
    normed = functional.rms_norm(x, x.shape[-1:], norm_weight, eps)
    normed = normed if norm_bias is None else normed + norm_bias
    return functional.linear(normed * functional.silu(g), linear_weight, linear_bias)


def _refuse_streams(residual: Tensor | None, prenorm: bool) -> None:
    if residual is not None or prenorm:
        raise UncoveredError("a fused norm adds a stream before its projection")


@register_plain_function("fla.modules.rotary.rotary_embedding", "fla.modules.rotary.ops.rotary_embedding")
def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate pairs of channels (batch, token, head, channel) by the angles of their positions."""
    position = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    offset = seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[:, None]
    # A position before the first is that of padding.
    position = (position + offset).clamp_min(0)
    cos, sin = (table[position].unsqueeze(-2).to(x) for table in (cos, sin))
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, first * sin + second * cos
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


@register_plain_function("fla.modules.causal_conv1d.ops.causal_conv1d_update")
def first_token_convolution(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply a sequence's only token by the last tap; earlier tokens in a cache are not covered."""
    if weight is None or bool(cache.any()):
        raise UncoveredError("a short convolution continues from a cache")
    y = x * weight[:, -1]
    y = y if bias is None else y + bias
    y = y if activation is None else functional.silu(y)
    return (y if residual is None else y + residual), cache


@register_plain_function("fla.layers.utils.index_first_axis")
def unpadded(x: Tensor, indices: Tensor) -> Tensor:
    """Read some tokens of all sequences."""
    return x[indices]


@register_plain_function("fla.layers.utils.index_put_first_axis")
def padded(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Write tokens among zeros."""
    written = x.new_zeros(first_axis_dim, *x.shape[1:])
    written[indices] = x
    return written


@register_plain_function("fla.ops.rwkv7.fused_addcmul.fused_addcmul_rwkv7")
def interpolations(x: Tensor, delta: Tensor, *mixes: Tensor | None) -> tuple[Tensor, ...]:
    """Add fractions of the difference of two tokens."""
    return tuple(x + delta * mix for mix in mixes if mix is not None)


@register_plain_function("fla.ops.rwkv7.fused_k_update.fused_k_rwkv7")
def keys_by_rate(key: Tensor, a: Tensor, ka: Tensor) -> Tensor:
    """Multiply keys by a function of their rates."""
    return key + key * (a - 1) * ka


@register_plain_function("fla.ops.rwkv7.gate_output_correction.gate_output_correction")
def with_bonus(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Add the bonus of each token, and multiply by the gate."""
    bonus = (r * k * r_k).sum(-1, keepdim=True) * v
    return (o + bonus.flatten(-2).view(o.shape)) * g


def _normed(
    module: Any, x: Tensor, gate: Tensor | None, residual: Tensor | None, prenorm: bool, in_float32: bool
) -> Any:
    exact = torch.promote_types(x.dtype, torch.float32)
    total = x.to(exact) if residual is None else x.to(exact) + residual.to(exact)
    is_rms = any("RMS" in ancestor.__name__ for ancestor in type(module).__mro__)
    is_rms = is_rms or getattr(module, "is_rms_norm", False)
    groups = getattr(module, "num_groups", 1)
    grouped = total.unflatten(-1, (groups, -1))
    width = grouped.shape[-1:]
    if is_rms:
        normed = functional.rms_norm(grouped, width, None, module.eps)
    else:
        normed = functional.layer_norm(grouped, width, None, None, module.eps)
    normed = normed.flatten(-2)
    normed = normed if module.weight is None else normed * module.weight
    normed = normed if module.bias is None else normed + module.bias
    if gate is not None:
        activate = torch.sigmoid if module.activation == "sigmoid" else functional.silu
        normed = normed * activate(gate.to(exact))
    normed = normed.to(x.dtype)
    if not prenorm:
        return normed
    wanted = residual.dtype if residual is not None else torch.float32 if in_float32 else x.dtype
    return normed, total.to(wanted)
