"""The vectors T_ij x_j of selected rows i, from the chain of a layer."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.kernels.groups import repeat_groups
from unilinattn.memory import parts
from unilinattn.mixers import Toeplitz
from unilinattn.operator.bands import Band, band, shifted
from unilinattn.operator.rows import rows_of
from unilinattn.operator.stages import Branch, Chain, Mix, Stage, channel_groups, run

KEYS = 16
"""Tokens whose contributions are computed in one pass, where each takes its own."""

TAP_FUNCTIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "identity": lambda p: p,
    "taylor1": lambda p: p / 2,
    "taylor2": lambda p: p / 2 + p * p / 4,
}
"""LaTIM's additive approximations of SiLU, applied to each convolution tap (LaTIM Eq. 19, section 3.3, Appendix C)."""


def contributions(
    chain: Sequence[Stage],
    index: Int[Tensor, "batch row"],
    x: Float[Tensor, "batch key in"],
    like: Float[Tensor, "batch length _"],
    name: str,
    activation: str,
) -> Float[Tensor, "batch row out key"]:
    """Return T_ij x_j for the rows i at the positions `index`.

    Linear in length if the first mixer to the last are per-channel, or a convolution followed by per-channel stages
    after a matrix (computed tap by tap), or a branch of such chains; else it takes a pass for each token. `like` has
    the length, dtype and device of the layer's output, and `name` is the layer's. With another `activation` than
    "exact" its function of each convolution tap replaces the activation (LaTIM Eq. 19-21).
    """
    return _through(*values_by_token(chain, index, x, like, name, activation), index)


def values_by_token(
    chain: Sequence[Stage],
    index: Int[Tensor, "batch row"],
    x: Float[Tensor, "batch key in"],
    like: Float[Tensor, "batch length _"],
    name: str,
    activation: str,
) -> tuple[Inexact[Tensor, "batch row channel key"], Chain]:
    """Return the contribution of each token to the values after the last mixer, and the stages that follow them.

    The arguments and the errors are those of `contributions`.
    """
    if activation == "exact":
        return _exact_values(chain, index, x, like)
    function = tap_function(activation)
    taps, value, after = _split(chain, x, name)
    return _through_taps(taps, after, index, value, like, function)


def sum_of_contributions(
    chain: Sequence[Stage], x: Float[Tensor, "batch key in"], name: str, activation: str
) -> Float[Tensor, "batch length out"]:
    """Return the sum of `contributions` over the tokens for every row, in linear time."""
    if activation == "exact":
        return run(chain, x, bias=False)
    function = tap_function(activation)
    taps, value, after = _split(chain, x, name)
    terms = [function(shifted(value, lag) * repeat_groups(factor, value.shape[2])) for lag, factor in taps.items()]
    return run(after, torch.stack(terms).sum(0), bias=False)


def _exact_values(chain: Sequence[Stage], index: Tensor, x: Tensor, like: Tensor) -> tuple[Tensor, Chain]:
    """Return `values_by_token` of the exact activation."""
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
    if not mixing:
        outputs = run(chain, x, bias=False)
        selected = outputs.gather(1, index[..., None].expand(-1, -1, outputs.shape[2]))
        return torch.einsum("brc,brk->brck", selected, functional.one_hot(index, x.shape[1]).to(x.dtype)), ()
    first, last = mixing[0], mixing[-1]
    value = run(chain[:first], x, bias=False)
    middle, after = chain[first : last + 1], tuple(chain[last + 1 :])
    groups = channel_groups(middle)
    lead = middle[0]
    if groups is not None:
        rows = rows_of(middle, groups, index, like).permute(0, 3, 2, 1)
        by_group = value.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        return (rows.unsqueeze(3) * by_group[:, None]).flatten(2, 3), after
    if (taps := band((lead,))) is not None:
        return _through_taps(taps, chain[first + 1 :], index, value, like, lambda term: term)
    if len(middle) == 1 and isinstance(lead, Branch):
        vectors = [_through(*_exact_values(inner, index, value, like), index) for inner in lead.chains]
        return torch.stack(vectors).sum(0), after
    return _by_key(middle, index, value), after


def _by_key(
    middle: Sequence[Stage], index: Int[Tensor, "batch row"], value: Float[Tensor, "batch key channel"]
) -> Inexact[Tensor, "batch row mixed key"]:
    """Return the contribution of each token through stages of any kind: one forward pass for each, `KEYS` at a time."""
    batch, keys, channels = value.shape
    rows: list[Tensor] = []
    for columns in parts(keys, KEYS):
        selected = torch.arange(keys, device=value.device)[columns]
        # A column of right-hand sides has one token's vector and zeros for all others.
        probe = value.new_zeros(batch, keys, channels, len(selected))
        probe[:, selected, :, torch.arange(len(selected), device="cpu")] = value[:, selected].transpose(0, 1)
        mixed = run(middle, probe, bias=False)
        rows.append(mixed.gather(1, index[:, :, None, None].expand(-1, -1, *mixed.shape[2:])))
    return torch.cat(rows, dim=3)


def _split(chain: Sequence[Stage], x: Tensor, name: str) -> tuple[Band, Tensor, Chain]:
    """Return the taps, the values and the stages after the activation of the convolution of `split_taps`."""
    before, conv, after = split_taps(tuple(chain), name)
    taps = band((conv,))
    assert taps is not None
    return taps, run(before, x, bias=False), after


def _through(
    vectors: Inexact[Tensor, "batch row channel key"], stages: Chain, index: Int[Tensor, "batch row"]
) -> Float[Tensor, "batch row out key"]:
    """Apply token-wise stages to the values of the rows at the positions `index`."""
    for stage in stages:
        vectors = stage.at(index).apply(vectors, bias=False)
    return vectors


def _through_taps(
    taps: Band,
    rest: Sequence[Stage],
    index: Int[Tensor, "batch row"],
    value: Float[Tensor, "batch key channel"],
    like: Float[Tensor, "batch length _"],
    function: Callable[[Tensor], Tensor],
) -> tuple[Inexact[Tensor, "batch row mixed key"], Chain]:
    """Sum the contributions of `function` of each tap's term through the mixers of the rest of a chain."""
    total: Tensor | None = None
    after: Chain = ()
    for lag, factor in taps.items():
        term = function(shifted(value, lag) * repeat_groups(factor, value.shape[2]))
        vectors, after = _exact_values(rest, index, term, like)
        # The term at position j + lag comes from token j.
        vectors = functional.pad(vectors[..., lag:], (0, min(lag, vectors.shape[-1])))
        total = vectors if total is None else total + vectors
    assert total is not None
    return total, after


def split_taps(chain: Chain, name: str) -> tuple[Chain, Mix, Chain]:
    """Split a chain at a convolution that an activation follows: the stages before, the convolution, those after both.

    Raises `UncoveredError` with the layer's `name` if there is none.
    """
    for k, (conv, act) in enumerate(pairwise(chain)):
        if isinstance(conv, Mix) and isinstance(conv.mixer, Toeplitz) and conv.role == "conv" and act.role == "act":
            return chain[:k], conv, chain[k + 2 :]
    raise UncoveredError(f"{name} has no convolution followed by an activation to split; use activation='exact'.")


def tap_function(activation: str) -> Callable[[Tensor], Tensor]:
    """Return a function of `TAP_FUNCTIONS`; raise `OptionError` with the nearest name if there is none."""
    if activation not in TAP_FUNCTIONS:
        raise OptionError(f"unknown activation {activation!r}" + nearest(activation, ["exact", *TAP_FUNCTIONS]))
    return TAP_FUNCTIONS[activation]
