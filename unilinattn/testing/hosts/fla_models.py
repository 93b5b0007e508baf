"""Builders of tiny models of flash-linear-attention, and the hosts of its delta rules."""

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
GROUPED = dict(head_dim=6, num_v_heads=4)
RWKV6 = dict(proj_low_rank_dim=3, gate_low_rank_dim=4)
RWKV7 = dict(num_heads=None, head_dim=8, decay_low_rank_dim=3, gate_low_rank_dim=4, a_low_rank_dim=3, v_low_rank_dim=2)


def fla_model(name: str, *, layer: Any = None, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a flash-linear-attention model, given the common name of its class and configuration.

    `layer` rebuilds the last block's mixer with arguments that the configuration does not pass on.
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
"""Value of a setting that is left to the configuration."""


def fla_mamba(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a Mamba of flash-linear-attention, by the name of its class."""
    # The configuration derives these from the others by default.
    derived = dict(intermediate_size=ABSENT, num_heads=ABSENT)
    return fla_model(name, **{**derived, "state_size": 5, "pad_token_id": 0, **settings})


DELTA: tuple[Host, ...] = (
    Host("gated deltanet", "fla_gated_deltanet", fla_model("GatedDeltaNet", head_dim=8, expand_v=1.5), length=9),
    Host(
        "gated deltanet, shared keys, negative eigenvalues, no gate",
        "fla_gated_deltanet",
        fla_model("GatedDeltaNet", **GROUPED, use_gate=False, allow_neg_eigval=True, expand_v=1),
        length=7,
    ),
    Host(
        "gated deltanet, no convolution, then biased ones and a sigmoid gate",
        "fla_gated_deltanet",
        fla_model(
            "GatedDeltaNet",
            **GROUPED,
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
            **GROUPED,
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
    Host("comba, shared keys, one token", "fla_comba", fla_model("Comba", **GROUPED, expand_v=1), length=1),
)
"""Gated and plain delta rules."""
