"""Where tokens of a stream begin as those of another, though no layer reads them: patches of an image in a text."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.host.draws import drawing
from unilinattn.host.observer import Inputs
from unilinattn.host.recorder import MAIN
from unilinattn.host.run import run
from unilinattn.tracing.changed_inputs import perturbed
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.layer_calls import LayerCalls
from unilinattn.tracing.token_streams import OWN, TokenStream, stream_read, stream_written
from unilinattn.tracing.trace import Trace

NONE = -1
"""In place of the token of a stream: none."""

SEVERAL = -2
"""In place of the token of a stream: more than one, one of another sequence, or one that goes back to its stream."""

_known: "WeakKeyDictionary[Layer, tuple[Entry, ...]]" = WeakKeyDictionary()
"""The entries of each trace by its last layer."""


@dataclass(frozen=True)
class Entry:
    """The tokens of a stream that begin as tokens of an earlier one.

    Attributes:
        written: the stream that begins.
        read: the earlier stream.
        layer: the index of the last layer whose output is in the vectors of `read` that enter.
        tokens: the token of `read` as which each token of `written` begins, counted over all its sequences, `NONE` or
            `SEVERAL`.
    """

    written: TokenStream
    read: TokenStream
    layer: int
    tokens: Int[Tensor, "image patch"]

    def among(self, batch: int) -> Int[Tensor, "batch token"]:
        """Return `tokens` as counted in each of `batch` sequences, `SEVERAL` for a token of another one."""
        tokens, length = self.tokens.reshape(batch, -1), self.read.count(batch)
        is_same = tokens // length == torch.arange(batch, device="cpu")[:, None]
        return torch.where(tokens < 0, tokens, torch.where(is_same, tokens % length, SEVERAL))


def stream_entries(trace: Trace) -> tuple[Entry, ...]:
    """Return the entries of a trace's streams into each other, but for those that a layer writes.

    They are measured: the outputs of the layers of an earlier stream are constants, so that each of its tokens keeps to
    itself, and noise at half of its tokens moves the tokens of a later stream that begin as these. With N tokens the
    model runs about 2 log2 N times up to the first layer of the later stream, twice if none moves.

    Raises `UncoveredError` if the vectors that this layer reads are none of its arguments.
    """
    last = trace.layers[-1]
    if last not in _known:
        _known[last] = () if last.in_pieces else tuple(_measured(trace))
    return _known[last]


def _measured(trace: Trace) -> list[Entry]:
    entries: list[Entry] = []
    for written, layer, port in _beginnings(trace):
        index = trace.layers.index(layer)
        earlier = [s for s in trace.streams if s is not written and s.layers[0] < index]
        if not earlier:
            continue
        runs = _Runs(trace, layer, port, earlier)
        # The latest first: what it has from an earlier one is no entry of that one.
        for read in sorted(earlier, key=lambda s: s.layers[0], reverse=True):
            if (entry := _entry(runs, written, read, index)) is not None:
                entry = _returned(trace, entry) if written.layers else entry
                entries.append(_without_steps(entry, entries))
    return [entry for entry in entries if bool((entry.tokens != NONE).any())]


def _beginnings(trace: Trace) -> Iterator[tuple[TokenStream, Layer, str]]:
    """Yield the streams that may begin as others, each with the layer and the port that read it first.

    These are the streams whose first layer reads their tokens, and those that a port reads and no layer writes.
    """
    ports: dict[TokenStream, Layer] = {}
    for layer in trace.layers:
        written = stream_written(layer, trace.layers, trace.streams)
        first = trace.layers[written.layers[0]].name == layer.name
        if layer.opaque:
            if first:
                yield written, layer, OWN
            continue
        for port in layer.ports:
            read = stream_read(layer, port, trace.layers, trace.streams)
            if read == written and first and written is not trace.streams[0]:
                yield written, layer, OWN
            elif not read.layers and port != OWN and read not in ports:
                ports[read] = layer
                yield read, layer, port


def _entry(runs: "_Runs", written: TokenStream, read: TokenStream, before: int) -> Entry | None:
    """Return the entry of a stream into a later one: each bit of a token's number is told by two runs."""
    layers = [index for index in read.layers if index < before]
    every = torch.ones(read.shape, dtype=torch.bool, device="cpu")
    moved = runs.moved(layers, every)
    if not bool(moved.any()):
        return None
    # Features may be those of a layer before the last one.
    by_layer = ((index, runs.moved([index], every)) for index in reversed(layers))
    last, single = next((each for each in by_layer if bool(each[1].any())), (layers[-1], ~moved & moved))
    number = torch.arange(every.numel(), device="cpu").view(read.shape)
    source, unique = torch.zeros(written.shape, dtype=torch.long, device="cpu"), moved == single
    for bit in range(max(1, (every.numel() - 1).bit_length())):
        has = (number >> bit) & 1 == 1
        one, zero = runs.moved([last], has), runs.moved([last], ~has)
        source += one << bit
        unique &= (one ^ zero) == single
    return Entry(written, read, last, torch.where(moved, source, NONE).masked_fill(~unique, SEVERAL))


