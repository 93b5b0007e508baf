"""Tiny hosts of RWKV-4, RG-LRU, mLSTM, lightning attention and short convolutions."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host, transformers_model
from unilinattn.testing.promote import promoted

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_ATTENTION = dict(hidden_size=16, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, **_IDS)
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


def _rwkv(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=10, num_hidden_layers=3, rescale_every=1)
    return transformers_model("RwkvForCausalLM", "RwkvConfig", **{**defaults, **settings})


def _recurrent_gemma(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(
        hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, attention_window_size=5
    )
    return transformers_model("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **{**_IDS, **defaults, **settings})


def _xlstm(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(hidden_size=16, num_hidden_layers=2, num_heads=2, chunk_size=8, ffn_round_up_to_multiple_of=4)
    return transformers_model("xLSTMForCausalLM", "xLSTMConfig", **{**_IDS, **defaults, **settings})


def _fused_xlstm(**settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of the host without its initialisation, which fails on fused gates."""

    def build() -> nn.Module:
        from transformers.initialization import no_init_weights

        with no_init_weights():
            return _xlstm(weight_mode="fused", **settings)()

    return build


def _minimax(**settings: Any) -> Callable[[], nn.Module]:
    build = _plain_experts(
        transformers_model("MiniMaxForCausalLM", "MiniMaxConfig", **{**_ATTENTION, **_LIGHTNING, **settings})
    )

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


def _lfm2(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model("Lfm2ForCausalLM", "Lfm2Config", **{**_ATTENTION, **_CONVOLUTION, **settings})


def _lfm2_moe(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_dense_layers=1, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    settings = {**_ATTENTION, **_CONVOLUTION, **defaults, **settings}
    return _plain_experts(transformers_model("Lfm2MoeForCausalLM", "Lfm2MoeConfig", **settings))


def _plain_experts(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of a model whose experts run one after the other; the grouped product has no float64."""

    def built() -> nn.Module:
        model: Any = build()
        model.set_experts_implementation("eager")
        return model

    return built


HOSTS: tuple[Host, ...] = (
    Host("rwkv", "rwkv4", _rwkv(), layers=6, masks=("right",)),
    Host("rwkv, wide inside", "rwkv4", _rwkv(attention_hidden_size=20, rescale_every=2), 6, 67, 1, masks=("right",)),
    Host("rwkv, never rescaled", "rwkv4", _rwkv(rescale_every=0, num_hidden_layers=2), 4, 7, 3, masks=("right",)),
    Host("rwkv, one token", "rwkv4", _rwkv(rescale_every=2), 6, 1, masks=("right",)),
    Host("recurrent gemma", "griffin", _recurrent_gemma(), 3, masks=("right",)),
    Host(
        "recurrent gemma, wide inside, wide kernel",
        "griffin",
        _recurrent_gemma(lru_width=24, conv1d_width=6, num_key_value_heads=1, attention_bias=True),
        3,
        67,
        1,
        masks=("right",),
    ),
    # Without a convolution nothing reads padding: the recurrence restarts at the first real token.
    Host(
        "recurrent gemma, no convolution",
        "griffin",
        _recurrent_gemma(conv1d_width=1, hidden_activation="silu", block_types=("attention", "recurrent")),
        3,
        9,
        3,
    ),
    Host(
        "recurrent gemma, one token",
        "griffin",
        _recurrent_gemma(block_types=("recurrent",), num_hidden_layers=2),
        2,
        1,
        masks=("right",),
    ),
    Host("xlstm", "xlstm", _xlstm(), length=21, masks=None),
    Host("xlstm, biases, low caps", "xlstm", _xlstm(use_bias=True, gate_soft_cap=0.5), length=67, batch=1, masks=None),
    Host(
        "xlstm, training kernel",
        "xlstm",
        _xlstm(mode="train", num_heads=4, qk_dim_factor=1.0, norm_reduction_force_float32=False),
        length=16,
        batch=3,
        masks=None,
    ),
    Host("xlstm, fused", "xlstm", _fused_xlstm(v_dim_factor=0.5, use_bias=True), length=9, masks=None),
    Host("xlstm, one token", "xlstm", _xlstm(), length=1, masks=None),
    Host("minimax", "minimax", _minimax(), 3),
    Host("minimax, one block", "minimax", _minimax(block_size=32, sliding_window=4), 3, 9, 3),
    Host(
        "minimax, two heads, relu",
        "minimax",
        _minimax(num_attention_heads=2, num_key_value_heads=1, block_size=7, hidden_act="relu"),
        3,
        67,
        1,
    ),
    Host("minimax, one token", "minimax", _minimax(), 3, 1),
    Host("lfm2", "lfm2", _lfm2(), 3),
    Host("lfm2, biases", "lfm2", _lfm2(conv_bias=True, conv_L_cache=5), 3, 9, 3, masks=("right",)),
    Host("lfm2, convolutions alone", "lfm2", _lfm2(layer_types=["conv"] * 3, conv_L_cache=2), 3, 35, 1),
    Host("lfm2, one token", "lfm2", _lfm2(), 3, 1),
    Host("lfm2, experts", "lfm2", _lfm2_moe(), 3, 11),
)
"""All configurations; the hosts also have attention layers, besides those of their adapter."""
