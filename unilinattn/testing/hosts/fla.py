"""Tiny hosts of flash-linear-attention: a model of each kind of layer, with and without its optional parts."""

from unilinattn.testing.hosts import Host, family
from unilinattn.testing.hosts.fla_models import fla_mamba, fla_model

_SHARED = dict(num_heads=4, num_kv_heads=2)
_GROUPED = dict(head_dim=6, num_v_heads=4)
_RWKV6 = dict(proj_low_rank_dim=3, gate_low_rank_dim=4)
_RWKV7 = dict(num_heads=None, head_dim=8, decay_low_rank_dim=3, gate_low_rank_dim=4, a_low_rank_dim=3, v_low_rank_dim=2)

_gated_deltanet = family("fla_gated_deltanet", fla_model, "GatedDeltaNet")
_deltanet = family("fla_deltanet", fla_model, "DeltaNet")
_kda = family("fla_kda", fla_model, "KDA")
_gated_deltaproduct = family("fla_gated_deltaproduct", fla_model, "GatedDeltaProduct")
_comba = family("fla_comba", fla_model, "Comba")
_gla = family("fla_gla", fla_model, "GLA")
_retnet = family("fla_retnet", fla_model, "RetNet")
_linear_attention = family("fla_linear_attention", fla_model, "LinearAttention")
_hgrn = family("fla_hgrn", fla_model, "HGRN")
_hgrn2 = family("fla_hgrn2", fla_model, "HGRN2")
_gsa = family("fla_gsa", fla_model, "GSA")
_lightnet = family("fla_lightnet", fla_model, "LightNet")
_mamba = family("fla_mamba", fla_mamba, "Mamba")
_mamba2 = family("fla_mamba2", fla_mamba, "Mamba2")
_rwkv6 = family("fla_rwkv6", fla_model, "RWKV6", layers=4, **_RWKV6)
_rwkv7 = family("fla_rwkv7", fla_model, "RWKV7", **_RWKV7)
_forgetting_attention = family("fla_forgetting_attention", fla_model, "ForgettingTransformer")
_attention = family("fla_attention", fla_model, "Transformer")
_samba = family("fla_attention", fla_mamba, "Samba")
_between = family("fla_attention", fla_model, "GatedDeltaNet")

