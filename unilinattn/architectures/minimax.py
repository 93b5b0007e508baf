"""MiniMax: lightning attention, a linear attention with one fixed decay per head."""

import torch
from torch.nn import functional

from unilinattn.call import Call, refusing
from unilinattn.mixers import ScalarDecay
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention",
    name="minimax",
    kind="lightning attention",
    extra_outputs=1,
    check=refusing("past_key_values"),
)
def minimax(call: Call) -> Flow:
    """Lightning attention of MiniMax: activated queries, keys and values, an RMS norm, then a sigmoid gate.

    Qin et al., ICML 2024 (Lightning Attention-2); MiniMax-01, 2025, section 2.2. The host computes in blocks with
    tables of decays, which equals one recurrence with decay exp(-slope) per head. Only the values carry.
    """
    host = call.host
    heads, width = host.num_attention_heads, host.head_dim
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    # The rows of the fused projection are grouped by head, then by query, key and value.
    rows = host.qkv_proj.weight.unflatten(0, (heads, 3, width))
    query_key, value = (
        call.stored(half).then(lambda r: r.flatten(0, -2)) for half in (rows[:, :2].transpose(0, 1), rows[:, 2])
    )
    activation = type(host.act_fn).__name__.removesuffix("Activation").lower()
    batch, length = call.input.shape[:2]

    side = Flow(call.input).matrix(query_key, role="input").activation(activation)
    side.scale(mask, role="act")
    queries, keys = side.value.unflatten(-1, (2, heads, width)).unbind(2)
    decay = -call.tensor(host.slope_rate).flatten().expand(batch, length, -1)

    flow = Flow(call.input).matrix(value, role="input").activation(activation).scale(mask, role="act")
    flow.core(ScalarDecay(queries, keys, decay))
    flow.rms_norm(call.tensor(host.norm.weight), host.norm.variance_epsilon)
    flow.gate(torch.sigmoid(functional.linear(call.input, call.tensor(host.output_gate.weight))))
    return flow.matrix(call.stored(host.out_proj.weight), role="output")
