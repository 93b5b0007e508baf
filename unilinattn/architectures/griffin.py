"""Griffin: the real-gated linear recurrent unit (RG-LRU) between a short convolution and a gate."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, host_function, padded_left
from unilinattn.flow import Flow
from unilinattn.mixers import DiagonalDecay
from unilinattn.registry import register_architecture


def _leak(block: nn.Module, mask: Tensor) -> str | None:
    if block.conv1d_width == 1 or not padded_left(mask):
        return None
    return "its recurrent blocks do not mask, and their convolutions read padded positions"


def _extras(block: nn.Module) -> int:
    """Count what a block returns beside its output: nothing, before the attention next to it joined the interface."""
    return int(hasattr(sys.modules[type(block).__module__], "eager_attention_forward"))


@register_architecture(
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock",
    name="griffin",
    kind="Griffin (RG-LRU)",
    leak=_leak,
    extras=_extras,
)
def griffin(call: Call) -> Flow:
    """RG-LRU as RecurrentGemma runs it: h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t, one head a channel.

    De et al., 2024 (Griffin), Eq. 1-4. Wherever `position_ids` is 0 a segment begins: the decay is exactly zero and
    the input is not scaled by sqrt(1 - a^2).
    """
    host, unit = call.host, call.host.rg_lru
    call.refuse("past_key_values")
    gate = functional.linear(call.input, call.weight(host.linear_y.weight), call.cast(host.linear_y.bias))
    reset = (call.arguments["position_ids"] == 0).to(call.input.device).expand(call.input.shape[:2])

    flow = Flow(call.input).matrix(call.weight(host.linear_x.weight), call.cast(host.linear_x.bias), role="input")
    flow.conv(call.weight(host.conv_1d.weight), call.cast(host.conv_1d.bias))
    entering = _block_gate(call, flow.value, unit.input_gate_weight, unit.input_gate_bias)
    forgetting = _block_gate(call, flow.value, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    decay = -8.0 * forgetting * functional.softplus(call.weight(unit.recurrent_param))
    # The host's own square root: where a is close to one its derivative is cut off.
    root = host_function(call.module, "SqrtBoundDerivative").apply(1 - torch.exp(2 * decay))
    scale = torch.where(reset.unsqueeze(-1), 1.0, root) * entering

    ones = torch.ones_like(scale[:, :, :1, None])
    flow.core(DiagonalDecay(ones, ones, decay.unsqueeze(-1), key_scale=scale, reset=reset))
    flow.gate(host.act_fn(gate))
    return flow.matrix(call.weight(host.linear_out.weight), call.cast(host.linear_out.bias), role="output")


def _block_gate(call: Call, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sigmoid of a block-diagonal projection; weight (block, in, out), bias (block, out)."""
    blocks = x.unflatten(-1, weight.shape[:2])
    return torch.sigmoid(torch.einsum("blgi,gio->blgo", blocks, call.weight(weight)) + call.weight(bias)).flatten(2)
