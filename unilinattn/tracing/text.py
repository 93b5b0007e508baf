"""Texts as inputs: their token ids, the labels and words of their tokens, and targets and logits named by text."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.tracing.inputs import vocabulary_size

Span = tuple[int, int]
"""First character of a token in its text, and the one after its last."""


@dataclass(frozen=True, eq=False)
class Text:
    """Tokenized texts.

    Attributes:
        texts: a text for each sequence.
        tokenizer: the tokenizer that encoded them.
        arguments: the host's arguments: `input_ids` and, for texts of different lengths, `attention_mask`.
        spans: the place of each token in its text, without padding; None for a tokenizer without offsets.
        words: the index of each token's word in its text, padding included; None for tokens outside of words, and for
            a tokenizer without word ids.
    """

    texts: tuple[str, ...]
    tokenizer: Any
    arguments: dict[str, Tensor]
    spans: tuple[tuple[Span, ...], ...] | None
    words: tuple[tuple[int | None, ...], ...] | None

    @property
    def offsets(self) -> list[list[Span]] | None:
        """`spans` with (0, 0) at padding, None for a tokenizer without offsets."""
        if self.spans is None:
            return None
        mask = self.arguments.get("attention_mask", torch.ones_like(self.arguments["input_ids"]))
        rows = []
        for spans, real in zip(self.spans, mask.tolist(), strict=True):
            remaining = iter(spans)
            rows.append([next(remaining) if one else (0, 0) for one in real])
        return rows

    def require_vocabulary(self, model: nn.Module) -> None:
        """Raise `InputError` for ids that the model does not have, and warn of a tokenizer with more tokens than it."""
        size = vocabulary_size(model)
        if size is None:
            return
        name, host, ids = type(self.tokenizer).__name__, type(model).__name__, self.arguments["input_ids"]
        if (last := int(ids.max())) >= size:
            token = self.tokenizer.convert_ids_to_tokens(last)
            raise InputError(
                f"the tokenizer gives {token!r} the id {last}, and {host} has ids 0 to {size - 1}: {name} belongs to "
                "another model. Load the tokenizer that was saved with this model."
            )
        if hasattr(self.tokenizer, "__len__") and len(self.tokenizer) > size:
            warnings.warn(
                f"{name} has {len(self.tokenizer)} tokens and {host} {size}: it may belong to another model, whose "
                "ids mean other tokens.",
                stacklevel=3,
            )

    def positions(self, target: str | re.Pattern[str]) -> Int[Tensor, " batch"]:
        """Return the last token of the only place where a text or a pattern matches in each sequence.

        Positions count real tokens. Raises `InputError` if it matches nowhere or more than once, and for a tokenizer
        without offsets.
        """
        if self.spans is None:
            raise InputError(
                f"target {_shown(target)} is a text, and {type(self.tokenizer).__name__} does not return the places of "
                "its tokens; give a position, or use a fast tokenizer (AutoTokenizer.from_pretrained returns one)."
            )
        pattern = re.compile(re.escape(target)) if isinstance(target, str) else target
        return torch.tensor([_place(pattern, *each, target) for each in zip(self.texts, self.spans, strict=True)])


def encoded(texts: str | Sequence[str], tokenizer: Any) -> Text:
    """Tokenize texts, and pad them on the tokenizer's side.

    Raises `InputError` for texts without a tokenizer, for other values among them and for a text without tokens.
    """
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        given = "no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} as tokenizer"
        raise InputError(f"the input is text, with {given}; pass tokenizer=AutoTokenizer.from_pretrained(path).")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"the inputs hold texts and a {type(wrong[0]).__name__}; give one text for each sequence.")
    has_offsets = bool(getattr(tokenizer, "is_fast", False))
    encodings = [tokenizer(text, **({"return_offsets_mapping": True} if has_offsets else {})) for text in texts]
    rows = [list(encoding["input_ids"]) for encoding in encodings]
    if empty := [number for number, row in enumerate(rows) if not row]:
        raise InputError(f"text {empty[0]}, {texts[empty[0]]!r}, has no tokens; give a text of at least one token.")
    longest = max(map(len, rows))
    left = getattr(tokenizer, "padding_side", "right") == "left"

    def padded(row: Sequence[Any], filler: Any) -> list[Any]:
        missing = [filler] * (longest - len(row))
        return [*missing, *row] if left else [*row, *missing]

    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    # The mask hides padding, so any id will do.
    filler = next((token for token in candidates if token is not None), 0)
    arguments = {"input_ids": torch.tensor([padded(row, filler) for row in rows])}
    if any(len(row) < longest for row in rows):
        arguments["attention_mask"] = torch.tensor([padded([1] * len(row), 0) for row in rows])
    if not has_offsets:
        return Text(texts, tokenizer, arguments, None, None)
    spans = tuple(tuple(map(tuple, encoding["offset_mapping"])) for encoding in encodings)
    words = tuple(tuple(padded(encoding.word_ids(), None)) for encoding in encodings)
    return Text(texts, tokenizer, arguments, spans, words)


def words_of(tokenizer: Any, ids: Sequence[int], prompt: int) -> tuple[list[int | None], list[Span]] | None:
    """Return the word and the characters of each token in the text that the ids decode to.

    If the tokenizer splits this text into other tokens, those of the first `prompt` ids, and no words behind them. None
    if it splits the prompt into other tokens, and for a tokenizer without offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    special = set(tokenizer.all_special_ids)
    for count in (len(ids), prompt):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        plain = [at for at, token in enumerate(ids[:count]) if token not in special]
        if list(encoding["input_ids"]) != [ids[at] for at in plain]:
            continue
        words: list[int | None] = [None] * len(ids)
        offsets: list[Span] = [(0, 0)] * len(ids)
        for at, word, span in zip(plain, encoding.word_ids(), encoding["offset_mapping"], strict=True):
            words[at], offsets[at] = word, (span[0], span[1])
        return words, offsets
    return None


