"""Saved results: one safetensors file each, with the labels as JSON in the header."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unilinattn.errors import ResultFileError
from unilinattn.results.labels import Header, describe

FORMAT = "unilinattn.results.attribution"
FORMAT_VERSION = "1"


def write(path: str | os.PathLike[str], header: Header, tensors: Mapping[str, Tensor]) -> Path:
    """Write header and tensors atomically and return the file's path.

    Raises `ResultFileError` if the folder does not exist, or if the path is a folder.
    """
    target = place_for_file(path, "result.safetensors")
    # safetensors refuses tensors that share storage.
    copies = {name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "header": header.model_dump_json()}
    # A rename is atomic, so an interrupted call leaves the older file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(copies, temporary, metadata)
        return temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str] | None, text: str) -> str:
    """Write `text` to `path`, if given, and return it.

    Raises `ResultFileError` if the folder does not exist, or if the path is a folder.
    """
    if path is not None:
        place_for_file(path, "result.html").write_text(text, encoding="utf-8")
    return text


def place_for_file(path: str | os.PathLike[str], example: str) -> Path:
    """Return `path` as the path of a file to write; `example` is a file name for the error message.

    Raises `ResultFileError` if the folder does not exist, or if the path is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise ResultFileError(
            f"Cannot save to {target}: it is a folder; name a file in it, such as {target / example}."
        )
    if not target.parent.is_dir():
        raise ResultFileError(f"Cannot save to {target}: there is no folder {target.parent}; create it first.")
    return target


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """Read a file written by `write`; the tensors are on the CPU.

    Raises `ResultFileError` if the file does not exist, is damaged, or has another format or version.
    """
    source = Path(path)
    if not source.is_file():
        raise ResultFileError(f"There is no result file at {source}.")
    try:
        with safe_open(source, framework="pt") as file:
            header = _read_header(source, file.metadata() or {})
            # Tensors of an open file are views of the mapped file, so they are copied. The file is no dict: only its
            # keys can be iterated over.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ResultFileError(
            f"{source} is not a whole safetensors file (truncated, damaged or of another kind): {error}"
        ) from error
    if "scores" not in tensors:
        raise ResultFileError(f"{source} holds no tensor 'scores', so it is no whole result; compute it again.")
    return header, tensors


def _read_header(source: Path, metadata: Mapping[str, str]) -> Header:
    if metadata.get("format") != FORMAT:
        raise ResultFileError(
            f"{source} is a safetensors file, but no saved result: its header does not say format {FORMAT!r}."
        )
    if (version := metadata.get("format_version")) != FORMAT_VERSION:
        raise ResultFileError(
            f"{source} has result format version {version}; this release reads version {FORMAT_VERSION}. "
            "Load it with the release that wrote it, or compute it again."
        )
    if "header" not in metadata:
        raise ResultFileError(f"{source} lacks the entry 'header' with its labels; compute it again.")
    try:
        return Header.model_validate_json(metadata["header"])
    except ValidationError as error:
        raise ResultFileError(f"The labels in {source} cannot be read: {describe(error)}") from error
