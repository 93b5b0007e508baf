"""The texts of a file."""

import json
from os import PathLike
from pathlib import Path

from unilinattn.errors import InputError


def read_texts(path: str | PathLike[str]) -> list[str]:
    """Read a text from each line of a UTF-8 file that ends in .txt, or the `text` of each line of a JSON-lines file.

    Empty lines are skipped. Raises `InputError`, with file and line, for a line that is no such object, and for a file
    that cannot be read or has no texts.
    """
    source = Path(path)
    is_json = source.suffix != ".txt"
    texts = [_from_json(line, where) if is_json else line for where, line in numbered_lines(source)]
    if not texts:
        kind = "a JSON object with a `text`" if is_json else "a text"
        raise InputError(f"{source} has no texts; give {kind} on each line.")
    return texts


def numbered_lines(source: Path) -> list[tuple[str, str]]:
    """Return the lines of a UTF-8 file that are not empty, each with its file and number.

    Raises `InputError` for a file that cannot be read.
    """
    try:
        # Split at line ends alone: `splitlines` also splits at characters that a text may hold.
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} cannot be read as UTF-8 text: {error}") from error
    return [(f"{source}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _from_json(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}") from error
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text:
        raise InputError(f'{where} is no JSON object with a text, such as {{"text": "the cat"}}.')
    return text
