"""`Ports`: the arguments of a recorded module that carry tokens, as the vectors of an operator's ports."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.call import Call
from unilinattn.call.axes import as_tokens, in_shape, joined_heads, split_heads, token_axis
from unilinattn.call.nested import unlisted
from unilinattn.errors import UncoveredError


@dataclass(frozen=True, eq=False)
class Ports:
    """The tensors that carry tokens into a module.

    Attributes:
        call: the call of the module; its input is the port x.
        inputs: the tensors by port.
        heads: the axis of tokens of those with heads (see `token_axis`), by port.
        transposed: whether the others are (token, batch, channel).
    """

    call: Call
    inputs: Mapping[str, Tensor]
    heads: Mapping[str, int]
    transposed: bool

    def vectors(self, port: str) -> Float[Tensor, "batch token channel"]:
        """Return the vectors of a port."""
        if port == "x":
            return self.call.input
        tensor = self.inputs[port].detach()
        if port in self.heads:
            return joined_heads(tensor, self.heads[port])
        if tensor.ndim == 2 < self.call.input.ndim and len(tensor) == len(self.call.input):
            return tensor[:, None]
        return as_tokens(tensor.transpose(0, 1) if self.transposed else tensor, axis=self.call.axes.inputs)

    def argument(self, port: str, vectors: Float[Tensor, "batch token channel"]) -> Tensor:
        """Return vectors in the shape of the module's argument."""
        shape = self.inputs[port].shape
        if port in self.heads:
            return split_heads(vectors, shape, self.heads[port])
        return in_shape(vectors.transpose(0, 1) if self.transposed else vectors, shape, self.call.axes.inputs)

    def output(self, output: Tensor) -> Float[Tensor, "batch token channel"]:
        """Return the vectors of the module's output."""
        is_transposed = self.transposed and output.ndim == 3
        return as_tokens(output.transpose(0, 1) if is_transposed else output, axis=self.call.axes.output)


def distinct(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first port of each tensor: queries, keys and values of self-attention are one."""
    ports: dict[int, str] = {}
    for port, value in inputs.items():
        ports.setdefault(id(value), port)
    return {port: inputs[port] for port in ports.values()}


def has_tokens(value: Any) -> bool:
    """Tell whether an argument may have vectors of tokens."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def is_stream(value: Any, axes: int) -> bool:
    """Tell whether an argument has numbers along as many axes as vectors of tokens have."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == axes


def heads_of(call: Call) -> dict[str, int]:
    """Return the axis of tokens of each argument (batch, head, token, channel) or with the tokens first, by its name.

    The layer's input has neither heads nor rows and columns.
    """
    if call.axes.inputs != -1 or not any(is_stream(value, 3) for value in unlisted(call.arguments).values()):
        return {}
    arguments = ((n, v) for n, v in unlisted(call.arguments).items() if is_stream(v, 4) and n not in call.masks)
    axes = ((name, token_axis(value.shape, *call.input.shape[:2])) for name, value in arguments)
    return {name: axis for name, axis in axes if axis is not None}


def require_told_heads(call: Call) -> None:
    """Raise `UncoveredError` for an argument with as many heads as tokens, whose tokens are not told apart."""
    length = call.input.shape[1]
    for name, value in unlisted(call.arguments).items():
        if is_stream(value, 4) and value.shape[1] == value.shape[2] == length and name not in call.masks:
            raise UncoveredError(
                f"{named_call(call)}: its argument {name!r} {tuple(value.shape)} has as many heads as tokens, so it is "
                "unknown which axis is which; trace another number of tokens."
            )


def is_vector(value: Any, call: Call) -> bool:
    """Tell whether an argument has one vector of each sequence of a call, whose input has several."""
    rows = len(call.input)
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and len(value) == rows


def named_call(call: Call) -> str:
    """Return the path and the class of a call's module."""
    return f"{call.name} ({type(call.module).__module__}.{type(call.module).__qualname__})"


def positional_and_named(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by position and by name; those of `*args` are named by their numbers."""
    numbers = sorted((name for name in arguments if name.isdigit()), key=int)
    if not numbers:
        return [], dict(arguments)
    parameters = inspect.signature(module.forward).parameters.values()
    leading = [p.name for p in takewhile(lambda p: p.kind is not p.VAR_POSITIONAL, parameters) if p.name in arguments]
    named = {name: value for name, value in arguments.items() if name not in (*leading, *numbers)}
    return [arguments[name] for name in (*leading, *numbers)], named
