"""LFM2: a short convolution between two gates mixes the tokens, and nothing else does."""

from torch.nn import functional

from unilinattn.architectures.call import Call, projection_leak
from unilinattn.flow import Flow
from unilinattn.mixers import Toeplitz
from unilinattn.registry import register_architecture
from unilinattn.stages import Mix


@register_architecture(
    "transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv",
    "transformers.models.lfm2_moe.modeling_lfm2_moe.Lfm2MoeShortConv",
    name="lfm2",
    kind="short convolution (LFM2)",
    leak=projection_leak,
)
def lfm2(call: Call) -> Flow:
    """LFM2's gated short convolution: C * conv(B * x), the convolution itself the core.

    Liquid AI, LFM2 Technical Report, 2025, section 2.2. B, C and x are one projection; both gates are frozen.
    """
    call.refuse("past_key_values")
    host = call.host
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    masked = call.input if mask is None else call.input * mask
    projection, bias = call.weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    entering, leaving, _ = functional.linear(masked, projection, bias).chunk(3, dim=-1)
    kernel = call.weight(host.conv.weight).squeeze(1).flip(-1)
    batch, length = call.input.shape[:2]

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(projection.chunk(3)[2], None if bias is None else bias.chunk(3)[2], role="input").gate(entering)
    flow.stage(Mix("core", Toeplitz(kernel, batch=batch, length=length), call.cast(host.conv.bias)))
    flow.gate(leaving)
    return flow.matrix(call.weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")