def _returned(trace: Trace, entry: Entry) -> Entry:
    """Return an entry of `SEVERAL` if tokens go back to the first stream, as where both alternate; else itself."""
    written, read = entry.written, entry.read
    every = torch.ones(written.shape, dtype=torch.bool, device="cpu")
    for index in read.layers:
        layers = [each for each in written.layers if each < index]
        # Between two layers of the first stream no other one writes.
        if index - 1 in layers and bool(
            _Runs(trace, trace.layers[index], OWN, [read, written]).moved(layers, every).any()
        ):
            return replace(entry, tokens=torch.full_like(entry.tokens, SEVERAL))
    return entry


def _without_steps(entry: Entry, entries: Sequence[Entry]) -> Entry:
    """Return an entry without the tokens that come through a stream between both, as which they begin."""
    tokens = entry.tokens
    for second in entries:
        for first in entries:
            if second.written == entry.written and (first.written, first.read) == (second.read, entry.read):
                through = first.tokens.flatten()[second.tokens.clamp_min(0)].masked_fill(second.tokens < 0, NONE)
                tokens = tokens.masked_fill((through == tokens) & (through != NONE), NONE)
    return replace(entry, tokens=tokens)


class _Runs:
    """Runs of a model up to the first layer of a stream, in which the layers of earlier streams write constants."""

    def __init__(self, trace: Trace, start: Layer, port: str, earlier: Sequence[TokenStream]) -> None:
        self._trace, self._start, self._port = trace, start, port
        self._layers = [trace.layers[index] for stream in earlier for index in stream.layers]
        self._before = self._vectors({})

    def moved(self, layers: Collection[int], tokens: Bool[Tensor, "image patch"]) -> Bool[Tensor, "batch token"]:
        """Return which tokens move that the stream's first layer reads, with noise at tokens that layers write."""
        now = self._vectors({self._trace.layers[index].name: tokens for index in layers})
        # Written so that a NaN does not move.
        return ((now < self._before) | (now > self._before)).any(-1).cpu()

    def _vectors(self, noisy: Mapping[str, Bool[Tensor, "batch token"]]) -> Tensor:
        calls = _Constants(self._trace.host, self._start, self._port, self._layers, noisy)
        with suppress(_ReachedError), drawing(self._trace.draws):
            run(self._trace.host, self._trace.arguments, observer=calls.attached())
        if calls.vectors is None:
            raise UncoveredError(
                f"{self._start.name} reads vectors that are none of its arguments, so it is unknown which tokens of "
                "other streams begin its own; layers=[...] selects layers of one stream."
            )
        return calls.vectors


class _ReachedError(Exception):
    """A run has reached the layer whose input is wanted."""


class _Constants(LayerCalls):
    """Replaces the outputs of layers by those of the trace, with noise at some tokens, up to the call of a layer.

    Attributes:
        vectors: the vectors that this layer reads.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Layer,
        port: str,
        layers: Sequence[Layer],
        noisy: Mapping[str, Bool[Tensor, "batch token"]],
    ) -> None:
        super().__init__(model, [*layers, start])
        self.vectors: Tensor | None = None
        self._start, self._port, self._noisy = start, port, noisy

    def entering(self, frame: str, module: nn.Module, inputs: Inputs) -> Inputs | None:
        """Stop at the layer whose input is wanted."""
        if frame == self._start.name:
            self.vectors = self.read(self._start, inputs, self._port)
            raise _ReachedError
        return None

    def leaving(self, frame: str, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Replace the vectors that a layer returns."""
        if (layer := self.layers.get(frame)) is None:
            return None
        vectors = layer.output
        if (tokens := self._noisy.get(frame)) is not None:
            vectors = torch.where(tokens.to(vectors.device)[..., None], perturbed(vectors), vectors)
        returned = layer.as_returned(vectors)
        # The module may return tensors of the same shape beside its output, such as its values.
        standing = iter(tensors(layer.structure))
        return mapped(output, lambda t: returned.to(t) if next(standing) is MAIN else t)
