"""Where a model's tokens get their vectors, such that no other input reaches its output beside them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.errors import UncoveredError
from unilinattn.host.inputs import ids_name, is_ids, sequences_in
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.logits import KEEP
from unilinattn.tracing.changed_inputs import changed_input
from unilinattn.tracing.joined_streams import new_vectors
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.reaching import (
    Read,
    Source,
    are_alone,
    explained_numbers,
    inputs_beside,
    is_structure,
    require_alone,
)
from unilinattn.tracing.token_streams import TokenStream, stream_read, stream_written, token_streams, tower_of
from unilinattn.tracing.tokens import TokenArgument, TokenCall, find_tokens, require_own_tokens

Sources = tuple[Source, ...]
"""The sources of several streams."""

_sources: "WeakKeyDictionary[Layer, dict[object, Sources | str]]" = WeakKeyDictionary()
"""The sources of the tokens of a trace, or the refusal, by the trace's last layer and then by the call."""


def _remembered(find: Callable[..., Sources]) -> Callable[..., Sources]:
    """Decorate a function of a model, arguments and layers, of which each trace asks once: it runs the model."""

    @wraps(find)
    def remembered(
        model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], read: Read = explained_numbers
    ) -> Sources:
        # Of a trace's arguments only the positions of the logits differ between the calls.
        positions = arguments.get(KEEP)
        call = find, read, tuple(positions.tolist()) if isinstance(positions, Tensor) else positions
        answers = _sources.setdefault(layers[-1], {})
        if call not in answers:
            try:
                answers[call] = find(model, arguments, layers, read)
            except UncoveredError as error:
                answers[call] = str(error)
        answer = answers[call]
        if isinstance(answer, str):
            raise UncoveredError(answer)
        return answer

    return remembered


@_remembered
@runs_in_gradient_mode(False)
def find_sources(
    model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], read: Read = explained_numbers
) -> Sources:
    """Return the sources of the tokens' vectors, one for each stream of tokens that reaches the output by itself.

    A source are the lookups of the tokens' ids, or what enters the first block of the stream: if there are no ids, and
    if another input, such as an image, gives some tokens their vectors. Runs of the model with the other inputs
    perturbed and the tokens' vectors held tell what else reaches the tensors that `read` returns of its output.

    Raises `UncoveredError` if another input reaches the logits beside the tokens, since its part in them would stand in
    the bias, and the errors of `find_tokens`.
    """
    streams = token_streams(layers)
    ids = ids_name(arguments)
    batch = sequences_in(arguments)
    is_merged = len(streams) > 1 or tuple(layers[0].input.shape[:2]) != streams[0].shape
    if ids is None and batch and (is_merged or streams[0].shape[0] != batch):
        # Without ids the tokens of the first block become all others, as when patches are merged.
        with suppress(UncoveredError):
            source = _first_source(model, arguments, layers, batch)
            if are_alone(model, arguments, (source,), layers, read):
                return (source,)
    lookups = Source(streams[0], None, ids)
    if len(streams) > 1 and (sources := _of_several(model, arguments, layers, lookups, batch, read)):
        return sources
    if ids is not None and arguments[ids].shape != layers[0].output.shape[:2]:
        # Patches beside a text, and tuned prompts, enter the first block with it; ids of codebooks are added before.
        with suppress(UncoveredError):
            source = Source(streams[0], find_tokens(model, arguments, layers))
            if are_alone(model, arguments, (source,), layers, read):
                return (source,)
    # Latent vectors of the model, which are constants, may read the tokens of the ids (Perceiver).
    of_ids = None if ids is None else _read_beside(ids, arguments[ids], layers)
    if of_ids is not None and are_alone(model, arguments, (of_ids,), layers, read):
        return (of_ids,)
    require_own_tokens(model, arguments, None if ids is None else arguments[ids], layers)
    if ids is not None and (sources := _with_others(model, arguments, layers, lookups, read)):
        return sources
    source = Source(streams[0], find_tokens(model, arguments, layers))
    if sources := _with_others(model, arguments, layers, source, read):
        return sources
    require_alone(model, arguments, (source,), layers, read)
    return (source,)


