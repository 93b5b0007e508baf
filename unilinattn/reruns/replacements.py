"""The inputs with other tokens in place of some, of `effects` and of checks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from unilinattn.discovery.perturbation import placeholder_ids, special_ids
from unilinattn.errors import InputError, OptionError
from unilinattn.host.inputs import ids_name, is_ids, vocabulary_size
from unilinattn.host.text import encoded, is_text
from unilinattn.tracing.trace import Trace

Span = int | str | re.Pattern[str] | tuple[int, int]
"""A token, (first, stop) of several, or the text of the only place whose tokens are replaced at once."""


@dataclass(frozen=True, eq=False)
class Replacement:
    """Tokens of a sequence, and the inputs in which they are other ones.

    Attributes:
        sequence: the index of the sequence.
        first, last: the first token, and the one after the last, counted over real tokens.
        tokens: the positions of these tokens, padding included.
        ids: the ids of the sequence with each replacement.
    """

    sequence: int
    first: int
    last: int
    tokens: Int[Tensor, " span"]
    ids: Int[Tensor, "draw length"]


def ids_of(trace: Trace) -> Int[Tensor, "batch length"]:
    """Return the ids of a trace; raise `InputError` for inputs without ids or with those of several streams."""
    if trace.ids is None:
        raise InputError(
            f"{trace.model} was not given one tensor of token ids, and other tokens are other ids; give a "
            "text or ids. The ids of an encoder and a decoder are two streams, of which it takes neither."
        )
    if tuple(trace.ids.shape) != trace.token_shape:
        raise InputError(
            f"the ids have shape {tuple(trace.ids.shape)}, and the layers of {trace.model} have "
            f"{trace.token_shape[0]} sequences of {trace.token_shape[1]} tokens, so an id is not a token of them."
        )
    return trace.ids


def against_inputs(trace: Trace, against: Any, tokenizer: Any) -> list[Replacement]:
    """Return each sequence with all of its tokens replaced by those of other inputs.

    Raises `InputError` for inputs without ids, with ids of another shape, or with another mask or other arguments.
    """
    ids, other = ids_of(trace), against
    if is_text(against):
        other = encoded(against, tokenizer).arguments
    name = ids_name(trace.arguments)
    assert name is not None
    other = other if isinstance(other, Mapping) else {name: other}
    other_ids: Any = other.get(name)
    if not is_ids(other_ids) or other_ids.shape != ids.shape:
        shape = tuple(other_ids.shape) if isinstance(other_ids, Tensor) else type(other_ids).__name__
        raise InputError(
            f"against has ids {shape}, and the inputs {tuple(ids.shape)}; give a text, or ids, of as many sequences of "
            "as many tokens. For some tokens in place of others there is replaced= with replacement=."
        )
    for key, value in other.items():
        same = trace.arguments.get(key)
        if key == name or not isinstance(value, Tensor):
            continue
        expected = same.cpu() if isinstance(same, Tensor) else torch.ones_like(value.cpu())
        if "mask" not in key and not isinstance(same, Tensor):
            expected = torch.zeros_like(value.cpu())
        if not torch.equal(value.cpu(), expected.to(value.dtype)):
            raise InputError(f"against has another {key} than the inputs; only the ids may differ.")
    _require_vocabulary(trace, other_ids.flatten().tolist())
    real, placeholders = real_tokens(trace), placeholder_ids(trace.host)
    before, after = (torch.isin(each.cpu(), placeholders) for each in (ids, other_ids))
    for b, token in ((before != after) & real.cpu()).nonzero().tolist():
        _refuse_placeholder(trace, b, int(real[b, :token].sum()))
    rows = enumerate(other_ids.to(ids))
    return [
        Replacement(b, 0, len(tokens := real[b].nonzero().squeeze(1)), tokens, torch.where(real[b], row, ids[b])[None])
        for b, row in rows
    ]


def replacements(
    trace: Trace, tokenizer: Any, replaced: Any, replacement: Any, draws: Any, seed: Any
) -> list[Replacement]:
    """Return the spans of tokens with their replacements, of every sequence.

    Without `replaced` they are the real tokens but for placeholders, in whose place the model puts an image. Without a
    `replacement` `draws` ids are drawn for each token, which differ from each other, from the token and from special
    ids. Raises `InputError` for tokens or ids that do not exist, for a text without a tokenizer and for a
    replacement of another length, and `OptionError` for `draws` that the vocabulary does not have.
    """
    ids, real = ids_of(trace), real_tokens(trace)
    alternatives = None if replacement is None else _alternatives(trace, replacement, tokenizer)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise OptionError(f"draws={draws!r}; give a positive number of replacements for each token.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError(f"seed={seed!r}; give a whole number of at least 0.")
    generator = torch.Generator().manual_seed(seed)
    ordinary = ordinary_ids(trace, tokenizer) if alternatives is None else None
    made, placeholders = [], placeholder_ids(trace.host)
    for b, row in enumerate(ids.cpu()):
        tokens = real[b].nonzero().squeeze(1).cpu()
        is_placeholder = torch.isin(row[tokens], placeholders)
        for first, last in _spans(trace, replaced, b, len(tokens)):
            columns = tokens[first:last]
            if bool(is_placeholder[first:last].any()):
                if replaced is None:
                    continue
                _refuse_placeholder(trace, b, first + int(is_placeholder[first:last].int().argmax()))
            if ordinary is None:
                assert alternatives is not None
                others = _fitting(alternatives, row[columns])
            else:
                others = torch.stack([_drawn(ordinary, token, draws, generator) for token in row[columns].tolist()], 1)
            changed = row.repeat(len(others), 1)
            changed[:, columns] = others.to(row)
            made.append(Replacement(b, first, last, columns, changed.to(ids.device)))
    return made


def _refuse_placeholder(trace: Trace, sequence: int, token: int) -> None:
    raise InputError(
        f"token {token} of sequence {sequence} is a placeholder, in whose place {trace.model} puts another input, such "
        "as a patch of an image, and there are as many of both; replace tokens of the text."
    )


def real_tokens(trace: Trace) -> Bool[Tensor, "batch length"]:
    """Return True at the real tokens."""
    mask, ids = trace.layers[-1].mask, ids_of(trace)
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device)


def _spans(trace: Trace, replaced: Any, sequence: int, length: int) -> list[tuple[int, int]]:
    """Return (first, stop) of the spans in one sequence of `length` real tokens."""
    if replaced is None:
        return [(token, token + 1) for token in range(length)]
    single = isinstance(replaced, (int, str, re.Pattern)) or (isinstance(replaced, tuple) and _is_pair(replaced))
    named = [replaced] if single else _listed(replaced, "replaced")
    spans = []
    for span in named:
        if isinstance(span, (str, re.Pattern)):
            if trace.text is None:
                raise InputError(f"replaced={span!r} is a text, and the model was not given text; give a position.")
            first, last = trace.text.tokens_of(span, "replaced")[sequence]
            spans.append((first, last + 1))
        elif isinstance(span, int) and not isinstance(span, bool) and -length <= span < length:
            spans.append((span % length, span % length + 1))
        elif _is_pair(span) and 0 <= span[0] < span[1] <= length:
            spans.append((span[0], span[1]))
        else:
            raise InputError(
                f"replaced={span!r}: sequence {sequence} has the real tokens 0 to {length - 1}; give a position, "
                "(first, stop) of several tokens, or a text that occurs once."
            )
    return spans


def _listed(values: Any, name: str) -> list[Any]:
    """Return the values of a sequence or a tensor; raise `InputError` for others and if there are none."""
    values = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(values, Sequence) or not values:
        raise InputError(f"{name}={values!r}; give a whole number, a text, or a list with at least one of them.")
    return list(values)


def _is_pair(span: Any) -> bool:
    return isinstance(span, (tuple, list)) and len(span) == 2 and all(type(each) is int for each in span)


def _alternatives(trace: Trace, replacement: Any, tokenizer: Any) -> list[list[int]]:
    """Return the ids of each alternative, in place of one token or of as many as it has."""
    named = [replacement] if isinstance(replacement, (int, str)) else _listed(replacement, "replacement")
    alternatives = []
    for each in named:
        if isinstance(each, str):
            if tokenizer is None:
                raise InputError(f"replacement {each!r} is a text; give ids of tokens, or also tokenizer=.")
            alternatives.append(list(tokenizer.encode(each, add_special_tokens=False)))
        else:
            alternatives.append([each] if isinstance(each, int) else _listed(each, "replacement"))
    if not all(alternatives):
        raise InputError(f"replacement={replacement!r} has a text without tokens; give ids, or other texts.")
    _require_vocabulary(trace, [token for each in alternatives for token in each])
    placeholders = {token for each in alternatives for token in each} & {*placeholder_ids(trace.host).tolist()}
    if placeholders:
        raise InputError(
            f"replacement has the id {min(placeholders)}, in whose place {trace.model} puts another input, such as a "
            "patch of an image; give ids of words."
        )
    return alternatives


def _fitting(alternatives: Sequence[Sequence[int]], tokens: Int[Tensor, " span"]) -> Int[Tensor, "draw span"]:
    """Return the alternatives of a span, without the span itself; one token takes the place of each of several."""
    length, rows = len(tokens), []
    for each in alternatives:
        if len(each) not in (1, length):
            raise InputError(
                f"a replacement has {len(each)} tokens, and the replaced span {length}; the length may not change. "
                "Give one of as many tokens, or of one."
            )
        row = list(each) * (length // len(each))
        rows += [] if row == tokens.tolist() else [row]
    if not rows:
        raise InputError(f"every replacement of the tokens with ids {tokens.tolist()} is equal to them; give others.")
    return torch.tensor(rows, device="cpu")


def ordinary_ids(trace: Trace, tokenizer: Any) -> Int[Tensor, " id"]:
    """Return the ids that may be drawn, in order: those of the vocabulary but for special ones.

    Raises `InputError` if the number of ids is unknown.
    """
    size = _vocabulary(trace)
    if size is None:
        raise InputError(
            f"the number of ids of {trace.model} is unknown, so none can be drawn: it has several tables of embeddings "
            "and names none by get_input_embeddings(). Add this method, or give `effects` ids as replacement=."
        )
    ids = torch.arange(min(size, len(tokenizer)) if hasattr(tokenizer, "__len__") else size, device="cpu")
    special = torch.tensor(getattr(tokenizer, "all_special_ids", []), dtype=torch.long, device="cpu")
    return ids[~torch.isin(ids, torch.cat([special_ids(trace.host), special]))]


def _drawn(ordinary: Int[Tensor, " id"], token: int, draws: int, generator: torch.Generator) -> Int[Tensor, " draw"]:
    others = ordinary[ordinary != token]
    if len(others) < draws:
        raise OptionError(f"draws={draws}; a token has {len(others)} replacements that are no special ids.")
    return others[torch.randperm(len(others), generator=generator, device="cpu")[:draws]]


def other_ids(
    ordinary: Int[Tensor, " id"], ids: Int[Tensor, "*shape"], generator: torch.Generator
) -> Int[Tensor, "*shape"]:
    """Return a random one of the `ordinary` ids, which are in order, for each id, but not the same.

    Raises `InputError` if there is no other one.
    """
    rank = torch.searchsorted(ordinary, ids)
    present = torch.isin(ids, ordinary)
    counts = len(ordinary) - present.long()
    if not bool((counts > 0).all()):
        raise InputError(f"the vocabulary has {len(ordinary)} ids that are not special, so none can replace another.")
    draw = (torch.rand(ids.shape, generator=generator, dtype=torch.float64, device="cpu") * counts).long()
    return ordinary[draw + (present & (draw >= rank))]


def _vocabulary(trace: Trace) -> int | None:
    """Return the number of ids of a model, None if it is unknown.

    It is that of the table that the model names, else of its only table, or of one that has a logit for each entry.
    """
    if (size := vocabulary_size(trace.host)) is not None:
        return size
    tables = {module.num_embeddings for module in trace.host.modules() if isinstance(module, nn.Embedding)}
    if len(tables) > 1 and trace.explained_logit.exists:
        tables &= {trace.explained_logit.logits.shape[-1]}
    return next(iter(tables)) if len(tables) == 1 else None


def _require_vocabulary(trace: Trace, ids: Sequence[int]) -> None:
    size = _vocabulary(trace)
    wrong = [token for token in ids if type(token) is not int or token < 0 or (size is not None and token >= size)]
    if wrong:
        last = "" if size is None else f" to {size - 1}"
        raise InputError(f"{trace.model} has no id {wrong[0]!r}; give ids from 0{last}.")
