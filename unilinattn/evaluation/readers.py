"""Read samples from files of texts, folders of images and data sets."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError, UnilinattnError, nearest
from unilinattn.evaluation.metrics import gold_links
from unilinattn.evaluation.samples import Sample
from unilinattn.evaluation.texts import numbered_lines
from unilinattn.host.image import processed
from unilinattn.optional import import_extra
from unilinattn.registry import ImageTokens
from unilinattn.tracing.trace import trace

OnError = Literal["stop", "skip"]
"""Whether an entry that cannot be read raises an error or is left out with a warning that names it."""

FIELDS = ("text", "target", "relevant", "label", "name")
"""Fields of a line of a JSON-lines file, and columns of a data set of texts."""

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Endings of image files."""

SHOWN = 3
"""Skipped entries that a warning names."""

Unit = tuple[str, Callable[[], Sample]]
"""Place of an entry, and the function that reads it."""


def read_samples(
    source: Any,
    tokenizer: Any = None,
    *,
    processor: Any = None,
    model: nn.Module | None = None,
    on_error: OnError = "stop",
) -> list[Sample]:
    """Read samples from a file of texts, a folder of images or a data set.

    - A file that ends in .txt: a text in each line.
    - Another file: JSON lines. A line is an object with `text`, and optionally `target` (a position, default -1),
      `relevant` (positions of the relevant tokens; or pairs [query, key], which explain every query), `label` (the id
      of the true token at the target) and `name`. Positions count the tokens of `tokenizer` from 0.
    - A folder: its image files in the order of their names, which are the samples' names.
    - A data set: any object with a length whose entries are mappings, such as `datasets.Dataset`, with the columns of a
      JSON line or with `image`, `label` (the true class) and `name`; other columns are not read.

    Empty lines are not counted as entries.

    Args:
        source: the path or the data set.
        tokenizer: the tokenizer of texts.
        processor: the processor of images, as in `unilinattn.trace`.
        model: the model of images; its registered patches and CLS (`Trace.image_tokens`) become the `grid`, the `valid`
            keys and the `target` of the samples.
        on_error: "stop" raises an error for an entry that cannot be read; "skip" leaves it out, with a warning.

    Raises `InputError`, with file and line, for an entry that cannot be read, and for a source without entries.
    """
    if on_error not in get_args(OnError):
        raise OptionError(f"unknown on_error {on_error!r}{nearest(on_error, get_args(OnError))}")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        name, units = str(path), _of_folder(path, processor) if path.is_dir() else _of_file(path, tokenizer)
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, Mapping):
        name, units = type(source).__name__, _of_dataset(source, tokenizer, processor)
    else:
        raise InputError(f"the data are a {type(source).__name__}; give a path, or a data set with a length.")
    samples: list[Sample] = []
    skipped: list[str] = []
    for where, read in units:
        try:
            samples.append(read())
        # Damaged pictures raise errors of several classes, among them SyntaxError.
        except (UnilinattnError, ValueError, LookupError, OSError, SyntaxError) as error:
            if on_error == "stop":
                raise InputError(f"{where}: {error}") from error
            skipped.append(f"{where}: {error}")
    if skipped:
        more = f"; and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
        warnings.warn(
            f"{len(skipped)} of {len(skipped) + len(samples)} entries of {name} are skipped: "
            f"{'; '.join(skipped[:SHOWN])}{more}",
            stacklevel=2,
        )
    if not samples:
        is_path = isinstance(source, str | os.PathLike)
        kind = "no images" if Path(name).is_dir() else "no lines" if is_path else "no entries"
        raise InputError(
            f"{name} has {kind} that can be read; give one JSON object with a `text` a line, a text a line in a .txt "
            "file, a folder of images, or a data set with a column `text` or `image`."
        )
    return samples if model is None else with_patches(samples, model)


def samples_of(data: Any, *, models: Any, tokenizer: Any, processor: Any, on_error: OnError) -> Iterable[Sample]:
    """Return samples: the given ones, or those of a file, a folder or a data set."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        is_read = any(isinstance(entry, Mapping) for entry in data)
    else:
        is_table = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
        is_read = isinstance(data, str | os.PathLike) or is_table
    if not is_read:
        return data
    alone = next(iter(models.values())) if isinstance(models, Mapping) and len(models) == 1 else None
    model = alone if processor is not None and isinstance(alone, nn.Module) else None
    return read_samples(data, tokenizer, processor=processor, model=model, on_error=on_error)


def _of_file(source: Path, tokenizer: Any) -> Iterator[Unit]:
    for where, line in numbered_lines(source):
        plain = source.suffix == ".txt"
        yield where, partial(_of_text, {"text": line}, tokenizer) if plain else partial(_from_line, line, tokenizer)


def image_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the image files of a folder in the order of their names.

    Raises `InputError` for a path that is no folder, and for a folder without images.
    """
    source = Path(folder)
    if not source.is_dir():
        raise InputError(f"{source} is no folder; give a folder of images ({', '.join(IMAGES)}).")
    if not (files := _images_in(source)):
        raise InputError(f"{source} holds no images; files with these endings are read: {', '.join(IMAGES)}.")
    return files


