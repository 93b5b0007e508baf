"""Check that nothing outside of a trace's layers moves information between tokens, in any layout of the tokens.

Every layer returns its recorded output. A random half of the tokens is perturbed where tokens originate (ids, the first
vectors of each stream, the layers' outputs), then the other half. Each vector that a layer reads or the model returns
may move with its own token only; a model may sort the first vectors of a stream before a layer reads them. Attention
outside of the layers is recognised by its scores: along the axis of the keys, some move with one half and others with
the other half. An output may pool tokens, as class logits do, unless it has those of a stream.

Cost: three runs of the model without the computation of its layers, two more for each further stream, and five more for
inputs that are no tokens, such as images: pieces of them are perturbed, to recognise attention before the first layer.
Memory: two numbers per token for every tensor that a layer reads, and 1,024 elements of every tensor between modules.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn.call.axes import as_tokens, channel_axis
from unilinattn.call.nested import mapped, tensors
from unilinattn.discovery.changes import ATTENTION, Entry, Shape, elements, lines, rows, sample
from unilinattn.discovery.halves import half_of, order_of, windows_of
from unilinattn.discovery.mixing import mixes_tokens
from unilinattn.discovery.perturbation import TOLERANCE, Call, Constant, Constants, Run
from unilinattn.discovery.perturbed_inputs import (
    AXES,
    PIECES,
    SignalPieces,
    TokenHalf,
    is_signal,
    is_token_ids,
    tokens_of,
)
from unilinattn.discovery.selections import CHOOSING, Selections
from unilinattn.host.inputs import call_host, sequences_in
from unilinattn.host.logits import logits_in
from unilinattn.host.module_calls import CallRecord, block_of, layer_input
from unilinattn.host.observer import Functions, Inputs

TURNS = ("transpose", "permute", "movedim", "swapaxes", "__get__")
"""Functions after which channels may be the last axis; `Tensor.mT` is a property."""


@dataclass(frozen=True)
class Leak:
    """A place outside of the layers where tokens mix.

    Attributes:
        module: path of the innermost module that mixes them; "" is the model itself.
        function: name of the attention function that mixes them, None for another kind.
        after, before: paths of the layers between which they mix, None for the model's input and output.
        regrouped: the vectors that the layer `before` reads, if they are tokens of another stream that lie in other
            groups, as merged patches do: each of their elements depends on one token. Or an output that pools tokens.
            None for tokens that mix.
    """

    module: str
    function: str | None
    after: str | None
    before: str | None
    regrouped: "Key | None" = None


def find_leak(
    model: nn.Module,
    arguments: Mapping[str, Any],
    layers: Sequence[CallRecord],
    constants: Constants,
    regrouped: Collection["Key"] = (),
) -> Leak | None:
    """Return the first place outside of the layers where tokens mix, None if there is none.

    `layers` are the recorded calls of the model's layers on `arguments`; the modules of `constants` return
    constants, and the vectors `regrouped` may have elements of several tokens. The model and the random number
    generators are restored.
    """
    pairs = [pair for record in layers for pair in zip((record.entered, record.output), record.axes, strict=True)]
    # The first layer tells where vectors of as many tokens as channels have these.
    shapes = {tuple(x.shape): axis for x, axis in reversed(pairs) if x is not None and x.ndim in AXES}
    streams = {tokens_of(shape, axis) for shape, axis in shapes.items()}
    lengths = {length for _, length in streams}
    # Ids of as many tokens in another batch are several for each token, such as those of codebooks.
    ids = {
        tuple(x.shape[:2])
        for name, x in arguments.items()
        if is_token_ids(name, arguments) and x.shape[1] not in lengths
    }
    windows = windows_of([record.entered for record in layers], sequences_in(arguments))
    halves = {shape: half_of(shape, windows.get(shape)) for shape in sorted(streams | ids) if prod(shape) > 1}
    perturbed = [
        TokenHalf(model, shape, half, axes=shapes) for shape, first in halves.items() for half in (first, ~first)
    ]
    # Without ids, what comes before the first block makes tokens of a signal.
    has_ids = any(is_token_ids(name, arguments) for name in arguments)
    begins = None if has_ids or not layers else block_of(layers[0])
    probe = _Probing(model, arguments, constants, shapes, begins)
    entries = probe.run(perturbed)
    leak = probe.first_attention(entries) or _first_leak(entries, halves, regrouped, probe.holders)
    if leak is not None and probe.orders:
        # Then the tokens of a stream may be those in which its first vectors are sorted.
        perturbed = [half.sorted(probe.orders) for half in perturbed]
        entries = probe.run(perturbed)
        leak = probe.first_attention(entries) or _first_leak(entries, halves, regrouped, probe.holders)
    if leak is not None and leak.regrouped is not None:
        entry = entries[leak.regrouped]
        pools = leak.before is None and not _has_tokens_of(halves, entry.shape, pairs)
        # Halves that do not move these vectors need no second run.
        moving = [perturbed[number] for number in entry.moved_by_both()]
        if not pools and probe.run(moving, leak.regrouped)[leak.regrouped].mixed:
            leak = replace(leak, regrouped=None)
    if leak is not None or not any(is_signal(name, x, streams) for name, x in arguments.items()):
        return leak
    signals = [SignalPieces(pieces, streams, first) for pieces in PIECES for first in (True, False)]
    return probe.first_attention(probe.run(signals))


Key = tuple[str, str, int, Any]
"""Kind of a tensor ("layer", "in", "out", "attention", "output"), path and number of the call, and its place there."""

Shapes = Mapping[tuple[int, ...], int]
"""The shapes of the vectors that layers read and return, with the axis of their channels."""

Entries = dict[Key, Entry]
"""The compared tensors of some runs, in order of execution."""


def _first_leak(
    entries: Entries, halves: Mapping[Shape, Tensor], regrouped: Collection[Key], holders: Mapping[str, str]
) -> Leak | None:
    """Return the first vectors that a layer reads or the model returns which move with other tokens.

    Those of a layer that are not known to move with tokens of their stream count as regrouped.

    Its module is the last one before them that made mixed tensors from others, innermost: an earlier one may end in a
    result that nothing reads. Without one it is the module that calls the layer, of `holders`.
    """
    after: str | None = None
    sources: list[str] = []
    # Vectors that a later layer reads may be made before an earlier one.
    earlier: list[str] = []
    mixed_inputs: set[tuple[str, int]] = set()
    for key, entry in entries.items():
        kind, path, number, _ = key
        if kind in ("layer", "output") and len(entry.shape) > 2:
            mixed = entry.of_other_tokens(halves)
            if mixed or (key not in regrouped and entry.of_several_tokens(halves)):
                is_layer = kind == "layer"
                groups = None if mixed else key
                innermost = [x for x in earlier if not any(other.startswith(f"{x}.") for other in earlier)]
                module = next(reversed(sources or innermost), holders.get(path, ""))
                return Leak(module, None, after, path if is_layer else None, groups)
        if kind == "layer" and path != after:
            after, earlier, sources = path, earlier + sources, []
        elif kind == "in" and entry.mixed:
            mixed_inputs.add((path, number))
        elif kind == "out" and entry.mixed and (path, number) not in mixed_inputs:
            # A module ends after those inside it, one of which already explains its mixed output.
            inside = f"{path}." if path else ""
            sources += [] if any(source.startswith(inside) for source in sources) else [path]
    return None


def _has_tokens_of(
    streams: Collection[Shape], shape: tuple[int, ...], vectors: Sequence[tuple[Tensor | None, int]]
) -> bool:
    """Tell whether an output of a shape may have the tokens of a stream.

    Its channels lie where the last ones of the layers' `vectors` of as many axes have them.
    """
    axis = next((axis for x, axis in reversed(vectors) if x is not None and x.ndim == len(shape)), None)
    return any(tokens_of(shape, each) in streams for each in ((1, -1) if axis is None else (axis,)))


class _Probing:
    """Runs of one model on one input, with its layers constant."""

    def __init__(
        self, model: nn.Module, arguments: Mapping[str, Any], constants: Constants, shapes: Shapes, begins: str | None
    ) -> None:
        self._arguments, self._probe = arguments, partial(_Probe, model, constants, shapes, begins)

    def run(self, halves: Sequence[TokenHalf | SignalPieces], whole: Key | None = None) -> Entries:
        """Run the model unperturbed and with each perturbation; return the compared tensors in order of execution.

        Of the vectors `whole`, which a layer reads, all elements are compared.
        """
        reference = self._probe(whole=whole)
        reference.run(self._arguments)
        self.holders, self.orders = reference.holders, reference.orders
        for number, half in enumerate(halves):
            self._probe(half, reference, number, whole).run(half.inputs(self._arguments))
        return reference.entries

    def first_attention(self, entries: Entries) -> Leak | None:
        """Return the first attention outside of the layers whose result reaches a layer or the output."""
        keys = list(entries)
        for index, key in enumerate(keys):
            if key[0] != "attention" or not entries[key].over_tokens or not self._reaches(key):
                continue
            after = next((k[1] for k in reversed(keys[:index]) if k[0] == "layer"), None)
            return Leak(key[1], key[3][1], after, next((k[1] for k in keys[index:] if k[0] == "layer"), None))
        return None

    def _reaches(self, key: Key) -> bool:
        """Tell whether the result of an attention moves vectors that a layer reads, or the model's output."""
        reference = self._probe()
        reference.run(self._arguments)
        self._probe(key, reference).run(self._arguments)
        sinks = (entry for (kind, *_), entry in reference.entries.items() if kind in ("layer", "output"))
        return any(bool((entry.changes[0] > entry.accepted).any()) for entry in sinks if entry.changes)


