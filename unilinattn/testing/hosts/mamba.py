"""Tiny hosts of the Mamba family: relatives of Mamba-1 and Mamba-2, also in hybrids with attention and experts."""

from collections.abc import Sequence
from typing import Any

from unilinattn.testing.hosts import Host, causal_model, family

Settings = dict[str, Any] | None
"""Settings of a model that replace those of its family."""

_HYBRID = dict(
    hidden_size=16, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=80
)
_SSD = dict(mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=8)
_MULTIPLIED = dict(embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0)

_falcon_mamba = family("falcon_mamba", causal_model, "FalconMamba", hidden_size=12, state_size=5, num_hidden_layers=2)
_jamba = family(
    "jamba",
    causal_model,
    "Jamba",
    **dict(_HYBRID, num_hidden_layers=2, mamba_d_state=5, mamba_dt_rank=3, num_experts=3),
    **dict(attn_layer_period=3, attn_layer_offset=1),
)
_zamba = family(
    "zamba",
    causal_model,
    "Zamba",
    **dict(_HYBRID, num_hidden_layers=4, attn_layer_period=1, attn_layer_offset=0, num_key_value_heads=4),
    # Older versions do not select their plain torch path automatically.
    **dict(mamba_d_state=5, mamba_dt_rank=3, n_mamba_heads=2, use_mamba_kernels=False),
)
_bamba = family("mamba2", causal_model, "Bamba", **_HYBRID, **_SSD, num_hidden_layers=2, attn_layer_indices=[1])
_falcon_h1 = family(
    "falcon_h1",
    causal_model,
    "FalconH1",
    **dict(_HYBRID, **_SSD, num_hidden_layers=1, mamba_d_ssm=24, ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.6]),
    **dict(ssm_in_multiplier=1.4, ssm_out_multiplier=0.6, attention_in_multiplier=0.8, attention_out_multiplier=1.2),
    key_multiplier=0.5,
)


def _granite(name: str, mixers: Sequence[str], settings: Settings = None, **others: Any) -> Host:
    experts = dict(num_local_experts=3, shared_intermediate_size=10)
    types = dict(num_hidden_layers=len(mixers), layer_types=mixers)
    make = family("mamba2", causal_model, "GraniteMoeHybrid", **_HYBRID, **_SSD, **_MULTIPLIED, **experts)
    return make(name, types | (settings or {}), **others)


def _zamba2(name: str, blocks: Sequence[str], settings: Settings = None, **others: Any) -> Host:
    sizes = dict(_HYBRID, num_key_value_heads=4, adapter_rank=3, mamba_d_state=6, mamba_ngroups=2, n_mamba_heads=4)
    types = dict(num_hidden_layers=len(blocks), layers_block_type=blocks)
    return family("mamba2_floor", causal_model, "Zamba2", **sizes, chunk_size=8)(
        name, types | (settings or {}), **others
    )


def _nemotron(name: str, pattern: str, settings: Settings = None, **others: Any) -> Host:
    mamba = dict(ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, chunk_size=8)
    experts = dict(n_routed_experts=3, moe_intermediate_size=8, moe_shared_expert_intermediate_size=8)
    types = dict(hybrid_override_pattern=pattern, num_hidden_layers=len(pattern))
    make = family("mamba2_floor", causal_model, "NemotronH", **_HYBRID, **mamba, **experts, head_dim=5)
    return make(name, types | (settings or {}), **others)