HOSTS: tuple[Host, ...] = (
    _gated_deltanet("gated deltanet", dict(head_dim=8, expand_v=1.5), length=9),
    _gated_deltanet(
        "gated deltanet, shared keys, negative eigenvalues, no gate",
        dict(**_GROUPED, use_gate=False, allow_neg_eigval=True, expand_v=1),
        length=7,
    ),
    _gated_deltanet(
        "gated deltanet, no convolution, then biased ones and a sigmoid gate",
        dict(
            **_GROUPED,
            use_short_conv=False,
            expand_v=1,
            layer=dict(
                num_heads=2, head_dim=5, expand_v=1, conv_bias=True, conv_size=3, output_gate_activation="sigmoid"
            ),
        ),
        length=6,
    ),
    _gated_deltanet("gated deltanet, one token", dict(head_dim=8), length=1),
    _deltanet("deltanet", length=9),
    _deltanet(
        "deltanet, elu, sum norm, gate, no strengths",
        dict(use_gate=True, use_beta=False, qk_norm="sum", qk_activation="elu", expand_v=2),
        length=7,
    ),
    _deltanet(
        "deltanet, no convolution, negative eigenvalues, then a biased one and relu",
        dict(
            use_short_conv=False, allow_neg_eigval=True, layer=dict(num_heads=4, conv_bias=True, qk_activation="relu")
        ),
        length=5,
    ),
    _kda("kda", dict(head_dim=8), length=9),
    _kda(
        "kda, shared keys, bounded decay, no convolution, then biased ones",
        dict(
            **_GROUPED,
            use_short_conv=False,
            lower_bound=-3.0,
            allow_neg_eigval=True,
            layer=dict(num_heads=2, head_dim=6, expand_v=0.5, conv_bias=True),
        ),
        length=7,
    ),
    _kda("kda, one token", dict(head_dim=4, num_v_heads=6), length=1),
    _gated_deltaproduct(
        "gated deltaproduct, two steps", dict(head_dim=6, expand_v=1, num_householder=2, use_forget_gate=True), length=7
    ),
    _gated_deltaproduct(
        "gated deltaproduct, three steps, no decay, no convolution, then shared keys and biases",
        dict(
            head_dim=6,
            expand_v=1,
            num_householder=3,
            use_short_conv=False,
            use_output_gate=False,
            allow_neg_eigval=True,
            layer=dict(num_heads=2, num_v_heads=4, head_dim=4, expand_v=1, conv_bias=True),
        ),
        length=5,
    ),
    _gated_deltaproduct(
        "gated deltaproduct, one step, one token",
        dict(head_dim=4, expand_v=2, num_householder=1, use_forget_gate=True),
        length=1,
    ),
    _comba("comba", dict(head_dim=8, expand_v=1), length=9),
    _comba(
        "comba, no gate, no correction, no inner decay, no convolution, then biased ones",
        dict(
            head_dim=6,
            expand_v=1,
            use_output_gate=False,
            use_output_correction=False,
            use_inner_decay=False,
            use_short_conv=False,
            layer=dict(num_heads=2, head_dim=4, expand_v=1, conv_bias=True),
        ),
        length=7,
    ),
    _comba("comba, shared keys, one token", dict(**_GROUPED, expand_v=1), length=1),
    _gla("gla", dict(expand_k=0.5), length=9),
    _gla(
        "gla, shared keys and values, convolution, feature map, bounded decay, unfused norm",
        dict(**_SHARED, expand_k=1, use_short_conv=True, feature_map="relu", clamp_min=-0.02, fuse_norm=False),
        length=7,
    ),
    _gla(
        "gla, no gate, no weights in the norm, then shared keys and biased convolutions and a sigmoid gate",
        dict(
            use_output_gate=False,
            elementwise_affine=False,
            layer=dict(**_SHARED, use_short_conv=True, conv_bias=True, gate_fn="sigmoid", gate_low_rank_dim=3),
        ),
        length=5,
    ),
    _retnet("retnet", length=9),
    _retnet(
        "retnet, shared keys and values, convolution, feature map, no gate",
        dict(**_SHARED, expand_v=1, use_short_conv=True, feature_map="relu", use_output_gate=False),
        length=7,
    ),
    _retnet(
        "retnet, unfused norm, then biased convolutions and a gelu gate",
        dict(fuse_norm=False, layer=dict(num_heads=2, expand_v=1, use_short_conv=True, conv_bias=True, gate_fn="gelu")),
        length=5,
    ),
    _linear_attention("linear attention", length=9),
    _linear_attention(
        "linear attention, shared keys and values, hedgehog, normalised",
        dict(**_SHARED, feature_map="hedgehog", norm_q=True, norm_k=True, norm_feature_map=True),
        length=7,
    ),
    _linear_attention(
        "linear attention, elu, then dpfp, normalised, without a norm",
        dict(
            feature_map="elu",
            layer=dict(num_heads=2, feature_map="dpfp", do_feature_map_norm=True, output_norm="identity"),
        ),
        length=5,
    ),
    _linear_attention(
        "linear attention, relu, then t2r shared by queries and keys",
        dict(feature_map="relu", layer=dict(num_heads=2, feature_map="t2r", tie_feature_map_qk=True)),
        length=3,
    ),
    _hgrn("hgrn", length=9),
    _hgrn("hgrn, convolution, wide", dict(use_short_conv=True, expand_ratio=2), length=7),
    _hgrn(
        "hgrn, no bound, then biased convolutions and no weights in the norm",
        dict(use_lower_bound=False, layer=dict(use_short_conv=True, conv_bias=True, elementwise_affine=False)),
        length=5,
    ),
    _hgrn2("hgrn2", dict(expand_ratio=8), length=9),
    _hgrn2(
        "hgrn2, convolution, no bound, another epsilon",
        dict(expand_ratio=4, use_short_conv=True, use_lower_bound=False, norm_eps=0.01),
        length=7,
    ),
    _hgrn2(
        "hgrn2, no weights in the norm, then biased convolutions",
        dict(expand_ratio=8, elementwise_affine=False, layer=dict(expand_ratio=8, use_short_conv=True, conv_bias=True)),
        length=5,
    ),
    _gsa("gsa", dict(num_slots=5), length=9),
    _gsa(
        "gsa, shared keys and values, convolution, relu, another epsilon",
        dict(**_SHARED, num_slots=3, use_short_conv=True, feature_map="relu", norm_eps=0.01),
        length=7,
    ),
    _gsa(
        "gsa, slots as wide as keys, then t2r, biased convolutions, scaled queries",
        dict(
            num_slots=None, layer=dict(num_heads=2, use_short_conv=True, conv_bias=True, feature_map="t2r", scale=None)
        ),
        length=5,
    ),
    _lightnet("lightnet", dict(num_heads=None, expand_ratio=8), length=9),
    _lightnet(
        "lightnet, convolution, another epsilon",
        dict(num_heads=None, expand_ratio=4, use_short_conv=True, gate_low_rank_dim=3, norm_eps=0.01),
        length=7,
    ),
    _lightnet(
        "lightnet, no weights in the norm, then biased convolutions",
        dict(
            num_heads=4,
            expand_ratio=None,
            elementwise_affine=False,
            layer=dict(expand_ratio=8, use_short_conv=True, conv_bias=True),
        ),
        length=5,
    ),
    _mamba("mamba", length=9),
    _mamba("mamba, biases, another rank", dict(use_bias=True, dt_rank=3), length=7),
    _mamba(
        "mamba, gelu, narrow, no convolution bias",
        dict(hidden_act="gelu", expand=1, use_conv_bias=False, conv_kernel=3, state_size=1),
        length=5,
    ),
    _mamba2("mamba2", dict(head_dim=8, chunk_size=4), length=9),
    _mamba2(
        "mamba2, groups, biases, a skip a channel, the norm before the gate",
        dict(head_dim=8, n_groups=2, use_bias=True, D_has_hdim=True, norm_before_gate=True, chunk_size=64),
        length=7,
    ),
    _mamba2(
        "mamba2, limited steps, relu, groups, no norm",
        dict(
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
    _rwkv6("rwkv6", length=7),
    _rwkv6(
        "rwkv6, wide keys, then a sigmoid gate and no weights in the norm",
        dict(expand_k=1, layer=dict(num_heads=4, gate_fn="sigmoid", elementwise_affine=False, **_RWKV6)),
        length=4,
    ),
    _rwkv6("rwkv6, one token", dict(num_heads=4), length=1),
    _rwkv7("rwkv7", layers=4, length=6),
    _rwkv7("rwkv7, three layers, unfused norms", dict(num_hidden_layers=3, fuse_norm=False), layers=6, length=4),
    _rwkv7("rwkv7, one token", dict(head_dim=4), layers=4, length=1),
    _forgetting_attention("forgetting transformer", length=9),
    _forgetting_attention(
        "forgetting transformer, shared keys, biases, norms, gate, window",
        dict(**_SHARED, qkv_bias=True, qk_norm=True, use_output_gate=True, window_size=2),
        length=7,
    ),
    _forgetting_attention(
        "forgetting transformer, one key for all, one token", dict(num_heads=4, num_kv_heads=1, qk_norm=True), length=1
    ),
    _attention("transformer", length=9),
    _attention(
        "transformer, shared keys, biases, norms, window, another rotation",
        dict(**_SHARED, qkv_bias=True, qk_norm=True, window_size=3, rope_theta=100.0),
        length=8,
    ),
    _samba("samba", dict(attn=dict(layers=[1], num_heads=2)), length=7),
    _between(
        "gated deltanet with attention between",
        dict(head_dim=8, expand_v=1, num_hidden_layers=3, attn=dict(layers=[1], num_heads=4, window_size=3)),
        layers=3,
        length=7,
    ),
)
"""All configurations; building one requires flash-linear-attention and Triton."""
