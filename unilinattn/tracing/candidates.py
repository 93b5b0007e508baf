"""Find modules without an adapter that mix tokens, by the functions of torch that they call.

The innermost module around such a function that takes a stream of tokens and returns one becomes a layer, if
perturbing some tokens of its input moves others of its output. What mixes elsewhere is found by `completeness`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import mapped
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments, sequences_in
from unilinattn.host.module_calls import CallRecord, as_tokens, first_tensor
from unilinattn.host.observer import Functions, Inputs, Observer
from unilinattn.host.recorder import MAIN, captured, main_tensor
from unilinattn.host.run import run
from unilinattn.registry import visible_functions
from unilinattn.tracing.perturbation import TOLERANCE, Constant, Constants
from unilinattn.tracing.unknown import is_basic, mixes_tokens


@dataclass(eq=False)
class _Call:
    """One call of a module: the functions that mix in it, and whether it is a layer that may be recorded.

    `computes_streams` says that it makes queries, keys and values for a module in it, with which it is one layer.
    """

    path: str
    module: nn.Module
    inputs: Inputs
    shape: tuple[int, ...] | None = None
    mixes: bool = False
    holds_layer: bool = False
    computes_streams: bool = False


def mixing_modules(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> list[str]:
    """Return the paths of modules outside of the recorded calls `layers` that mix tokens, in order of execution.

    Runs the model once without the computation of its layers, and each candidate once more per call.
    """
    constants: dict[str, list[Constant]] = {}
    for layer in layers:
        if layer.output is not None:
            constants.setdefault(layer.name, []).append(Constant(layer.structure, layer.output))
    search = _Search(model, constants)
    run(model, arguments, mixers=search.constant_layers(), observer=search.attached(), seed=torch.get_rng_state())
    return list(search.paths) if search.paths or layers else search.weak()


class _Search(Observer[_Call]):
    """One run that finds the innermost modules around functions that mix tokens."""

    def __init__(self, model: nn.Module, layers: Constants) -> None:
        super().__init__(model)
        self._layers = layers
        self.paths: dict[str, None] = {}
        self._weak: dict[str, None] = {}
        self._batch: int | None = None
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
            if self.stack and not self._trying and mixes_tokens(func, args, kwargs):
                self.stack[-1].mixes = True
        return result

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Follow a call, except those of a trial."""
        return None if self._trying else super().enter(path, module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Follow the end of a call, except those of a trial."""
        return None if self._trying else super().leave(module, args, kwargs, output)

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> _Call:
        """Note the shape of the call's tokens."""
        call = _Call(path, module, inputs)
        args, kwargs = inputs
        x = first_tensor((*args, *kwargs.values()))
        call.shape = None if x is None else tuple(x.shape)
        if not self.stack:
            self._batch = sequences_in(bound_arguments(module, args, kwargs))
        if path in self._layers:
            for outer in self.stack:
                outer.holds_layer = True
        return call

    def leaving(self, frame: _Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Make the call a layer if it takes and returns a stream, else hand what mixes to the module around it."""
        inside = any(call.path in self._layers or call.path in self.paths for call in self.stack) or (
            frame.path in self._layers
        )
        if not frame.mixes or inside or (frame.holds_layer and not frame.computes_streams):
            return
        result = main_tensor(output)
        parent = self.stack[-2] if len(self.stack) > 1 else None
        if result is None or is_basic(module) or not self._is_stream(frame, result):
            if parent is not None:
                parent.mixes = True
            return
        if parent is None:
            return
        if self._is_wrapped(frame, parent):
            parent.mixes = True
            return
        if self._computes_streams(frame, parent):
            parent.mixes = parent.computes_streams = True
            return
        if not self._moves_others(frame, result):
            # The tokens may lie along another axis here, and a module whose weights begin at zero moves nothing yet.
            self._weak.setdefault(frame.path)
            parent.mixes = True
            return
        self.paths = {path: None for path in self.paths if not path.startswith(f"{frame.path}.")}
        self.paths[frame.path] = None
        for outer in self.stack[:-1]:
            outer.holds_layer = True

    @staticmethod
    def _is_wrapped(frame: _Call, parent: _Call) -> bool:
        """Whether the module around a call has the same input, such as one that adds it to the output and norms it."""
        inner, outer = (first_tensor((*call.inputs[0], *call.inputs[1].values())) for call in (frame, parent))
        return inner is outer and bool(parent.path) and not parent.path.rpartition(".")[2].isdigit()

    def _computes_streams(self, frame: _Call, parent: _Call) -> bool:
        """Whether the module around a call with several tensors of one shape, such as queries and keys, has one."""
        counts = []
        for call in (frame, parent):
            values = (*call.inputs[0], *call.inputs[1].values())
            counts.append(len({id(v) for v in values if isinstance(v, Tensor) and tuple(v.shape) == frame.shape}))
        registered = any(path.startswith(f"{parent.path}.") for path in self._layers)
        return counts[0] > 1 >= counts[1] and bool(parent.path) and not registered

    def weak(self) -> list[str]:
        """Return the innermost modules that may mix tokens, of a model in which no module moves other tokens."""
        return [path for path in self._weak if not any(other.startswith(f"{path}.") for other in self._weak)]

    def _is_stream(self, frame: _Call, result: Tensor) -> bool:
        """Whether a call takes and returns vectors of tokens, in as many sequences as the model."""
        shape = frame.shape
        if shape is None or result.ndim < 3 or not result.is_floating_point():
            return False
        if self._batch not in (shape[0], shape[1] if len(shape) == 3 else None):
            return False
        if self._batch not in (result.shape[0], result.shape[1] if result.ndim == 3 else None):
            return False
        if result.ndim > len(shape) and result.shape[1:-1].numel() != prod(shape[1:-1]):
            # One more axis, which is none of rows and columns of the tokens, has heads.
            return False
        return not _has_channels_first(frame.module, shape)

    def _moves_others(self, frame: _Call, result: Tensor) -> bool:
        """Tell whether other tokens of a module's output move with some tokens of a tensor that it reads."""
        args, kwargs = frame.inputs
        x = first_tensor((*args, *kwargs.values()))
        assert x is not None
        length = as_tokens(x, self._batch).shape[1]
        if length < 2 or as_tokens(result, self._batch).shape[1] != length:
            return length > 1
        # A cross attention reads the tokens of another tensor.
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
        streams = {id(v): v for v in (x, *values) if v.ndim == x.ndim and self._batch in v.shape[:2]}
        return any(self._moves(frame, result, v) for v in streams.values() if as_tokens(v, self._batch).shape[1] > 1)

    def _moves(self, frame: _Call, result: Tensor, x: Tensor) -> bool:
        tokens = as_tokens(x, self._batch)
        length = tokens.shape[1]
        generator = torch.Generator().manual_seed(0)
        half = torch.randperm(length, generator=generator) < length // 2
        noise = torch.randn(tokens.shape[1:], generator=generator).to(tokens)
        size = tokens.float().square().mean().sqrt().to(tokens)
        moved = tokens + (size + 1e-3) * noise * half.to(tokens)[:, None]
        moved = moved.transpose(0, 1) if tokens.shape[:2] != x.shape[:2] and x.ndim == 3 else moved.view(x.shape)
        args, kwargs = (
            tuple(moved if v is x else v for v in frame.inputs[0]),
            {name: moved if v is x else v for name, v in frame.inputs[1].items()},
        )
        self._trying = True
        try:
            after = main_tensor(frame.module.forward(*args, **kwargs))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return True
        finally:
            self._trying = False
        if after is None or after.shape != result.shape:
            return True
        before, after = (as_tokens(t, self._batch) for t in (result, after))
        if before.shape[1] == length:
            before, after = before[:, ~half], after[:, ~half]
        allowed = TOLERANCE.get(result.dtype, 0.05)
        return float((after - before).norm()) > allowed * float(before.norm())


def _has_channels_first(module: nn.Module, shape: Sequence[int]) -> bool:
    """Whether a module reads channels from the second axis, as its layers tell that know their number.

    Images for which no layer tells have their channels there.
    """
    convolved = _sizes(module, "in_channels", "num_features", "num_channels")
    projected = _sizes(module, "in_features", "normalized_shape")
    if len(shape) > 3:
        return shape[1] in convolved or shape[-1] not in projected
    return shape[-1] not in convolved | projected and shape[1] in convolved | projected


def _sizes(module: nn.Module, *names: str) -> set[int]:
    """Return the numbers of channels that layers of a module have in attributes."""
    sizes = [getattr(inner, name, None) for inner in module.modules() for name in names]
    return {size[-1] if isinstance(size, tuple) and size else size for size in sizes if size is not None}
