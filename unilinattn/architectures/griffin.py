"""Griffin: the real-gated linear recurrent unit (RG-LRU) between a short convolution and a gate."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Call, host_function, padded_left, refusing
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _leak(block: nn.Module, mask: Tensor) -> str | None:
    if block.conv1d_width == 1 or not padded_left(mask):
        return None
    return "its recurrent blocks do not mask, and their convolutions read padded positions"


def _extras(block: nn.Module, arguments: object) -> int:
    """Count the block's outputs after the first: none in versions without the attention interface."""
    return int(hasattr(sys.modules[type(block).__module__], "eager_attention_forward"))


@register_architecture(
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock",
    name="griffin",
    kind="Griffin (RG-LRU)",
    padding_leak=_leak,
    extra_outputs=_extras,
    check=refusing("past_key_values"),
)
def griffin(call: Call) -> Flow:
    """RG-LRU of RecurrentGemma: h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t, each channel a head.

    De et al., 2024 (Griffin), Eq. 1-4. A segment begins wherever `position_ids` is 0: there the decay is exactly zero
    and the input is not scaled by sqrt(1 - a^2).
    """
    host, unit = call.host, call.host.rg_lru
    gate = call.affine(host.linear_y)(call.input)
    reset = (call.arguments["position_ids"] == 0).to(call.input.device).expand(call.input.shape[:2])

    flow = Flow(call.input).matrix(*call.affine(host.linear_x), role="input")
    flow.conv(*call.affine(host.conv_1d))
    input_gate = _block_gate(call, flow.value, unit.input_gate_weight, unit.input_gate_bias)
    recurrent_gate = _block_gate(call, flow.value, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    decay = -8.0 * recurrent_gate * functional.softplus(call.tensor(unit.recurrent_param))
    # The host's square root bounds its derivative where a is close to one.
    root = host_function(call.module, "SqrtBoundDerivative").apply(1 - torch.exp(2 * decay))
    scale = torch.where(reset.unsqueeze(-1), 1.0, root) * input_gate

    ones = torch.ones_like(scale[:, :, :1, None])
    flow.core(DiagonalDecay(ones, ones, decay.unsqueeze(-1), key_scale=scale, reset=reset))
    flow.gate(host.act_fn(gate))
    return flow.matrix(*call.affine(host.linear_out), role="output")


def _block_gate(call: Call, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sigmoid of a block-diagonal projection; weight (block, in, out), bias (block, out)."""
    blocks = x.unflatten(-1, weight.shape[:2])
    return torch.sigmoid(torch.einsum("blgi,gio->blgo", blocks, call.tensor(weight)) + call.tensor(bias)).flatten(2)
