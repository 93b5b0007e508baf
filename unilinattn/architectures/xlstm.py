"""xLSTM: the matrix memory mLSTM, a LayerNorm per head and an output gate."""

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Affine, Call, host_function, padded_left
from unilinattn.errors import UncoveredError
from unilinattn.mixers import MLSTM
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _leak(layer: nn.Module, mask: Tensor) -> str | None:
    return "its memory takes in padded tokens like any other" if padded_left(mask) else None


def _check(call: Call) -> None:
    if call.arguments.get("state") is not None:
        raise UncoveredError(
            f"{call.name}: the call continues from a state (use_cache, or more tokens than max_inference_chunksize = "
            f"{call.host.config.max_inference_chunksize}); run the whole sequence at once, without a cache."
        )


@register_architecture(
    "transformers.models.xlstm.modeling_xlstm.xLSTMLayer",
    name="xlstm",
    kind="xLSTM (mLSTM)",
    padding_leak=_leak,
    extra_outputs=1,
    check=_check,
)
def xlstm(call: Call) -> Flow:
    """mLSTM of xLSTM-7B: soft-capped exponential gates, a LayerNorm per head, a sigmoid output gate.

    Beck et al., NeurIPS 2024, Eq. 19-27; Beck et al., 2025 (xLSTM 7B). Only the values carry; the normaliser is
    frozen. With every kernel the host starts from a zero memory and the running maximum m_0 = 0.
    """
    host, config = call.host, call.host.config
    (query, key, value, gate), (enter, forget) = _projections(call)
    x, heads = call.input, config.num_heads
    queries, keys = (rows(x).unflatten(-1, (heads, -1)) for rows in (query, key))
    soft_cap = host_function(call.module, "soft_cap")
    inputs, forgets = (soft_cap(rows(x), config.gate_soft_cap) for rows in (enter, forget))
    core = MLSTM(queries * queries.shape[-1] ** -0.5, keys, functional.logsigmoid(forgets), inputs, eps=config.eps)

    flow = Flow(x).matrix(*value, role="input").core(core)
    norm = host.multihead_norm
    flow.layer_norm(*call.affine(norm), eps=norm.eps, groups=heads)
    flow.gate(torch.sigmoid(gate(x)))
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _projections(call: Call) -> tuple[list[Affine], list[Affine]]:
    """Return the projections of query, key, value and output gate, and those of input and forget gate."""
    host, heads = call.host, call.host.config.num_heads
    if host.config.weight_mode == "single":
        wide, narrow = [host.q, host.k, host.v, host.ogate_preact], [host.igate_preact, host.fgate_preact]
        return [call.affine(projection) for projection in wide], [call.affine(projection) for projection in narrow]
    sizes = [host.qk_dim, host.qk_dim, host.v_dim, host.v_dim]
    return _rows(call, host.qkv_opreact, sizes), _rows(call, host.ifgate_preact, [heads, heads])


def _rows(call: Call, projection: nn.Linear, sizes: list[int]) -> list[Affine]:
    rows, ends = call.affine(projection), list(accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
