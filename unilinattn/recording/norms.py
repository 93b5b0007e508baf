"""Rules of norms: centred live, divided by a frozen size."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import Center
from unilinattn.recording.compilation import Compilation, rule
from unilinattn.recording.contraction import Product, contracted, with_channels
from unilinattn.recording.layout import Carried, added
from unilinattn.recording.nodes import Node


@rule("layer_norm")
def layer_norm(
    run: Compilation,
    node: Node,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: int | float = 1e-5,
) -> Carried:
    """Centre the last axes, divide by their frozen deviation."""
    carried, point, dims = run.value(x), x.value.detach(), tuple(range(-len(normalized_shape), 0))
    carried = _centred(_over_channels(carried, dims, run.like), dims)
    scale = torch.rsqrt(point.var(dims, keepdim=True, unbiased=False) + eps)
    return _affine(run, run.scaled(carried, scale, "norm", norm_of=math.prod(normalized_shape)), weight, bias)


@rule("rms_norm")
def rms_norm(
    run: Compilation,
    node: Node,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: int | float | None = None,
) -> Carried:
    """Divide the last axes by their frozen root mean square."""
    point, dims = x.value.detach(), tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(point.dtype).eps if eps is None else eps
    scale = torch.rsqrt(point.pow(2).mean(dims, keepdim=True) + eps)
    return _affine(run, run.scaled(run.value(x), scale, "norm", norm_of=math.prod(normalized_shape)), weight, None)


@rule("group_norm")
def group_norm(
    run: Compilation, node: Node, x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: int | float = 1e-5
) -> Carried:
    """Centre each group of channels over all tokens, divide by its frozen deviation."""
    carried, count = run.value(x), x.value.ndim
    point = x.value.detach().unflatten(1, (num_groups, -1))
    dims = tuple(range(2, count + 1))
    carried = carried.moved(carried.index.unflatten(1, (num_groups, -1)))
    # The mean is linear too: first over the channels of a token, then over the tokens.
    mean, letters = carried, tuple(range(count + 1))
    for axis in dims:
        remaining = tuple(letter for letter in letters if letter != axis)
        weights = run.like.new_full((point.shape[axis],), 1 / point.shape[axis])
        shape = torch.Size(point.shape[letter] for letter in remaining)
        mean, letters = contracted(mean, weights, Product(letters, (axis,), remaining), shape), remaining
    mean = run.scaled(mean, -1.0, "norm")
    carried = added(carried, mean.moved(mean.index[(..., *[None] * len(dims))].expand(point.shape)))
    carried = run.scaled(carried, torch.rsqrt(point.var(dims, keepdim=True, unbiased=False) + eps), "norm")
    carried = carried.moved(carried.index.flatten(1, 2))
    by_channel = (-1, *[1] * (count - 2))
    return _affine(run, carried, *(_shaped(value, by_channel) for value in (weight, bias)))


@rule("batch_norm")
def batch_norm(
    run: Compilation,
    node: Node,
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: int | float = 0.1,
    eps: int | float = 1e-5,
) -> Carried:
    """Apply the running mean and variance, which are constants."""
    if training or running_mean is None or running_var is None:
        raise UncoveredError("a batch norm normalises over the batch; call model.eval() before tracing")
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    offset = -running_mean * scale + (0 if bias is None else bias)
    by_channel = (-1, *[1] * (x.value.ndim - 2))
    return run.shifted(run.scaled(run.value(x), scale.reshape(by_channel), "norm"), offset.reshape(by_channel))


@rule("instance_norm")
def instance_norm(
    run: Compilation,
    node: Node,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: int | float = 0.1,
    eps: int | float = 1e-5,
) -> Carried:
    """Norm each channel over all tokens, or by the running mean and variance."""
    if use_input_stats:
        return group_norm(run, node, x, x.value.shape[1], weight, bias, eps)
    return batch_norm(run, node, x, running_mean, running_var, weight, bias, eps=eps)


@rule("normalize")
def normalize(
    run: Compilation, node: Node, x: Any, p: int | float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any
) -> Carried:
    """Divide by the frozen norm."""
    return run.scaled(run.value(x), 1 / x.value.detach().norm(p, dim, keepdim=True).clamp_min(eps), "norm")


def _affine(run: Compilation, carried: Carried, weight: Any, bias: Any) -> Carried:
    carried = carried if weight is None else run.scaled(carried, weight, "norm", of_value=False)
    return carried if bias is None else run.shifted(carried, bias)


def _shaped(value: Any, shape: tuple[int, ...]) -> Any:
    return value.reshape(shape) if isinstance(value, Tensor) else value


def _over_channels(carried: Carried, dims: tuple[int, ...], like: Tensor) -> Carried:
    """Return a tensor whose axes `dims` number channels only; raise `UncoveredError` for a norm over tokens."""
    for axis in (dim % carried.index.ndim for dim in dims):
        kinds = {is_row for size, is_row in carried.layout.split[axis] if size > 1}
        if kinds == {True}:
            raise UncoveredError("a layer norm over tokens")
        if len(kinds) == 2:
            carried = with_channels(carried, axis, like)
    return carried


def _centred(carried: Carried, dims: tuple[int, ...]) -> Carried:
    """Subtract the mean over the last axes, which are consecutive channels."""
    layout = carried.layout
    if not layout.is_whole or not layout.has_all_channels:
        carried = carried.arranged()
    size = carried.index.shape[dims[0] :].numel()
    return carried.same_elements(Center("norm", carried.shape[2] // size))
