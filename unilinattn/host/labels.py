"""Labels of tokens: the text of each one, from its place in a text or from the decoded ids.

The labels of a sequence, without special tokens, join to its text: white space belongs to the token behind it. Of a
character that several tokens share, the first token has the text, and the others are `CONTINUATION`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any
from unicodedata import category

from unilinattn.results.words import CONTINUATION

UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are no character."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Spelling of a space in vocabularies of SentencePiece."""

MOST_PARTS = 8
"""Largest number of tokens that are decoded as one text: a character has at most four bytes."""


def labels_of_text(tokenizer: Any, ids: Sequence[int], spans: Sequence[tuple[int, int]], text: str) -> list[str]:
    """Return the labels of tokens whose places (first character, one after the last) in a text are known.

    A token without characters, such as a special one, has the label of its id. Of the characters that the tokenizer
    leaves out, accents and joiners belong to the token before them, and others to the token behind them.
    """
    labels: list[str] = []
    last, done = None, 0
    for token, (begin, end) in zip(ids, spans, strict=True):
        if last is not None and (marks := _marks(text[done:begin])):
            labels[last] += marks
            done += len(marks)
        if end <= begin and not text[done:begin].isspace():
            labels.append(token_text(tokenizer, token))
        elif text[begin:end].strip() and not tokenizer.convert_ids_to_tokens(token).strip(SPACE):
            # A space that the tokenizer added before the text has the place of the first letter.
            labels.append(SPACE)
        elif end <= done:
            labels.append(CONTINUATION)
        else:
            last = len(labels)
            labels.append(text[done:end])
            done = end
    if last is not None:
        labels[last] += _marks(text[done:])
    return labels


def _marks(text: str) -> str:
    """Return the marks at the start of a text: accents (Unicode's category M) and joiners (Cf)."""
    return "".join(takewhile(lambda letter: category(letter)[0] == "M" or category(letter) == "Cf", text))


def labels_of_ids(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the labels of ids of one text: the text that each one adds behind the tokens before it."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    decoded = cache(lambda *tokens: tokenizer.decode(list(tokens)))
    labels: list[str] = []
    before: Sequence[int] = ()
    while (first := len(labels)) < len(ids):
        group, text = ids[first : first + 1], ""
        if group[0] not in special:
            for last in range(first + 1, min(first + MOST_PARTS, len(ids)) + 1):
                group, text = ids[first:last], _added(decoded, before, ids[first:last])
                if text and UNDECODED not in text:
                    break
        # A token that adds nothing is no part of the one behind it, whose text is the same without it.
        alone = len(group) > 1 and decoded(*group[1:]).strip() == text.strip()
        if not text or UNDECODED in text or alone:
            group, text = group[:1], token_text(tokenizer, group[0])
        labels += [text, *[CONTINUATION] * (len(group) - 1)]
        before = () if group[0] in special else group
    return labels


def _added(decoded: Callable[..., str], before: Sequence[int], group: Sequence[int]) -> str:
    """Return the text that tokens add behind others: tokenizers write spaces only between tokens."""
    front = decoded(*before) if before else ""
    text = decoded(*before, *group)
    return text[len(front) :] if text.startswith(front) else decoded(*group)


def token_text(tokenizer: Any, token: int) -> str:
    """Return the decoded text of a token; its spelling in the vocabulary if that is empty, its bytes if it is partial.

    Bytes are written as by tokenizers with byte fallback, such as `<0xF0><0x9F>`.
    """
    text: str = tokenizer.decode([token])
    if text and UNDECODED not in text:
        return text
    spelling: str = tokenizer.convert_ids_to_tokens(token)
    letters = _byte_letters()
    if not text or spelling.startswith("<0x") or not all(letter in letters for letter in spelling):
        return spelling
    return "".join(f"<0x{letters[letter]:02X}>" for letter in spelling)


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE (GPT-2): printable ones are themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}
