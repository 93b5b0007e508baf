"""Texts as inputs: their token ids, the labels and words of their tokens, and targets and logits named by text."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn.call.offloaded import device_of
from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.host.inputs import decoder_start, vocabulary_size
from unilinattn.host.labels import labels_of_ids, labels_of_text, token_text

Value = TypeVar("Value")
NO_TEXT = "the inputs are no texts; put the id of the beginning-of-text token before the ids, or give the texts."
"""End of an error for an option that only texts have."""

Span = tuple[int, int]
"""First character of a token in its text, and the one after its last."""


@dataclass(frozen=True, eq=False)
class Text:
    """Tokenized texts.

    Attributes:
        texts: a text for each sequence, of a pair both in a row; None if only their tokens were given.
        tokenizer: the tokenizer that encoded them, None if it is unknown.
        arguments: the host's arguments: `input_ids`, for texts of different lengths `attention_mask`, and for pairs the
            `token_type_ids` of a tokenizer that has them.
        spans: the place of each token in its text, without padding; None for a tokenizer without offsets.
        words: the index of each token's word in its text, padding included; None for tokens outside of words, and for
            a tokenizer without word ids.
    """

    texts: tuple[str, ...] | None
    tokenizer: Any
    arguments: dict[str, Tensor]
    spans: tuple[tuple[Span, ...], ...] | None
    words: tuple[tuple[int | None, ...], ...] | None

    @property
    def offsets(self) -> list[list[Span]] | None:
        """`spans` with (0, 0) at padding, None for a tokenizer without offsets."""
        if self.spans is None:
            return None
        return [self._padded(row, [(0, 0)] * len(self._real[index]), index) for index, row in enumerate(self.spans)]

    @property
    def labels(self) -> list[list[str]] | None:
        """The text of each token (see `host.labels`), padding included; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        rows = []
        for index, (ids, real) in enumerate(zip(self.arguments["input_ids"].tolist(), self._real, strict=True)):
            tokens = [token for token, is_real in zip(ids, real, strict=True) if is_real]
            if self.texts is None or self.spans is None:
                labels = labels_of_ids(self.tokenizer, tokens)
            else:
                labels = labels_of_text(self.tokenizer, tokens, self.spans[index], self.texts[index])
            # Padding is one and the same token.
            filler = [token_text(self.tokenizer, ids[real.index(0)])] if 0 in real else [""]
            rows.append(self._padded(labels, filler * len(ids), index))
        return rows

    @property
    def _real(self) -> list[list[int]]:
        ids = self.arguments["input_ids"]
        rows: list[list[int]] = self.arguments.get("attention_mask", torch.ones_like(ids)).tolist()
        return rows

    def _padded(self, values: Sequence[Value], fillers: Sequence[Value], index: int) -> list[Value]:
        """Return the values of a sequence's real tokens, with fillers at its padding."""
        remaining = iter(values)
        return [next(remaining) if real else filler for real, filler in zip(self._real[index], fillers, strict=True)]

    def arguments_for(self, model: nn.Module) -> dict[str, Tensor]:
        """Return `arguments` on a model's device, with the first id of a decoder for a model that has one.

        Raises `InputError` for ids that the model does not have, and warns of a tokenizer with more tokens than it.
        """
        self._require_vocabulary(model)
        device = device_of(model)
        start = decoder_start(model, len(self.arguments["input_ids"]))
        return {name: ids.to(device) for name, ids in {**self.arguments, **start}.items()}

    def _require_vocabulary(self, model: nn.Module) -> None:
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

        Raises the errors of `tokens_of`.
        """
        return torch.tensor([last for _, last in self.tokens_of(target)], device="cpu")

    def tokens_of(self, target: str | re.Pattern[str], name: str = "target") -> list[tuple[int, int]]:
        """Return the first and the last token of the only place where a text or a pattern matches in each sequence.

        Positions count real tokens. Raises `InputError` if it matches nowhere or more than once, and for a tokenizer
        without offsets; `name` is that of the argument.
        """
        if self.texts is None:
            raise InputError(
                f"{name} {_shown(target)} is a text, and the inputs are the tokens of one that is unknown; give a "
                "position, or the text with tokenizer=."
            )
        if self.spans is None:
            raise InputError(
                f"{name} {_shown(target)} is a text, and {type(self.tokenizer).__name__} does not return the places of "
                "its tokens; give a position, or use a fast tokenizer (AutoTokenizer.from_pretrained returns one)."
            )
        pattern = re.compile(re.escape(target)) if isinstance(target, str) else target
        return [_place(pattern, *each, f"{name} {_shown(target)}") for each in zip(self.texts, self.spans, strict=True)]


def encoded(texts: str | Sequence[Any], tokenizer: Any, *, bos: bool = False) -> Text:
    """Tokenize texts, or pairs of texts such as ("premise", "hypothesis"), and pad them on the tokenizer's side.

    `bos`: whether the tokenizer's beginning-of-text token goes before each text that does not open with it.

    Raises `InputError` for texts without a tokenizer, for other values among them, for a text without tokens and for
    one that no encoding has, and `OptionError` for `bos` and a tokenizer without such a token.
    """
    sequences = [_parts(number, text) for number, text in enumerate([texts] if isinstance(texts, str) else texts)]
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        named = "no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} as tokenizer"
        raise InputError(f"the input is text, with {named}; pass tokenizer=AutoTokenizer.from_pretrained(path).")
    encodings = [tokenizer(*each) for each in sequences]
    rows = [list(encoding["input_ids"]) for encoding in encodings]
    if empty := [number for number, row in enumerate(rows) if not row]:
        raise InputError(
            f"text {empty[0]}, {sequences[empty[0]][0]!r}, has no tokens; give a text of at least one token."
        )
    starts = [_start(tokenizer, row) if bos else [] for row in rows]
    rows = [[*start, *row] for start, row in zip(starts, rows, strict=True)]
    longest = max(map(len, rows))
    left = getattr(tokenizer, "padding_side", "right") == "left"

    def padded(row: Sequence[Any], filler: Any) -> list[Any]:
        missing = [filler] * (longest - len(row))
        return [*missing, *row] if left else [*row, *missing]

    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    # The mask hides padding, so any id will do.
    filler = next((token for token in candidates if token is not None), 0)
    arguments = {"input_ids": torch.tensor([padded(row, filler) for row in rows], device="cpu")}
    if any(len(row) < longest for row in rows):
        arguments["attention_mask"] = torch.tensor([padded([1] * len(row), 0) for row in rows], device="cpu")
    if any(len(each) > 1 for each in sequences) and "token_type_ids" in encodings[0]:
        arguments["token_type_ids"] = torch.tensor(
            [
                padded([*[0] * len(start), *each["token_type_ids"]], 0)
                for start, each in zip(starts, encodings, strict=True)
            ],
            device="cpu",
        )
    joined = tuple(map("".join, sequences))
    if not getattr(tokenizer, "is_fast", False):
        return Text(joined, tokenizer, arguments, None, None)
    placed = [_placed(each.encodings[0], len(first)) for each, (first, *_) in zip(encodings, sequences, strict=True)]
    # A token before the text has no characters and no word, as other special tokens.
    words = tuple(
        tuple(padded([*[None] * len(start), *numbers], None))
        for start, (_, numbers) in zip(starts, placed, strict=True)
    )
    spans = tuple((*[(0, 0)] * len(start), *each) for start, (each, _) in zip(starts, placed, strict=True))
    return Text(joined, tokenizer, arguments, spans, words)


def _start(tokenizer: Any, row: Sequence[int]) -> list[int]:
    """Return the beginning-of-text token of a tokenizer, nothing if a row of ids opens with it."""
    start: int | None = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        raise OptionError(
            f"bos=True, and {type(tokenizer).__name__} has no beginning-of-text token (`bos_token`); leave bos out, or "
            "set `tokenizer.bos_token` to the token with which the model was trained to begin."
        )
    return [] if row[0] == start else [start]


def tokenized(inputs: Any, tokenizer: Any) -> Text | None:
    """Return the tokens of a mapping that a fast tokenizer returned (`BatchEncoding`), None for other inputs."""
    encodings = getattr(inputs, "encodings", None)
    ids = inputs.get("input_ids") if encodings and isinstance(inputs, Mapping) else None
    if not encodings or not isinstance(ids, Tensor) or ids.tolist() != [each.ids for each in encodings]:
        return None
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    arguments = {"input_ids": ids, "attention_mask": mask}
    placed = [_placed(each, None) for each in encodings]
    real = [
        tuple(span for span, is_real in zip(spans, row, strict=True) if is_real)
        for (spans, _), row in zip(placed, mask.tolist(), strict=True)
    ]
    return Text(None, tokenizer, arguments, tuple(real), tuple(tuple(words) for _, words in placed))


def _parts(number: int, text: Any) -> tuple[str, ...]:
    """Return the text, or the two texts of a pair, of a sequence; raise `InputError` for other values."""
    texts = (text,) if isinstance(text, str) else text
    if not _is_pair(text) and not isinstance(text, str):
        raise InputError(
            f"the inputs hold texts and a {type(text).__name__}; give one text for each sequence, or one pair of texts."
        )
    for each in texts:
        try:
            each.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"text {number} has {each[error.start]!r} at character {error.start}, half of a surrogate pair, which "
                "is no character; decode its bytes as UTF-8 first."
            ) from None
    return tuple(texts)


def _is_pair(text: Any) -> bool:
    return isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(each, str) for each in text)


def _placed(encoding: Any, length: int | None) -> tuple[list[Span], list[int | None]]:
    """Return the place and the word of each token of a text, or of a pair of texts in a row.

    `length`: characters of the first text of a pair; None for those up to its last token.
    """
    first = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence == 0]
    begin = max((encoding.offsets[index][1] for index in first), default=0) if length is None else length
    words = 1 + max((encoding.word_ids[index] for index in first if encoding.word_ids[index] is not None), default=-1)
    spans, numbers = [], []
    for (start, end), word, sequence in zip(encoding.offsets, encoding.word_ids, encoding.sequence_ids, strict=True):
        spans.append((start + begin, end + begin) if sequence else (start, end))
        numbers.append(word + words if sequence and word is not None else word)
    return spans, numbers


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
        plain = [index for index, token in enumerate(ids[:count]) if token not in special]
        if list(encoding["input_ids"]) != [ids[index] for index in plain]:
            continue
        words: list[int | None] = [None] * len(ids)
        offsets: list[Span] = [(0, 0)] * len(ids)
        for index, word, span in zip(plain, encoding.word_ids(), encoding["offset_mapping"], strict=True):
            words[index], offsets[index] = word, (span[0], span[1])
        return words, offsets
    return None


def is_text(inputs: Any) -> bool:
    """Tell whether inputs are a text or a sequence that holds a text or a pair of texts."""
    if isinstance(inputs, str):
        return True
    return isinstance(inputs, (list, tuple)) and any(isinstance(value, str) or _is_pair(value) for value in inputs)


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


def _place(pattern: re.Pattern[str], text: str, spans: Sequence[Span], subject: str) -> tuple[int, int]:
    matches = [match.span() for match in pattern.finditer(text) if match.end() > match.start()]
    if len(matches) != 1:
        count = f"occurs {len(matches)} times, at characters {', '.join(str(m[0]) for m in matches[:5])}"
        raise InputError(
            f"{subject} {count if matches else 'does not occur'} in the text {_shortened(text)}; give a "
            "text that occurs once, or a position."
        )
    ((begin, end),) = matches
    inside = [index for index, span in enumerate(spans) if span[0] < end and span[1] > begin]
    return inside[0], inside[-1]


def _shown(target: str | re.Pattern[str]) -> str:
    return repr(target) if isinstance(target, str) else f"the pattern {target.pattern!r}"


def _shortened(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else f"{text[:length]}...")
