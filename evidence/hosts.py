"""Untrained language models of transformers' classes, of one size: two layers of width 64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unilinattn.errors import OptionError, nearest
from unilinattn.optional import import_extra

CLASSES = {
    "mamba": ("MambaForCausalLM", "MambaConfig"),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config"),
    "transformer": ("LlamaForCausalLM", "LlamaConfig"),
    "local_transformer": ("Qwen3ForCausalLM", "Qwen3Config"),
    "gated_deltanet": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
}
"""The model class and the configuration class of each host by name."""

SIZES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 16},
    "mamba2": {"state_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 64},
    "transformer": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128},
    # The first layer sees four tokens. The frequencies of the positions are high enough to tell neighbours apart; most
    # of the default ones are not.
    "local_transformer": {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "gated_deltanet": {
        "layer_types": ["linear_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
    },
}
"""Settings of each host besides the common ones."""


STEP_SIZES = (0.001, 0.1)
"""Range of the first step sizes of Mamba-2 and Gated DeltaNet, whose logarithm is drawn uniformly."""


def start_slowly(host: nn.Module) -> None:
    """Draw the first step sizes of gated delta rules as in Mamba-2.

    transformers sets them to softplus(1) = 1.3, with which most heads forget a token at the next one, and a small model
    does not learn to look back.
    """
    low, high = STEP_SIZES
    for module in host.modules():
        bias = getattr(module, "dt_bias", None)
        if isinstance(bias, nn.Parameter):
            step = low * (high / low) ** torch.rand(bias.shape)
            # The inverse of softplus.
            bias.data = step + torch.log(-torch.expm1(-step))


def builder(name: str, vocabulary: int, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds an untrained model, whose weights depend on torch's seed.

    `settings` are more arguments of the configuration.

    Raises `OptionError` for an unknown name.
    """
    if name not in CLASSES:
        raise OptionError(f"unknown host {name!r}{nearest(name, CLASSES)}")

    def build() -> nn.Module:
        package: Any = import_extra("transformers", "hf")
        model, config = (getattr(package, one) for one in CLASSES[name])
        # The default ids lie outside these small vocabularies, and the tasks have no special tokens.
        tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        shape = {"vocab_size": vocabulary, "hidden_size": 64, "num_hidden_layers": 2, **SIZES[name], **settings}
        host: nn.Module = model(config(**shape, **tokens, tie_word_embeddings=False, use_cache=False))
        if name == "gated_deltanet":
            start_slowly(host)
        return host

    return build
