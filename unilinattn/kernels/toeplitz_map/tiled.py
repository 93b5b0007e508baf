"""The reduced map of convolutions in torch, from windows of the kernel; see README.md."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps, causal_rows


def windows(kernel: Inexact[Tensor, "head tap"], rows: slice, cols: slice) -> Inexact[Tensor, "head row col"]:
    """Return K[i - j] of a block with its last row first: windows of the reversed kernel, without a copy."""
    # Rows 4-5 and columns 2-4 take the lags 0 to 3. Of (K3, K2, K1, K0) the windows of width 3 are row 5, (K3, K2, K1),
    # and row 4, (K2, K1, K0): one step of the window is one row up. Lags outside of the kernel are zeros.
    least, most = rows.start - cols.stop + 1, rows.stop - 1 - cols.start
    lags = kernel[:, max(least, 0) : max(most + 1, 0)]
    count = most - least + 1
    before = min(max(-least, 0), count)
    lags = functional.pad(lags, (before, count - before - lags.shape[1]))
    return lags.flip(1).unfold(1, cols.stop - cols.start, 1)


def toeplitz_rows(
    kernel: Inexact[Tensor, "head tap"],
    left: Inexact[Tensor, "#batch #length #channel"] | None,
    taps: Taps | None,
    query: Float[Tensor, "batch length group rank"] | None = None,
    key: Float[Tensor, "batch length group rank"] | None = None,
    *,
    batch: int,
    length: int,
    blocks: Iterable[slice],
) -> Iterator[Inexact[Tensor, "batch row key"]]:
    """Yield blocks of rows, in any order, of sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c].

    alpha[i, j] = K[i - j], times q_i . k_j if they are given; consecutive heads share their groups.
    """

    def tile(rows: slice, cols: slice) -> Tensor:
        block = windows(kernel, rows, cols).flip(1).expand(batch, -1, -1, -1)
        if query is None or key is None:
            return block
        q, k = (repeat_groups(t, len(kernel), 2) for t in (query[:, rows], key[:, cols]))
        return block * torch.einsum("bihn,bjhn->bhij", q, k)

    yield from causal_rows(tile, kernel.new_zeros, (batch, length), blocks, left, taps)
