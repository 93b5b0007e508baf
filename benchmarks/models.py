"""Layers of the size of published 130m models, with random weights: what the benchmarks run on."""

import torch
import transformers
from torch import Tensor, nn

from unilinattn.trace import Trace, trace

VOCABULARY = 64
IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def build(kind: str, layers: int = 1) -> nn.Module:
    """Build a model of a few layers: "mamba" (E = 1536, N = 16), "mamba2" (24 heads of 64, N = 128), "softmax" (12)."""
    torch.manual_seed(0)
    if kind == "mamba":
        config = transformers.MambaConfig(hidden_size=768, state_size=16, num_hidden_layers=layers, **IDS)
        return transformers.MambaForCausalLM(config).eval()
    if kind == "mamba2":
        sizes = dict(hidden_size=768, state_size=128, num_heads=24, head_dim=64, n_groups=1, chunk_size=256)
        config = transformers.Mamba2Config(num_hidden_layers=layers, **sizes, **IDS)
        return transformers.Mamba2ForCausalLM(config).eval()
    config = transformers.GPT2Config(n_embd=768, n_head=12, n_layer=layers, n_positions=4096, **IDS)
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(length: int) -> Tensor:
    """Draw token ids, (1, length)."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def traced(kind: str, length: int) -> Trace:
    """Trace one layer."""
    return trace(build(kind), tokens(length))
