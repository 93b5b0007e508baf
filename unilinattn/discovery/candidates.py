"""Find modules without an adapter that mix tokens, by the functions of torch that they call.

The innermost module around such a function that takes a stream of tokens and returns one becomes a layer, if
perturbing some tokens of its input moves others of its output. What mixes elsewhere is found by `completeness`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.axes import LAST, Axes, as_tokens, axes_of, channel_axis, in_shape
from unilinattn.call.nested import mapped
from unilinattn.discovery.mixing import mixes_tokens
from unilinattn.discovery.perturbation import TOLERANCE, Constants, constants_of
from unilinattn.discovery.unknown import is_basic
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments, sequences_in
from unilinattn.host.isolation import outside_host
from unilinattn.host.module_calls import CallRecord, first_tensor
from unilinattn.host.observer import Functions, Inputs, Observer
from unilinattn.host.recorder import MAIN, captured, main_tensor
from unilinattn.host.run import run
from unilinattn.host.windows import are_windows
from unilinattn.registry import visible_functions


@dataclass(eq=False)
class _Call:
    """One call of a module: what mixes in it, and whether it is a layer that may be recorded.

    Attributes:
        number: the number of the call in the run.
        block: that of the innermost call around it of a module in a list, which takes the model's sequences; 0 without.
        mixes: whether a function mixes in it, outside of the layers in it.
        attends: whether a function that is no convolution does.
        batch: the number of sequences of the model; None for windows, whose rows are no sequences.
        first: the number of the first layer in it, 0 without.
        streams: the calls in it that mix, and would be layers but for being a part of this one.
        is_part: whether it is a layer because the module around it holds others.
        windowed: whether its sequences are windows of those of the model.
        computes_streams: whether it makes queries, keys and values for a module in it, with which it is one layer.
        keeps_steps: whether it returns as many steps in time as it reads, (batch, channel, step).
        is_of_steps: whether these are the tokens, as in a model of convolutions; elsewhere a stem makes tokens of them.
    """

    path: str
    module: nn.Module
    inputs: Inputs
    number: int
    block: int
    tensor: Tensor | None
    batch: int | None
    mixes: bool = False
    attends: bool = False
    holds_layer: bool = False
    first: int = 0
    is_part: bool = False
    windowed: bool = False
    computes_streams: bool = False
    keeps_steps: bool = False
    is_of_steps: bool = False
    streams: "list[_Call]" = field(default_factory=list)

    @property
    def windows(self) -> "list[_Call]":
        """The calls in it that mix the tokens of windows by more than convolutions."""
        return [call for call in self.streams if call.windowed and call.attends and not is_basic(call.module)]

    @property
    def parts(self) -> "list[_Call]":
        """The calls that are layers if it mixes: those in it that mix windows, or itself."""
        inner = self.windows if self.windowed else self.streams if len(self.windows) > 1 else []
        return inner or [self]

    @property
    def values(self) -> tuple[Any, ...]:
        """Its arguments."""
        return (*self.inputs[0], *self.inputs[1].values())

    @property
    def axis(self) -> int:
        """The axis of channels of the stream that it reads."""
        assert self.tensor is not None
        return channel_axis(self.module, self.tensor.shape) or -1

    @property
    def is_of_tokens(self) -> bool:
        """Whether its vectors are those of tokens, and no pixels of which a stem makes some."""
        return self.axis == -1 or self.is_of_steps

    @property
    def tokens(self) -> int:
        """The number of tokens of that stream."""
        assert self.tensor is not None
        return as_tokens(self.tensor, axis=self.axis).shape[1]


def mixing_modules(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> dict[str, bool]:
    """Return the paths of modules outside of the recorded calls `layers` that mix tokens, in order of execution.

    True for those that mix by another function than a convolution.

    Runs the model once without the computation of its layers, and each candidate once more per call.
    """
    search = _Search(model, constants_of(layers))
    run(model, arguments, mixers=search.constant_layers(), observer=search.attached(), seed=torch.get_rng_state())
    paths = search.layer_paths()
    return paths if paths or layers else dict.fromkeys(search.weak(), True)


class _Search(Observer[_Call]):
    """One run that finds the innermost modules around functions that mix tokens."""

    def __init__(self, model: nn.Module, layers: Constants) -> None:
        super().__init__(model)
        self._layers = layers
        self.paths: dict[str, _Call] = {}
        self._weak: dict[str, None] = {}
        self._arguments: list[Tensor] = []
        self._batch: int | None = None
        self._count = 0
        self._first: int | None = None
        self._trying = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow the calls of modules and of functions."""
        with super().attached(), visible_functions(self.model), Functions(self._called):
            yield

    @contextmanager
    def constant_layers(self) -> Iterator[None]:
        """Make the layers return their recorded outputs."""
        with captured(self.model), replaced_forwards(self.model, self._constant):
            yield

    def _constant(self, path: str, module: nn.Module, host: Forward) -> Forward | None:
        constants, calls = self._layers.get(path), count()
        if constants is None:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            constant = constants[min(next(calls), len(constants) - 1)]
            return mapped(constant.returned, lambda t: constant.output.clone() if t is MAIN else t)

        return forward

    def _called(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        with torch._C.DisableTorchFunction():
            name = getattr(func, "__name__", "")
            if self.stack and not self._trying and mixes_tokens(func, args, kwargs):
                self.stack[-1].mixes = True
                self.stack[-1].attends |= not _only_convolves(name, args, result)
        return result

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Follow a call, except those of a trial."""
        return None if self._trying else super().enter(path, module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Follow the end of a call, except those of a trial."""
        return None if self._trying else super().leave(module, args, kwargs, output)

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> _Call:
        """Number the call."""
        args, kwargs = inputs
        self._count += 1
        if not self.stack:
            self._batch = sequences_in(bound_arguments(module, args, kwargs))
            self._arguments = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim]
        x = first_tensor((*args, *kwargs.values()))
        is_block = path.rpartition(".")[2].isdigit() and x is not None and x.shape[0] == self._batch
        block = self._count if is_block else self.stack[-1].block if self.stack else 0
        call = _Call(path, module, inputs, self._count, block, x, self._batch)
        if path in self._layers:
            self._first = self._first or call.block or call.number
            for outer in self.stack:
                outer.holds_layer, outer.first = True, outer.first or call.number
        return call

    def leaving(self, frame: _Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Make the call a layer if it takes and returns a stream, else hand what mixes to the module around it."""
        inside = any(call.path in self._layers or call.path in self.paths for call in self.stack)
        if not frame.mixes or inside or frame.path in self._layers:
            return
        if frame.attends and frame.holds_layer:
            self._take_convolutions(frame)
        parent = self.stack[-2] if len(self.stack) > 1 else None
        only_convolves = parent is None and not frame.attends and self._first is None
        if (frame.holds_layer and not frame.computes_streams) or only_convolves:
            # Beside layers, and in the forward of a model of convolutions, the parts that mix are layers by themselves,
            # but for convolutions of pixels before blocks.
            stem = 0 if frame.block else frame.first
            for call in frame.streams:
                call.is_of_steps = only_convolves and call.keeps_steps
                if call.tokens > 1 and (call.number > stem or call.attends or call.is_of_tokens):
                    call.is_part = True
                    self._add(call)
            return
        result = main_tensor(output)
        if parent is None:
            # No module around the mixers of windows has the sequences of the model.
            for call in [] if self.paths or self._layers else frame.windows:
                self._add(call)
            return
        is_stream = result is not None and self._is_stream(frame, result)
        if is_stream and frame.tensor is not None and result is not None:
            frame.keeps_steps = result.ndim == 3 and result.shape[2:] == frame.tensor.shape[2:]
        is_whole = is_stream and not is_basic(module) and not self._is_wrapped(frame, parent)
        computes_streams = is_whole and self._computes_streams(frame, parent)
        if result is not None and is_whole and not computes_streams:
            if self._moves_others(frame, result):
                if frame.windowed or _is_widened(frame, parent):
                    # The module around one mixer of windows has the sequences of the model, or its channels.
                    parent.mixes, parent.attends = True, parent.attends or frame.attends
                    parent.streams += frame.parts
                    return
                for call in frame.parts:
                    self._add(call)
                return
            # The tokens may lie along another axis here, and a module whose weights begin at zero moves nothing yet.
            self._weak.setdefault(frame.path)
            is_stream = False
        parent.mixes, parent.attends = True, parent.attends or frame.attends
        is_stream = is_stream and result is not None and self._moves_others(frame, result)
        # A convolution of single tokens mixes none.
        parent.computes_streams |= computes_streams and is_stream
        parent.streams += frame.parts if is_stream else frame.streams

    def _take_convolutions(self, frame: _Call) -> None:
        """Make the convolutions inside of an attention, such as those of its keys, a part of it."""
        inside = [path for path in (*self._layers, *self.paths) if path.startswith(f"{frame.path}.")]
        calls = [self.paths.get(path) for path in inside]
        if frame.path and not is_basic(frame.module) and all(call is not None and not call.attends for call in calls):
            frame.holds_layer = False
            for path in inside:
                del self.paths[path]

    def _add(self, call: _Call) -> None:
        """Make a call a layer, of which those in it are parts."""
        self.paths = {path: other for path, other in self.paths.items() if not path.startswith(f"{call.path}.")}
        self.paths.setdefault(call.path, call)
        for outer in self.stack:
            if outer is not call:
                outer.holds_layer, outer.first = True, min(outer.first or call.number, call.number)

    def layer_paths(self) -> dict[str, bool]:
        """Return the paths of the layers, but for a stem: convolutions of images before the first other layer."""
        wholes = [call for call in self.paths.values() if not call.is_part]
        attending = [call.block or call.number for call in self.paths.values() if call.attends]
        attending += [] if self._first is None else [self._first]
        first = min(attending or [call.block or call.number for call in wholes], default=0)
        calls = (call for call in self.paths.values() if call.number >= first or call.is_of_tokens)
        return {call.path: call.attends for call in calls}

    @staticmethod
    def _is_wrapped(frame: _Call, parent: _Call) -> bool:
        """Whether the module around a call has the same input, such as one that adds it to the output and norms it."""
        if is_basic(parent.module):
            return False
        inner, outer = (first_tensor(call.values) for call in (frame, parent))
        return inner is outer and bool(parent.path) and not parent.path.rpartition(".")[2].isdigit()

    def _computes_streams(self, frame: _Call, parent: _Call) -> bool:
        """Whether the module around a call makes several tensors of one shape for it, such as queries and keys, of one.

        What it hands on, such as the stream that an attention adds to its output, it does not make.
        """
        assert frame.tensor is not None
        alike, entered = (
            {id(v) for v in call.values if isinstance(v, Tensor) and v.shape == frame.tensor.shape}
            for call in (frame, parent)
        )
        registered = any(path.startswith(f"{parent.path}.") for path in self._layers)
        return len(alike - entered) > 1 >= len(entered) and bool(parent.path) and not registered

    def weak(self) -> list[str]:
        """Return the innermost modules that may mix tokens, of a model in which no module moves other tokens."""
        return [path for path in self._weak if not any(other.startswith(f"{path}.") for other in self._weak)]

    def _is_stream(self, frame: _Call, result: Tensor) -> bool:
        """Whether a call takes and returns vectors of tokens, in as many sequences as the model."""
        x = frame.tensor
        if x is None or result.ndim < 3 or not result.is_floating_point():
            return False
        batch = self._batch
        with self._trial():
            if are_windows(frame.module, frame.inputs, x, result, batch):
                frame.windowed, frame.batch = True, None
        for tensor in (x, result):
            if batch not in (tensor.shape[0], tensor.shape[1] if tensor.ndim == 3 else None):
                if not batch or tensor.shape[0] % batch:
                    return False
                frame.windowed = True
        axes = axes_of(frame.module, x, result)
        if axes is None:
            return False
        # The pixels of an image are no tokens.
        # Nor are the frames of a signal of which convolutions make another number of tokens.
        is_resized = not frame.attends and _steps(x, axes.inputs) != _steps(result, axes.output)
        if (x.ndim > 3 or is_resized) and any(x is argument for argument in self._arguments):
            return False
        if frame.windowed and not frame.attends and self._length(frame, result, axes.output) == 1:
            # Each piece of a signal becomes a token.
            return False
        # One more axis, which is none of rows and columns of the tokens, has heads.
        return result.ndim <= x.ndim or self._length(frame, result, axes.output) == self._length(frame, x, axes.inputs)

    @staticmethod
    def _length(frame: _Call, x: Tensor, axis: int) -> int:
        return as_tokens(x, frame.batch, axis).shape[1]

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Call a module again, which is no call of the run."""
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    def _moves_others(self, frame: _Call, result: Tensor) -> bool:
        """Tell whether other tokens of a module's output move with some tokens of a tensor that it reads."""
        x = frame.tensor
        assert x is not None
        axes = axes_of(frame.module, x, result) or LAST
        # An image may have as many columns as channels.
        is_cube = x.ndim > 3 and x.shape[1] == x.shape[-1]
        others = [Axes(-axes.inputs, -axes.output if result.ndim == x.ndim else axes.output)] if is_cube else []
        return all(self._moves_along(frame, x, result, each) for each in (axes, *others))

    def _moves_along(self, frame: _Call, x: Tensor, result: Tensor, axes: Axes) -> bool:
        length = self._length(frame, x, axes.inputs)
        if length < 2 or self._length(frame, result, axes.output) != length:
            return length > 1
        # A cross attention reads the tokens of another tensor.
        tensors = (v for v in frame.values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim == x.ndim)
        streams = {id(v): v for v in (x, *tensors) if self._batch in v.shape[:2] or len(v) == len(x)}
        return any(
            self._moves(frame, result, v, axes) for v in streams.values() if self._length(frame, v, axes.inputs) > 1
        )

    def _moves(self, frame: _Call, result: Tensor, x: Tensor, axes: Axes) -> bool:
        tokens = as_tokens(x, frame.batch, axes.inputs)
        length = tokens.shape[1]
        generator = torch.Generator().manual_seed(0)
        half = torch.randperm(length, generator=generator, device="cpu") < length // 2
        noise = torch.randn(tokens.shape[1:], generator=generator, device="cpu").to(tokens)
        size = tokens.float().square().mean().sqrt().to(tokens)
        moved = tokens + (size + 1e-3) * noise * half.to(tokens)[:, None]
        moved = in_shape(moved, x.shape, axes.inputs)
        args, kwargs = (
            tuple(moved if v is x else v for v in frame.inputs[0]),
            {name: moved if v is x else v for name, v in frame.inputs[1].items()},
        )
        try:
            with self._trial():
                after = main_tensor(outside_host(lambda: frame.module.forward(*args, **kwargs)))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return True
        if after is None or after.shape != result.shape:
            return True
        before, after = (as_tokens(t, frame.batch, axes.output) for t in (result, after))
        if before.shape[1] == length:
            before, after = before[:, ~half], after[:, ~half]
        allowed = TOLERANCE.get(result.dtype, 0.05)
        return float((after - before).norm()) > allowed * float(before.norm())


def _steps(x: Tensor, axis: int) -> int:
    """Return the number of vectors of each sequence, whose channels are at `axis`."""
    return x.shape[2:].numel() if axis == 1 else x.shape[1:-1].numel()


def _is_widened(frame: _Call, parent: _Call) -> bool:
    """Whether a convolution has other channels than the stream, to which only the module around it leads back."""
    x, stream = frame.tensor, parent.tensor
    if frame.attends or x is None or stream is None or x.ndim != 3 or stream.ndim != 3:
        return False
    # A list, and the model itself, lead nowhere back.
    is_block = not parent.path or parent.path.rpartition(".")[2].isdigit()
    return not is_block and parent.tokens == frame.tokens and stream.shape[parent.axis] != x.shape[frame.axis]


def _only_convolves(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Tell whether a function that mixes is a convolution, or a pool that makes fewer tokens."""
    return name.startswith("conv") or ("pool" in name and result.shape != args[0].shape)
