"""LFM2 and LFM3: a short convolution between two gates is the only token mixer."""

from unilinattn.call import Call, projection_leak, refusing
from unilinattn.mixers import Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Mix
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv",
    "transformers.models.lfm2_moe.modeling_lfm2_moe.Lfm2MoeShortConv",
    "transformers.models.lfm3.modeling_lfm3.Lfm3ShortConv",
    name="lfm2",
    kind="short convolution (LFM2)",
    padding_leak=projection_leak,
    check=refusing("past_key_values"),
)
def lfm2(call: Call) -> Flow:
    """Gated short convolution of LFM2: C * conv(B * x), with the convolution as core.

    Liquid AI, LFM2 Technical Report, 2025, section 2.2. B, C and x are one projection; both gates are frozen.
    """
    host = call.host
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    masked = call.input if mask is None else call.input * mask
    projection, (kernel, bias) = call.affine(host.in_proj), call.affine(host.conv)
    input_gate, output_gate, values = projection(masked).chunk(3, dim=-1)
    core = Toeplitz(kernel.squeeze(1).flip(-1), batch=len(values), length=values.shape[1])

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(*projection[-values.shape[2] :], role="input").gate(input_gate)
    flow.stage(Mix("core", core, bias))
    flow.gate(output_gate)
    return flow.matrix(*call.affine(host.out_proj), role="output")
