"""The states between chunks on a GPU: one program per head and block of channels; see README.md."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.chunk_states.triton_kernels import carry_chunks
from unilinattn.kernels.launch import on, power

COLUMNS = 32
"""Most channels of a program."""

STATES = 64
"""Most coordinates of a program whose transitions are decays; a matrix needs all coordinates in one program."""

INNER = 32
"""Coordinates per product with a transition matrix."""

WIDE = 128
"""Coordinates above which a program with a transition matrix has half as many channels, so that it fits registers."""


def chunk_states(
    transition: Float[Tensor, "batch chunk head state_or_1 from_or_1"],
    written: Float[Tensor, "batch chunk head state channel"],
    initial: Float[Tensor, "batch head state channel"] | None = None,
    *,
    reverse: bool = False,
) -> Float[Tensor, "batch boundary head state channel"]:
    """Return S_0 = initial (zero by default) and S_{c+1} = T_c S_c + U_c; transposed and from the end if `reverse`.

    Differentiable once.
    """
    states: Tensor = _Carry.apply(transition, written, initial, reverse)
    return states


def _run(transition: Tensor, written: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Carry the states; returns float32."""
    batch, chunks, heads, size, channels = written.shape
    states = torch.empty(batch, chunks + 1, heads, size, channels, dtype=torch.float32, device=written.device)
    states[:, -1 if reverse else 0] = 0 if initial is None else initial
    (states[:, :-1] if reverse else states[:, 1:]).copy_(written)
    diagonal = transition.shape[-1] == 1
    columns = min(COLUMNS if diagonal or size <= WIDE else COLUMNS // 2, power(channels, 16))
    rows = min(STATES, power(size, 16)) if diagonal else power(size, 16)
    # The transpose is the same pass with exchanged strides, and negative ones from chunk to chunk.
    order = -1 if reverse else 1
    t_batch, t_chunk, t_head, *t_inner = transition.stride()
    if transition.shape[3] == 1:
        t_inner[0] = 0
    s_batch, s_chunk, s_head = states.stride()[:3]
    with on(states):
        carry_chunks[(-(-channels // columns), -(-size // rows), batch * heads)](
            transition[:, -1] if reverse else transition,
            states[:, -1] if reverse else states,
            chunks,
            heads,
            size,
            channels,
            t_batch,
            order * t_chunk,
            t_head,
            *(t_inner if diagonal else t_inner[::order]),
            s_batch,
            order * s_chunk,
            s_head,
            DIAGONAL=diagonal,
            STATES=rows,
            COLUMNS=columns,
            INNER=min(INNER, power(size, 16)),
            num_warps=8,
            num_stages=1,
        )
    return states


class _Carry(torch.autograd.Function):
    """The states between chunks, with gradients by the transposed pass."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, written: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
        """Run the kernel."""
        states = _run(transition, written, initial, reverse)
        ctx.save_for_backward(transition, states)
        ctx.reverse, ctx.dtypes = reverse, (written.dtype, None if initial is None else initial.dtype)
        return states.to(written.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Carry the gradients through the transposed transitions; that of T_c is one product of states."""
        transition, states = ctx.saved_tensors
        written_dtype, initial_dtype = ctx.dtypes
        later, earlier = slice(1, None), slice(None, -1)
        entering, leaving, last = (later, earlier, 0) if ctx.reverse else (earlier, later, -1)
        # The gradient of a boundary's state enters the transposed pass as a chunk's writes enter this one.
        adjoint = _run(transition, upstream[:, entering], upstream[:, last], not ctx.reverse)
        written, by_initial = adjoint[:, leaving], adjoint[:, -1 - last]
        left, right = (states[:, entering], written) if ctx.reverse else (written, states[:, entering])
        by_transition = None
        if ctx.needs_input_grad[0]:
            if transition.shape[-1] == 1:
                each = (left * right).sum(-1, keepdim=True)
                by_transition = each if transition.shape[3] > 1 else each.sum(3, keepdim=True)
            else:
                by_transition = left @ right.mT
            by_transition = by_transition.to(transition.dtype)
        return by_transition, written.to(written_dtype), initial_dtype and by_initial.to(initial_dtype), None
