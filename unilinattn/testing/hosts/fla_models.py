"""Builders of tiny models of flash-linear-attention."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts import IDS

_COMMON = dict(
    **IDS, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_heads=2, norm_eps=1e-5, use_cache=False
)


def fla_model(name: str, *, layer: Any = None, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a flash-linear-attention model, given the common name of its class and configuration.

    `layer` rebuilds the last block's mixer with arguments that the configuration does not pass on.
    """

    def build() -> nn.Module:
        from fla import models

        values = {**_COMMON, **settings}
        config = getattr(models, f"{name}Config")(
            **{key: value for key, value in values.items() if value is not ABSENT}
        )
        model = getattr(models, f"{name}ForCausalLM")(config)
        if layer is not None:
            block = model.model.layers[-1]
            block.attn = type(block.attn)(hidden_size=16, layer_idx=config.num_hidden_layers - 1, **layer)
        return model

    return build


ABSENT = object()
"""Value of a setting that is left to the configuration."""


def fla_mamba(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a Mamba of flash-linear-attention, by the name of its class."""
    # The configuration derives these from the others by default.
    derived = dict(intermediate_size=ABSENT, num_heads=ABSENT)
    return fla_model(name, **{**derived, "state_size": 5, "pad_token_id": 0, **settings})
