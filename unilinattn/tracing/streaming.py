"""Trace a model on consecutive pieces of its tokens: mixers carry their states, and streams are written to files.

`trace(stream_to=)` is the only way to millions of tokens: a trace has three tensors (batch, length, channel) for each
layer, which no memory holds at that length, and neither does it hold the values of the host's forward on all tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import tensors
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host import substitution
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments, real_tokens
from unilinattn.host.logits import logits_at
from unilinattn.host.module_calls import OPAQUE, CallRecord, Prefix, ResidualSite
from unilinattn.host.recorder import Recorder
from unilinattn.host.run import run
from unilinattn.host.substitution import build_flow, called_on, functional, returned
from unilinattn.operator.carry import Carry, States, carried_by
from unilinattn.operator.piecewise import Piece
from unilinattn.operator.reconstruction import worst_error
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.tracing.recording import covered_run
from unilinattn.tracing.residual import group_parallel, locate_in_stream
from unilinattn.tracing.streams import Stream

MASK = "attention_mask"

PIECE = 1 << 16
"""Number of tokens that the model runs on at once."""

SAME_FACTOR = 1e-3
"""Largest relative difference of a layer's factor in the stream between two pieces: more is not rounding."""


def run_in_pieces(
    model: nn.Module,
    arguments: Mapping[str, Any],
    folder: Any,
    dtype: torch.dtype | None,
    *,
    strict: bool,
    progress: bool,
    above: int,
) -> tuple[Recorder, Any]:
    """Run a model on consecutive pieces of its tokens, and return a recorder of the whole run and the last output.

    Registered mixers run through their operators, which carry their states from piece to piece. The inputs, outputs and
    streams of the layers are tensors in files of `folder`. Before that the host itself runs on the first tokens, inside
    which the first piece ends, so that the comparison of each layer's output covers the states, and everything else
    that the host computes from several tokens.

    Raises the errors of `covered_run` for that run, `OptionError` if `folder` is no folder, `InputError` for padding
    and for tensors other than the ids or embeddings of the tokens, and `UncoveredError` for a layer that cannot be
    computed in pieces, and if the pieces differ from the host.
    """
    first = _first_tokens(arguments, folder)
    above = max(above, substitution.PREFIX)
    recorder, _, _ = covered_run(model, first, strict=strict, progress=progress, above=above)
    records = recorder.layers
    _require_pieces(records)
    length, output = _tokens(arguments)[1].shape[1], None
    run = _Run(model, records, length, Path(folder), dtype)
    with bars(progress):
        for tokens in steps(list(_pieces(length)), "trace"):
            output = run.on(arguments, tokens)
    whole = Recorder(model)
    whole.layers = [run.record(index) for index in range(len(records))]
    return whole, output


@dataclass
class _Streams:
    """The files of one layer, the states of its mixers, and its pieces so far, each with the states before it."""

    carry: Carry = field(default_factory=Carry)
    pieces: list[tuple[slice, States]] = field(default_factory=list)
    input: Stream | None = None
    output: Stream | None = None
    stream: Stream | None = None
    norms: list[Tensor] = field(default_factory=list)


