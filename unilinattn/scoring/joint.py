"""The maps of layers on several streams as maps of one sequence, the tokens of one stream after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.reruns.entries import NONE, SEVERAL, Entry, stream_entries
from unilinattn.scoring.maps import sum_on_first
from unilinattn.scoring.scaled import Blocks
from unilinattn.scoring.selection import begins_stream, composable_steps, layers_in, query_rows, stream_mask, streams_of
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.sinks import sink_tokens
from unilinattn.tracing.token_streams import TokenStream, key_slots
from unilinattn.tracing.trace import Target, Trace

Step = tuple[Layer, ...]

Multiply = Callable[[Float[Tensor, "batch row query"], Layer], Float[Tensor, "batch row key"]]
"""Returns rows times the map of a layer."""


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
    def batch(self) -> int:
        """The number of sequences: the least of any stream, since a sequence may have several images."""
        return min(stream.shape[0] for stream in self.keys)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, query, key)."""
        queries, keys = (sum(stream.count(self.batch) for stream in streams) for streams in (self.queries, self.keys))
        return self.batch, queries, keys

    @property
    def slots(self) -> dict[TokenStream, slice]:
        """The keys of each stream."""
        return key_slots(self.keys, self.batch)

    @property
    def names(self) -> Mapping[str, Mapping[str, int]]:
        """By "query" and "key", the number of tokens of each stream by its name; nothing if one stream is both."""
        axes = {"query": self.queries, "key": self.keys}
        counts = {axis: {stream.name: stream.count(self.batch) for stream in streams} for axis, streams in axes.items()}
        return counts if len(self.keys) > 1 or self.queries != self.keys else {}

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
        return torch.cat([mask.reshape(self.batch, -1) for mask in real], 1)

    def sinks(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the positions of each sequence's attention sinks among the keys, None if they are unknown."""
        by_stream = [sink_tokens(layers_in(self.trace, stream), stream.shape) for stream in self.keys]
        if all(sinks is None for sinks in by_stream):
            return None
        positions: list[list[int]] = [[] for _ in range(self.batch)]
        for (stream, slot), sinks in zip(self.slots.items(), by_stream, strict=True):
            images = stream.shape[0] // self.batch
            for index, row in enumerate(sinks or ()):
                start = slot.start + index % images * stream.shape[1]
                positions[index // images].extend(start + key for key in row)
        return tuple(map(tuple, positions))


@dataclass(frozen=True)
class Joint:
    """The layers that a method composes, and the tokens of all streams that they read and write.

    With an encoder of E tokens and a decoder of D tokens the maps are (E + D) x (E + D): that of a layer of the encoder
    has entries in its first E rows and columns, that of cross-attention in its last D rows and first E columns. Tokens
    of a stream without the layer keep their rows of the identity. Tokens that begin as those of another stream, such as
    patches of an image in a text, are these tokens after the last step that these have there (see `stream_entries`).

    Attributes:
        trace: the trace.
        steps: the layers in steps, in order of execution.
        streams: the streams in the order of their tokens.
    """

    trace: Trace
    steps: Sequence[Step]
    streams: tuple[TokenStream, ...]

    @classmethod
    def of(cls, trace: Trace, method: str, layers: Sequence[Layer]) -> "Joint":
        """Return the composition of layers; raise the errors of `composable_steps`."""
        steps = composable_steps(trace, method, layers)
        used = {stream: None for step in steps for stream in reversed(streams_of(trace, step[0]))}
        ordered = [stream for stream in trace.streams if stream in used]
        return cls(trace, steps, (*(stream for stream in used if stream not in trace.streams), *ordered))

    @cached_property
    def entries(self) -> Mapping[str, Int[Tensor, "batch token"]]:
        """For some steps, by the name of the first layer, the token as which each token goes on after it.

        Raises `UncoveredError` for a token that begins as several others.
        """
        slots, device = key_slots(self.streams, self.batch), self.trace.layers[-1].output.device
        identity = torch.arange(self.length, device="cpu").expand(self.batch, -1)
        by_step: dict[str, Int[Tensor, "batch token"]] = {}
        for entry in stream_entries(self.trace) if len(self.streams) > 1 else ():
            if not {entry.written, entry.read} <= slots.keys() or (step := self._last_step(entry)) is None:
                continue
            slot, tokens = slots[entry.written], entry.among(self.batch)
            enters = tokens != NONE
            twice = any(bool((enters & (each[:, slot] != identity[:, slot])).any()) for each in by_step.values())
            if twice or bool((tokens == SEVERAL).any()):
                raise UncoveredError(
                    f"a token of {entry.written.name} begins as several tokens of {entry.read.name} or of further "
                    "streams, as one of another sequence, or goes back to its first stream, so no product of maps "
                    "tells what it reads; layers=[...] selects layers of one stream."
                )
            begins = by_step.setdefault(step[0].name, identity.clone())
            begins[:, slot] = torch.where(enters, tokens + slots[entry.read].start, begins[:, slot])
        return {name: begins.to(device) for name, begins in by_step.items()}

    def _last_step(self, entry: Entry) -> Step | None:
        """Return the last step that is in the vectors which enter."""
        names = {self.trace.layers[index].name for index in entry.read.layers if index <= entry.layer}
        return next((step for step in reversed(self.steps) if step[0].name in names), None)

    @property
    def batch(self) -> int:
        """The number of sequences: the least of any stream, since a sequence may have several images."""
        return min(stream.shape[0] for stream in self.streams)

    @property
    def length(self) -> int:
        """The number of tokens of all streams."""
        return sum(stream.count(self.batch) for stream in self.streams)

    def slot(self, stream: TokenStream) -> slice:
        """Return the tokens of a stream among all tokens."""
        return key_slots(self.streams, self.batch)[stream]

    def axes(self, *, whole: bool) -> Axes:
        """Return the axes of the product: the queries are all tokens if it is `whole`, else those of targets."""
        queries = self.streams if whole else (self.trace.target_stream,)
        return Axes(self.trace, queries, self.streams)

    def written(self, layer: Layer) -> slice:
        """Return the tokens that a layer writes."""
        return self.slot(streams_of(self.trace, layer)[0])

    def read(self, layer: Layer) -> slice:
        """Return the tokens that a layer reads."""
        return self.slot(streams_of(self.trace, layer)[1])

    def rows(self, target: Target | None) -> Int[Tensor, "batch row"]:
        """Return the positions of all tokens, or of a target, among the tokens of all streams."""
        last = self.trace.layers[-1]
        if target is None:
            return torch.arange(self.length, device=last.output.device).expand(self.batch, -1)
        rows = query_rows(self.trace, last, target)
        if self.trace.target_stream not in self.streams:
            raise UncoveredError(
                f"a target counts the tokens of {last.name}, and the composed layers have their queries on another "
                "stream; pass target=None and read off the row."
            )
        return rows + self.slot(self.trace.target_stream).start

    def unit_rows(self, rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row token"]:
        """Return rows of the identity."""
        like = self.trace.layers[-1].output
        return like.new_zeros(*rows.shape, self.length).scatter_(2, rows.unsqueeze(-1), 1.0)

    def through(
        self, step: Step, multiply: Multiply, rows: Float[Tensor, "batch row token"]
    ) -> Float[Tensor, "batch row token"]:
        """Return rows times I + the maps of a step, which `multiply` multiplies them by."""
        if (begins := self.entries.get(step[0].name)) is not None:
            rows = torch.zeros_like(rows).scatter_add_(2, begins.unsqueeze(1).expand_as(rows), rows)
        written, read = self.written(step[0]), self.read(step[0])
        selected = rows[..., written]
        if len(self.streams) > 1 and not bool(selected.any()):
            # The stream does not reach these rows, such as another tower's.
            return rows
        images = step[0].output.shape[0] // len(rows)
        by_image = selected.unflatten(-1, (images, -1)).transpose(1, 2).flatten(0, 1)
        added = sum_on_first(multiply(by_image, layer) for layer in step).to(rows)
        added = added.unflatten(0, (-1, images)).transpose(1, 2).flatten(2)
        if selected.shape == rows.shape and written == read:
            return rows + added
        product = rows.clone()
        if begins_stream(self.trace, step[0]):
            product[..., written] = 0
        product[..., read] += added
        return product

    def blocks(self, step: Step, blocks: Callable[[Layer], Blocks]) -> Blocks:
        """Yield the maps of a step's layers among all tokens, in blocks of rows."""
        written, read = self.written(step[0]), self.read(step[0])
        for layer in step:
            queries = layer.output.shape[1]
            for span, block in blocks(layer):
                for image, part in enumerate(block.unflatten(0, (self.batch, -1)).unbind(1)):
                    start, keys = written.start + image * queries, read.start + image * part.shape[-1]
                    columns = slice(keys, keys + part.shape[-1])
                    yield slice(start + span.start, start + span.stop), self._widened(part, columns)

    def dropped(self, step: Step) -> slice | None:
        """Return the rows of a step's map that have no identity (see `begins_stream`), None if all have one."""
        return self.written(step[0]) if begins_stream(self.trace, step[0]) else None

    def whole(
        self, step: Step, mixing: Float[Tensor, "image query key"], residual: Float[Tensor, "image query"] | None
    ) -> Float[Tensor, "batch token token"]:
        """Return the map of a step among all tokens; `residual` is the share of each query's own token, if apart."""
        written, read = self.written(step[0]), self.read(step[0])
        if mixing.shape[1] == self.length and written == read:
            return mixing
        total = torch.eye(self.length, dtype=mixing.dtype, device=mixing.device).repeat(self.batch, 1, 1)
        total[:, written, written] = 0 if residual is None else torch.diag_embed(residual.reshape(self.batch, -1))
        for image, part in enumerate(mixing.unflatten(0, (self.batch, -1)).unbind(1)):
            rows, keys = written.start + image * part.shape[1], read.start + image * part.shape[2]
            total[:, rows : rows + part.shape[1], keys : keys + part.shape[2]] += part
        if (begins := self.entries.get(step[0].name)) is not None:
            total = total.gather(1, begins.unsqueeze(-1).expand_as(total))
        return total

    def _widened(self, block: Float[Tensor, "batch row key"], read: slice) -> Float[Tensor, "batch row token"]:
        if block.shape[-1] == self.length:
            return block
        wide = block.new_zeros(*block.shape[:-1], self.length)
        wide[..., read] = block
        return wide

    def enter(self, step: Step, stream: TokenStream) -> bool:
        """Whether tokens of a stream go on as others after a step (see `entries`)."""
        begins, slot = self.entries.get(step[0].name), self.slot(stream)
        positions = torch.arange(slot.start, slot.stop, device="cpu")
        return begins is not None and bool((begins[:, slot].cpu() != positions).any())

    def blank(self, scores: Float[Tensor, "batch row token"], rows: Int[Tensor, "batch row"]) -> None:
        """Set the scores of pairs with padding to zero, in place."""
        mask = self.axes(whole=True).mask()
        if mask is not None:
            mask = mask.to(scores.device)
            scores.masked_fill_(~mask[:, None, :], 0)
            scores.masked_fill_(~mask.gather(1, rows.to(scores.device))[:, :, None], 0)

    def spread(
        self, layer: Layer, numbers: Float[Tensor, "image _"], rows: Int[Tensor, "batch row"]
    ) -> Float[Tensor, "batch row"]:
        """Return the numbers of a layer's queries at some rows of all tokens, 0 at tokens of other streams."""
        wide = numbers.new_zeros(len(rows), self.length)
        wide[:, self.written(layer)] = numbers.reshape(len(rows), -1)
        return wide.gather(1, rows.to(wide.device))
