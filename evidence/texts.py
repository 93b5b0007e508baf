"""Two linear RNNs that learned the documentation of Python packages, with their tokenizer and held-out prompts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from evidence.hosts import start_slowly
from evidence.study import FOLDER
from unilinattn.errors import CheckpointError, OptionError, nearest
from unilinattn.optional import import_extra

WEIGHTS = FOLDER / "weights"

HELD_OUT = WEIGHTS / "text-held_out.json"
"""The file of held-out passages and prompts."""

VOCABULARY = 3072
"""Entries of the tokenizer."""

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"num_hidden_layers": 5, "hidden_size": 160, "state_size": 64, "head_dim": 64, "num_heads": 5, "n_groups": 1},
    ),
    "gated_deltanet": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4,
            "hidden_size": 160,
            "intermediate_size": 224,
            "linear_num_key_heads": 5,
            "linear_num_value_heads": 5,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    ),
}
"""The model class, the configuration class and the shipped size of each model by name."""

MULTIPLES = {"small": 1, "large": 2}
"""Sizes: the factor of the layers and of the widths and heads of the shipped size."""


def configuration(name: str, size: str = "small") -> dict[str, Any]:
    """Return the keyword arguments of a model's configuration class.

    Raises `OptionError` for an unknown name or size.
    """
    if name not in MODELS:
        raise OptionError(f"unknown model {name!r}{nearest(name, MODELS)}")
    if size not in MULTIPLES:
        raise OptionError(f"unknown size {size!r}{nearest(size, MULTIPLES)}")
    scaled = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_heads"}
    scaled |= {"linear_num_key_heads", "linear_num_value_heads"}
    shape = {key: value * MULTIPLES[size] if key in scaled else value for key, value in MODELS[name][2].items()}
    if name == "gated_deltanet":
        shape["layer_types"] = ["linear_attention"] * shape["num_hidden_layers"]
    return {"vocab_size": VOCABULARY, **shape, **NO_TOKENS, "tie_word_embeddings": True, "use_cache": False}


def build(name: str, size: str = "small") -> nn.Module:
    """Return an untrained model, whose weights depend on torch's seed.

    Raises `OptionError` for an unknown name or size.
    """
    config = configuration(name, size)
    package: Any = import_extra("transformers", "hf")
    host: nn.Module = getattr(package, MODELS[name][0])(getattr(package, MODELS[name][1])(**config))
    if name == "gated_deltanet":
        start_slowly(host)
    return host


def load(name: str) -> tuple[nn.Module, Any]:
    """Return a trained model in float32 and evaluation mode, and its tokenizer (a `PreTrainedTokenizerFast`).

    The tokenizer puts no token before a text; in the training each text follows the token of id 0.

    Raises `OptionError` for an unknown name, and `CheckpointError` if a file is absent or does not fit the model.
    """
    host, path = build(name), WEIGHTS / f"text-{name}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is absent; train it with `python -m evidence.train_text {name}`.")
    weights = {key: tensor.float() for key, tensor in load_file(path).items()}
    try:
        host.load_state_dict(with_tied(weights))
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit {type(host).__name__}: {error}. Train it again.") from error
    return host.eval(), tokenizer()


def tokenizer() -> Any:
    """Return the tokenizer of both models; its token `<|endoftext|>`, of id 0, begins a text."""
    package: Any = import_extra("transformers", "hf")
    path = WEIGHTS / "text-tokenizer.json"
    return package.PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<|endoftext|>")


def prompts() -> Sequence[Mapping[str, Any]]:
    """Return the held-out prompts, of 12 to 48 tokens each, after which both models expect the same next token.

    A prompt has a `source`, `ids` and `text`, the `expected` token and its `word`, the true `next` token, and each
    model's `probability` of the expected token, also after the last four tokens only (`probability_after_recent`),
    which do not suffice for half of the prompts (`text_prompts.is_far`).
    """
    return json.loads(HELD_OUT.read_text())["prompts"]


def passages() -> Sequence[Mapping[str, Any]]:
    """Return held-out passages of 256 tokens each, with `source` and `ids`."""
    return json.loads(HELD_OUT.read_text())["passages"]


def records() -> Mapping[str, Any]:
    """Return the record of the text, of the baselines, and of the training of both models."""
    return json.loads((WEIGHTS / "text.json").read_text())


def untied(host: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model without the output matrix, which is the embedding matrix."""
    return {key: tensor for key, tensor in host.state_dict().items() if key != "lm_head.weight"}


def with_tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the embedding matrix also as the output matrix."""
    embeddings = [tensor for key, tensor in weights.items() if "embed" in key]
    return {**weights, "lm_head.weight": embeddings[0]} if embeddings else dict(weights)


@torch.no_grad()
def nats(host: nn.Module, ids: Tensor) -> float:
    """Return the mean negative log-likelihood of all tokens but the first of each row: ids is [batch, length]."""
    logits = host(ids).logits[:, :-1].float()
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
