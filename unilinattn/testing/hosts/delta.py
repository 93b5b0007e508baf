"""Tiny hosts of the delta-rule family: hybrids of gated delta rule and attention, most with expert layers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host, transformers_model

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_HYBRID = dict(hidden_size=16, intermediate_size=12, num_attention_heads=4, max_position_embeddings=80, **_IDS)
_LINEAR, _FULL = "linear_attention", "full_attention"
_GATED = dict(
    layer_types=[_LINEAR, _FULL, _LINEAR],
    num_hidden_layers=3,
    num_key_value_heads=2,
    head_dim=6,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
_EXPERTS = dict(moe_intermediate_size=8, num_experts_per_tok=2)
_LATENT = dict(num_key_value_heads=4, kv_lora_rank=6, v_head_dim=5, qk_nope_head_dim=3, num_hidden_layers=3, **_EXPERTS)


def _plain_experts(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of a model whose experts run one after the other; the grouped product has no float64."""

    def built() -> nn.Module:
        model: Any = build()
        model.set_experts_implementation("eager")
        return model

    return built


def _qwen3_next(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_experts=4, shared_expert_intermediate_size=6, **_EXPERTS)
    model = transformers_model(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", **{**_HYBRID, **_GATED, **defaults, **settings}
    )
    return _plain_experts(model)


def _qwen3_5(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **{**_HYBRID, **_GATED, **settings})


def _qwen3_5_moe(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_experts=4, shared_expert_intermediate_size=6, **_EXPERTS)
    settings = {**_HYBRID, **_GATED, **defaults, **settings}
    return _plain_experts(transformers_model("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **settings))


def _olmo_hybrid(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model("OlmoHybridForCausalLM", "OlmoHybridConfig", **{**_HYBRID, **_GATED, **settings})


def _kimi_linear(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(
        layer_types=[_LINEAR, _FULL, _LINEAR],
        qk_rope_head_dim=2,
        num_local_experts=4,
        linear_head_dim=5,
        linear_num_heads=3,
    )
    model = transformers_model(
        "KimiLinearForCausalLM", "KimiLinearConfig", **{**_HYBRID, **_LATENT, **defaults, **settings}
    )
    return _plain_experts(model)


def _bailing_hybrid(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(
        layer_types=[_LINEAR, _FULL, _LINEAR],
        mlp_layer_types=["dense", "sparse", "sparse"],
        qk_rope_head_dim=2,
        num_local_experts=4,
        n_group=2,
        topk_group=1,
        head_dim=5,
    )
    settings = {**_HYBRID, **_LATENT, **defaults, **settings}
    return _plain_experts(transformers_model("BailingHybridForCausalLM", "BailingHybridConfig", **settings))


def _glm5_next(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(
        layer_types=[_LINEAR, "indexed_attention", "indexed_attention", _LINEAR],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        num_hidden_layers=4,
        q_lora_rank=6,
        n_routed_experts=4,
        index_topk=4,
        index_kpool=2,
        index_head_dim=6,
        index_n_heads=8,
        linear_head_dim=5,
        linear_num_heads=3,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    )
    settings = {**_HYBRID, **_LATENT, **defaults, **settings}

    def build() -> nn.Module:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

        return Glm5NextTextModel(Glm5NextTextConfig(**settings))

    return _plain_experts(build)


HOSTS: tuple[Host, ...] = (
    Host("qwen3 next", "qwen3_next", _qwen3_next(), layers=3),
    Host(
        "qwen3 next, a value head a key head, no experts",
        "qwen3_next",
        _qwen3_next(linear_num_value_heads=2, num_experts=0, attention_bias=True),
        layers=3,
        length=67,
        batch=1,
    ),
    Host("qwen3 next, one token", "qwen3_next", _qwen3_next(linear_conv_kernel_dim=2), layers=3, length=1),
    Host("qwen3.5", "qwen3_5", _qwen3_5(), layers=3, length=11),
    Host("qwen3.5, gelu, biases", "qwen3_5", _qwen3_5(hidden_act="gelu", attention_bias=True), layers=3, batch=3),
    Host("qwen3.5, experts", "qwen3_5", _qwen3_5_moe(linear_num_value_heads=6), layers=3, length=10, batch=1),
    Host("qwen3.5, one token", "qwen3_5", _qwen3_5(), layers=3, length=1),
    Host("olmo hybrid", "olmo_hybrid", _olmo_hybrid(), layers=3),
    Host(
        "olmo hybrid, positive strengths, biases",
        "olmo_hybrid",
        _olmo_hybrid(linear_allow_neg_eigval=False, attention_bias=True, linear_conv_kernel_dim=5),
        layers=3,
        length=7,
        batch=1,
    ),
    Host("olmo hybrid, two heads", "olmo_hybrid", _olmo_hybrid(linear_num_value_heads=2), layers=3, length=8, batch=1),
    Host("olmo hybrid, one token", "olmo_hybrid", _olmo_hybrid(), layers=3, length=1),
    Host("kimi linear", "kimi_delta", _kimi_linear(), layers=3),
    Host(
        "kimi linear, latent queries, biases",
        "kimi_delta",
        _kimi_linear(q_lora_rank=4, attention_bias=True, linear_conv_kernel_dim=3),
        layers=3,
        length=7,
        batch=1,
    ),
    Host("kimi linear, long", "kimi_delta", _kimi_linear(linear_num_heads=2), layers=3, length=66, batch=1),
    Host("kimi linear, one token", "kimi_delta", _kimi_linear(), layers=3, length=1),
    Host("bailing hybrid", "kimi_delta", _bailing_hybrid(), layers=3, length=11),
    Host(
        "bailing hybrid, unbounded decay, biases",
        "kimi_delta",
        _bailing_hybrid(kda_safe_gate=False, attention_bias=True),
        layers=3,
        batch=1,
    ),
    Host("glm 5 next", "kimi_delta", _glm5_next(), layers=4, length=11),
    Host(
        "glm 5 next, unbounded decay, shared index",
        "kimi_delta",
        _glm5_next(linear_lower_bound=None, indexer_types=["full", "full", "shared", "full"], attention_bias=True),
        layers=4,
        batch=1,
    ),
)
"""All configurations of the family."""
