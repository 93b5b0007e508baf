"""`Axes`: the queries and keys of scores over several streams, whose tokens come one stream after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Bool
from torch import Tensor

from unilinattn.host.inputs import real_tokens
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.sinks import sink_tokens
from unilinattn.tracing.token_streams import TokenStream, key_slots
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True)
class Axes:
    """The streams whose tokens are the queries and the keys of a method's scores.

    Attributes:
        trace: the trace.
        queries, keys: the streams, in the order of their tokens.
    """

    trace: Trace
    queries: tuple[TokenStream, ...]
    keys: tuple[TokenStream, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, query, key)."""
        queries, keys = (sum(stream.shape[1] for stream in streams) for streams in (self.queries, self.keys))
        return self.keys[0].shape[0], queries, keys

    @property
    def slots(self) -> dict[TokenStream, slice]:
        """The keys of each stream."""
        return key_slots(self.keys)

    @property
    def names(self) -> Mapping[str, Mapping[str, int]]:
        """By "query" and "key", the number of tokens of each stream by its name; nothing for a single stream."""
        axes = {"query": self.queries, "key": self.keys}
        counts = {axis: {stream.name: stream.shape[1] for stream in streams} for axis, streams in axes.items()}
        return counts if len(self.keys) > 1 else {}

    def mask(self) -> Bool[Tensor, "batch key"] | None:
        """Return the mask of real keys, None if all are real."""
        masks = [stream_mask(self.trace, stream) for stream in self.keys]
        if all(mask is None for mask in masks):
            return None
        device = self.trace.layers[-1].output.device
        real = (
            torch.ones(stream.shape, dtype=torch.bool, device=device) if mask is None else mask.to(device)
            for stream, mask in zip(self.keys, masks, strict=True)
        )
        return torch.cat(list(real), 1)

    def sinks(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the positions of each sequence's attention sinks among the keys, None if they are unknown."""
        by_stream = [sink_tokens(_layers(self.trace, stream), stream.shape) for stream in self.keys]
        if all(sinks is None for sinks in by_stream):
            return None
        none: tuple[tuple[int, ...], ...] = ((),) * self.shape[0]
        shifted = [
            [[slot.start + key for key in row] for row in sinks or none]
            for slot, sinks in zip(self.slots.values(), by_stream, strict=True)
        ]
        return tuple(tuple(chain.from_iterable(rows)) for rows in zip(*shifted, strict=True))


def stream_mask(trace: Trace, stream: TokenStream) -> Bool[Tensor, "batch token"] | None:
    """Return the real tokens of a stream, None if all are real."""
    layers = _layers(trace, stream)
    if layers:
        return layers[0].mask
    # Of a stream that no layer writes, such as the states of an encoder elsewhere, only an argument tells.
    masks = (real_tokens(trace.arguments, name) for name in ("encoder_attention_mask", "attention_mask"))
    return next((mask for mask in masks if mask is not None and tuple(mask.shape) == stream.shape), None)


def _layers(trace: Trace, stream: TokenStream) -> list[Layer]:
    return [trace.layers[index] for index in stream.layers]
