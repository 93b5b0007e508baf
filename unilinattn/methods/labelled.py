"""Labels of results: the texts of tokens, the patches of images and the names of logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from unilinattn.errors import InputError
from unilinattn.host.inputs import is_ids
from unilinattn.host.labels import labels_of_ids
from unilinattn.methods.targets import explained_kind, explains_sequence, logit_names
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.tokens import first_of_ids
from unilinattn.tracing.trace import Trace

Tokens = Sequence[str] | Sequence[Sequence[str]] | Callable[..., Any]
"""Texts of the key tokens, padding included: a list for each sequence, a list for a single sequence, or a tokenizer."""


def with_labels(
    result: Attribution, trace: Trace, tokens: Tokens | None, tokenizer: Any, grid: tuple[int, int] | None
) -> Attribution:
    """Return the result with the labels of a text's tokens or of an image's patches.

    Raises `InputError` for labels that do not fit.
    """
    text, image = trace.text, trace.image_tokens
    if tokenizer is None and text is not None:
        tokenizer = text.tokenizer
    tokens = tokenizer if tokens is None else tokens
    labels: dict[str, Any] = {}
    if "logit" in result.options and "query" not in result.dims:
        labels["pooled"] = explains_sequence(trace, result.options["logit"])
        labels["logit_kind"] = explained_kind(trace, result.options["logit"])
        labels["logit_names"] = logit_names(trace, result.options["logit"], result.options.get("target"), tokenizer)
    keys = result.streams.get("key") or _stream_of_layers(result, trace)
    if tokens is not None:
        labels["tokens"] = labels_of_tokens(tokens, trace, keys)
        if result.streams and "query" in result.dims:
            labels["query_tokens"] = labels_of_tokens(tokens, trace, result.streams["query"])
    if text is not None and _are_of_text(keys, trace):
        labels |= {"word_ids": text.words, "offsets": text.offsets}
    if grid is not None:
        labels["grid"] = grid
    # A given grid with other numbers is checked against the keys, as for unknown models.
    if image is not None and grid in (None, image.grid):
        labels |= {"grid": image.grid, "patches": image.patches, "cls": image.cls}
    return replace(result, **labels) if labels else result


def _stream_of_layers(result: Attribution, trace: Trace) -> dict[str, int]:
    """Return the name and number of the tokens that a result's layers write, nothing if the model has one stream."""
    written = {index for index, layer in enumerate(trace.layers) if layer.name in result.layers}
    stream = next((stream for stream in trace.streams if written <= {*stream.layers}), None)
    if len(trace.streams) == 1 or stream is None or stream.shape[1] != result.sizes["key"]:
        return {}
    return {stream.name: stream.shape[1]}


def _are_of_text(streams: Mapping[str, int], trace: Trace) -> bool:
    """Whether keys are the tokens of the trace's text, by the name and number of each stream; none are all tokens."""
    return all(_ids_of_stream(trace, *stream) == "input_ids" for stream in streams.items())


def labels_of_tokens(tokens: Any, trace: Trace, streams: Mapping[str, int] = MappingProxyType({})) -> list[list[str]]:
    """Return the texts of the tokens of each sequence, given as such or by a tokenizer.

    Of several `streams` of tokens, by name and number, a tokenizer names those with ids; others have their numbers.

    Raises `InputError` for other values, and for a tokenizer of a trace without ids.
    """
    if hasattr(tokens, "convert_ids_to_tokens") and streams:
        by_stream = [_labels_of_stream(tokens, trace, name, count) for name, count in streams.items()]
        return [list(chain.from_iterable(rows)) for rows in zip(*by_stream, strict=True)]
    if hasattr(tokens, "convert_ids_to_tokens"):
        if trace.text is not None and trace.text.tokenizer is tokens and trace.text.labels is not None:
            return trace.text.labels
        if trace.ids is None:
            raise InputError(
                f"tokens is a tokenizer, and {trace.model} was not given one tensor of token ids that it could name; "
                "give one list of texts a sequence."
            )
        names = [labels_of_ids(tokens, row) for row in trace.ids.tolist()]
        # The last layer may also have fewer tokens, as an attention pool has.
        return _among_added(names, trace) if trace.token_shape[1] > trace.ids.shape[1] else names
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise InputError(
            f"tokens is a {type(tokens).__name__}; give one text a token, in one list a sequence, or the tokenizer."
        )
    texts = [token for token in tokens if isinstance(token, str)]
    if len(texts) == len(tokens):
        return _filled([texts], trace)
    rows = [row for row in tokens if isinstance(row, Sequence) and not isinstance(row, str)]
    if len(rows) < len(tokens):
        raise InputError(
            "tokens holds texts and other values side by side; give one list of texts a sequence, or the tokenizer."
        )
    return _filled([list(row) for row in rows], trace)


def _among_added(names: list[list[str]], trace: Trace) -> list[list[str]]:
    """Return the texts of ids among the tokens that a model adds, such as patches or a tuned prompt.

    These have their numbers, and all have if it is unknown which are those of the ids.
    """
    first, length = first_of_ids(trace.host, trace.arguments, trace.layers), trace.token_shape[1]
    if first is None:
        return [[f"token {index}" for index in range(length)] for _ in names]
    last = [length - first - len(row) for row in names]
    added = [f"added {index}" for index in range(first + max(last, default=0))]
    return [[*added[:first], *row, *added[first : first + rest]] for row, rest in zip(names, last, strict=True)]


def _filled(rows: list[list[str]], trace: Trace) -> list[list[str]]:
    """Return labels with empty ones for padding at the end of a sequence, which a host may add by itself."""
    if trace.mask is None or len(rows) != len(trace.mask):
        return rows
    pairs = zip(rows, trace.mask, strict=True)
    return [row if bool(real[len(row) :].any()) else [*row, *[""] * (len(real) - len(row))] for row, real in pairs]


def _labels_of_stream(tokenizer: Any, trace: Trace, name: str, count: int) -> list[list[str]]:
    """Return the texts of one stream's ids, else its numbers."""
    ids = _ids_of_stream(trace, name, count)
    if ids == "input_ids" and trace.text is not None and trace.text.tokenizer is tokenizer and trace.text.labels:
        return trace.text.labels
    if ids is not None:
        return [labels_of_ids(tokenizer, row) for row in trace.arguments[ids].tolist()]
    return [[f"{name} {index}" for index in range(count)] for _ in range(trace.layers[-1].output.shape[0])]


def _ids_of_stream(trace: Trace, name: str, count: int) -> str | None:
    """Return the argument with the ids of a stream's tokens: of its name, or of that of no other stream."""
    shape = (trace.layers[-1].output.shape[0], count)
    others = [stream.name for stream in trace.streams if stream.name != name]
    rivals = [stream for stream in trace.streams if stream.shape == shape]
    arguments = {key: ids for key, ids in trace.arguments.items() if key.endswith("input_ids") and is_ids(ids)}
    for key, ids in sorted(arguments.items(), key=lambda item: not item[0].startswith(name)):
        if tuple(ids.shape) != shape or any(key.startswith(other) for other in others):
            continue
        layers = [trace.layers[index] for stream in rivals if stream.name == name for index in stream.layers]
        # Streams of equal numbers, such as patches and words, are told apart by a run with other ids.
        if len(arguments) > 1 or len(rivals) < 2 or first_of_ids(trace.host, trace.arguments, layers) is not None:
            return key
    return None
