"""Decayed products of rows and columns within one chunk, and the decays between its tokens and its two ends.

Every exponent is a sum of the log-decays between two tokens, never a difference of two longer sums: no digit cancels
after a strong decay, and a log-decay of -inf (a reset) needs no special case. Masks apply to the exponents, before the
exponential, so gradients stay finite.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.subnormal import decays, flushed_


def to_token(log_decay: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Return the log-decay from before the chunk to each token, its own step included."""
    return log_decay.cumsum(1)


def before_token(log_decay: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Return the log-decay from before the chunk to just before each token's own step."""
    return functional.pad(log_decay[:, :-1].cumsum(1), (0, 0, 0, 0, 1, 0))


def from_token(log_decay: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Return the log-decay from after each token to the chunk's end."""
    return functional.pad(log_decay[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1))


def between(log_decay: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length length head state"]:
    """Return at (i, j) the sum of log-decays of the steps j + 1 to i, -inf for j > i."""
    length = log_decay.shape[1]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_decay.device)
    # Row i of column j holds step i where i > j, so the sum down to row i is that of the steps j + 1 to i.
    spread = log_decay.unsqueeze(2).expand(-1, -1, length, -1, -1)
    total = spread.masked_fill(ones.triu()[..., None, None], 0).cumsum(1)
    return total.masked_fill(ones.triu(1)[..., None, None], -torch.inf)


def fading(log_decay: Float[Tensor, "batch length head"]) -> Float[Tensor, "batch head length length"]:
    """Return `decays` of `between` for one log-decay per head, as (batch, head, query, key)."""
    length = log_decay.shape[1]
    spread = log_decay.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, length)
    later = log_decay.new_full((length, length), -torch.inf).triu(1)
    return decays(spread.tril(-1).cumsum(2).add_(later))


def pairs(
    left: Float[Tensor, "batch length head state"],
    right: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head staten"],
) -> Float[Tensor, "batch head length length"]:
    """Return tril sum_n left_in exp(G_in - G_jn) right_jn, with one log-decay per head or per coordinate."""
    return pairs_of([left], [right], log_decay)[0][0]


def pairs_of(
    lefts: Sequence[Float[Tensor, "batch length head state"]],
    rights: Sequence[Float[Tensor, "batch length head state"]],
    log_decay: Float[Tensor, "batch length head staten"],
) -> list[list[Float[Tensor, "batch head length length"]]]:
    """Return `pairs` of each left factor with each right factor; the decays are computed once."""
    if log_decay.shape[-1] == 1:
        faded = fading(log_decay.squeeze(-1))
        rows, cols = (torch.cat([t.transpose(1, 2) for t in factors], dim=2) for factors in (lefts, rights))
        products = (rows @ cols.mT).unflatten(3, (len(rights), -1)).unflatten(2, (len(lefts), -1))
        products = flushed_(products * faded[:, :, None, :, None])
        return [[products[:, :, i, :, j] for j in range(len(rights))] for i in range(len(lefts))]
    # (batch, head, token, factor, state): each product takes all factors of its tokens.
    x, y = (torch.stack(list(factors), dim=3).transpose(1, 2) for factors in (lefts, rights))
    decay, length = log_decay.transpose(1, 2), log_decay.shape[1]
    filled = x.new_zeros(len(lefts), len(rights), *x.shape[:2], length, length)
    filled.diagonal(dim1=-2, dim2=-1).copy_(flushed_(x @ y.mT).permute(3, 4, 0, 1, 2))
    half = 1
    while half < length:
        # Pairs of neighbouring blocks of `half` tokens, the last of which may be shorter.
        whole = length // (2 * half)
        last = 2 * half * whole
        for start, count, ahead in ((0, whole, half), (last, 1, length - last - half)):
            if count and ahead > 0:
                stop = start + count * (half + ahead)
                x0, y0, g0 = (t[:, :, start:stop].unflatten(2, (count, half + ahead)) for t in (x, y, decay))
                corner = _corner(x0[:, :, :, half:], y0[:, :, :, :half], g0, half)
                squares = filled[..., start:stop, start:stop].unflatten(-1, (count, -1)).unflatten(-3, (count, -1))
                # The blocks on the diagonal of (block of rows, block of columns) are one view: block is its last axis.
                squares.diagonal(dim1=-4, dim2=-2)[..., half:, :half, :] = corner
        half *= 2
    return [list(row.unbind()) for row in filled.unbind()]


def _corner(
    later: Float[Tensor, "batch head count ahead left state"],
    earlier: Float[Tensor, "batch head count half right state"],
    log_decay: Float[Tensor, "batch head count token state"],
    half: int,
) -> Float[Tensor, "left right batch head ahead half count"]:
    """Return the pairs of tokens after the cut at `half` with tokens before it.

    The exponents of both factors end at the cut, so neither factor exceeds its vector.
    """
    read = flushed_(later * decays(log_decay[:, :, :, half:].cumsum(3)).unsqueeze(4)).flatten(3, 4)
    if half > 1:
        leaving = log_decay[:, :, :, 1:half].flip(3).cumsum(3).flip(3)
        earlier = flushed_(earlier * decays(functional.pad(leaving, (0, 0, 0, 1))).unsqueeze(4))
    corner = flushed_(read @ earlier.flatten(3, 4).mT)
    split = corner.unflatten(4, (half, -1)).unflatten(3, (-1, later.shape[4]))
    return split.permute(4, 6, 0, 1, 3, 5, 2)


def read_before(
    matrix: Float[Tensor, "batch head length length"],
) -> Float[Tensor, "batch head length length"]:
    """Move rows down by one: `pairs` with left factors of the next token then read the state before each step."""
    return functional.pad(matrix[:, :, :-1], (0, 0, 1, 0))


def next_token(
    factor: Float[Tensor, "batch length head state"],
) -> Float[Tensor, "batch length head state"]:
    """Return the factor of the next token at each token, zero at the last one."""
    return functional.pad(factor[:, 1:], (0, 0, 0, 0, 0, 1))


def exclusive_pairs(
    left: Float[Tensor, "batch length head state"],
    right: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head staten"],
) -> Float[Tensor, "batch head length length"]:
    """Return stril sum_n left_in exp(G_{i-1,n} - G_jn) right_jn: a row reads the state before its own step."""
    return read_before(pairs(next_token(left), right, log_decay))
