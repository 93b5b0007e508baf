"""Tiny hosts of latent and gated attention: values from a normed latent, outputs behind a gate."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from unilinattn.testing.hosts import IDS, Host, causal_model, family

_ATTENTION = dict(
    hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=40, **IDS
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
        return model(config(**settings))

    return built


def _host(name: str, model: str, *settings: Mapping[str, Any], **others: Any) -> Host:
    return family("latent_attention", causal_model, model, **_ATTENTION, **_LATENT)(name, *settings, **others)


def _text_host(name: str, model: Sequence[str], *settings: Mapping[str, Any], **others: Any) -> Host:
    return family("latent_attention", _text_model, *model, **_ATTENTION, **_LATENT)(name, *settings, **others)


def _gated_host(name: str, model: str, *settings: Mapping[str, Any], **others: Any) -> Host:
    return family("attention", causal_model, model, **_ATTENTION, **{**_LATENT, **_GATED})(name, *settings, **others)


HOSTS: tuple[Host, ...] = (
    _host("deepseek 2", "DeepseekV2", dict(first_k_dense_replace=1, qk_nope_head_dim=4, **_EXPERTS)),
    _host(
        "deepseek 2, latent queries, biases",
        "DeepseekV2",
        dict(first_k_dense_replace=2, qk_nope_head_dim=4, q_lora_rank=4, attention_bias=True),
        length=7,
        batch=1,
    ),
    _host("deepseek 3", "DeepseekV3", dict(first_k_dense_replace=1, q_lora_rank=4, **_EXPERTS), length=11),
    _host(
        "deepseek 3, biases, wide values, one token",
        "DeepseekV3",
        dict(first_k_dense_replace=2, rope_interleave=False, attention_bias=True, v_head_dim=9),
        length=1,
    ),
    _host(
        "deepseek 3.2, selected keys",
        "DeepseekV32",
        dict(mlp_layer_types=_DENSE_SPARSE, head_dim=2, **_EXPERTS, **_INDEX),
    ),
    # Without a mask, older versions are causal only with the eager attention function.
    _host(
        "glm dsa, selected keys",
        "GlmMoeDsa",
        dict(mlp_layer_types=_DENSE_SPARSE, attn_implementation="eager", **_EXPERTS, **_INDEX),
        length=9,
        batch=1,
    ),
    _host("longcat flash, scaled latent", "LongcatFlash", _LONGCAT, length=9),
    _host("minicpm 3", "MiniCPM3", dict(q_lora_rank=4), length=8, batch=3),
    _host("youtu", "Youtu", length=7),
    _host("mistral 4", "Mistral4", _EXPERTS, length=7),
    _host("glm 4 lite", "Glm4MoeLite", dict(mlp_layer_types=_DENSE_SPARSE, **_EXPERTS), length=7),
    _host("a.x k1", "AXK1", dict(q_lora_rank=4, **_EXPERTS), length=7),
    _host("a.x k2, gated, selected keys", "AXK2", dict(mlp_layer_types=_DENSE_SPARSE, **_EXPERTS, **_INDEX), length=9),
    _host(
        "hy 4, gated, sinks, selected keys",
        "HYV4",
        dict(mlp_layer_types=_DENSE_SPARSE, hc_mult=2, **_EXPERTS, **_INDEX),
        length=9,
    ),
    _text_host(
        "dots 3, gated, scaled latent, selected keys",
        ["dots3_note", "Dots3Note"],
        dict(**_DOTS, **_EXPERTS, **_INDEX),
        length=9,
    ),
    _text_host(
        "mistral large 4, selected keys",
        ["mistral_large4", "MistralLarge4"],
        dict(mlp_layer_types=["dense"] * 2, **_EXPERTS, **_INDEX),
        length=9,
    ),
    _gated_host(
        "afmoe, gated, sliding window", "Afmoe", dict(num_experts=4, num_dense_layers=1, sliding_window=4, **_ROUTED)
    ),
    _gated_host(
        "laguna, a gate a head",
        "Laguna",
        dict(num_experts=4, shared_expert_intermediate_size=8, sliding_window=4, **_ROUTED),
        length=9,
    ),
    _gated_host("beam, gate with a bias", "Beam", length=7, batch=1),
)
"""All configurations of the family."""
