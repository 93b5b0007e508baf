"""Train a small language model on the manual of Python, and save it as a checkpoint with its tokenizer."""

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

TOKENS, WIDTH, LENGTH, BATCH = 1024, 96, 128, 8
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def mamba2() -> Mamba2ForCausalLM:
    """Return a Mamba-2 of two layers with random weights."""
    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=TOKENS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            state_size=32,
            num_heads=8,
            head_dim=WIDTH // 4,
            n_groups=1,
            chunk_size=64,
            **NO_MARKS,
        )
    )


def transformer() -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            initializer_range=0.1,
            **NO_MARKS,
        )
    )


def train(build: Callable[[], PreTrainedModel], folder: str | Path, *, steps: int = 200) -> None:
    """Train a model on next tokens of the manual for `steps` batches, and save it with its tokenizer in `folder`."""
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=TOKENS, show_progress=False)
    data = torch.tensor(tokenizer.encode(text).ids)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
