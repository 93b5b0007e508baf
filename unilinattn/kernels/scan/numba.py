"""The linear-time passes on a CPU with Numba: compiled loops for S6 and for scalar decays, else the form of torch."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels import loops
from unilinattn.kernels.scan import tiled
from unilinattn.kernels.scan.memories import Diagonal, Scalar
from unilinattn.kernels.threads import in_pieces


def diagonal_scan(
    memory: Diagonal, value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Run a memory forward in time on values and read it at each token; differentiable once."""
    return _Scan.apply(*memory, value) if _is_selective(memory, value) else tiled.diagonal_scan(memory, value)


def diagonal_scan_adjoint(
    memory: Diagonal, grad: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `diagonal_scan`'s matrix: backward in time, queries write and keys read."""
    if tiled.is_differentiated(*memory, grad) or not _is_selective(memory, grad):
        return tiled.diagonal_scan_adjoint(memory, grad)
    return _adjoint(*memory, grad)


def scalar_scan(
    memory: Scalar, value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Run a memory with one decay per head forward in time on values; differentiable once."""
    if not _is_short(memory, value):
        return tiled.scalar_scan(memory, value)
    return _of_groups(_Scan.apply, memory, value)


def scalar_scan_adjoint(
    memory: Scalar, grad: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `scalar_scan`'s matrix."""
    if tiled.is_differentiated(*memory, grad) or not _is_short(memory, grad):
        return tiled.scalar_scan_adjoint(memory, grad)
    return _of_groups(_adjoint, memory, grad)


def _of_groups(
    scan: Callable[..., Tensor], memory: Scalar, value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Return a scan in which each group of heads is a sequence, and a head's decay that of each of its channels."""
    groups = memory.query.shape[2]

    def by_group(tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)

    query, key = (by_group(factor).flatten(2).unsqueeze(2) for factor in (memory.query, memory.key))
    decay, scale = (by_group(t.unsqueeze(3).expand(value.shape)).flatten(2) for t in memory[2:])
    values = by_group(value).flatten(2)
    rate = values.new_ones(values.shape[2], 1)
    out = scan(query, key, decay.unsqueeze(3), scale, rate, None, values.unsqueeze(3))
    return out.view(len(value), groups, *out.shape[1:3]).transpose(1, 2).reshape(value.shape)


def _is_short(memory: Scalar, value: Tensor) -> bool:
    """Whether the factors are float32, and the recurrence takes at most the products of the chunked form.

    These are `CHUNK` for a token and channel, and one for each coordinate in the loops, whose lanes may be idle.
    """
    channels = value.shape[2:].numel() // memory.query.shape[2]
    lanes = -(-channels // loops.LANES) * loops.LANES
    few = memory.query.shape[3] * lanes <= tiled.CHUNK * channels
    return few and all(t.dtype == torch.float32 for t in (*memory, value))


def state_elements(batch: int, length: int, channels: int, state: int) -> int:
    """Elements of the saved states of a differentiated scan, and of the pieces' gradients of query and key."""
    return batch * state * (-(-length // loops.GROUP) * channels + 2 * length * _pieces(channels))


class _Scan(torch.autograd.Function):
    """A selective state space, whose gradient recomputes the states of some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Run the compiled loop; keep the state before each group of tokens if a factor's gradient may follow."""
        value = inputs[-1]
        groups = -(-value.shape[1] // loops.GROUP) if any(ctx.needs_input_grad[:-1]) else 0
        starts = value.new_empty(len(value), groups, inputs[0].shape[3], value.shape[2])
        out = value.new_empty(value.shape)
        _over_pieces(loops.scan, *_factors(*inputs), out.squeeze(3), starts)
        ctx.save_for_backward(*inputs, starts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the compiled loop of the gradients, or the transpose if only the values have one."""
        *inputs, starts = ctx.saved_tensors
        if not any(ctx.needs_input_grad[:-1]):
            return *(None,) * 6, _adjoint(*inputs[:-1], upstream)
        batch, length, channels, _ = upstream.shape
        size = starts.shape[2]
        shared = (batch, _pieces(channels), length, size)
        by_query, by_key = upstream.new_zeros(shared), upstream.new_zeros(shared)
        by_decay, by_scale, by_value = (upstream.new_empty(batch, length, channels) for _ in range(3))
        by_rate = upstream.new_empty(batch, inputs[4].shape[1], channels)
        gradients = by_query, by_key, by_decay, by_scale, by_rate, by_value
        _over_pieces(loops.scan_gradients, *_factors(*inputs), starts, upstream.squeeze(3), *gradients)
        by_query, by_key = (t.sum(1).unsqueeze(2) for t in (by_query, by_key))
        return by_query, by_key, by_decay.unsqueeze(3), by_scale, by_rate.sum(0).T, None, by_value.unsqueeze(3)


def _adjoint(*inputs: Any) -> Tensor:
    grad = inputs[-1]
    out = grad.new_empty(grad.shape)
    _over_pieces(loops.scan_adjoint, *_factors(*inputs), out.squeeze(3))
    return out


def _is_selective(memory: Diagonal, value: Tensor) -> bool:
    """Whether the factors are float32 and those of S6: one decay, scale and channel per head, one query and key."""
    query, key, log_decay, key_scale, rate, _ = memory
    if key_scale is None or rate is None:
        return False
    single = query.shape[2] == key.shape[2] == log_decay.shape[3] == value.shape[3] == 1
    return single and all(t.dtype == torch.float32 for t in (query, key, log_decay, key_scale, rate, value))


def _factors(*inputs: Any) -> tuple[Tensor, ...]:
    """Return the factors and the values as the compiled loops take them."""
    query, key, log_decay, key_scale, rate, reset, value = inputs
    reset = value.new_zeros(value.shape[:2], dtype=torch.bool) if reset is None else reset
    return query.squeeze(2), key.squeeze(2), log_decay.squeeze(3), key_scale, rate.T, reset, value.squeeze(3)


def _over_pieces(loop: Callable[..., None], *tensors: Tensor) -> None:
    """Run a compiled loop for each piece of the channels of each sequence; tensors for results are contiguous."""
    calls = len(tensors[2]) * _pieces(tensors[2].shape[2])
    in_pieces(loop, calls, *(t.detach().contiguous().numpy() for t in tensors))


def _pieces(channels: int) -> int:
    return -(-channels // loops.PIECE)
