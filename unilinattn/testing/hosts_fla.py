"""Tiny hosts of flash-linear-attention: a model of each kind of layer, with and without what it can leave out."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host

_COMMON = dict(
    vocab_size=VOCABULARY,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=2,
    num_heads=2,
    norm_eps=1e-5,
    use_cache=False,
)
_GROUPED = dict(head_dim=6, num_v_heads=4)
_RWKV6 = dict(proj_low_rank_dim=3, gate_low_rank_dim=4)
_RWKV7 = dict(num_heads=None, head_dim=8, decay_low_rank_dim=3, gate_low_rank_dim=4, a_low_rank_dim=3, v_low_rank_dim=2)


def fla_model(name: str, *, layer: Any = None, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model of flash-linear-attention by the name that its class and configuration share.

    `layer` makes the last block's mixer anew with arguments that the configuration does not pass on.
    """

    def build() -> nn.Module:
        from fla import models

        given = {**_COMMON, **settings}
        config = getattr(models, f"{name}Config")(**{key: value for key, value in given.items() if value is not ABSENT})
        model = getattr(models, f"{name}ForCausalLM")(config)
        if layer is not None:
            block = model.model.layers[-1]
            block.attn = type(block.attn)(layer_idx=config.num_hidden_layers - 1, **layer)
        return model

    return build


ABSENT = object()
"""In place of a setting: leave it to the configuration."""


def _mamba(name: str, **settings: Any) -> Callable[[], nn.Module]:
    # Its configuration derives these from the others, unless they are given.
    derived = dict(intermediate_size=ABSENT, num_heads=ABSENT)
    return fla_model(name, **{**derived, "state_size": 5, "pad_token_id": 0, **settings})


