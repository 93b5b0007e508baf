"""Multi-head latent attention: keys and values come from a normed low-rank latent."""

import torch

from unilinattn.architectures.attention_weights import attention_weights, weighted_values
from unilinattn.architectures.probe import probe, values_missed, with_output
from unilinattn.call import Call, Captured, package_version
from unilinattn.call.attention_interface import only_attention, require_same_tokens
from unilinattn.call.exactness import tolerance
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _check(call: Call) -> None:
    call.refuse("past_key_values")
    require_same_tokens(call)


@register_architecture(
    "transformers.models.axk1.modeling_axk1.AXK1Attention",
    "transformers.models.axk2.modeling_axk2.AXK2Attention",
    "transformers.models.bailing_hybrid.modeling_bailing_hybrid.BailingHybridAttention",
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention",
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention",
    "transformers.models.deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention",
    "transformers.models.dots3_note.modeling_dots3_note.Dots3NoteTextAttention",
    "transformers.models.glm4_moe_lite.modeling_glm4_moe_lite.Glm4MoeLiteAttention",
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextAttention",
    "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaAttention",
    "transformers.models.hy_v4.modeling_hy_v4.HYV4Attention",
    "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearAttention",
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashMLA",
    "transformers.models.minicpm3.modeling_minicpm3.MiniCPM3Attention",
    "transformers.models.mistral4.modeling_mistral4.Mistral4Attention",
    "transformers.models.mistral_large4.modeling_mistral_large4.MistralLarge4TextAttention",
    "transformers.models.youtu.modeling_youtu.YoutuAttention",
    name="latent_attention",
    kind="multi-head latent attention (MLA)",
    needs_capture=True,
    check=_check,
)
def latent_attention(call: Call) -> Flow:
    """Softmax attention whose values are a matrix of a latent: input projection, frozen RMS norm, up-projection.

    DeepSeek-V2, 2024, Eq. 9-11. The weights, an output gate and the output projection are probed as in `attention`.
    For a layer that reads another layer's latent, `core` works, and anything that needs the values raises
    `UncoveredError`.
    """
    captured = only_attention(call)
    attended = attention_weights(call, captured)
    _, output = probe(call, captured, call.input)
    flow = _values(call, captured).core(attended.mixer)
    return with_output(flow, call, captured, weighted_values(call, captured, attended), output)


def _values(call: Call, captured: Captured) -> Flow:
    host, tensor = call.host, call.tensor
    norm, head = host.kv_a_layernorm, host.qk_nope_head_dim + host.v_head_dim
    by_head = host.kv_b_proj.weight.unflatten(0, (-1, head))[:, host.qk_nope_head_dim :]
    up = call.stored(by_head).then(lambda rows: rows.flatten(0, 1))
    where = f"{call.name} ({type(call.module).__name__} of {package_version(call.module)})"
    if norm is None:
        reason = f"{where}: its values come from an earlier layer's latent (is_kv_shared_layer), not from its input."
        return Flow(call.input).unmapped("input", f"{reason} Use scope='core'.", len(up))
    flow = Flow(call.input)
    flow.matrix(*call.affine(host.kv_a_proj_with_mqa)[: host.kv_lora_rank], role="input")
    flow.rms_norm(tensor(norm.weight), norm.variance_epsilon)
    for name in ("kv_lora_scale", "mla_scale_kv_lora"):
        if hasattr(call.module, name):
            flow.scale(call.input.new_full((1, 1, 1), getattr(call.module, name)), role="norm")
    flow.matrix(up, role="input")
    missed = values_missed(flow.value.detach(), call, captured)
    # Hosts compute this norm in float32 even in a float64 model.
    if missed > max(tolerance("attention", dtype) for dtype in (captured.record.value.dtype, torch.float32)):
        reason = f"{where}: its values differ from those of its latent (missed by {missed:.1e} on the observed input)."
        return Flow(call.input).unmapped("input", f"{reason} Use scope='core'.", len(up))
    return flow
