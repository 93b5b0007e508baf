"""The HiPPO-LegS matrix in its diagonal plus low-rank form, the initialisation of S4, DSS and S5."""

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor


class HippoLegS(NamedTuple):
    """HiPPO-LegS in the basis that diagonalises its normal part: A = V (diag(poles) - p p*) V*, B = V b.

    Complex128. The poles lie on Re = -1/2 in conjugate pairs, sorted by imaginary part: the first half has the
    negative ones.
    """

    poles: Complex[Tensor, " state"]
    low_rank: Complex[Tensor, " state"]
    inputs: Complex[Tensor, " state"]
    vectors: Complex[Tensor, "state state"]


def hippo_matrix(size: int) -> Float[Tensor, "state state"]:
    """Return HiPPO-LegS: A_nk = -sqrt(2n+1) sqrt(2k+1) below the diagonal, -(n+1) on it, 0 above (float64).

    Gu, Dao, Ermon, Rudra and Ré, "HiPPO: Recurrent Memory with Optimal Polynomial Projections" (2020), Thm. 2.
    """
    root = torch.sqrt(2 * torch.arange(size, dtype=torch.float64) + 1)
    return torch.diag(torch.arange(size, dtype=torch.float64)) - (root[:, None] * root).tril()


def hippo_legs(size: int) -> HippoLegS:
    """Return HiPPO-LegS as a diagonalised normal matrix minus a rank-one matrix.

    Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces" (2022), Theorem 1 and
    Appendix C.1. `size` is even, so that every pole has its conjugate.
    """
    index = torch.arange(size, dtype=torch.float64)
    low_rank = torch.sqrt(index + 0.5)
    # Without its diagonal of -1/2 the normal part is skew-symmetric, so i times it is Hermitian.
    skew = hippo_matrix(size) + low_rank[:, None] * low_rank + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies, vectors = torch.linalg.eigh(-1j * skew)
    adjoint = vectors.mH
    inputs = torch.sqrt(2 * index + 1)
    return HippoLegS(
        torch.complex(torch.full_like(frequencies, -0.5), frequencies),
        adjoint @ low_rank.to(adjoint.dtype),
        adjoint @ inputs.to(adjoint.dtype),
        vectors,
    )
