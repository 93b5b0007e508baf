"""`Memory`: the linear-time passes on a GPU by parallel segments of tokens, and their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.launch import on, power
from unilinattn.kernels.scan.triton_diagonal import carry

LEAST = 64
"""Tokens of the shortest segment, so that there are far fewer states between segments than tokens."""

PROGRAMS = 8
"""Programs per multiprocessor, from which the number of segments follows."""


def carry_over(states: Float[Tensor, "batch segment head channel state"], total: Tensor) -> None:
    """Replace each segment's final state by its initial state, in place."""
    batch, segments, heads, columns, width = states.shape
    size = heads * columns * width
    block = min(256, power(size))
    with on(states):
        carry[(-(-size // block), batch)](states, total, segments, size, columns, width, total.shape[3], SIZE=block)


def segment_length(length: int, programs: int, like: Tensor, unit: int) -> int:
    """Return the tokens per segment, a multiple of `unit`: the largest that still fills the device."""
    wanted = max(1, PROGRAMS * _processors(like.device) // programs)
    return -(-max(LEAST, -(-length // wanted)) // unit) * unit


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1 << 20


class States(NamedTuple):
    """The tensors that a pass reads and writes: initial states, final states with their log-decays, and outputs."""

    entering: Tensor | None = None
    leaving: Tensor | None = None
    total: Tensor | None = None
    out: Tensor | None = None


class Memory(ABC):
    """A memory, or with `reverse` its transpose, that runs on segments of tokens at the same time."""

    unit: ClassVar[int]
    """Tokens of a block; a segment has whole blocks."""

    def __init__(self, *, reverse: bool) -> None:
        """Set the direction."""
        self.reverse = reverse

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Number of coordinates of a head's state, and of its decays."""

    @abstractmethod
    def programs(self, value: Float[Tensor, "batch length head channel"]) -> int:
        """Number of programs that run one segment."""

    @abstractmethod
    def launch(self, value: Float[Tensor, "batch length head channel"], segment: int, states: States) -> None:
        """Write the outputs, or each segment's final state and its log-decay, for segments of `segment` tokens."""

    @abstractmethod
    def gradients(self, value: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients of <grad, A value> by each factor and by the value, for the matrix A forward in time.

        That of the value may be None: it is then a pass of the transpose.
        """

    def run(self, value: Float[Tensor, "batch length head channel"]) -> Float[Tensor, "batch length head channel"]:
        """Apply the memory; returns float32."""
        length = value.shape[1]
        segment = segment_length(length, self.programs(value), value, self.unit)
        entering = self.states(value, segment) if segment < length else None
        out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        self.launch(value, segment, States(entering=entering, out=out))
        return out

    def states(self, value: Tensor, segment: int) -> Float[Tensor, "batch segment head channel state"]:
        """Return the initial state of each segment."""
        batch, length, heads, columns = value.shape
        states, decays = self.widths
        shape = (batch, -(-length // segment), heads, columns, states)
        leaving = torch.empty(shape, dtype=torch.float32, device=value.device)
        total = leaving.new_empty(*shape[:3], decays)
        self.launch(value, segment, States(leaving=leaving, total=total))
        carry_over(leaving, total)
        return leaving


class Scan(torch.autograd.Function):
    """A memory or its transpose, with the gradients of both; `make(*factors, reverse=)` returns it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Memory], reverse: bool, value: Tensor, *factors: Tensor | None) -> Tensor:
        """Run the kernels on the values."""
        ctx.make, ctx.reverse = make, reverse
        ctx.save_for_backward(value, *factors)
        return make(*factors, reverse=reverse).run(value).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and recompute all states for the factors."""
        value, *factors = ctx.saved_tensors
        gradients: list[Tensor | None] = [None] * len(factors)
        by_value = None
        if any(ctx.needs_input_grad[3:]):
            # <upstream, A value>, or <upstream, A^T value> = <value, A upstream>.
            entered, read = (upstream, value) if ctx.reverse else (value, upstream)
            *gradients, by_value = ctx.make(*factors, reverse=False).gradients(entered, read)
            by_value = None if ctx.reverse else by_value
        if by_value is None and ctx.needs_input_grad[2]:
            by_value = ctx.make(*factors, reverse=not ctx.reverse).run(upstream)
        each = zip([by_value, *gradients], [value, *factors], strict=True)
        return None, None, *(None if g is None or like is None else g.to(like.dtype) for g, like in each)
