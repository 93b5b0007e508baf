"""A small Mamba that knows a few capitals, with its tokenizer, trained in a second."""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

CAPITALS = {"France": "Paris", "England": "London", "Peru": "Lima", "Japan": "Tokyo", "Norway": "Oslo"}
SENTENCES = [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of the sentences; rare words have several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@cache
def capitals(steps: int = 60) -> tuple[MambaForCausalLM, Any]:
    """Train the model to continue the sentences, and return it with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = byte_level_tokenizer()
    config = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=32, state_size=8, num_hidden_layers=2, eos_token_id=1, pad_token_id=0
    )
    model = MambaForCausalLM(config)
    batch = tokenizer([sentence + "<eos>" for sentence in SENTENCES], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    return model.eval(), tokenizer
