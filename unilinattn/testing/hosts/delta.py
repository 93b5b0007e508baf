"""Tiny hosts of the delta-rule family: hybrids of gated delta rule and attention, most with expert layers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts import IDS, Host, causal_model, family, plain_experts, transformers_model

_HYBRID = dict(hidden_size=16, intermediate_size=12, num_attention_heads=4, max_position_embeddings=80, **IDS)
_LINEAR, _FULL = "linear_attention", "full_attention"
_TYPES = dict(layer_types=[_LINEAR, _FULL, _LINEAR], num_hidden_layers=3)
_HEADS = dict(linear_key_head_dim=5, linear_value_head_dim=7, linear_num_key_heads=2, linear_num_value_heads=4)
_GATED = dict(**_HYBRID, **_TYPES, **_HEADS, num_key_value_heads=2, head_dim=6)
_ROUTED = dict(moe_intermediate_size=8, num_experts_per_tok=2)
_EXPERTS = dict(num_experts=4, shared_expert_intermediate_size=6, **_ROUTED)
_LATENT = dict(**_HYBRID, **_ROUTED, num_key_value_heads=4, kv_lora_rank=6, v_head_dim=5, qk_nope_head_dim=3)

_qwen3_next = family("qwen3_next", causal_model, "Qwen3Next", layers=3, **_GATED, **_EXPERTS)
_qwen3_5 = family("qwen3_5", transformers_model, "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", layers=3, **_GATED)
_olmo_hybrid = family("olmo_hybrid", causal_model, "OlmoHybrid", layers=3, **_GATED)
_kimi_linear = family(
    "kimi_delta",
    causal_model,
    "KimiLinear",
    layers=3,
    **dict(_LATENT, **_TYPES, qk_rope_head_dim=2, num_local_experts=4, linear_head_dim=5, linear_num_heads=3),
)
_bailing_hybrid = family(
    "kimi_delta",
    causal_model,
    "BailingHybrid",
    layers=3,
    **dict(_LATENT, **_TYPES, mlp_layer_types=["dense", "sparse", "sparse"], qk_rope_head_dim=2),
    **dict(num_local_experts=4, n_group=2, topk_group=1, head_dim=5),
)


def _qwen3_5_moe_model(**settings: Any) -> Callable[[], nn.Module]:
    return plain_experts(transformers_model("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **settings))


def _glm5_next_model(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

        return Glm5NextTextModel(Glm5NextTextConfig(**settings))

    return plain_experts(build)


_qwen3_5_moe = family("qwen3_5", _qwen3_5_moe_model, layers=3, **_GATED, **_EXPERTS)
_glm5_next = family(
    "kimi_delta",
    _glm5_next_model,
    layers=4,
    **dict(_LATENT, layer_types=[_LINEAR, "indexed_attention", "indexed_attention", _LINEAR], num_hidden_layers=4),
    **dict(mlp_layer_types=["dense", "sparse", "dense", "sparse"], q_lora_rank=6, n_routed_experts=4, index_topk=4),
    **dict(index_kpool=2, index_head_dim=6, index_n_heads=8, linear_head_dim=5, linear_num_heads=3),
    **dict(hc_mult=2, hc_sinkhorn_iters=3),
)

HOSTS: tuple[Host, ...] = (
    _qwen3_next("qwen3 next"),
    _qwen3_next(
        "qwen3 next, a value head a key head, no experts",
        dict(linear_num_value_heads=2, num_experts=0, attention_bias=True),
        length=67,
        batch=1,
    ),
    _qwen3_next("qwen3 next, one token", dict(linear_conv_kernel_dim=2), length=1),
    _qwen3_5("qwen3.5", length=11),
    _qwen3_5("qwen3.5, gelu, biases", dict(hidden_act="gelu", attention_bias=True), batch=3),
    _qwen3_5_moe("qwen3.5, experts", dict(linear_num_value_heads=6), length=10, batch=1),
    _qwen3_5("qwen3.5, one token", length=1),
    _olmo_hybrid("olmo hybrid"),
    _olmo_hybrid(
        "olmo hybrid, positive strengths, biases",
        dict(linear_allow_neg_eigval=False, attention_bias=True, linear_conv_kernel_dim=5),
        length=7,
        batch=1,
    ),
    _olmo_hybrid("olmo hybrid, two heads", dict(linear_num_value_heads=2), length=8, batch=1),
    _olmo_hybrid("olmo hybrid, one token", length=1),
    _kimi_linear("kimi linear"),
    _kimi_linear(
        "kimi linear, latent queries, biases",
        dict(q_lora_rank=4, attention_bias=True, linear_conv_kernel_dim=3),
        length=7,
        batch=1,
    ),
    _kimi_linear("kimi linear, long", dict(linear_num_heads=2), length=66, batch=1),
    _kimi_linear("kimi linear, one token", length=1),
    _bailing_hybrid("bailing hybrid", length=11),
    _bailing_hybrid("bailing hybrid, unbounded decay, biases", dict(kda_safe_gate=False, attention_bias=True), batch=1),
    _glm5_next("glm 5 next", length=11),
    _glm5_next(
        "glm 5 next, unbounded decay, shared index",
        dict(linear_lower_bound=None, indexer_types=["full", "full", "shared", "full"], attention_bias=True),
        batch=1,
    ),
)
"""All configurations of the family."""
