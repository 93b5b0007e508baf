"""Mixing functions: calls of other packages' functions that mix tokens, each as the stages of its carried argument."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from unilinattn.call.nested import mapped
from unilinattn.errors import OptionError, UncoveredError
from unilinattn.mixers import CoreMixer
from unilinattn.operator.flow import Flow

MASK = "mask"
"""Name of a parameter that gets the real tokens (batch, token) of packed sequences, None if all are real."""


Stages = Callable[..., Flow | CoreMixer]
"""Continues a flow from a function's carried argument to its result, or returns the core mixer between them."""


PlainFunction = Callable[..., Any]
"""Plain torch code of a function without token mixing."""

StagesOf = TypeVar("StagesOf", bound=Stages)
Plain = TypeVar("Plain", bound=PlainFunction)


@dataclass(frozen=True)
class MixingFunction:
    """A function that mixes tokens, and the stages from its carried argument to its result.

    Attributes:
        stages: continues a flow from the carried argument, (batch, token, channel), or returns a core mixer.
        carried: name of the carried argument.
        tokens: the axes of tokens of the carried argument and of the result; the first axis is the batch, and 0 stands
            for packed sequences without one.
        extra_outputs: the values that stand for those that the function returns after its result, or the name of the
            argument that asks for one.
        packed: name of the argument with the bounds of sequences that are packed in a batch of one.
        refused: names of arguments of which only a call without them is covered.
        steps: name of the argument with the number of consecutive entries of the axis of tokens that are steps of one
            token, whose last is read; None for one.
        channelwise: whether a channel of the carried argument is mixed by the same channel of the other tensors.
    """

    stages: Stages
    carried: str
    tokens: tuple[int, int]
    extra_outputs: tuple[Any, ...] | str
    packed: str
    refused: tuple[str, ...]
    steps: str | None
    channelwise: bool = False

    def value(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call of `function` returns, in the dtype of its arguments.

        Raises `UncoveredError` for a call that is not covered.
        """
        arguments = self.arguments(function, args, kwargs)
        carried = self.by_token(arguments[self.carried])
        steps = 1 if self.steps is None else arguments[self.steps]
        frame = Frame(carried.shape[0], carried.shape[1] // steps, None)
        if (bounds := arguments.get(self.packed)) is not None:
            frame = Frame.of_bounds(bounds)
        flow = self.flow(frame, steps, frame.tokens(carried, steps), arguments)
        last = flow.value[:, steps - 1 :: steps]
        result = self.as_result(unflattened(frame.packed(last), carried.shape))
        extra = self.extra_outputs
        if isinstance(extra, str):
            extra = (None,) if arguments.get(extra) else ()
        return (result, *extra) if extra else result

    def by_token(self, value: Tensor) -> Shaped[Tensor, "batch token *channel"]:
        """Return a tensor of the carried argument's axes with the batch and the tokens first."""
        return value.movedim(self.tokens[0], 1) if self.tokens[0] else value[None]

    def as_result(self, value: Shaped[Tensor, "batch token *channel"]) -> Tensor:
        """Return such a tensor with the axes of the result."""
        return value.movedim(1, self.tokens[1]) if self.tokens[1] else value[0]

    def flow(self, frame: "Frame", steps: int, x: Float[Tensor, "batch token *channel"], arguments: Any) -> Flow:
        """Return the flow from the carried argument's vectors `x` to the result.

        Raises `UncoveredError` for an argument that is not covered.
        """
        for name in self.refused:
            if arguments.get(name) is not None and arguments[name] is not False:
                raise UncoveredError(f"{name!r} is given")
        values = {name: value for name, value in arguments.items() if name != self.packed}
        if frame.rows is not None:
            values = {name: frame.by_sequence(self, value, steps) for name, value in values.items()}
        mask = frame.mask(steps)
        try:
            return self._flow(x, mask, values)
        except UncoveredError:
            # In a run whose graph is kept, factors of the core may have functions that its mode has no rule for.
            return self._flow(x, mask, mapped(values, torch.detach))

    def _flow(self, x: Float[Tensor, "batch token *channel"], mask: Tensor | None, values: Mapping[str, Any]) -> Flow:
        parameters = inspect.signature(self.stages).parameters
        flow = Flow(x.flatten(2))
        values = {name: value for name, value in {"flow": flow, MASK: mask, **values}.items() if name in parameters}
        if mask is not None:
            flow.scale(mask[..., None].to(x), role="input")
        built = self.stages(**values)
        if not isinstance(built, CoreMixer):
            return built
        heads = x.shape[2] if x.ndim == 4 else built.heads
        if built.heads != heads:
            # Consecutive heads of the mixer share the values of one.
            channels = torch.arange(x.shape[2:].numel(), device=x.device).view(heads, -1)
            channels = channels.repeat_interleave(built.heads // heads, 0).flatten()
            flow.matrix(functional.one_hot(channels, x.shape[2:].numel()).to(x), role="input")
        return flow.core(built)

    @staticmethod
    def arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, with the defaults of the function."""
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name)
        return arguments


@dataclass(frozen=True)
class Frame:
    """The sequences in which a function's tokens are computed, and the places of packed tokens in them.

    Attributes:
        batch, length: number of sequences, and of tokens of each.
        rows: for packed tokens, the number of each among all sequences' tokens; None if nothing is packed.
    """

    batch: int
    length: int
    rows: Int[Tensor, " row"] | None

    @classmethod
    def of_bounds(cls, bounds: Int[Tensor, " bound"]) -> "Frame":
        """Return the frame of packed sequences, each of which starts at the first token."""
        sizes = bounds.diff().tolist()
        length = max(sizes)
        rows = [torch.arange(size, device=bounds.device) + number * length for number, size in enumerate(sizes)]
        return cls(len(sizes), length, torch.cat(rows))

    def by_sequence(self, function: MixingFunction, value: Any, steps: int) -> Any:
        """Return an argument's tokens by sequence, and an argument without packed tokens unchanged."""
        assert self.rows is not None
        if not isinstance(value, Tensor) or value.ndim < 1 + bool(function.tokens[0]):
            return value
        batched = value if function.tokens[0] else value[None]
        if batched.shape[:2] == (1, len(self.rows)):
            return self.tokens(batched)
        return self.tokens(batched, steps) if batched.shape[:2] == (1, len(self.rows) * steps) else value

    def tokens(self, packed: Tensor, steps: int = 1) -> Float[Tensor, "batch token *axes"]:
        """Return packed tokens by sequence, zero where there are none."""
        if self.rows is None:
            return packed
        by_token = packed[0].unflatten(0, (-1, steps))
        result = by_token.new_zeros(self.batch * self.length, *by_token.shape[1:]).index_copy(0, self.rows, by_token)
        return result.unflatten(0, (self.batch, self.length)).flatten(1, 2)

    def packed(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all sequences in the order in which they are packed."""
        return tokens if self.rows is None else tokens.flatten(0, 1)[self.rows][None]

    def mask(self, steps: int = 1) -> Bool[Tensor, "batch token"] | None:
        """Return which tokens are real, None if all are."""
        if self.rows is None or len(self.rows) == self.batch * self.length:
            return None
        real = torch.zeros(self.batch * self.length, dtype=torch.bool, device=self.rows.device)
        real[self.rows] = True
        return real.view(self.batch, self.length).repeat_interleave(steps, 1)


def unflattened(result: Shaped[Tensor, "batch token channel"], shape: torch.Size) -> Tensor:
    """Return a result with the axes of channels of the carried argument, which may have fewer heads."""
    if result.shape[2] == shape[2:].numel():
        return result.unflatten(2, shape[2:])
    return result.unflatten(2, (-1, shape[-1])) if len(shape) == 4 and result.shape[2] % shape[-1] == 0 else result


FUNCTIONS: dict[str, MixingFunction | PlainFunction] = {}
"""The registered functions by qualified name."""


def register_mixing_function(
    *functions: str,
    carried: str,
    tokens: int | tuple[int, int] = 1,
    extra_outputs: int | tuple[Any, ...] | str = 0,
    packed: str = "cu_seqlens",
    refused: Collection[str] = ("initial_state",),
    steps: str | None = None,
    channelwise: bool = False,
) -> Callable[[StagesOf], StagesOf]:
    """Register functions that mix tokens by a kernel, named as strings, "package.module.function".

    A module that calls one needs no adapter: the call is one step of its recorded operator. `stages` gets those
    arguments of the call whose names are its parameters, as frozen factors, and returns the core mixer between the
    `carried` argument and the result; or it has a parameter `flow`, continues it from the carried argument, as (batch,
    token, channel), to the result, and returns it.

    Args:
        functions: qualified names; nothing is imported. "package.*.function" stands for the functions of this name in
            all modules of a package that has copies of one.
        carried: name of the argument in which the function is linear.
        tokens: the axis of tokens of the carried argument and of the result; the first axis is the batch, all other
            axes are channels. Two axes if they differ; 0 stands for packed sequences without an axis of a batch.
        extra_outputs: number of values that the function returns after its result, or the name of the argument that
            asks for one; they are None in a recorded run. A tuple has the values themselves, such as tuples of None.
        packed: name of the argument with the bounds of several sequences in a batch of one. The stages get them as a
            batch, in which a parameter `mask` says which tokens are real.
        refused: names of arguments that must be None.
        steps: name of the argument with the number of consecutive entries of the axis of tokens that are steps of one
            token; the result has those after its last step.
        channelwise: whether all tensors have the shape of the carried argument, and each channel of a sequence is mixed
            by the same one of the other tensors. Such a function takes heads for sequences too.

    Raises `OptionError` if a function is registered already.
    """

    def decorate(stages: StagesOf) -> StagesOf:
        axes = tokens if isinstance(tokens, tuple) else (tokens, tokens)
        extra = (None,) * extra_outputs if isinstance(extra_outputs, int) else extra_outputs
        entry = MixingFunction(stages, carried, axes, extra, packed, tuple(refused), steps, channelwise)
        _register(functions, entry)
        return stages

    return decorate


def register_plain_function(*functions: str) -> Callable[[Plain], Plain]:
    """Register the plain torch code of functions that hide theirs in a kernel and mix no tokens, such as fused norms.

    Recorded operators run `form(*args, **kwargs)` in place of the function. `functions` are qualified names.

    Raises `OptionError` if a function is registered already.
    """

    def decorate(form: Plain) -> Plain:
        _register(functions, form)
        return form

    return decorate


def _register(names: Collection[str], entry: MixingFunction | PlainFunction) -> None:
    taken = [name for name in names if name in FUNCTIONS]
    if taken:
        raise OptionError(f"the functions {taken} are registered already; register other ones.")
    FUNCTIONS.update(dict.fromkeys(names, entry))
