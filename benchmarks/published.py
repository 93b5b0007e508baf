"""Whole models of published shapes, with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models import Sizes


@dataclass(frozen=True)
class Shape:
    """A published configuration of a model of transformers.

    Attributes:
        model: name of the model's class.
        config: the published configuration.
        narrow: entries that replace those of `config` in a model small enough to compute every definition.
        layers: number of layers of each structure, named as in `benchmarks.models`.
        sizes: widths of these layers.
    """

    model: str
    config: Mapping[str, Any]
    narrow: Mapping[str, Any]
    layers: Mapping[str, int]
    sizes: Sizes

    def build(self, *, narrow: bool = False) -> nn.Module:
        """Build the model with random weights."""
        torch.manual_seed(0)
        no_tokens = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
        kind = getattr(transformers, self.model)
        config = kind.config_class(**{**self.config, **no_tokens, **(self.narrow if narrow else {})})
        model: nn.Module = kind(config)
        return model.eval()


def tokens(model: nn.Module, length: int) -> Tensor:
    """Draw token ids of a model's vocabulary, (1, length)."""
    vocabulary: int = model.get_input_embeddings().num_embeddings
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(length))


NARROW = dict(hidden_size=32, num_hidden_layers=3, vocab_size=64)
SSD = dict(state_size=128, num_heads=24, head_dim=64, n_groups=1, chunk_size=256)
NARROW_SSD = dict(state_size=16, num_heads=4, head_dim=16, chunk_size=32)
GRANITE = dict(
    hidden_size=768,
    num_hidden_layers=32,
    layer_types=["attention" if k in (10, 13, 17, 27) else "mamba" for k in range(32)],
    num_attention_heads=12,
    num_key_value_heads=4,
    mamba_n_heads=48,
    mamba_d_head=32,
    mamba_d_state=128,
    mamba_n_groups=1,
    mamba_chunk_size=256,
    shared_intermediate_size=2048,
    num_local_experts=0,
    num_experts_per_tok=0,
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    residual_multiplier=0.246,
    logits_scaling=3.0,
    vocab_size=100352,
)
NARROW_GRANITE = dict(
    layer_types=["mamba", "attention", "mamba"],
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_chunk_size=32,
    shared_intermediate_size=48,
)

SHAPES: Mapping[str, Shape] = {
    "mamba-130m": Shape(
        "MambaForCausalLM",
        dict(hidden_size=768, num_hidden_layers=24, state_size=16, vocab_size=50280),
        NARROW,
        {"mamba": 24},
        Sizes(),
    ),
    # With the default range of 0.1 the product of the 48 random maps exceeds float32.
    "mamba-370m": Shape(
        "MambaForCausalLM",
        dict(hidden_size=1024, num_hidden_layers=48, state_size=16, vocab_size=50280, initializer_range=0.05),
        NARROW,
        {"mamba": 48},
        Sizes(width=1024),
    ),
    "mamba2-130m": Shape(
        "Mamba2ForCausalLM",
        dict(hidden_size=768, num_hidden_layers=24, vocab_size=50288, **SSD),
        {**NARROW, **NARROW_SSD},
        {"mamba2": 24},
        Sizes(),
    ),
    # The published model has 1024 positions.
    "gpt2": Shape(
        "GPT2LMHeadModel",
        dict(n_embd=768, n_layer=12, n_head=12, n_positions=4096, vocab_size=50257),
        dict(n_embd=32, n_layer=4, n_head=4, vocab_size=64),
        {"softmax": 12},
        Sizes(),
    ),
    "granite-4.0-h-350m": Shape(
        "GraniteMoeHybridForCausalLM", GRANITE, {**NARROW, **NARROW_GRANITE}, {"mamba2": 28, "softmax": 4}, Sizes()
    ),
}
"""The models by name; granite-4.0-h-350m is a hybrid of Mamba-2 and softmax layers."""
