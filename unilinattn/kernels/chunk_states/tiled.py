"""The states between chunks in torch, one chunk after another; see README.md."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.subnormal import flushed_


def chunk_states(
    transition: Float[Tensor, "batch chunk head state_or_1 from_or_1"],
    written: Float[Tensor, "batch chunk head state channel"],
    initial: Float[Tensor, "batch head state channel"] | None = None,
    *,
    reverse: bool = False,
) -> Float[Tensor, "batch boundary head state channel"]:
    """Return S_0 = initial (zero by default) and S_{c+1} = T_c S_c + U_c; transposed and from the end if `reverse`."""
    state = torch.zeros_like(written[:, 0]) if initial is None else initial
    states, diagonal = [state], transition.shape[-1] == 1
    order = -1 if reverse else 1
    for step, write in list(zip(transition.unbind(1), written.unbind(1), strict=True))[::order]:
        moved = step * state if diagonal else (step.mT if reverse else step) @ state
        state = flushed_(moved + write)
        states.append(state)
    return torch.stack(states[::order], dim=1)