def is_text(inputs: Any) -> bool:
    """Tell whether inputs are a text or a sequence that holds one."""
    if isinstance(inputs, str):
        return True
    return isinstance(inputs, (list, tuple)) and any(isinstance(value, str) for value in inputs)


def token_text(tokenizer: Any, token: int) -> str:
    """Return the decoded text of a token, or its spelling in the vocabulary if the text is empty or partial."""
    text: str = tokenizer.decode([token])
    # A part of a character decodes to the replacement character.
    return tokenizer.convert_ids_to_tokens(token) if "\N{REPLACEMENT CHARACTER}" in text or not text else text


def token_id(tokenizer: Any, token: str) -> int:
    """Return the id of a token, spelled as in the vocabulary or as in a text.

    Raises `OptionError` for a text of several tokens.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if token in vocabulary:
        return vocabulary[token]
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        # The list of the whole vocabulary would hide the message.
        hint = nearest(token, vocabulary).partition(" Accepted:")[0]
        count = f": it has {len(ids)}" if len(ids) > 1 else ""
        raise OptionError(
            f"logit {token!r} is not one token of this tokenizer{count}{hint} Give a token as the vocabulary spells "
            "it, or its id."
        )
    return ids[0]


def _place(pattern: re.Pattern[str], text: str, spans: Sequence[Span], target: str | re.Pattern[str]) -> int:
    matches = [match.span() for match in pattern.finditer(text) if match.end() > match.start()]
    if len(matches) != 1:
        found = f"occurs {len(matches)} times, at characters {', '.join(str(m[0]) for m in matches[:5])}"
        raise InputError(
            f"target {_shown(target)} {found if matches else 'does not occur'} in the text {_shortened(text)}; give a "
            "text that occurs once, or a position."
        )
    ((begin, end),) = matches
    return max(place for place, span in enumerate(spans) if span[0] < end and span[1] > begin)


def _shown(target: str | re.Pattern[str]) -> str:
    return repr(target) if isinstance(target, str) else f"the pattern {target.pattern!r}"


def _shortened(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else f"{text[:length]}...")