def open_image(path: Path) -> Any:
    """Return the PIL image in a file, in RGB; raise `InputError` for a file that is no image or is damaged."""
    package = import_extra("PIL.Image", "vision")
    # Damaged pictures raise errors of several classes, among them SyntaxError.
    try:
        with package.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, package.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read as an image: {error}.") from error


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)


def _of_folder(source: Path, processor: Any) -> Iterator[Unit]:
    def read(path: Path) -> Sample:
        return _of_image({"image": open_image(path), "name": path.name}, processor)

    for path in _images_in(source):
        yield str(path), partial(read, path)


def _of_dataset(source: Any, tokenizer: Any, processor: Any) -> Iterator[Unit]:
    def read(index: int) -> Sample:
        entry = source[index]
        if isinstance(entry, Sample):
            return entry
        if isinstance(entry, Mapping) and entry.get("image") is not None:
            return _of_image(entry, processor)
        if isinstance(entry, Mapping) and isinstance(entry.get("text"), str):
            return _of_text({name: entry[name] for name in FIELDS if entry.get(name) is not None}, tokenizer)
        columns = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise InputError(f"the entry has neither `text` nor `image`: {columns}.")

    for number in range(len(source)):
        yield f"{type(source).__name__}, entry {number}", partial(read, number)


def _of_image(entry: Mapping[str, Any], processor: Any) -> Sample:
    label = entry.get("label")
    if label is not None and type(label) is not int:
        raise InputError(f"label is {label!r}; give the integer of a class.")
    return Sample(inputs=processed(entry["image"], processor), label=label, name=str(entry.get("name") or ""))


def with_patches(samples: Sequence[Sample], model: nn.Module) -> list[Sample]:
    """Return samples of images with the model's patches as grid and valid keys, and its CLS as target.

    The model is traced once for each size of image.
    """
    tokens_by_size: dict[tuple[int, ...], ImageTokens | None] = {}
    placed = []
    for sample in samples:
        tensors = sample.inputs.values() if isinstance(sample.inputs, Mapping) else (sample.inputs,)
        images = [value for value in tensors if isinstance(value, Tensor) and value.ndim == 4]
        tokens = None
        if images:
            size = tuple(images[0].shape)
            if size not in tokens_by_size:
                tokens_by_size[size] = trace(model, sample.inputs, progress=False).image_tokens
            tokens = tokens_by_size[size]
        if tokens is not None:
            valid = torch.zeros(max((*tokens.patches, *tokens.cls)) + 1, dtype=torch.bool, device="cpu")
            valid[list(tokens.patches)] = True
            target = tokens.cls[0] if len(tokens.cls) == 1 else None
            sample = replace(sample, grid=tokens.grid, valid=valid, target=target)
        placed.append(sample)
    return placed


def _from_line(line: str, tokenizer: Any) -> Sample:
    entry = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise InputError('the line is no JSON object with a text, such as {"text": "the cat", "target": -1}.')
    for name in entry:
        if name not in FIELDS:
            raise InputError(f"unknown field {name!r}{nearest(name, FIELDS)}")
    return _of_text(entry, tokenizer)


def _of_text(entry: Mapping[str, Any], tokenizer: Any) -> Sample:
    if not callable(tokenizer):
        raise InputError("texts need their tokenizer; give tokenizer=AutoTokenizer.from_pretrained(path).")
    for name in ("target", "label"):
        if type(entry.get(name, 0)) is not int:
            raise InputError(f"{name} is {entry[name]!r}; give an integer.")
    ids = torch.tensor([tokenizer(entry["text"])["input_ids"]], dtype=torch.long, device="cpu")
    length = ids.shape[1]
    if length == 0:
        raise InputError("the text has no tokens.")
    links, relevant, every = entry.get("relevant"), None, False
    if isinstance(links, list) and not any(isinstance(link, list) for link in links):
        relevant = gold_links([(0, key) for key in links], 1, length)[0]
    elif isinstance(links, list) and all(isinstance(link, list) and len(link) == 2 for link in links):
        relevant, every = gold_links([(query, key) for query, key in links], length, length), True
    elif links is not None:
        raise InputError(f"relevant is {links!r}; give a list of positions, or of pairs [query, key].")
    return Sample(
        inputs=ids,
        target=entry.get("target", None if every else -1),
        relevant=relevant,
        label=entry.get("label"),
        name=str(entry.get("name", "")),
    )
