"""Softmax attention of timm's vision transformers: ViT, DeiT and what else is built of the same module."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from unilinattn.architectures.call import Call, package_version
from unilinattn.errors import UncoveredError
from unilinattn.flow import Flow
from unilinattn.mixers import Dense
from unilinattn.registry import register_architecture


@register_architecture(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    name="timm-attention",
    kind="softmax attention",
)
def timm_attention(call: Call) -> Flow:
    """Attention of timm's ViT and DeiT, fused or not: normed queries and keys, scaled output and gate included.

    HMA ACL Eq. 1; Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021). The weights are recomputed in plain form,
    which is what the fused kernel computes too; the norm and the gate between attention and projection are frozen.
    """
    host, weight = call.host, call.weight
    qkv, heads = host.qkv, host.num_heads
    bias = call.cast(qkv.bias)
    query, key, _ = functional.linear(call.input, weight(qkv.weight), bias).chunk(3, dim=-1)
    query, key = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, key))
    scores = (host.scale * _normed(call, host.q_norm, query)) @ _normed(call, host.k_norm, key).transpose(2, 3)
    weights = torch.softmax(scores + _mask(call, scores), dim=-1)

    value_bias = None if bias is None else bias.chunk(3)[2]
    flow = Flow(call.input).matrix(weight(qkv.weight).chunk(3)[2], value_bias, role="input").core(Dense(weights))
    _scale_norm(flow, call)
    gate = getattr(call.module, "gate", None)
    if gate is not None:
        flow.gate(torch.sigmoid(functional.linear(call.input, weight(gate.weight), call.cast(gate.bias))))
    return flow.matrix(weight(host.proj.weight), call.cast(host.proj.bias), role="output")


def _normed(call: Call, norm: nn.Module, x: Tensor) -> Tensor:
    """Let the host's own norm of queries or keys act, in the operator's precision."""
    return functional_call(norm, {name: call.weight(p) for name, p in norm.named_parameters()}, (x,))


def _mask(call: Call, scores: Float[Tensor, "batch head query key"]) -> Tensor:
    """Return what the host adds to the scores: a causal mask before a given one, which is boolean or added as it is."""
    mask = call.arguments.get("attn_mask")
    if call.arguments.get("is_causal"):
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if mask is None:
        return scores.new_zeros(())
    if mask.dtype != torch.bool:
        return call.weight(mask)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)


def _scale_norm(flow: Flow, call: Call) -> None:
    """Append the norm between attention and projection, which only some of these models have."""
    norm = getattr(call.module, "norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return
    if isinstance(norm, nn.LayerNorm):
        flow.layer_norm(call.cast(norm.weight), call.cast(norm.bias), norm.eps)
    elif type(norm).__name__.startswith(("RmsNorm", "RMSNorm")) and norm.eps is not None:
        flow.rms_norm(call.cast(norm.weight), float(norm.eps))
    else:
        raise UncoveredError(
            f"{call.name} (timm's Attention, {package_version(call.module)}): scale_norm with {norm} is not covered; "
            "LayerNorm and RmsNorm are."
        )
