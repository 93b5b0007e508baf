"""The linear-time passes on a CPU with Numba: one compiled loop for a selective state space, else the form of torch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels import loops
from unilinattn.kernels.scan import tiled
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.scan.tiled import scalar_scan, scalar_scan_adjoint
from unilinattn.kernels.threads import in_pieces

__all__ = ["diagonal_scan", "diagonal_scan_adjoint", "scalar_scan", "scalar_scan_adjoint"]


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


def state_elements(batch: int, length: int, channels: int, state: int) -> int:
    """Elements of the saved states of a differentiated scan, and of the pieces' gradients of query and key."""
    pieces = -(-channels // loops.PIECE)
    return batch * state * (-(-length // loops.GROUP) * channels + 2 * length * pieces)


class _Scan(torch.autograd.Function):
    """A selective state space, whose gradient recomputes the states of some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Run the compiled loop; keep the state before each group of tokens if a factor's gradient may follow."""
        value = inputs[-1]
        groups = -(-value.shape[1] // loops.GROUP) if any(ctx.needs_input_grad[:-1]) else 0
        starts = value.new_empty(len(value), groups, inputs[0].shape[3], value.shape[2])
        out = value.new_empty(value.shape)
        for arrays, *results in zip(_arrays(*inputs), _lists(out.squeeze(3)), _lists(starts), strict=True):
            _over_channels(loops.scan, *arrays, *results)
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
        shared = (batch, -(-channels // loops.PIECE), length, size)
        by_query, by_key = upstream.new_zeros(shared), upstream.new_zeros(shared)
        by_decay, by_scale, by_value = (upstream.new_empty(batch, length, channels) for _ in range(3))
        by_rate = upstream.new_empty(batch, size, channels)
        tensors = (starts, upstream.squeeze(3), by_query, by_key, by_decay, by_scale, by_rate, by_value)
        for arrays, *others in zip(_arrays(*inputs), *map(_lists, tensors), strict=True):
            _over_channels(loops.scan_gradients, *arrays, *others)
        by_query, by_key = (t.sum(1).unsqueeze(2) for t in (by_query, by_key))
        return by_query, by_key, by_decay.unsqueeze(3), by_scale, by_rate.sum(0).T, None, by_value.unsqueeze(3)


def _adjoint(*inputs: Any) -> Tensor:
    grad = inputs[-1]
    out = grad.new_empty(grad.shape)
    for arrays, result in zip(_arrays(*inputs), _lists(out.squeeze(3)), strict=True):
        _over_channels(loops.scan_adjoint, *arrays, result)
    return out


def _is_selective(memory: Diagonal, value: Tensor) -> bool:
    """Whether the factors are float32 and those of S6: one decay, scale and channel per head, one query and key."""
    query, key, log_decay, key_scale, rate, _ = memory
    if key_scale is None or rate is None:
        return False
    single = query.shape[2] == key.shape[2] == log_decay.shape[3] == value.shape[3] == 1
    return single and all(t.dtype == torch.float32 for t in (query, key, log_decay, key_scale, rate, value))


def _arrays(*inputs: Any) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield the arrays of each sequence, of the factors and of the values, as the compiled loops take them."""
    query, key, log_decay, key_scale, rate, reset, value = inputs
    reset = value.new_zeros(value.shape[:2], dtype=torch.bool) if reset is None else reset
    rate = rate.T.expand(len(value), -1, -1)
    query, key, log_decay, value = query.squeeze(2), key.squeeze(2), log_decay.squeeze(3), value.squeeze(3)
    return zip(*map(_lists, (query, key, log_decay, key_scale, rate, reset, value)), strict=True)


def _lists(tensor: Tensor) -> list[NDArray[Any]]:
    """Return an array of each sequence; of a contiguous tensor, such as one for results, it is a view."""
    return [t.detach().contiguous().numpy() for t in tensor]


def _over_channels(loop: Callable[..., None], *arrays: NDArray[Any]) -> None:
    """Run a compiled loop for each piece of the channels."""
    in_pieces(loop, -(-arrays[2].shape[1] // loops.PIECE), *arrays)
