"""Perturbations of a model's inputs and of the vectors of its layers: half of the tokens, or every other piece."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from unilinattn.call.axes import as_tokens, channel_axis, in_shape
from unilinattn.discovery.changes import Shape
from unilinattn.discovery.noise import exchanged, noisy, noisy_beside
from unilinattn.discovery.perturbation import special_ids
from unilinattn.host.inputs import ids_name, is_ids, real_tokens

AXES = (2, 3, 4, 5)
"""Numbers of axes of vectors of tokens, which may be packed in one axis, or lie along those of an image or a video."""

PIECES = (2, 16)
"""Numbers of pieces of an input without tokens: halves, and pieces in which attention to some neighbours ends."""


class TokenHalf:
    """A perturbation of the tokens of one stream in one of two halves.

    Args:
        model: the model.
        shape: (batch, tokens) of the stream, or of ids that are no stream of the layers.
        half: the perturbed tokens.
        order: the place of each token among the first vectors of the stream, None for the same one.
        axes: the axis of channels of vectors, by their shape.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: Shape,
        half: Bool[Tensor, "batch token"],
        order: Int[Tensor, " row"] | None = None,
        axes: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        self._model, self._shape, self._half, self._order, self._axes = model, shape, half, order, axes or {}

    def sorted(self, orders: Mapping[Shape, Int[Tensor, " row"]]) -> "TokenHalf":
        """Return the perturbation of the same tokens, with the orders of the first vectors of some streams."""
        return TokenHalf(self._model, self._shape, self._half, orders.get(self._shape), self._axes)

    def inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Exchange the ids or vectors of tokens, so that values stay valid: coordinates may be among them."""
        return {name: self._exchanged(name, value, arguments) for name, value in arguments.items()}

    def noisy(self, t: Tensor, axis: int) -> Tensor:
        """Add noise to the tokens of the stream in vectors whose channels are at `axis`."""
        return self._noisy(t, axis, self._half)

    def at_origin(self, t: Tensor, axis: int) -> Tensor:
        """Add noise to the tokens of the stream in its first vectors, before they are sorted."""
        half = self._half
        if self._order is not None:
            half = torch.empty_like(half).flatten().index_copy(0, self._order, half.flatten()).view_as(half)
        return self._noisy(t, axis, half)

    def beside(self, t: Tensor, output: Tensor) -> Tensor:
        """Add noise to the tokens of the stream in a tensor that a layer returns beside its output."""
        return noisy_beside(t, output, self._half)

    def _noisy(self, t: Tensor, axis: int, half: Bool[Tensor, "batch token"]) -> Tensor:
        if t.ndim not in AXES or tokens_of(t.shape, axis) != self._shape:
            return t
        return in_shape(noisy(as_tokens(t, axis=axis), half), t.shape, axis)

    def _exchanged(self, name: str, value: Any, arguments: Mapping[str, Any]) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or tuple(value.shape[:2]) != self._shape:
            return value
        half = self._half.to(value.device)
        if value.is_floating_point():
            if value.ndim != 3 or "mask" in name:
                return value
            axis, is_square = self._axes.get(tuple(value.shape)), value.shape[1] == value.shape[2]
            if axis is None and is_square and channel_axis(self._model, value.shape) == 1:
                # Either axis may have its tokens: those of the first vectors that are known are perturbed.
                return value
            if axis == 1:
                return exchanged(value.mT, half).mT if is_square else value
            return exchanged(value, half)
        if not is_token_ids(name, arguments):
            return value
        # Other special ids would change the layout: padding is masked, and those of an image become its vectors.
        special = torch.isin(value, special_ids(self._model).to(value))
        # Codes of sound may have their numbers.
        ordinary = half & ~(special if value.ndim == 2 else special.all(-1))
        real = real_tokens(arguments, name.replace("input_ids", "attention_mask"))
        return exchanged(value, ordinary if real is None or real.shape != half.shape else ordinary & real)


class SignalPieces:
    """A perturbation of every other piece of the inputs that are no sequences of tokens, such as images."""

    def __init__(self, pieces: int, streams: Collection[Shape], first: bool) -> None:
        self._pieces, self._streams, self._first = pieces, streams, first

    def inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Reverse every other piece of the longest axis."""
        return {name: self._reversed(x) if is_signal(name, x, self._streams) else x for name, x in arguments.items()}

    def noisy(self, t: Tensor, axis: int) -> Tensor:
        """Return the vectors: only the inputs are perturbed."""
        return t

    at_origin = noisy

    def _reversed(self, x: Tensor) -> Tensor:
        axis = max(range(1 if x.ndim > 2 else 0, x.ndim), key=lambda axis: x.shape[axis])
        pieces = x.tensor_split(self._pieces, dim=axis)
        # Of two pieces (a b c | d e f), the first perturbation gives (a b c | f e d), the second (c b a | d e f).
        flipped = [x.flip(axis) if index % 2 == int(self._first) else x for index, x in enumerate(pieces)]
        return torch.cat(flipped, dim=axis)


def is_signal(name: str, x: Any, streams: Collection[Shape]) -> bool:
    """Tell whether an input is a tensor of numbers that are no sequence of a stream's tokens."""
    is_numbers = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and "mask" not in name
    return is_numbers and (x.ndim not in AXES[1:] or tokens_of(x.shape, -1) not in streams)


def is_token_ids(name: str, arguments: Mapping[str, Any]) -> bool:
    """Tell whether an argument has the ids of tokens, by its name or as the only tensor that may have them.

    They may be those of several codebooks, (batch, length, codebook).
    """
    if name.endswith("input_ids"):
        return is_ids(arguments[name], axes=(2, 3))
    return is_ids(arguments[name]) and name == ids_name(arguments)


def tokens_of(shape: Sequence[int], axis: int) -> Shape:
    """Return (batch, tokens) of vectors whose channels are at `axis`; packed tokens are one sequence."""
    if axis == 1:
        return shape[0], prod(shape[2:])
    return (1, shape[0]) if len(shape) == 2 else (shape[0], prod(shape[1:-1]))
