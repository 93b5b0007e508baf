"""Softmax attention of timm's vision transformers: ViT, DeiT and every model built from the same module."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from unilinattn.call import Call, package_version
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _check(call: Call) -> None:
    """Raise `UncoveredError` for a norm between attention and projection that is neither a LayerNorm nor an RmsNorm."""
    norm = _scale_norm_of(call)
    if norm is None or isinstance(norm, nn.LayerNorm) or (_is_rms_norm(norm) and norm.eps is not None):
        return
    raise UncoveredError(
        f"{call.name} (timm's Attention, {package_version(call.module)}): scale_norm with {norm} is not covered; "
        "LayerNorm and RmsNorm are."
    )


@register_architecture(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    name="timm-attention",
    kind="softmax attention",
    check=_check,
)
def timm_attention(call: Call) -> Flow:
    """Attention of timm's ViT and DeiT, fused or eager, with optional query, key and output norms and output gate.

    HMA ACL Eq. 1; Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021). The weights are recomputed in eager form,
    which the fused kernel equals. The norm and the gate between attention and projection are frozen.
    """
    host, heads = call.host, call.host.num_heads
    projection = call.affine(host.qkv)
    query, key, values = projection(call.input).chunk(3, dim=-1)
    query, key = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, key))
    scores = (host.scale * _normed(call, host.q_norm, query)) @ _normed(call, host.k_norm, key).transpose(2, 3)
    weights = torch.softmax(scores + _mask(call, scores), dim=-1)

    flow = Flow(call.input).matrix(*projection[-values.shape[2] :], role="input").core(Dense(weights))
    _scale_norm(flow, call)
    gate = getattr(call.module, "gate", None)
    if gate is not None:
        flow.gate(torch.sigmoid(call.affine(gate)(call.input)))
    return flow.matrix(*call.affine(host.proj), role="output")


def _normed(call: Call, norm: nn.Module, x: Tensor) -> Tensor:
    """Apply the host's norm of queries or keys in the operator's dtype."""
    return functional_call(norm, {name: call.tensor(p) for name, p in norm.named_parameters()}, (x,))


def _mask(call: Call, scores: Float[Tensor, "batch head query key"]) -> Tensor:
    """Return the addend of the scores: the causal mask if set, else the given boolean or additive mask, else 0."""
    mask = call.arguments.get("attn_mask")
    if call.arguments.get("is_causal"):
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if mask is None:
        return scores.new_zeros(())
    if mask.dtype != torch.bool:
        return call.tensor(mask)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)


def _scale_norm(flow: Flow, call: Call) -> None:
    """Append the norm between attention and projection, if the model has one."""
    norm = _scale_norm_of(call)
    if isinstance(norm, nn.LayerNorm):
        flow.layer_norm(*call.affine(norm), eps=norm.eps)
    elif norm is not None:
        flow.rms_norm(call.tensor(norm.weight), float(norm.eps))


def _scale_norm_of(call: Call) -> Any:
    norm = getattr(call.module, "norm", None)
    return None if isinstance(norm, nn.Identity) else norm


def _is_rms_norm(norm: nn.Module) -> bool:
    return type(norm).__name__.startswith(("RmsNorm", "RMSNorm"))