class _Run:
    """A run of a model in pieces, which writes the tensors of each layer to files."""

    def __init__(
        self, model: nn.Module, records: Sequence[CallRecord], length: int, folder: Path, dtype: torch.dtype | None
    ) -> None:
        """Prepare for the layers of the host's own run on the first tokens, recorded in `records`."""
        self._model, self._records, self._length, self._folder, self._dtype = model, records, length, folder, dtype
        # Parallel layers share their stream, and their group is the same in every piece.
        self._first = {index: group[0] for group in group_parallel(records) for index in group}
        self._layers = [_Streams() for _ in records]
        self._calls = 0

    def on(self, arguments: Mapping[str, Any], tokens: slice) -> Any:
        """Run the model on some tokens, write the layers' tensors, and return the model's output."""
        recorder, model = Recorder(self._model, locate=locate_in_stream), self._model
        piece = logits_at(model, _cut(arguments, tokens), lambda: [torch.tensor([-1], device="cpu")], above=0)
        self._calls = 0
        mixers = replaced_forwards(model, partial(self._carried, tokens))
        output = run(model, piece, mixers=mixers, observer=recorder.attached())
        if [record.name for record in recorder.layers] != [record.name for record in self._records]:
            raise UncoveredError(
                f"{type(model).__name__} runs other layers on tokens {tokens.start} to {tokens.stop - 1} than on the "
                "first ones; trace without stream_to=."
            )
        group_parallel(recorder.layers)
        for index, record in enumerate(recorder.layers):
            self._write(index, record, tokens)
        for record in recorder.layers:
            # The calls of a run refer to each other, so their tensors would wait for the garbage collector.
            record.parent = record.output = record.entered = record.site = None
            record.arguments, record.returned = {}, ()
        return output

    def record(self, index: int) -> CallRecord:
        """Return the record of a layer's call on all tokens, compared with the host on the first ones.

        Raises `UncoveredError` if they differ.
        """
        first, layer = self._records[index], self._layers[index]
        assert layer.input is not None and layer.output is not None and first.output is not None
        host = first.output
        error = worst_error(layer.output.read(slice(host.shape[1])), host)
        if not error <= layer_tolerance(host.dtype):
            raise UncoveredError(
                f"{first.name}: in pieces its output differs from the host's on the first {host.shape[1]} tokens by "
                f"{error:.1e} (relative; {layer_tolerance(host.dtype):.0e} is allowed in {host.dtype}), so this model "
                "computes something from several tokens or from positions that its layers' states do not carry; trace "
                "without stream_to=."
            )
        whole = layer.input.tensor
        pieces = tuple(Piece(tokens, partial(layer.input.read, tokens), states) for tokens, states in layer.pieces)
        around = self._layers[self._first[index]]
        stream, site = around.stream, None
        if first.site is not None and stream is not None:
            site = ResidualSite(stream.tensor, stream.tensor, 1.0, first.site.multiplier, None, 0.0)
        return replace(
            first,
            arguments={name: whole if value is first.input else value for name, value in first.arguments.items()},
            entered=whole,
            output=layer.output.tensor,
            site=site,
            prefix=Prefix(
                host.detach(),
                error,
                {"x": (whole.shape[0], whole.shape[1])},
                pieces,
                torch.cat(around.norms, 1) if around.norms else None,
            ),
        )

    def _carried(self, tokens: slice, name: str, module: nn.Module, host: Forward) -> Forward | None:
        """Return the forward of a mixer that carries its state from piece to piece."""
        architecture = functional(module)
        if architecture is None:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = called_on(module, name, bound_arguments(module, args, kwargs))
            layer = self._layers[self._calls]
            self._calls += 1
            layer.pieces.append((tokens, layer.carry.states))
            with carried_by(layer.carry):
                output = build_flow(architecture, call).value
            output = output.to(_only_tensor(call.arguments, name).dtype)
            return returned(output, architecture, module, call.arguments)

        return forward

    def _write(self, index: int, record: CallRecord, tokens: slice) -> None:
        layer, first, count = self._layers[index], self._records[index], tokens.stop - tokens.start
        assert record.entered is not None and record.output is not None
        dtype = torch.promote_types(self._dtype or record.output.dtype, torch.float32)
        if (record.entered.shape[1], record.output.shape[1]) != (count, count):
            raise UncoveredError(
                f"{record.name} maps {record.entered.shape[1]} tokens to {record.output.shape[1]} in a piece of "
                f"{count} tokens, so its tokens are not those of the model; trace without stream_to=."
            )
        if not _same_sum(first.site, record.site):
            raise UncoveredError(
                f"{record.name}: its output is added to the stream in another way on tokens {tokens.start} to "
                f"{tokens.stop - 1} than on the first ones; trace without stream_to=."
            )

        def write(stream: Stream | None, piece: Tensor) -> Stream:
            stream = stream or Stream(self._folder, (piece.shape[0], self._length, piece.shape[2]), dtype)
            stream.write(tokens, piece)
            return stream

        layer.input, layer.output = write(layer.input, record.entered), write(layer.output, record.output)
        site = record.site
        if site is not None and self._first[index] == index:
            entered = site.stream if site.skip == 1 else site.skip * site.stream
            layer.stream = write(layer.stream, entered)
            # Norms that were read from the files afterwards would bring whole streams into memory.
            layer.norms.append(torch.linalg.vector_norm(entered.detach().to(dtype), dim=-1))


