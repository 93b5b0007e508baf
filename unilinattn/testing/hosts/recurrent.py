"""Tiny hosts of RWKV-4, RG-LRU, mLSTM, lightning attention and short convolutions."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host, causal_model, family, transformers_model
from unilinattn.testing.promote import promoted

_ATTENTION = dict(hidden_size=16, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2)
_CONVOLUTION = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
_LIGHTNING = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    head_dim=6,
    block_size=5,
    num_local_experts=4,
    linear_attn_alpha_factor=1.5,
    linear_attn_beta_factor=0.7,
    full_attn_alpha_factor=0.8,
)


def _uninitialised(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of the host without its initialisation, which fails on fused gates."""

    def build() -> nn.Module:
        from transformers.initialization import no_init_weights

        with no_init_weights():
            return causal_model(name, **settings)()

    return build


def _lightning(name: str, **settings: Any) -> Callable[[], nn.Module]:
    build = causal_model(name, **settings)

    def with_tables() -> nn.Module:
        model = build()
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "decay_factors")]
        for layer in layers:
            layer._apply = MethodType(_apply_and_refill, layer)
        return model

    return with_tables


def _apply_and_refill(layer: Any, *args: Any, **options: Any) -> nn.Module:
    """Cast a lightning layer, and recompute its tables of decays if the cast is to float64.

    A cast keeps the tables computed in float32, with which the layer is a recurrence to eight digits only.
    """
    nn.Module._apply(layer, *args, **options)
    if layer.slope_rate.dtype == torch.float64:
        with promoted():
            layer.slope_rate = layer.get_slope_rate()
            layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    return layer


_rwkv = family(
    "rwkv4",
    transformers_model,
    "RwkvForCausalLM",
    "RwkvConfig",
    layers=6,
    masks=("right",),
    **dict(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=10, num_hidden_layers=3, rescale_every=1),
)
_recurrent_gemma = family(
    "griffin",
    causal_model,
    "RecurrentGemma",
    layers=3,
    masks=("right",),
    **dict(hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, attention_window_size=5),
)
_XLSTM = dict(hidden_size=16, num_hidden_layers=2, num_heads=2, chunk_size=8, ffn_round_up_to_multiple_of=4)
_xlstm = family("xlstm", causal_model, "xLSTM", masks=None, **_XLSTM)
_fused_xlstm = family("xlstm", _uninitialised, "xLSTM", masks=None, **_XLSTM, weight_mode="fused")
_minimax = family("minimax", _lightning, "MiniMax", layers=3, **_ATTENTION, **_LIGHTNING)
_lfm2 = family("lfm2", causal_model, "Lfm2", layers=3, **_ATTENTION, **_CONVOLUTION)
_lfm2_moe = family(
    "lfm2",
    causal_model,
    "Lfm2Moe",
    layers=3,
    **dict(_ATTENTION, **_CONVOLUTION, num_dense_layers=1, moe_intermediate_size=8, num_experts=4),
    num_experts_per_tok=2,
)
_lfm3 = family("lfm2", causal_model, "Lfm3", layers=3, head_dim=4, **_ATTENTION, **_CONVOLUTION)

HOSTS: tuple[Host, ...] = (
    _rwkv("rwkv"),
    _rwkv("rwkv, wide inside", dict(attention_hidden_size=20, rescale_every=2), length=67, batch=1),
    _rwkv("rwkv, never rescaled", dict(rescale_every=0, num_hidden_layers=2), layers=4, length=7, batch=3),
    _rwkv("rwkv, one token", dict(rescale_every=2), length=1),
    _recurrent_gemma("recurrent gemma"),
    _recurrent_gemma(
        "recurrent gemma, wide inside, wide kernel",
        dict(lru_width=24, conv1d_width=6, num_key_value_heads=1, attention_bias=True),
        length=67,
        batch=1,
    ),
    # Without a convolution nothing reads padding: the recurrence restarts at the first real token.
    _recurrent_gemma(
        "recurrent gemma, no convolution",
        dict(conv1d_width=1, hidden_activation="silu", block_types=("attention", "recurrent")),
        length=9,
        batch=3,
        masks=("left", "right"),
    ),
    _recurrent_gemma(
        "recurrent gemma, one token", dict(block_types=("recurrent",), num_hidden_layers=2), layers=2, length=1
    ),
    _xlstm("xlstm", length=21),
    _xlstm("xlstm, biases, low caps", dict(use_bias=True, gate_soft_cap=0.5), length=67, batch=1),
    _xlstm(
        "xlstm, training kernel",
        dict(mode="train", num_heads=4, qk_dim_factor=1.0, norm_reduction_force_float32=False),
        length=16,
        batch=3,
    ),
    _fused_xlstm("xlstm, fused", dict(v_dim_factor=0.5, use_bias=True), length=9),
    _xlstm("xlstm, one token", length=1),
    _minimax("minimax"),
    _minimax("minimax, one block", dict(block_size=32, sliding_window=4), length=9, batch=3),
    _minimax(
        "minimax, two heads, relu",
        dict(num_attention_heads=2, num_key_value_heads=1, block_size=7, hidden_act="relu"),
        length=67,
        batch=1,
    ),
    _minimax("minimax, one token", length=1),
    _lfm2("lfm2"),
    _lfm2("lfm2, biases", dict(conv_bias=True, conv_L_cache=5), length=9, batch=3, masks=("right",)),
    _lfm2("lfm2, convolutions alone", dict(layer_types=["conv"] * 3, conv_L_cache=2), length=35, batch=1),
    _lfm2("lfm2, one token", length=1),
    _lfm2_moe("lfm2, experts", length=11),
    _lfm3("lfm3"),
)
"""All configurations; the hosts also have attention layers, besides those of their adapter."""
