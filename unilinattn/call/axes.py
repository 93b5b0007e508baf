"""`Axes`: which axis of a layer's tensors numbers channels, the last one or the second one, as in images."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn


class Axes(NamedTuple):
    """The axis of channels of a layer's inputs and of its output: -1 or 1."""

    inputs: int = -1
    output: int = -1


LAST = Axes()
"""Channels are the last axis of every tensor."""


POOLS = (
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.Upsample,
)
"""Pools and interpolations of torch, whose inputs have their channels in the second axis."""


READ = ("in_channels", "in_features", "num_features", "num_channels", "normalized_shape")
WRITTEN = ("out_channels", "out_features", "num_features", "num_channels", "normalized_shape")
"""Attributes of the layers of torch with the number of channels that they read, and that they write."""

CONVOLVED = ("in_channels", "out_channels", "num_features", "num_channels")
"""Those of layers whose channels are the second axis."""


def axes_of(module: nn.Module, entered: Tensor, output: Tensor) -> Axes | None:
    """Return the axes of channels of a call, None if the module's layers do not tell them.

    An entering image of as many rows and columns as channels has its channels where the returned one has them. So has
    a signal of as many steps as channels that is convolved, and a returned one has them where the entering one has.
    """
    before = channel_axis(module, entered.shape)
    after = before if entered.shape == output.shape else channel_axis(module, output.shape, writes=True)
    if before is None or after is None:
        return None
    if output.ndim == entered.ndim and _is_cube(entered) != _is_cube(output):
        convolves = bool(_sizes(module, *CONVOLVED))
        if _is_cube(entered) and (convolves or entered.ndim > 3):
            before = after
        elif convolves and entered.ndim == 3:
            after = before
    return Axes(before, after)


def _is_cube(x: Tensor) -> bool:
    """Whether an image has as many rows and columns as channels, or a signal as many steps."""
    return x.ndim in (3, 4) and len(set(x.shape[1:])) == 1


def channel_axis(module: nn.Module, shape: Sequence[int], writes: bool = False) -> int | None:
    """Return the axis of channels of a tensor that a module reads, or of one that it `writes`, None for neither axis.

    The axis has a number of channels that one of its layers has. Where both axes have one, an image has as many rows as
    columns, or else it is that of the first layer that reads one, or the last that writes one; of axes of the same size
    convolutions and pools have channels in the second, linear layers and norms in the last.
    """
    if isinstance(module, POOLS):
        return 1
    convolved = _sizes(module, *CONVOLVED)
    projected = _sizes(module, "in_features", "out_features", "normalized_shape")
    second, last = shape[1], shape[-1]
    if second != last and {second, last} <= convolved | projected:
        if len(shape) == 4 and shape[2] in (second, last):
            return 1 if shape[2] == last else -1
        names = WRITTEN if writes else READ
        layers = [_size(layer, names) for layer in module.modules()]
        first = next((size for size in (layers[::-1] if writes else layers) if size in (second, last)), None)
        if first is not None:
            return 1 if first == second else -1
    if second in convolved and (len(shape) > 3 or last not in (projected if second == last else projected | convolved)):
        return 1
    if last in projected | convolved or len(shape) < 4:
        return -1
    # Pools, of which no layer knows the number of channels.
    return 1 if _sizes(module, "kernel_size") else None


def _sizes(module: nn.Module, *names: str) -> set[int]:
    """Return the numbers that layers of a module have in attributes."""
    return {size for layer in module.modules() for name in names if (size := _size(layer, (name,))) is not None}


def _size(layer: nn.Module, names: Sequence[str]) -> int | None:
    """Return the number in the first of these attributes that a layer has, the last one of several numbers."""
    size: Any = next((value for name in names if (value := getattr(layer, name, None)) is not None), None)
    return size[-1] if isinstance(size, (tuple, list)) and size else size


def as_tokens(x: Tensor, batch: int | None = None, axis: int = -1) -> Shaped[Tensor, "batch token channel"]:
    """Return a tensor as vectors of tokens: axes of no channels number the tokens, and packed tokens are one sequence.

    The number of sequences `batch` tells tokens that come first (token, batch, channel), and one vector a sequence.
    `axis` is that of the channels.
    """
    if axis == 1:
        return x.flatten(2).transpose(1, 2)
    if x.ndim == 2 and batch == x.shape[0]:
        return x[:, None]
    if x.ndim == 3 and batch == x.shape[1] and batch != x.shape[0]:
        return x.transpose(0, 1)
    return x[None] if x.ndim == 2 else x.flatten(1, -2)


def in_shape(vectors: Float[Tensor, "batch token channel"], shape: torch.Size, axis: int = -1) -> Tensor:
    """Return vectors of tokens in the shape of a host's tensor whose channels are at `axis`."""
    if axis == 1:
        return vectors.transpose(1, 2).reshape(shape)
    if vectors.shape == shape:
        return vectors
    return (vectors.transpose(0, 1) if len(shape) == 3 else vectors).contiguous().view(shape)


def as_read(x: Tensor, shape: torch.Size, axis: int = -1) -> Float[Tensor, "batch token channel"]:
    """Return a host's tensor as vectors of tokens, (batch, token, channel) = `shape`."""
    if axis == 1 and x.shape == shape and shape[1] == 1:
        # One vector of each sequence, beside maps.
        return x
    if axis == 1:
        return x.flatten(2).transpose(1, 2)
    if x.shape == shape:
        return x
    return (x.transpose(0, 1) if x.ndim == 3 else x).reshape(shape)


def token_axis(shape: Sequence[int], batch: int, length: int) -> int | None:
    """Return the axis of tokens of (batch, head, token, channel) or (batch, token, head, channel), None for neither.

    It is unknown for as many heads as tokens.
    """
    if len(shape) != 4 or shape[0] != batch or (shape[1] == length) == (shape[2] == length):
        return None
    return 1 if shape[1] == length else 2


def joined(x: Tensor, shape: Sequence[int]) -> Shaped[Tensor, "batch token channel"]:
    """Return an argument as vectors of tokens in a shape, those of its heads joined."""
    axis = token_axis(x.shape, *shape[:2])
    return x.reshape(tuple(shape)) if axis is None else joined_heads(x, axis)


def joined_heads(x: Tensor, axis: int) -> Shaped[Tensor, "batch token channel"]:
    """Return the vectors of heads, whose tokens are along an axis, as those of their tokens."""
    return x.transpose(1, axis).flatten(2)


def split_heads(vectors: Float[Tensor, "batch token channel"], shape: Sequence[int], axis: int) -> Tensor:
    """Return vectors of tokens as those of heads, in a shape whose tokens are along an axis."""
    return vectors.view(shape[0], shape[axis], shape[3 - axis], shape[3]).transpose(1, axis)
