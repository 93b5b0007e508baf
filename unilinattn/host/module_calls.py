"""`CallRecord`: one recorded call of a module of a host."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.call import Call, Captured
from unilinattn.call.axes import LAST, Axes, as_tokens
from unilinattn.call.nested import tensors
from unilinattn.call.offloaded import loaded
from unilinattn.errors import HostError, UncoveredError
from unilinattn.operator.piecewise import Piece
from unilinattn.registry import UNREGISTERED, Architecture, list_architectures

NO_SUM = -1
"""In place of the number of a candidate: none of them is a sum."""


@dataclass(frozen=True)
class ResidualSite:
    """How a host adds a layer's output to a stream: total = skip * stream + multiplier * output + factor * other.

    `total` is a tensor that a later module received or returned, `other` the output of one more module (a parallel MLP
    or mixer) or None.
    """

    total: Tensor
    stream: Tensor
    skip: float
    multiplier: float
    other: Tensor | None
    factor: float


def _no_operator(call: Call) -> Any:
    """Raise `UncoveredError`: a mixer without an adapter has no operator."""
    raise UncoveredError(
        f"{call.name} ({type(call.module).__qualname__}) is opaque: no adapter knows it, so it has no operator. "
        "Register one with `unilinattn.register_architecture`."
    )


OPAQUE = Architecture("opaque", "opaque", (), "", _no_operator)
"""Architecture of unknown mixers in `trace(..., strict=False)`."""


@dataclass(frozen=True)
class Prefix:
    """The check of an operator that replaced a host's forward.

    Attributes:
        output: the host's own output for the first tokens.
        error: relative error of the operator on them: norm of the difference over norm of the host's output, over real
            tokens, of the worst sequence.
        ports: (batch, number of tokens) of each tensor that the operator reads, by port.
        pieces: the tokens in the pieces that the operator ran on, None if it ran on all tokens at once.
        stream_norms: the norm of the stream that enters the block at each token, if the run was in pieces.
    """

    output: Float[Tensor, "batch prefix out"]
    error: float
    ports: dict[str, tuple[int, int]]
    pieces: tuple[Piece, ...] | None = None
    stream_norms: Float[Tensor, "batch token"] | None = None


@dataclass(frozen=True)
class Following:
    """A module between a layer's output and the stream, such as a norm: its arguments and its output."""

    module: nn.Module
    name: str
    arguments: dict[str, Any]
    input: Tensor
    output: Tensor


@dataclass(eq=False)
class CallRecord:
    """One call of one module: its arguments, its output, and the calls inside it.

    `returned` holds the returned tensors of the output's size. `shares_input` tells whether the module around it has
    the same input. For a layer, `windowed` tells whether it reads windows of the sequences that a module around it
    reads; `structure` is the nesting that it returned, with a mark in place of its output; `entered` is a copy of its
    input; `site` is the sum of its output, as the modules `following` return it, and a stream; `candidates` has a
    number for each tensor whose sum with a stream was searched, that of the sum among those tried, `NO_SUM`, or None if
    it is unknown, and `earlier_candidates` those of an earlier trace; `reader` is the path of the module that reads the
    output itself, if no such sum was found; `masks` are the arguments of `Call.masks`; and `batch` is the number of
    sequences and `axes` the axes of channels, for a module without an adapter; `left` are the attributes that it wrote,
    if a search asked for them. For another module, `unplaced` are the
    layers inside whose `site` is not known yet.
    """

    module: nn.Module
    name: str
    arguments: dict[str, Any]
    parent: "CallRecord | None"
    architecture: Architecture | None = None
    seen: list[Captured] = field(default_factory=list)
    children: list["CallRecord"] = field(default_factory=list)
    output: Tensor | None = None
    structure: Any = None
    holds_layer: bool = False
    entered: Tensor | None = None
    returned: tuple[Tensor, ...] = ()
    site: ResidualSite | None = None
    following: tuple[Following, ...] = ()
    candidates: list[int | None] = field(default_factory=list)
    earlier_candidates: tuple[int | None, ...] = ()
    reader: str | None = None
    prefix: Prefix | None = None
    batch: int | None = None
    axes: Axes = LAST
    masks: frozenset[str] = frozenset()
    shares_input: bool = False
    windowed: bool = False
    left: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    unplaced: list["CallRecord"] = field(default_factory=list)

    @property
    def input(self) -> Tensor | None:
        """The first floating-point tensor among the arguments that is (batch, length, channel).

        For a layer without one, the first with two axes (see `layer_input`).
        """
        return (first_tensor if self.architecture is None else layer_input)(self.arguments.values())

    @property
    def kind(self) -> str:
        """The kind of a layer; a recorded one may have called transformers' attention interface."""
        kind = "" if self.architecture is None else self.architecture.kind
        is_attention = self.architecture is not None and self.architecture.name == UNREGISTERED and self.seen
        return f"softmax attention, {kind}" if is_attention else kind

    @property
    def outermost(self) -> "CallRecord":
        """The outermost enclosing call of a module with an architecture, by default this call."""
        outermost, frame = self, self.parent
        while frame is not None:
            outermost = frame if frame.architecture is not None else outermost
            frame = frame.parent
        return outermost


