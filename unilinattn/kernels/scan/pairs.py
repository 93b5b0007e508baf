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

LEAF = 8
"""Tokens of a diagonal block that is filled elementwise; larger blocks are halved into matrix products."""


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
    return pairs_of([left], right, log_decay)[0]


def pairs_of(
    lefts: Sequence[Float[Tensor, "batch length head state"]],
    right: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head staten"],
) -> list[Float[Tensor, "batch head length length"]]:
    """Return `pairs` of several left factors with one right factor; the decays are computed once."""
    if log_decay.shape[-1] == 1:
        faded = fading(log_decay.squeeze(-1))
        return [flushed_(torch.einsum("bihn,bjhn->bhij", left, right) * faded) for left in lefts]
    length = right.shape[1]
    if length <= LEAF:
        arrived = decays(between(log_decay)) * right.unsqueeze(1)
        return [flushed_((left.unsqueeze(2) * arrived).sum(-1)).permute(0, 3, 1, 2) for left in lefts]
    if length % 2:
        *padded, y, g = (functional.pad(t, (0, 0, 0, 0, 0, 1)) for t in (*lefts, right, log_decay))
        return [matrix[..., :length, :length] for matrix in pairs_of(padded, y, g)]
    (y0, y1), (g0, g1) = (t.chunk(2, dim=1) for t in (right, log_decay))
    halves = [left.chunk(2, dim=1) for left in lefts]
    blocks = pairs_of([torch.cat(half) for half in halves], torch.cat([y0, y1]), torch.cat([g0, g1]))
    # Both exponents end at the cut between the halves, so neither factor exceeds its vector.
    ahead, behind = decays(to_token(g1)), flushed_(y0 * decays(from_token(g0)))
    joined = []
    for (_, x1), block in zip(halves, blocks, strict=True):
        corner = flushed_(torch.einsum("bihn,bjhn->bhij", flushed_(x1 * ahead), behind))
        first, second = block.chunk(2)
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        joined.append(torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2))
    return joined


def exclusive_pairs(
    left: Float[Tensor, "batch length head state"],
    right: Float[Tensor, "batch length head state"],
    log_decay: Float[Tensor, "batch length head staten"],
) -> Float[Tensor, "batch head length length"]:
    """Return stril sum_n left_in exp(G_{i-1,n} - G_jn) right_jn: a row reads the state before its own step."""
    return functional.pad(pairs(left[:, 1:], right[:, :-1], log_decay[:, :-1]), (0, 1, 1, 0))
