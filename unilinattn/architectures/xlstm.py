"""xLSTM: the matrix memory mLSTM, its heads normed apart, behind an output gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, host_function, padded_left
from unilinattn.errors import UncoveredError
from unilinattn.flow import Flow
from unilinattn.mixers import MLSTM
from unilinattn.registry import register_architecture


def _leak(layer: nn.Module, mask: Tensor) -> str | None:
    return "its memory takes in padded tokens like any other" if padded_left(mask) else None


@register_architecture(
    "transformers.models.xlstm.modeling_xlstm.xLSTMLayer",
    name="xlstm",
    kind="xLSTM (mLSTM)",
    leak=_leak,
    extras=1,
)
def xlstm(call: Call) -> Flow:
    """mLSTM as xLSTM-7B has it: soft-capped exponential gates, a LayerNorm a head, a sigmoid output gate.

    Beck et al., NeurIPS 2024, Eq. 19-27; Beck et al., 2025 (xLSTM 7B). Only the values carry; the normaliser is
    frozen. The host starts from a memory of zeros with the running maximum m_0 = 0 whatever its kernel.
    """
    host, config = call.host, call.host.config
    if call.arguments.get("state") is not None:
        raise UncoveredError(
            f"{call.name}: it goes on from a state (use_cache, or more tokens than max_inference_chunksize = "
            f"{config.max_inference_chunksize}); run the whole sequence at once, without a cache."
        )
    (query, key, value, gate), (enter, forget) = _projections(call)
    x, heads = call.input, config.num_heads
    queries, keys = (functional.linear(x, *rows).unflatten(-1, (heads, -1)) for rows in (query, key))
    soft_cap = host_function(call.module, "soft_cap")
    enters, forgets = (soft_cap(functional.linear(x, *rows), config.gate_soft_cap) for rows in (enter, forget))
    core = MLSTM(queries * queries.shape[-1] ** -0.5, keys, functional.logsigmoid(forgets), enters, eps=config.eps)

    flow = Flow(x).matrix(*value, role="input").core(core)
    norm = host.multihead_norm
    flow.layer_norm(call.weight(norm.weight), call.cast(norm.bias), norm.eps, groups=heads)
    flow.gate(torch.sigmoid(functional.linear(x, *gate)))
    return flow.matrix(call.weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


Projection = tuple[Tensor, Tensor | None]


def _projections(call: Call) -> tuple[list[Projection], list[Projection]]:
    """Return weight and bias of query, key, value and output gate, and of input and forget gate."""
    host, heads = call.host, call.host.config.num_heads
    if host.config.weight_mode == "single":
        wide, narrow = [host.q, host.k, host.v, host.ogate_preact], [host.igate_preact, host.fgate_preact]
        first, second = ([(call.weight(p.weight), call.cast(p.bias)) for p in parts] for parts in (wide, narrow))
        return first, second
    sizes = [host.qk_dim, host.qk_dim, host.v_dim, host.v_dim]
    return _rows(call, host.qkv_opreact, sizes), _rows(call, host.ifgate_preact, [heads, heads])


def _rows(call: Call, projection: nn.Linear, sizes: list[int]) -> list[Projection]:
    bias = [None] * len(sizes) if projection.bias is None else call.weight(projection.bias).split(sizes)
    return list(zip(call.weight(projection.weight).split(sizes), bias, strict=True))