def require_covered_calls(layers: Iterable[CallRecord], *, strict: bool) -> None:
    """Run the `check` of each layer's adapter; a call that it refuses is recorded, unless the host is wrong.

    With strict=False a call that neither covers becomes an opaque layer.
    The layers that were computed by their operators were checked before.
    """
    for record in layers:
        if record.architecture is None or record.architecture.check is None or record.prefix is not None:
            continue
        if record.entered is None or record.output is None:
            continue
        seen = tuple(record.seen)
        # Operators compute in float32 at least.
        dtype = torch.promote_types(record.entered.dtype, torch.float32)
        pairs = zip((record.entered, record.output), record.axes, strict=True)
        entered, output = (as_tokens(x.to(dtype), record.batch, axis) for x, axis in pairs)
        call = Call(record.module, record.name, record.arguments, entered, output, seen, record.axes, record.masks)
        try:
            with loaded(record.module):
                record.architecture.check(call)
        except UncoveredError as error:
            other = list_architectures()[UNREGISTERED]
            is_final = record.architecture is other or isinstance(error, HostError)
            reason = error if is_final else _refusal(other, call)
            if reason is None:
                record.architecture = other
                continue
            if strict:
                both = error if reason is error else f"{error} Nor can it be recorded: {reason}"
                raise type(error)(
                    f"{both} Or trace with strict=False, which leaves this layer out, for methods that need no "
                    "operator, such as 'occlusion' and 'input_x_gradient'."
                ) from None
            record.architecture = OPAQUE


def _refusal(architecture: Architecture, call: Call) -> UncoveredError | None:
    """Return the error for which an adapter does not cover a call, None if it does."""
    assert architecture.check is not None
    try:
        with loaded(call.module):
            architecture.check(call)
    except UncoveredError as error:
        return error
    return None


def block_of(layer: CallRecord) -> str | None:
    """Return the path of the innermost module in a list around a layer, None without one."""
    names = layer.name.split(".")
    blocks = [count for count, name in enumerate(names, 1) if name.isdigit()]
    return ".".join(names[: blocks[-1]]) if blocks else None


def first_tensor(values: Any, *, axes: int = 3) -> Tensor | None:
    """Return the first floating-point tensor with at least `axes` axes, by default batch, length and channel."""
    fitting = (v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= axes)
    return next(fitting, None)


def layer_input(values: Iterable[Any]) -> Tensor | None:
    """Return the tensor that a layer reads among its arguments: the first one of tokens, by default of packed ones.

    Packed tokens, (token, channel), are those of all sequences in one axis. A list of feature maps is read from its
    first one on, if no other tensor has tokens.
    """
    values = list(values)
    lists = chain.from_iterable(value for value in values if type(value) in (tuple, list))
    tries = ((values, 3), (list(lists), 3), (values, 2))
    return next((x for listed, axes in tries if (x := first_tensor(listed, axes=axes)) is not None), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the floating-point tensors with at least two axes in a tensor or in nested mappings and sequences."""
    return (tensor for tensor in tensors(value) if tensor.is_floating_point() and tensor.ndim >= 2)
