"""Tiny hosts of latent and gated attention: values from a normed latent, outputs behind a gate."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host, transformers_model

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_ATTENTION = dict(
    hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=40, **_IDS
)
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=6, q_lora_rank=None, qk_rope_head_dim=2, qk_nope_head_dim=3, v_head_dim=5
)
_GATED = dict(num_key_value_heads=2, head_dim=6)
_ROUTED = dict(moe_intermediate_size=8, num_experts_per_tok=2)
_EXPERTS = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, **_ROUTED)
_DENSE_SPARSE = ["dense", "sparse"]
# Scores of selected keys pass a ReLU: with few heads several keys tie at zero, and padding changes how ties break.
_INDEX = dict(index_topk=4, index_head_dim=6, index_n_heads=8, q_lora_rank=6)
_DOTS = dict(layer_types=["indexed_attention"] * 2, mlp_layer_types=["dense"] * 2)
_LONGCAT = dict(
    num_layers=1,
    ffn_hidden_size=12,
    expert_ffn_hidden_size=8,
    moe_topk=2,
    n_routed_experts=4,
    zero_expert_num=2,
    q_lora_rank=4,
    head_dim=2,
    qk_head_dim=5,
)


def _text_model(folder: str, family: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of the text model of a family without a text-only causal model."""

    def built() -> nn.Module:
        package = f"transformers.models.{folder}"
        config = getattr(import_module(f"{package}.configuration_{folder}"), f"{family}TextConfig")
        model = getattr(import_module(f"{package}.modeling_{folder}"), f"{family}TextModel")
        return model(config(**{**_ATTENTION, **_LATENT, **settings}))

    return built


def _host(family: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a host whose experts run one after the other; the grouped product has no float64."""
    build = transformers_model(f"{family}ForCausalLM", f"{family}Config", **{**_ATTENTION, **_LATENT, **settings})

    def built() -> nn.Module:
        model: Any = build()
        model.set_experts_implementation("eager")
        return model

    return built


HOSTS: tuple[Host, ...] = (
    Host(
        "deepseek 2",
        "latent_attention",
        _host("DeepseekV2", first_k_dense_replace=1, qk_nope_head_dim=4, **_EXPERTS),
    ),
    Host(
        "deepseek 2, latent queries, biases",
        "latent_attention",
        _host("DeepseekV2", first_k_dense_replace=2, qk_nope_head_dim=4, q_lora_rank=4, attention_bias=True),
        length=7,
        batch=1,
    ),
    Host(
        "deepseek 3",
        "latent_attention",
        _host("DeepseekV3", first_k_dense_replace=1, q_lora_rank=4, **_EXPERTS),
        length=11,
    ),
    Host(
        "deepseek 3, biases, wide values, one token",
        "latent_attention",
        _host("DeepseekV3", first_k_dense_replace=2, rope_interleave=False, attention_bias=True, v_head_dim=9),
        length=1,
    ),
    Host(
        "deepseek 3.2, selected keys",
        "latent_attention",
        _host("DeepseekV32", mlp_layer_types=_DENSE_SPARSE, head_dim=2, **_EXPERTS, **_INDEX),
    ),
    # Without a mask, older versions are causal only with the eager attention function.
    Host(
        "glm dsa, selected keys",
        "latent_attention",
        _host("GlmMoeDsa", mlp_layer_types=_DENSE_SPARSE, attn_implementation="eager", **_EXPERTS, **_INDEX),
        length=9,
        batch=1,
    ),
    Host(
        "longcat flash, scaled latent",
        "latent_attention",
        _host("LongcatFlash", **_LONGCAT),
        length=9,
    ),
    Host("minicpm 3", "latent_attention", _host("MiniCPM3", q_lora_rank=4), length=8, batch=3),
    Host("youtu", "latent_attention", _host("Youtu"), length=7),
    Host("mistral 4", "latent_attention", _host("Mistral4", **_EXPERTS), length=7),
    Host("glm 4 lite", "latent_attention", _host("Glm4MoeLite", mlp_layer_types=_DENSE_SPARSE, **_EXPERTS), length=7),
    Host("a.x k1", "latent_attention", _host("AXK1", q_lora_rank=4, **_EXPERTS), length=7),
    Host(
        "a.x k2, gated, selected keys",
        "latent_attention",
        _host("AXK2", mlp_layer_types=_DENSE_SPARSE, **_EXPERTS, **_INDEX),
        length=9,
    ),
    Host(
        "hy 4, gated, sinks, selected keys",
        "latent_attention",
        _host("HYV4", mlp_layer_types=_DENSE_SPARSE, hc_mult=2, **_EXPERTS, **_INDEX),
        length=9,
    ),
    Host(
        "dots 3, gated, scaled latent, selected keys",
        "latent_attention",
        _text_model("dots3_note", "Dots3Note", **_DOTS, **_EXPERTS, **_INDEX),
        length=9,
    ),
    Host(
        "mistral large 4, selected keys",
        "latent_attention",
        _text_model("mistral_large4", "MistralLarge4", mlp_layer_types=["dense"] * 2, **_EXPERTS, **_INDEX),
        length=9,
    ),
    Host(
        "afmoe, gated, sliding window",
        "attention",
        _host("Afmoe", **_GATED, num_experts=4, num_dense_layers=1, sliding_window=4, **_ROUTED),
    ),
    Host(
        "laguna, a gate a head",
        "attention",
        _host("Laguna", **_GATED, num_experts=4, shared_expert_intermediate_size=8, sliding_window=4, **_ROUTED),
        length=9,
    ),
    Host("beam, gate with a bias", "attention", _host("Beam", **_GATED), length=7, batch=1),
)
"""All configurations of the family."""