def _with_others(
    model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], source: Source, read: Read
) -> tuple[Source, ...]:
    """Return a source and the arguments that layers read beside it, if these are all that reaches `read`, or none.

    Such as the entities of a text, or the states of an encoder that ran before.
    """
    reaching = list(inputs_beside(model, arguments, (source,), layers, read))
    others = [other for name in reaching if (other := _read_beside(name, arguments[name], layers)) is not None]
    if not reaching or (others and are_alone(model, arguments, (source, *others), layers, read)):
        return (source, *others)
    return ()


def _read_beside(name: str, value: Any, layers: Sequence[Layer]) -> Source | None:
    """Return the source of the tokens of an argument, ids or vectors, that layers read and none writes."""
    is_vectors = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
    if not is_vectors and not is_ids(value):
        return None
    streams, transparent = token_streams(layers), [layer for layer in layers if not layer.opaque]
    read = (stream_read(layer, port, layers, streams) for layer in transparent for port in layer.ports)
    stream = next((stream for stream in read if stream.shape == value.shape[:2] and not stream.layers), None)
    if stream is None:
        return None
    return Source(stream, TokenArgument(value, name=name)) if is_vectors else Source(stream, None, name)


def _of_several(
    model: nn.Module,
    arguments: Mapping[str, Any],
    layers: Sequence[Layer],
    lookups: Source,
    batch: int | None,
    read: Read,
) -> Sources:
    """Return the one stream that all others are computed from, or those that are all that reaches the output.

    `lookups` are those of the ids as the first stream. Returns none if the streams are not all that reaches the output.
    """
    streams, first = token_streams(layers), lookups.stream
    is_first = lookups.ids is not None and tuple(arguments[lookups.ids].shape) == first.shape
    # Modules between blocks, such as a pool, may compute the other streams.
    if is_first and are_alone(model, arguments, (lookups,), layers, read):
        return (lookups,)
    # The last stream may read all others, as a text with patches in place of some of its tokens does.
    last = stream_written(layers[-1], layers, streams)
    # A projector of patches may write as many vectors, in another part of the model.
    tower = tuple(index for index in last.layers if tower_of(layers[index].name) == tower_of(layers[-1].name))
    candidates = dict.fromkeys(((last, last.layers), (last, tower), (first, first.layers)))
    for stream, indices in candidates:
        with suppress(UncoveredError):
            if stream.shape[0] == batch:
                source = Source(stream, find_tokens(model, arguments, [layers[index] for index in indices]))
                if are_alone(model, arguments, (source,), layers, read):
                    return (source,)
    return _several(model, arguments, layers, streams, batch, read)


def _first_source(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], batch: int) -> Source:
    """Return the source of the tokens that enter the first block, whose layers may read windows of a sequence."""
    shape = layers[0].input.shape[:2]
    inside = [index for index, layer in enumerate(layers) if layer.input.shape[:2] == shape]
    origin = find_tokens(model, arguments, [layers[index] for index in inside], batch=batch)
    tokens = batch, origin.tokens(origin.vectors).shape[:2].numel() // batch
    written = tuple(index for index in inside if tuple(layers[index].output.shape[:2]) == tokens)
    return Source(TokenStream(token_streams(layers)[0].name, tokens, written), origin)


