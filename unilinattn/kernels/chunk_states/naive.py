"""The definition of the states between chunks in float64: the reference of the fast forms."""

import torch
from jaxtyping import Float
from torch import Tensor


def chunk_states(
    transition: Float[Tensor, "batch chunk head state_or_1 from_or_1"],
    written: Float[Tensor, "batch chunk head state channel"],
    initial: Float[Tensor, "batch head state channel"] | None = None,
    *,
    reverse: bool = False,
) -> Float[Tensor, "batch boundary head state channel"]:
    """Fill S_0 = initial (zero by default) and S_{c+1} = T_c S_c + U_c, for transitions T and written states U.

    A transition with one column is a decay for each coordinate, or for all of them. `reverse`: the transpose, from the
    last chunk to the first: R_C = initial and R_c = T_c^T R_{c+1} + U_c.
    """
    batch, chunks, heads, size, channels = written.shape
    states = torch.zeros(batch, chunks + 1, heads, size, channels, dtype=torch.float64, device=written.device)
    order = range(chunks - 1, -1, -1) if reverse else range(chunks)
    if initial is not None:
        states[:, chunks if reverse else 0] = initial.double()
    for c in order:
        source, target = (c + 1, c) if reverse else (c, c + 1)
        step = transition[:, c].double()
        matrix = torch.diag_embed(step.squeeze(-1).expand(-1, -1, size)) if step.shape[-1] == 1 else step
        states[:, target] = (matrix.mT if reverse else matrix) @ states[:, source] + written[:, c].double()
    return states
