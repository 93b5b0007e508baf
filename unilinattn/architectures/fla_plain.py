"""Plain forms of flash-linear-attention's fused modules between layers: norms and the gated MLP.

The package's kernels compute in float32 and round their results, and so do these forms, in float64 for a float64 input.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.registry import register_plain_form

_NORMS = "fla.modules.norm.layernorm"
_GATED_NORMS = "fla.modules.norm.fused_norm_gate"


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