HOSTS: tuple[Host, ...] = (
    Host("gated deltanet", "fla_gated_deltanet", fla_model("GatedDeltaNet", head_dim=8, expand_v=1.5), length=9),
    Host(
        "gated deltanet, shared keys, negative eigenvalues, no gate",
        "fla_gated_deltanet",
        fla_model("GatedDeltaNet", **_GROUPED, use_gate=False, allow_neg_eigval=True, expand_v=1),
        length=7,
    ),
    Host(
        "gated deltanet, no convolution, then biased ones and a sigmoid gate",
        "fla_gated_deltanet",
        fla_model(
            "GatedDeltaNet",
            **_GROUPED,
            use_short_conv=False,
            expand_v=1,
            layer=dict(
                hidden_size=16,
                num_heads=2,
                head_dim=5,
                expand_v=1,
                conv_bias=True,
                conv_size=3,
                output_gate_activation="sigmoid",
            ),
        ),
        length=6,
    ),
    Host("gated deltanet, one token", "fla_gated_deltanet", fla_model("GatedDeltaNet", head_dim=8), length=1),
    Host("deltanet", "fla_deltanet", fla_model("DeltaNet"), length=9),
    Host(
        "deltanet, elu, sum norm, gate, no strengths",
        "fla_deltanet",
        fla_model("DeltaNet", use_gate=True, use_beta=False, qk_norm="sum", qk_activation="elu", expand_v=2),
        length=7,
    ),
    Host(
        "deltanet, no convolution, negative eigenvalues, then a biased one and relu",
        "fla_deltanet",
        fla_model(
            "DeltaNet",
            use_short_conv=False,
            allow_neg_eigval=True,
            layer=dict(hidden_size=16, num_heads=4, conv_bias=True, qk_activation="relu"),
        ),
        length=5,
    ),
    Host("kda", "fla_kda", fla_model("KDA", head_dim=8), length=9),
    Host(
        "kda, shared keys, bounded decay, no convolution, then biased ones",
        "fla_kda",
        fla_model(
            "KDA",
            **_GROUPED,
            use_short_conv=False,
            lower_bound=-3.0,
            allow_neg_eigval=True,
            layer=dict(hidden_size=16, num_heads=2, head_dim=6, expand_v=0.5, conv_bias=True),
        ),
        length=7,
    ),
    Host("kda, one token", "fla_kda", fla_model("KDA", head_dim=4, num_v_heads=6), length=1),
    Host(
        "gated deltaproduct, two steps",
        "fla_gated_deltaproduct",
        fla_model("GatedDeltaProduct", head_dim=6, expand_v=1, num_householder=2, use_forget_gate=True),
        length=7,
    ),
    Host(
        "gated deltaproduct, three steps, no decay, no convolution, then shared keys and biases",
        "fla_gated_deltaproduct",
        fla_model(
            "GatedDeltaProduct",
            head_dim=6,
            expand_v=1,
            num_householder=3,
            use_short_conv=False,
            use_output_gate=False,
            allow_neg_eigval=True,
            layer=dict(hidden_size=16, num_heads=2, num_v_heads=4, head_dim=4, expand_v=1, conv_bias=True),
        ),
        length=5,
    ),
    Host(
        "gated deltaproduct, one step, one token",
        "fla_gated_deltaproduct",
        fla_model("GatedDeltaProduct", head_dim=4, expand_v=2, num_householder=1, use_forget_gate=True),
        length=1,
    ),
    Host("comba", "fla_comba", fla_model("Comba", head_dim=8, expand_v=1), length=9),
    Host(
        "comba, no gate, no correction, no inner decay, no convolution, then biased ones",
        "fla_comba",
        fla_model(
            "Comba",
            head_dim=6,
            expand_v=1,
            use_output_gate=False,
            use_output_correction=False,
            use_inner_decay=False,
            use_short_conv=False,
            layer=dict(hidden_size=16, num_heads=2, head_dim=4, expand_v=1, conv_bias=True),
        ),
        length=7,
    ),
    Host("comba, shared keys, one token", "fla_comba", fla_model("Comba", **_GROUPED, expand_v=1), length=1),
    Host("gla", "fla_gla", fla_model("GLA", expand_k=0.5), length=9),
    Host(
        "gla, shared keys and values, convolution, feature map, bounded decay, unfused norm",
        "fla_gla",
        fla_model(
            "GLA",
            num_heads=4,
            num_kv_heads=2,
            expand_k=1,
            use_short_conv=True,
            feature_map="relu",
            clamp_min=-0.02,
            fuse_norm=False,
        ),
        length=7,
    ),
    Host(
        "gla, no gate, no weights in the norm, then shared keys and biased convolutions and a sigmoid gate",
        "fla_gla",
        fla_model(
            "GLA",
            use_output_gate=False,
            elementwise_affine=False,
            layer=dict(
                hidden_size=16,
                num_heads=4,
                num_kv_heads=2,
                use_short_conv=True,
                conv_bias=True,
                gate_fn="sigmoid",
                gate_low_rank_dim=3,
            ),
        ),
        length=5,
    ),
    Host("retnet", "fla_retnet", fla_model("RetNet"), length=9),
    Host(
        "retnet, shared keys and values, convolution, feature map, no gate",
        "fla_retnet",
        fla_model(
            "RetNet",
            num_heads=4,
            num_kv_heads=2,
            expand_v=1,
            use_short_conv=True,
            feature_map="relu",
            use_output_gate=False,
        ),
        length=7,
    ),
    Host(
        "retnet, unfused norm, then biased convolutions and a gelu gate",
        "fla_retnet",
        fla_model(
            "RetNet",
            fuse_norm=False,
            layer=dict(hidden_size=16, num_heads=2, expand_v=1, use_short_conv=True, conv_bias=True, gate_fn="gelu"),
        ),
        length=5,
    ),
    Host("linear attention", "fla_linear_attention", fla_model("LinearAttention"), length=9),
    Host(
        "linear attention, shared keys and values, hedgehog, normalised",
        "fla_linear_attention",
        fla_model(
            "LinearAttention",
            num_heads=4,
            num_kv_heads=2,
            feature_map="hedgehog",
            norm_q=True,
            norm_k=True,
            norm_feature_map=True,
        ),
        length=7,
    ),
    Host(
        "linear attention, elu, then dpfp, normalised, without a norm",
        "fla_linear_attention",
        fla_model(
            "LinearAttention",
            feature_map="elu",
            layer=dict(
                hidden_size=16, num_heads=2, feature_map="dpfp", do_feature_map_norm=True, output_norm="identity"
            ),
        ),
        length=5,
    ),
    Host(
        "linear attention, relu, then t2r shared by queries and keys",
        "fla_linear_attention",
        fla_model(
            "LinearAttention",
            feature_map="relu",
            layer=dict(hidden_size=16, num_heads=2, feature_map="t2r", tie_feature_map_qk=True),
        ),
        length=3,
    ),
    Host("hgrn", "fla_hgrn", fla_model("HGRN"), length=9),
    Host("hgrn, convolution, wide", "fla_hgrn", fla_model("HGRN", use_short_conv=True, expand_ratio=2), length=7),
    Host(
        "hgrn, no bound, then biased convolutions and no weights in the norm",
        "fla_hgrn",
        fla_model(
            "HGRN",
            use_lower_bound=False,
            layer=dict(hidden_size=16, use_short_conv=True, conv_bias=True, elementwise_affine=False),
        ),
        length=5,
    ),
    Host("hgrn2", "fla_hgrn2", fla_model("HGRN2", expand_ratio=8), length=9),
    Host(
        "hgrn2, convolution, no bound, another epsilon",
        "fla_hgrn2",
        fla_model("HGRN2", expand_ratio=4, use_short_conv=True, use_lower_bound=False, norm_eps=1e-2),
        length=7,
    ),
    Host(
        "hgrn2, no weights in the norm, then biased convolutions",
        "fla_hgrn2",
        fla_model(
            "HGRN2",
            expand_ratio=8,
            elementwise_affine=False,
            layer=dict(hidden_size=16, expand_ratio=8, use_short_conv=True, conv_bias=True),
        ),
        length=5,
    ),
    Host("gsa", "fla_gsa", fla_model("GSA", num_slots=5), length=9),
    Host(
        "gsa, shared keys and values, convolution, relu, another epsilon",
        "fla_gsa",
        fla_model(
            "GSA",
            num_heads=4,
            num_kv_heads=2,
            num_slots=3,
            use_short_conv=True,
            feature_map="relu",
            norm_eps=1e-2,
        ),
        length=7,
    ),
    Host(
        "gsa, slots as wide as keys, then t2r, biased convolutions, scaled queries",
        "fla_gsa",
        fla_model(
            "GSA",
            num_slots=None,
            layer=dict(hidden_size=16, num_heads=2, use_short_conv=True, conv_bias=True, feature_map="t2r", scale=None),
        ),
        length=5,
    ),
    Host("lightnet", "fla_lightnet", fla_model("LightNet", num_heads=None, expand_ratio=8), length=9),
    Host(
        "lightnet, convolution, another epsilon",
        "fla_lightnet",
        fla_model("LightNet", num_heads=None, expand_ratio=4, use_short_conv=True, gate_low_rank_dim=3, norm_eps=1e-2),
        length=7,
    ),
    Host(
        "lightnet, no weights in the norm, then biased convolutions",
        "fla_lightnet",
        fla_model(
            "LightNet",
            num_heads=4,
            expand_ratio=None,
            elementwise_affine=False,
            layer=dict(hidden_size=16, expand_ratio=8, use_short_conv=True, conv_bias=True),
        ),
        length=5,
    ),
    Host("mamba", "fla_mamba", _mamba("Mamba"), length=9),
    Host("mamba, biases, another rank", "fla_mamba", _mamba("Mamba", use_bias=True, dt_rank=3), length=7),
    Host(
        "mamba, gelu, narrow, no convolution bias",
        "fla_mamba",
        _mamba("Mamba", hidden_act="gelu", expand=1, use_conv_bias=False, conv_kernel=3, state_size=1),
        length=5,
    ),
    Host("mamba2", "fla_mamba2", _mamba("Mamba2", head_dim=8, chunk_size=4), length=9),
    Host(
        "mamba2, groups, biases, a skip a channel, the norm before the gate",
        "fla_mamba2",
        _mamba("Mamba2", head_dim=8, n_groups=2, use_bias=True, D_has_hdim=True, norm_before_gate=True, chunk_size=64),
        length=7,
    ),
    Host(
        "mamba2, limited steps, relu, groups, no norm",
        "fla_mamba2",
        _mamba(
            "Mamba2",
            head_dim=4,
            n_groups=4,
            dt_limit=(0.3, 0.9),
            rmsnorm=False,
            hidden_act="relu",
            use_conv_bias=False,
            chunk_size=3,
        ),
        length=5,
    ),
    Host("rwkv6", "fla_rwkv6", fla_model("RWKV6", **_RWKV6), length=7),
    Host(
        "rwkv6, wide keys, then a sigmoid gate and no weights in the norm",
        "fla_rwkv6",
        fla_model(
            "RWKV6",
            **_RWKV6,
            expand_k=1,
            layer=dict(hidden_size=16, num_heads=4, gate_fn="sigmoid", elementwise_affine=False, **_RWKV6),
        ),
        length=4,
    ),
    Host("rwkv6, one token", "fla_rwkv6", fla_model("RWKV6", **_RWKV6, num_heads=4), length=1),
    Host("rwkv7", "fla_rwkv7", fla_model("RWKV7", **_RWKV7), length=6),
    Host(
        "rwkv7, three layers, unfused norms",
        "fla_rwkv7",
        fla_model("RWKV7", **_RWKV7, num_hidden_layers=3, fuse_norm=False),
        layers=3,
        length=4,
    ),
    Host("rwkv7, one token", "fla_rwkv7", fla_model("RWKV7", **{**_RWKV7, "head_dim": 4}), length=1),
    Host("forgetting transformer", "fla_forgetting_attention", fla_model("ForgettingTransformer"), length=9),
    Host(
        "forgetting transformer, shared keys, biases, norms, gate, window",
        "fla_forgetting_attention",
        fla_model(
            "ForgettingTransformer",
            num_heads=4,
            num_kv_heads=2,
            qkv_bias=True,
            qk_norm=True,
            use_output_gate=True,
            window_size=2,
        ),
        length=7,
    ),
    Host(
        "forgetting transformer, one key for all, one token",
        "fla_forgetting_attention",
        fla_model("ForgettingTransformer", num_heads=4, num_kv_heads=1, qk_norm=True),
        length=1,
    ),
    Host("transformer", "fla_attention", fla_model("Transformer"), length=9),
    Host(
        "transformer, shared keys, biases, norms, window, another rotation",
        "fla_attention",
        fla_model(
            "Transformer", num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True, window_size=3, rope_theta=100.0
        ),
        length=8,
    ),
    Host("samba", "fla_attention", _mamba("Samba", attn=dict(layers=[1], num_heads=2)), length=7),
    Host(
        "gated deltanet with attention between",
        "fla_attention",
        fla_model(
            "GatedDeltaNet",
            head_dim=8,
            expand_v=1,
            num_hidden_layers=3,
            attn=dict(layers=[1], num_heads=4, window_size=3),
        ),
        layers=3,
        length=7,
    ),
)
"""Every configuration; the package itself, and Triton, have to be there to build one."""