def _first_tokens(arguments: Mapping[str, Any], folder: Any) -> dict[str, Any]:
    """Return the host's arguments on the first `PREFIX` tokens, after checking those of `stream_to`.

    Raises `OptionError` if `folder` is no folder, and `InputError` for padding and for tensors other than the ids or
    embeddings of the tokens.
    """
    if not isinstance(folder, (str, Path)) or not Path(folder).is_dir():
        raise OptionError(f"stream_to={folder!r}; give an existing folder, with space for the streams, or None.")
    name, x = _tokens(arguments)
    if real_tokens(arguments) is not None:
        raise InputError(
            "stream_to= has no padding: its pieces are cut at the same tokens; trace each text separately."
        )
    others = [
        key for key, value in arguments.items() if key not in (name, MASK) and any(t.ndim for t in tensors(value))
    ]
    if others:
        raise InputError(
            f"stream_to= runs the model on pieces of {name}, and {others[0]!r} cannot be cut with them; leave it out, "
            "or trace without stream_to=."
        )
    return _cut(arguments, slice(0, min(substitution.PREFIX, x.shape[1])))


def _pieces(length: int) -> Iterator[slice]:
    """Yield the tokens of each piece; the first one ends inside the prefix that is compared with the host."""
    start, stop = 0, max(1, min(substitution.PREFIX, length) // 2)
    while start < length:
        yield slice(start, min(stop, length))
        start, stop = stop, stop + PIECE


def _require_pieces(records: Sequence[CallRecord]) -> None:
    """Raise `UncoveredError` for layers that keep the host's forward, and for arguments that cannot be cut."""
    for record in records:
        architecture = record.architecture
        if architecture is None or architecture is OPAQUE or architecture.needs_capture:
            raise UncoveredError(
                f"{record.name} ({type(record.module).__name__}) carries no state from one piece of the tokens to the "
                "next, as softmax attention, whose rows need all earlier tokens; trace without stream_to=."
            )
        _only_tensor(record.arguments, record.name)


def _only_tensor(arguments: Mapping[str, Any], name: str) -> Tensor:
    """Return the only tensor among a layer's arguments; raise `UncoveredError` for several."""
    first, *others = (key for key, value in arguments.items() if any(True for _ in tensors(value)))
    if others:
        raise UncoveredError(
            f"{name} gets the tensor {others[0]!r} beside its input {first!r}, which cannot be cut into pieces; trace "
            "without stream_to=."
        )
    x: Tensor = next(tensors(arguments[first]))
    return x


def _same_sum(first: ResidualSite | None, other: ResidualSite | None) -> bool:
    """Whether two outputs have the same factors in their sums with the stream, up to rounding."""
    if first is None or other is None:
        return first is other
    pairs = (first.skip, other.skip), (first.multiplier, other.multiplier)
    return all(abs(a - b) <= SAME_FACTOR * abs(a) for a, b in pairs)


def _tokens(arguments: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return the name and the tensor of a host's tokens, (batch, length, ...); raise `InputError` without one."""
    for name in ("input_ids", "inputs_embeds", *arguments):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.ndim in (2, 3):
            return name, x
    raise InputError("stream_to= cuts a sequence of tokens into pieces; give a tensor of ids or of embeddings.")


def _cut(arguments: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return the arguments on some tokens; a mask without padding is left out."""
    name, x = _tokens(arguments)
    return {**{key: value for key, value in arguments.items() if key != MASK}, name: x[:, tokens]}
