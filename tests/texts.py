"""A byte-level tokenizer trained on three sentences, and small models of its vocabulary."""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

PARIS = "The capital of France is Paris"
LONDON = "The capital of England is London"
VOCABULARY = 280


@cache
def tokenizer(side: str = "right") -> Any:
    """Return the tokenizer, which splits "France" and "Paris" into several tokens and pads on `side`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False, special_tokens=["<pad>"]
    )
    backend.train_from_iterator([PARIS, LONDON, "tokenization matters"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", padding_side=side)


@cache
def mamba() -> MambaForCausalLM:
    """Return a two-layer Mamba of the tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config).eval()
