"""Tiny hosts of the Mamba family: relatives of Mamba-1 and Mamba-2, also in hybrids with attention and experts."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts import VOCABULARY, Host, transformers_model

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_HYBRID = dict(
    hidden_size=16, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=80
)
_SSD = dict(mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=8)


def _hybrid(model: str, config: str, *settings: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a builder of a hybrid whose experts also run in float64."""
    merged: dict[str, Any] = {**_IDS, **_HYBRID}
    for part in settings:
        merged |= part

    def build() -> nn.Module:
        built: Any = transformers_model(model, config, **merged)()
        if hasattr(built, "set_experts_implementation"):
            built.set_experts_implementation("eager")
        return built

    return build


def _falcon_mamba(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(hidden_size=12, state_size=5, num_hidden_layers=2, **_IDS)
    return transformers_model("FalconMambaForCausalLM", "FalconMambaConfig", **{**defaults, **settings})


def _jamba(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_hidden_layers=2, mamba_d_state=5, mamba_dt_rank=3, num_experts=3)
    order = dict(attn_layer_period=3, attn_layer_offset=1)
    return _hybrid("JambaForCausalLM", "JambaConfig", defaults, order, settings)


def _zamba(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_hidden_layers=4, attn_layer_period=1, attn_layer_offset=0, num_key_value_heads=4)
    # Older versions do not select their plain torch path automatically.
    mamba = dict(mamba_d_state=5, mamba_dt_rank=3, n_mamba_heads=2, use_mamba_kernels=False)
    return _hybrid("ZambaForCausalLM", "ZambaConfig", defaults, mamba, settings)


def _bamba(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_hidden_layers=2, attn_layer_indices=[1])
    return _hybrid("BambaForCausalLM", "BambaConfig", _SSD, defaults, settings)


def _granite(*layers: str, **settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(
        num_hidden_layers=len(layers), layer_types=[*layers], num_local_experts=3, shared_intermediate_size=10
    )
    factors = dict(embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0)
    return _hybrid("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _SSD, defaults, factors, settings)


def _zamba2(*layers: str, **settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_hidden_layers=len(layers), layers_block_type=[*layers], num_key_value_heads=4, adapter_rank=3)
    mamba = dict(mamba_d_state=6, mamba_ngroups=2, n_mamba_heads=4, chunk_size=8)
    return _hybrid("Zamba2ForCausalLM", "Zamba2Config", defaults, mamba, settings)


def _nemotron(pattern: str, **settings: Any) -> Callable[[], nn.Module]:
    mamba = dict(ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, chunk_size=8)
    experts = dict(n_routed_experts=3, moe_intermediate_size=8, moe_shared_expert_intermediate_size=8)
    defaults = dict(hybrid_override_pattern=pattern, num_hidden_layers=len(pattern), head_dim=5)
    return _hybrid("NemotronHForCausalLM", "NemotronHConfig", mamba, experts, defaults, settings)


def _falcon_h1(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(num_hidden_layers=1, mamba_d_ssm=24)
    factors = dict(
        ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.6],
        ssm_in_multiplier=1.4,
        ssm_out_multiplier=0.6,
        attention_in_multiplier=0.8,
        attention_out_multiplier=1.2,
        key_multiplier=0.5,
    )
    return _hybrid("FalconH1ForCausalLM", "FalconH1Config", _SSD, defaults, factors, settings)


_MAMBA2, _FLOOR, _H1 = "mamba2", "mamba2_floor", "falcon_h1"

HOSTS: tuple[Host, ...] = (
    Host("falcon mamba", "falcon_mamba", _falcon_mamba()),
    # transformers >= 5.17 masks before the projection, whose bias the convolution then reads at left padding.
    Host("falcon mamba, biases", "falcon_mamba", _falcon_mamba(use_bias=True), length=7, masks=("right",)),
    Host("falcon mamba, one token", "falcon_mamba", _falcon_mamba(use_conv_bias=False), length=1),
    Host(
        "falcon mamba, chunk and one",
        "falcon_mamba",
        _falcon_mamba(hidden_size=6, expand=1, time_step_rank=3, conv_kernel=3, mixer_rms_eps=1e-2),
        length=65,
        batch=1,
    ),
    Host("jamba", "jamba", _jamba(num_hidden_layers=4), layers=4),
    Host("jamba, biases", "jamba", _jamba(mamba_proj_bias=True), length=7, masks=("right",)),
    Host(
        "jamba, no conv bias, no experts",
        "jamba",
        _jamba(mamba_conv_bias=False, num_experts=1, num_experts_per_tok=1, rms_norm_eps=1e-2, mamba_d_conv=3),
        length=11,
        batch=1,
    ),
    Host("jamba, one token", "jamba", _jamba(), length=1),
    Host("zamba", "zamba", _zamba(num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=1), layers=7),
    Host("zamba, biases", "zamba", _zamba(mamba_proj_bias=True), layers=6, length=7, masks=("right",)),
    Host("zamba, four heads", "zamba", _zamba(n_mamba_heads=4, mamba_conv_bias=False), layers=6, length=9, batch=1),
    Host("zamba, one head", "zamba", _zamba(n_mamba_heads=1, mamba_d_conv=3, mamba_expand=1), layers=6, length=5),
    Host("zamba, one token", "zamba", _zamba(), layers=6, length=1),
    Host("bamba", _MAMBA2, _bamba(num_hidden_layers=3), layers=3),
    Host("bamba, biases", _MAMBA2, _bamba(mamba_proj_bias=True), length=9, masks=("right",)),
    Host(
        "bamba, one group, limited steps",
        _MAMBA2,
        _bamba(mamba_n_groups=1, mamba_conv_bias=False, time_step_limit=(0.3, 0.9), attention_bias=True),
        length=19,
        batch=1,
    ),
    Host("bamba, one token", _MAMBA2, _bamba(mamba_n_groups=4), length=1),
    Host("granite hybrid", _MAMBA2, _granite("mamba", "attention", "mamba"), layers=3),
    Host(
        "granite hybrid, no experts, rotary",
        _MAMBA2,
        _granite(
            "attention",
            "mamba",
            num_local_experts=0,
            num_experts_per_tok=0,
            position_embedding_type="rope",
            mamba_n_groups=1,
        ),
        length=11,
        batch=1,
    ),
    Host(
        "granite hybrid, biases, limited steps",
        _MAMBA2,
        _granite("mamba", mamba_proj_bias=True, time_step_limit=(0.3, 0.9), mamba_chunk_size=3),
        layers=1,
        length=7,
        masks=("right",),
    ),
    Host("granite hybrid, one token", _MAMBA2, _granite("mamba", mamba_conv_bias=False), layers=1, length=1),
    Host("zamba2", _FLOOR, _zamba2("hybrid", "hybrid", "hybrid", "mamba", num_mem_blocks=2), layers=7),
    Host(
        "zamba2, adapters, rotary, one group",
        _FLOOR,
        _zamba2("mamba", "hybrid", use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=1),
        layers=3,
        length=11,
        batch=1,
    ),
    Host(
        "zamba2, biases, high floor",
        _FLOOR,
        _zamba2("hybrid", "hybrid", add_bias_linear=True, time_step_min=0.6, chunk_size=16),
        layers=4,
        length=7,
        masks=("right",),
    ),
    Host("zamba2, one token", _FLOOR, _zamba2("mamba", "hybrid", mamba_ngroups=4), layers=3, length=1),
    Host("nemotron h", _FLOOR, _nemotron("ME*-M"), layers=3),
    Host("nemotron h, biases", _FLOOR, _nemotron("M*", use_bias=True), length=5, masks=("right",)),
    Host(
        "nemotron h, latent experts, high floor",
        _FLOOR,
        _nemotron("*EM", moe_latent_size=5, time_step_min=0.6, use_conv_bias=False, n_groups=1, chunk_size=16),
        length=11,
        batch=1,
    ),
    Host("nemotron h, one token", _FLOOR, _nemotron("M*-"), length=1),
    Host("falcon h1", _H1, _falcon_h1(num_hidden_layers=2), layers=4),
    Host("falcon h1, norm before gate", _H1, _falcon_h1(mamba_rms_norm=True), length=9),
    Host(
        "falcon h1, norm after gate, biases",
        _H1,
        _falcon_h1(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
        ),
        length=7,
        masks=("right",),
    ),
    Host(
        "falcon h1, one group, limited steps",
        _H1,
        _falcon_h1(mamba_n_groups=1, mamba_d_ssm=None, mamba_conv_bias=False, time_step_limit=(0.3, 0.9)),
        length=19,
        batch=1,
    ),
    Host("falcon h1, one token", _H1, _falcon_h1(mamba_rms_norm=True), length=1),
)
"""All configurations; `architecture` is the adapter of the recurrent layers, not of a hybrid's attention."""