HOSTS: tuple[Host, ...] = (
    _falcon_mamba("falcon mamba"),
    # transformers >= 5.17 masks before the projection, whose bias the convolution then reads at left padding.
    _falcon_mamba("falcon mamba, biases", dict(use_bias=True), length=7, masks=("right",)),
    _falcon_mamba("falcon mamba, one token", dict(use_conv_bias=False), length=1),
    _falcon_mamba(
        "falcon mamba, chunk and one",
        dict(hidden_size=6, expand=1, time_step_rank=3, conv_kernel=3, mixer_rms_eps=0.01),
        length=65,
        batch=1,
    ),
    _jamba("jamba", dict(num_hidden_layers=4), layers=4),
    _jamba("jamba, biases", dict(mamba_proj_bias=True), length=7, masks=("right",)),
    _jamba(
        "jamba, no conv bias, no experts",
        dict(mamba_conv_bias=False, num_experts=1, num_experts_per_tok=1, rms_norm_eps=0.01, mamba_d_conv=3),
        length=11,
        batch=1,
    ),
    _jamba("jamba, one token", length=1),
    _zamba("zamba", dict(num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=1), layers=7),
    _zamba("zamba, biases", dict(mamba_proj_bias=True), layers=6, length=7, masks=("right",)),
    _zamba("zamba, four heads", dict(n_mamba_heads=4, mamba_conv_bias=False), layers=6, length=9, batch=1),
    _zamba("zamba, one head", dict(n_mamba_heads=1, mamba_d_conv=3, mamba_expand=1), layers=6, length=5),
    _zamba("zamba, one token", layers=6, length=1),
    _bamba("bamba", dict(num_hidden_layers=3), layers=3),
    _bamba("bamba, biases", dict(mamba_proj_bias=True), length=9, masks=("right",)),
    _bamba(
        "bamba, one group, limited steps",
        dict(mamba_n_groups=1, mamba_conv_bias=False, time_step_limit=(0.3, 0.9), attention_bias=True),
        length=19,
        batch=1,
    ),
    _bamba("bamba, one token", dict(mamba_n_groups=4), length=1),
    _granite("granite hybrid", ["mamba", "attention", "mamba"], layers=3),
    _granite(
        "granite hybrid, no experts, rotary",
        ["attention", "mamba"],
        dict(num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope", mamba_n_groups=1),
        length=11,
        batch=1,
    ),
    _granite(
        "granite hybrid, biases, limited steps",
        ["mamba"],
        dict(mamba_proj_bias=True, time_step_limit=(0.3, 0.9), mamba_chunk_size=3),
        layers=1,
        length=7,
        masks=("right",),
    ),
    _granite("granite hybrid, one token", ["mamba"], dict(mamba_conv_bias=False), layers=1, length=1),
    _zamba2("zamba2", ["hybrid", "hybrid", "hybrid", "mamba"], dict(num_mem_blocks=2), layers=7),
    _zamba2(
        "zamba2, adapters, rotary, one group",
        ["mamba", "hybrid"],
        dict(use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=1),
        layers=3,
        length=11,
        batch=1,
    ),
    _zamba2(
        "zamba2, biases, high floor",
        ["hybrid", "hybrid"],
        dict(add_bias_linear=True, time_step_min=0.6, chunk_size=16),
        layers=4,
        length=7,
        masks=("right",),
    ),
    _zamba2("zamba2, one token", ["mamba", "hybrid"], dict(mamba_ngroups=4), layers=3, length=1),
    _nemotron("nemotron h", "ME*-M", layers=3),
    _nemotron("nemotron h, biases", "M*", dict(use_bias=True), length=5, masks=("right",)),
    _nemotron(
        "nemotron h, latent experts, high floor",
        "*EM",
        dict(moe_latent_size=5, time_step_min=0.6, use_conv_bias=False, n_groups=1, chunk_size=16),
        length=11,
        batch=1,
    ),
    _nemotron("nemotron h, one token", "M*-", length=1),
    _falcon_h1("falcon h1", dict(num_hidden_layers=2), layers=4),
    _falcon_h1("falcon h1, norm before gate", dict(mamba_rms_norm=True), length=9),
    _falcon_h1(
        "falcon h1, norm after gate, biases",
        dict(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
        ),
        length=7,
        masks=("right",),
    ),
    _falcon_h1(
        "falcon h1, one group, limited steps",
        dict(mamba_n_groups=1, mamba_d_ssm=None, mamba_conv_bias=False, time_step_limit=(0.3, 0.9)),
        length=19,
        batch=1,
    ),
    _falcon_h1("falcon h1, one token", dict(mamba_rms_norm=True), length=1),
)
"""All configurations; `architecture` is the adapter of the recurrent layers, not of a hybrid's attention."""
