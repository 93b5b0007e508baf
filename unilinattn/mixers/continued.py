"""Passes of a state space that begin at a state: the state enters and leaves through tokens added at the ends."""

from collections.abc import Callable

import torch
from jaxtyping import Inexact
from torch import Tensor

Pass = Callable[[Tensor], Tensor]


def forward_from(
    apply: Pass, size: int, state: Tensor | None, value: Inexact[Tensor, "batch token head channel"]
) -> tuple[Inexact[Tensor, "batch token head channel"], Inexact[Tensor, "batch state head channel"]]:
    """Return the outputs of a pass from a state (None for zero), and the state after it.

    `apply` runs the recurrence with `size` tokens added at each end (`with_ends`). The first ones write the state's
    coordinates, one each, and the last ones read them.
    """
    before, after = _ends(size, value)
    outputs = apply(torch.cat([before if state is None else state, value, after], dim=1))
    # A slice would keep the outputs of all tokens.
    return outputs[:, size:-size], outputs[:, -size:].clone()


def backward_from(
    adjoint: Pass, size: int, state: Tensor | None, grad: Inexact[Tensor, "batch token head channel"]
) -> tuple[Inexact[Tensor, "batch token head channel"], Inexact[Tensor, "batch state head channel"]]:
    """Return the outputs of a transposed pass from the gradient of the last state, and that of the first state."""
    before, after = _ends(size, grad)
    outputs = adjoint(torch.cat([before, grad, after if state is None else state], dim=1))
    return outputs[:, size:-size], outputs[:, :size].clone()


def with_ends(
    factor: Inexact[Tensor, "batch token *group"],
    *,
    first: Inexact[Tensor, "size state"] | float,
    last: Inexact[Tensor, "size state"] | float,
    size: int,
) -> Inexact[Tensor, "batch extended *group"]:
    """Add `size` tokens at each end of a factor, with a vector for each token or one number for all."""
    shape = (factor.shape[0], size, *factor.shape[2:])
    ends = [
        factor.new_full(shape, end) if isinstance(end, float) else end.to(factor)[None, :, None].expand(shape)
        for end in (first, last)
    ]
    return torch.cat([ends[0], factor, ends[1]], dim=1)


def _ends(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    zeros = like.new_zeros(like.shape[0], size, *like.shape[2:])
    return zeros, zeros
