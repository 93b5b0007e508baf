"""The folder of an evaluation: its configuration, and the numbers computed so far."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unilinattn.errors import ResultFileError

FORMAT = "unilinattn.evaluation"
FORMAT_VERSION = "1"

CONFIGURATION = "configuration.json"

SHOWN = 5
"""Largest number of differences that an error lists."""


class Store:
    """Values by key, one JSON file each, beside the configuration that they belong to.

    Files are replaced in one step, so an interrupted write leaves none. Without a folder nothing is stored.

    Raises `ResultFileError` for a folder that cannot be written, holds other files, or belongs to another
    configuration, whose differences it names.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, configuration: Mapping[str, Any]) -> None:
        """Create the folder, or check that it has this configuration."""
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        described = {"format": FORMAT, "format_version": FORMAT_VERSION, **configuration}
        if self._folder.exists() and not self._folder.is_dir():
            raise ResultFileError(f"{self._folder} is no folder, so no results can be stored there; name another.")
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.exists() else []
        if any(not name.startswith(".") for name in names) and CONFIGURATION not in names:
            raise ResultFileError(
                f"{self._folder} holds {sorted(names)[0]!r} and no {CONFIGURATION}: it is not the folder of an "
                "evaluation. Name another, or empty it."
            )
        self.agree(Path(CONFIGURATION).stem, described)

    @property
    def folder(self) -> Path | None:
        """The folder, None if nothing is stored."""
        return self._folder

    def agree(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a value, or require that the stored one is the same.

        Raises `ResultFileError` with the differences.
        """
        plain = json.loads(json.dumps(value))
        stored = self.read(key)
        if stored is None:
            self.write(key, plain)
        elif lines := list(_differences(stored, plain)):
            more = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
            raise ResultFileError(
                f"{self._folder} holds the results of another evaluation: {'; '.join(lines[:SHOWN])}{more}. Name "
                "another folder, or ask for what is stored there."
            )

    def read(self, key: str) -> Any:
        """Return the stored value of a key, None if there is none.

        Raises `ResultFileError` for a file that is not JSON.
        """
        if self._folder is None or not (path := self._path(key)).is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ResultFileError(f"{path} is damaged ({error}); delete it to compute its numbers again.") from error

    def write(self, key: str, value: Any) -> None:
        """Store a value; the file appears whole or not at all."""
        if self._folder is not None:
            replace_text(self._path(key), json.dumps(value))

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.json"


def replace_text(path: Path, text: str | bytes) -> None:
    """Write a file in one step, text as UTF-8, and create its folder.

    Raises `ResultFileError` if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(text.encode() if isinstance(text, str) else text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResultFileError(f"Cannot write {path}: {error.strerror or error}.") from error


def _differences(stored: Any, asked: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, with its path."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for name in [*stored, *(name for name in asked if name not in stored)]:
            inner = f"{path}.{name}" if path else name
            if name not in asked:
                yield f"{inner} is stored, and not asked for"
            elif name not in stored:
                yield f"{inner} is asked for, and not stored"
            else:
                yield from _differences(stored[name], asked[name], inner)
    elif stored != asked:
        yield f"{path} is {json.dumps(stored)} there, {json.dumps(asked)} now"