def _several(
    model: nn.Module,
    arguments: Mapping[str, Any],
    layers: Sequence[Layer],
    streams: Sequence[TokenStream],
    batch: int | None,
    read: Read,
) -> Sources:
    """Return the sources of several streams that together are all that reaches the output; none if they are not all."""
    calls: list[Source] = []
    for stream in (stream for stream in streams if stream.shape[0] == batch):
        inside = [layers[index] for index in stream.layers]
        towers = dict.fromkeys(tower_of(layer.name) for layer in inside)
        # A projector may write as many vectors as another part of the model has tokens.
        parts = [[layer for layer in inside if tower_of(layer.name) == tower] for tower in towers]
        for part in (inside, *parts) if len(parts) > 1 else parts:
            with suppress(UncoveredError):
                calls.append(Source(stream, find_tokens(model, arguments, part, in_lists=True)))
                break
    made = [source.origin for source in calls if isinstance(source.origin, TokenCall)]
    if len(made) == len(calls) > 1:
        origins = new_vectors(model, arguments, made)
        calls = [replace(source, origin=origin) for source, origin in zip(calls, origins, strict=True)]
    lookups = [_lookups_of(model, arguments, layers, call) for call in calls]
    by_ids = any(source.ids is not None for source in lookups)
    for sources in (lookups, calls) if by_ids else (calls,):
        if sources and are_alone(model, arguments, sources, layers, read):
            # A stream that is computed from another one is no source, such as the tokens after a merging of patches.
            for source in reversed(sources):
                fewer = [other for other in sources if other is not source]
                if fewer and are_alone(model, arguments, fewer, layers, read):
                    sources = fewer
            return tuple(sources)
    return ()


def _lookups_of(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], source: Source) -> Source:
    """Return the lookups of the ids that give a stream its vectors; the source itself if there is no such argument."""
    call, stream = source.origin, source.stream
    inside = [layers[index] for index in stream.layers]
    for name, value in arguments.items():
        if not (isinstance(call, TokenCall) and is_ids(value) and tuple(value.shape) == stream.shape):
            continue
        if is_structure(name):
            continue
        # The model may accept no other ids, such as those that mark the places of an image.
        with suppress(Exception):
            moved = find_tokens(model, changed_input(model, arguments, name), inside, in_lists=True)
            if isinstance(moved, TokenCall) and not torch.equal(moved.vectors, call.vectors):
                return Source(stream, None, name)
    return source


def layers_of_stream(layers: Sequence[Layer], last: bool) -> list[Layer]:
    """Return the layers that read as many sequences and tokens as the last one returns, or as the first one reads."""
    shape = layers[-1].output.shape[:2] if last else layers[0].input.shape[:2]
    return [layer for layer in layers if layer.input.shape[:2] == shape] or list(layers[-1:])


@_remembered
@runs_in_gradient_mode(False)
def find_vectors(
    model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], read: Read = explained_numbers
) -> Sources:
    """Return the sources of all streams that reach the output, or of the last layer's if something else does too.

    Raises the errors of `find_tokens`.
    """
    streams, ids = token_streams(layers), ids_name(arguments)
    stream = stream_written(layers[-1], layers, streams)
    lookups = Source(stream, None, ids)
    fits = ids is not None and tuple(arguments[ids].shape[:2]) == stream.shape
    if fits and are_alone(model, arguments, (lookups,), layers, read):
        return (lookups,)
    with suppress(UncoveredError):
        return find_sources(model, arguments, layers, read)
    return (Source(stream, find_tokens(model, arguments, layers_of_stream(layers, True))),)


@runs_in_gradient_mode(False)
def without_lookups(
    model: nn.Module,
    arguments: Mapping[str, Any],
    layers: Sequence[Layer],
    sources: Sequence[Source],
    read: Read = explained_numbers,
) -> Sources:
    """Return sources whose ids no table embeds as such, as where they are hashed, with what enters the first block.

    Raises the errors of `find_tokens` and of `require_alone`.
    """
    changed = []
    for source in sources:
        inside = [layers[index] for index in source.stream.layers]
        changed.append(source if source.ids is None else Source(source.stream, find_tokens(model, arguments, inside)))
    require_alone(model, arguments, changed, layers, read)
    return tuple(changed)