class _Probe(Run):
    """A run that records numbers of tensors, or compares them with those of the unperturbed run.

    Attributes:
        entries: the recorded numbers by key, in order of execution.
        first: the first vectors of each stream.
        stem: the number of functions up to the last one that mixes pixels before the first layer.
        block: that of the functions before the first block of a model without ids.
        turn: that up to the last one before the first layer that turned as many channels as tokens.
        holders: the path of the module that calls each layer.
        orders: for each stream whose first vectors are sorted before a layer reads them, the place of each token then
            among those before.
    """

    def __init__(
        self,
        model: nn.Module,
        constants: Constants,
        shapes: Shapes,
        begins: str | None,
        change: "TokenHalf | SignalPieces | Key | None" = None,
        reference: "_Probe | None" = None,
        number: int = 0,
        whole: "Key | None" = None,
    ) -> None:
        """Prepare the unperturbed run, or run `number` with a perturbed half or a perturbed result of one attention."""
        super().__init__(model, 0, constants)
        self._shapes, self._change, self._whole = shapes, change, whole
        self._streams = {tokens_of(shape, axis) for shape, axis in shapes.items()}
        self.entries: Entries = {} if reference is None else reference.entries
        self.first: dict[Shape, Tensor] = {} if reference is None else reference.first
        self._is_reference, self._number = reference is None, number
        self._begun: set[Shape] = set()
        self._images = {tokens_of(shape, axis) for shape, axis in shapes.items() if axis == 1}
        self._count, self._has_read, self._begins = 0, False, begins
        self.holders: dict[str, str] = {}
        self.orders: dict[Shape, Int[Tensor, " token"]] = {}
        self._read: set[Shape] = set()
        self.stem: int = 0 if reference is None else reference.stem
        self.block: int = 0 if reference is None else reference.block
        self.turn: int = 0 if reference is None else reference.turn
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._selections: Selections = Selections(None if reference is None else reference._selections)

    def call_host(self, arguments: Mapping[str, Any]) -> None:
        """Call the model under a function mode, and compare its output."""
        # The order of an input's tokens is that of the input.
        self._read |= {(t.shape[0], t.shape[1]) for t in tensors(arguments) if t.ndim > 1}
        with Functions(self.called):
            output = call_host(self.model, arguments)
        logits = logits_in(output)  # Also of an object of another kind.
        results = [*tensors(output), *([] if logits is None else [logits])]
        for index, t in enumerate(t for t in results if t.is_floating_point() and t.ndim and t.numel()):
            key: Key = ("output", "", 1, index)
            # The last layer tells where an output of as many tokens as channels has these.
            last = next((axis for shape, axis in self._shapes.items() if len(shape) == 3), -1)
            t = t.mT if _is_square(t) and self._shapes.get(tuple(t.shape), last) == 1 else t
            self._compare(key, elements if key == self._whole else rows if t.ndim == 3 else sample, t)

    def entering(self, frame: Call, module: nn.Module, inputs: Inputs) -> None:
        """Compare the tensors that enter a module."""
        if self._is_reference and not self.block and frame.path == self._begins:
            self.block = self._count
            self._begun.clear()
        self._compare_all("in", frame, inputs)

    def leaving(self, frame: Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Compare the tensors that leave a module."""
        self._compare_all("out", frame, output)

    def reading(self, path: str, number: int, constant: Constant, inputs: Inputs) -> None:
        """Compare the vectors that a layer reads."""
        self._has_read = True
        self.holders[path] = self.stack[-2].path if len(self.stack) > 1 else ""
        # A pool reads as many channels as tokens in another order than attention does.
        read = layer_input((*inputs[0], *inputs[1].values()))
        shapes = self._shapes if read is None else {**self._shapes, tuple(read.shape): constant.axes.inputs}
        module = self.model.get_submodule(path)

        def axis_of(t: Tensor) -> int:
            return shapes.get(tuple(t.shape)) or (channel_axis(module, t.shape) if t.ndim > 3 else None) or -1

        axes = ((t, axis_of(t)) for t in tensors(inputs) if t.ndim in AXES)
        streams = [(t, axis) for t, axis in axes if tokens_of(t.shape, axis) in self._streams]
        self._read |= {tokens_of(t.shape, axis) for t, axis in streams}
        vectors = [as_tokens(t, axis=axis) for t, axis in streams]
        for index, t in enumerate(t for t in vectors if t.is_floating_point() and t.shape[-1] > 1):
            key: Key = ("layer", path, number, index)
            self._compare(key, elements if key == self._whole else rows, t)

    def held_output(self, constant: Constant) -> Tensor:
        """Return the recorded output, perturbed."""
        return self._perturbed(constant.output.clone(), constant.axes.output)

    def other_output(self, constant: Constant, t: Tensor) -> Tensor:
        """Return another tensor of a layer, perturbed: what reads it moves with the tokens that it comes from."""
        return self._change.beside(t, constant.output) if isinstance(self._change, TokenHalf) else t

    def called(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Inspect the result of a function of the host; return it or its replacement."""
        name = getattr(func, "__name__", "")
        self._count += 1
        if self._is_reference and not self._has_read and mixes_tokens(func, args, kwargs):
            # Images have the shape of the first stream while convolutions still mix their pixels.
            self.stem = self._count
            self._begun -= {shape for shape in self._begun if shape in self._images}
        if self._is_reference and not self._has_read and name in TURNS and _is_square(result):
            self.turn = self._count
            self._begun.discard(tokens_of(result.shape, -1))
        if name in CHOOSING:
            result = self._selections.of_first_run((name, self._numbered(name)), name, args, kwargs, result)
        if name in ATTENTION:
            path, number, count = self._numbered("attention")
            key = ("attention", path, number, (count, name))
            self._compare(key, lines, ATTENTION[name](args, kwargs))
            if key == self._change:
                # Every vector changes, and also which sequence has it: whatever reads the result moves.
                return mapped(result, lambda t: t.flip(0) + 1 if t.is_floating_point() else t)
        return self._originated(name, args, result)

    def _numbered(self, kind: str) -> tuple[str, int, int]:
        """Return the path and number of the module's call, and how many functions of a kind it called before."""
        path, number = (self.stack[-1].path, self.stack[-1].number) if self.stack else ("", 1)
        self._calls[kind, path, number] += 1
        return path, number, self._calls[kind, path, number] - 1

    def _perturbed(self, t: Tensor, axis: int) -> Tensor:
        return self._change.noisy(t, axis) if isinstance(self._change, TokenHalf | SignalPieces) else t

    def _originated(self, name: str, args: Any, result: Any) -> Any:
        """Perturb the first vectors of a stream, unless they moved with the inputs."""
        if not isinstance(result, Tensor) or result.ndim not in AXES or not result.is_floating_point():
            return result
        # A function without operands makes constants, and one in place changes an operand too.
        makes = not any(True for _ in tensors(args)) or name.endswith("_like") or name.startswith("new_")
        if tuple(result.shape) not in self._shapes or makes:
            return result
        axis = self._shapes[tuple(result.shape)]
        # Channels before tokens have the shape of a stream only with its width.
        shape = tokens_of(result.shape, axis)
        if self._is_reference and shape in self.first and shape not in self._read:
            order = order_of(*(as_tokens(x, axis=axis) for x in (self.first[shape], result)))
            self.orders |= {} if order is None else {shape: order}
        if name.endswith("_"):
            return result
        is_early = self._count <= self.block or (axis == 1 and self._count < self.stem)
        if shape in self._begun or is_early or (_is_square(result) and self._count < self.turn):
            return result
        self._begun.add(shape)
        if self._is_reference:
            self.first[shape] = result.detach().clone()
            return result
        first = self.first.get(shape)
        if first is None or not torch.equal(first, result) or not isinstance(self._change, TokenHalf | SignalPieces):
            return result
        return self._change.at_origin(result, axis)

    def _compare_all(self, kind: str, call: Call, value: Any) -> None:
        for index, t in enumerate(t for t in tensors(value) if t.is_floating_point() and t.ndim > 1 and t.numel()):
            self._compare((kind, call.path, call.number, index), sample, t)

    def _compare(self, key: Key, numbers: Callable[[Tensor], tuple[Tensor, Tensor]], t: Tensor) -> None:
        values, size = numbers(t.detach().to(torch.promote_types(t.dtype, torch.float32)))
        if self._is_reference:
            # Vectors of tokens along rows and columns are numbered as those of one axis.
            shape = (*values.shape, t.shape[-1]) if numbers is rows else tuple(t.shape)
            self.entries[key] = Entry(values, size, TOLERANCE.get(t.dtype, 0.05), shape)
        elif key in self.entries:
            self.entries[key].compare(self._number, values)


def _is_square(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == x.shape[2]
