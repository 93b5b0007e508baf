"""From a chain of stages to T_ij x_j: the chain is split at its token mixers."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.kernels.groups import repeat_groups
from unilinattn.mixers import Toeplitz
from unilinattn.operator.rows import rows_of
from unilinattn.operator.stages import Branch, Chain, Mix, Scale, Stage, channel_groups, run

TAP_FUNCTIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "identity": lambda p: p,
    "taylor1": lambda p: p / 2,
    "taylor2": lambda p: p / 2 + p * p / 4,
}
"""LaTIM's additive stand-ins for SiLU, applied to each convolution tap (LaTIM Eq. 19, section 3.3, Appendix C)."""

Band = Mapping[int, Tensor]
"""Coefficients (batch|1, length|1, channel or group) by lag: y_m = sum_lag c_lag[m] x_{m - lag}."""


def contributions(
    chain: Sequence[Stage],
    index: Int[Tensor, "batch row"],
    x: Float[Tensor, "batch key in"],
    like: Float[Tensor, "batch length _"],
    name: str,
) -> Float[Tensor, "batch row out key"]:
    """Return what each token's x_j adds at selected rows.

    Where only per-channel stages stand between the mixers, the rows of their product weigh each token's vector. A
    convolution or token shift in front of a matrix is taken tap by tap; a branch chain by chain.
    """
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
    if not mixing:
        columns = run(chain, x, bias=False)
        picked = columns.gather(1, index[..., None].expand(-1, -1, columns.shape[2]))
        here = functional.one_hot(index, x.shape[1]).to(x.dtype)
        return torch.einsum("brc,brk->brck", picked, here)
    first, last = mixing[0], mixing[-1]
    u = run(chain[:first], x, bias=False)
    middle = chain[first : last + 1]
    groups = channel_groups(middle)
    lead = middle[0]
    if groups is not None:
        rows = rows_of(middle, groups, index, like).permute(0, 3, 2, 1)
        shares = (rows.unsqueeze(3) * u.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)[:, None]).flatten(2, 3)
    elif (taps := band((lead,))) is not None:
        return through_taps(taps, chain[first + 1 :], index, u, like, name, lambda landed: landed)
    elif len(middle) == 1 and isinstance(lead, Branch):
        parts = [contributions(inner, index, u, like, name) for inner in lead.chains]
        shares = torch.stack(parts).sum(0)
    else:
        raise UncoveredError(
            f"{name}: contributions through two long-range token mixers with a matrix between them are not covered."
        )
    for stage in chain[last + 1 :]:
        shares = stage.at(index).apply(shares, bias=False)
    return shares


def tapwise(
    chain: Chain,
    index: Int[Tensor, "batch row"],
    x: Float[Tensor, "batch key in"],
    like: Float[Tensor, "batch length _"],
    name: str,
    function: Callable[[Tensor], Tensor],
) -> Float[Tensor, "batch row out key"]:
    """Return contributions with a function of each convolution tap in the activation's place (LaTIM Eq. 19-21)."""
    before, conv, rest = split_taps(chain, name)
    taps = band((conv,))
    assert taps is not None
    return through_taps(taps, rest, index, run(before, x, bias=False), like, name, function)


def through_taps(
    taps: Band,
    rest: Chain | Sequence[Stage],
    index: Int[Tensor, "batch row"],
    u: Float[Tensor, "batch key channel"],
    like: Float[Tensor, "batch length _"],
    name: str,
    function: Callable[[Tensor], Tensor],
) -> Float[Tensor, "batch row out key"]:
    """Add up what each tap's share, landed on its position, contributes through the rest of a chain."""
    total = None
    for lag, factor in taps.items():
        landed = shifted(u, lag) * repeat_groups(factor, u.shape[2])
        part = contributions(rest, index, function(landed), like, name)
        # A share that landed `lag` steps later belongs to the token that it came from.
        part = functional.pad(part[..., lag:], (0, min(lag, part.shape[-1])))
        total = part if total is None else total + part
    assert total is not None
    return total


def band(chain: Sequence[Stage]) -> Band | None:
    """Return a chain of scales and short convolutions as coefficients by lag, None if it holds anything else."""
    total: dict[int, Tensor] = {0: torch.ones(1, 1, 1)}
    for stage in chain:
        own = _band_of(stage)
        if own is None:
            return None
        composed: dict[int, Tensor] = {}
        for outer, factor in own.items():
            for inner, before in total.items():
                product = _product(factor, _delayed(before.to(factor), outer))
                known = composed.get(outer + inner)
                composed[outer + inner] = product if known is None else _sum(known, product)
        total = composed
    return total


def _band_of(stage: Stage) -> Band | None:
    if isinstance(stage, Scale):
        return {0: stage.scale}
    if isinstance(stage, Mix) and isinstance(stage.mixer, Toeplitz) and stage.mixer.is_short:
        return {lag: tap[None, None] for lag, tap in enumerate(stage.mixer.taps.unbind(1))}
    if isinstance(stage, Branch):
        total: dict[int, Tensor] = {}
        for inner in stage.chains:
            own = band(inner)
            if own is None:
                return None
            for lag, factor in own.items():
                total[lag] = _sum(total[lag], factor) if lag in total else factor
        return total
    return None


def _product(a: Tensor, b: Tensor) -> Tensor:
    width = max(a.shape[-1], b.shape[-1])
    return repeat_groups(a, width) * repeat_groups(b, width)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    width = max(a.shape[-1], b.shape[-1])
    return repeat_groups(a, width) + repeat_groups(b, width)


def _delayed(factor: Tensor, lag: int) -> Tensor:
    """Read a token's factor `lag` steps later; a factor that is the same for every token stays."""
    if factor.shape[1] == 1 or lag == 0:
        return factor
    return shifted(factor, lag)


def shifted(x: Float[Tensor, "batch length channel"], lag: int) -> Float[Tensor, "batch length channel"]:
    """Move tokens so many steps later; what passes the end is gone."""
    kept = max(x.shape[1] - lag, 0)
    return functional.pad(x[:, :kept], (0, 0, x.shape[1] - kept, 0))


def split_taps(chain: Chain, name: str) -> tuple[Chain, Mix, Chain]:
    """Cut a chain at a short convolution that an activation follows: before, the convolution, after the activation."""
    for k, (conv, act) in enumerate(pairwise(chain)):
        if isinstance(conv, Mix) and isinstance(conv.mixer, Toeplitz) and conv.role == "conv" and act.role == "act":
            return chain[:k], conv, chain[k + 2 :]
    raise UncoveredError(f"{name} has no convolution followed by an activation to split; use activation='exact'.")


def tap_function(activation: str) -> Callable[[Tensor], Tensor]:
    """Return one of LaTIM's stand-ins for the activation; raise `OptionError` with the nearest name."""
    if activation not in TAP_FUNCTIONS:
        raise OptionError(f"unknown activation {activation!r}" + nearest(activation, ["exact", *TAP_FUNCTIONS]))
    return TAP_FUNCTIONS[activation]
