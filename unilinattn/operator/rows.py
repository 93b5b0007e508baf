"""Rows of a per-channel chain's matrix, and their reduction over heads, some channels at a time."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.mixers import Toeplitz
from unilinattn.operator.selection import JOINS, REDUCTIONS, Checked, as_slice, chosen_heads
from unilinattn.operator.stages import Branch, Mix, Scale, Stage, run_adjoint, walk


def rows_of(
    chain: Sequence[Stage], groups: int, index: Int[Tensor, "batch row"], like: Float[Tensor, "batch length _"]
) -> Inexact[Tensor, "batch key group row"]:
    """Return rows of a per-channel chain's matrix at selected positions.

    The last mixer gives its own rows; what stands after it scales them, what stands before carries them back.
    `like` has the length, dtype and device of the chain's output.
    """
    return _rows_of(chain, groups, index, like, as_slice(index), slice(0, groups))


def block_of(
    chain: Sequence[Stage], groups: int, rows: slice, like: Float[Tensor, "batch length _"], channels: slice
) -> Inexact[Tensor, "batch key group row"]:
    """Return consecutive rows of a per-channel chain's matrix, of some of its `groups` channels.

    `channels` begin and end at multiples of `channel_unit`.
    """
    index = torch.arange(rows.start, rows.stop, device=like.device).expand(like.shape[0], -1)
    return _rows_of(chain, groups, index, like, rows, channels)


def channel_unit(chain: Sequence[Stage], groups: int) -> int:
    """Return the least number of consecutive channels that `block_of` takes apart: those of whole heads.

    Where a mixer of another structure than a convolution stands before the last one, all channels go together.
    """
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
    if not mixing:
        return 1
    before = [stage.mixer for stage in walk(chain[: mixing[-1]]) if isinstance(stage, Mix)]
    if any(not isinstance(mixer, Toeplitz) for mixer in before):
        return groups
    last = chain[mixing[-1]]
    if isinstance(last, Branch):
        return lcm(*(channel_unit(inner, groups) for inner in last.chains))
    assert isinstance(last, Mix)
    return groups // last.mixer.heads


def _rows_of(
    chain: Sequence[Stage], groups: int, index: Tensor, like: Tensor, block: slice | None, channels: slice
) -> Tensor:
    """Return rows of some channels; `block` is the same positions where they are consecutive, else None."""
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
    last = mixing[-1] if mixing else -1
    weight = like.new_ones(*index.shape, channels.stop - channels.start)
    for stage in chain[last + 1 :]:
        weight = _of_channels(stage.at(index), groups, channels).apply(weight, bias=False)
    weight = weight.transpose(1, 2).unsqueeze(1)
    if not mixing:
        own = like.new_zeros(*like.shape[:2], 1, index.shape[1])
        return own.scatter_(1, index[:, None, None, :], 1.0) * weight
    stage = chain[last]
    if isinstance(stage, Branch):
        columns = _rows_of(stage.chains[0], groups, index, like, block, channels)
        for inner in stage.chains[1:]:
            columns = columns + _rows_of(inner, groups, index, like, block, channels)
    else:
        assert isinstance(stage, Mix)
        each = groups // stage.mixer.heads
        heads = slice(channels.start // each, channels.stop // each)
        rows = stage.mixer.rows(index)[:, heads] if block is None else stage.mixer.tile(rows=block, heads=heads)
        columns = (rows if each == 1 else rows.repeat_interleave(each, dim=1)).permute(0, 3, 1, 2)
    # An adjoint conjugates complex stages, a row of their product does not.
    before = [_of_channels(stage, groups, channels) for stage in chain[:last]]
    return run_adjoint(before, (columns * weight).conj()).conj()


def _of_channels(stage: Stage, groups: int, channels: slice) -> Stage:
    """Return a per-channel stage restricted to some of a chain's channels."""
    if channels == slice(0, groups):
        return stage
    index = torch.arange(channels.start, channels.stop)
    if isinstance(stage, Scale):
        scale = stage.scale
        return Scale(stage.role, scale[..., (index // (groups // scale.shape[-1])).to(scale.device)])
    if isinstance(stage, Branch):
        return replace(stage, chains=tuple(tuple(_of_channels(s, groups, channels) for s in c) for c in stage.chains))
    assert isinstance(stage, Mix) and isinstance(stage.mixer, Toeplitz)
    batch, heads, length, _ = stage.mixer.shape
    kernel = stage.mixer.taps[(index // (groups // heads)).to(stage.mixer.taps.device)]
    return Mix(stage.role, Toeplitz(kernel, batch=batch, length=length))


def reduced_block(
    chain: Sequence[Stage],
    groups: int,
    repeat: int,
    rows: slice,
    heads: Checked,
    like: Float[Tensor, "batch length _"],
    step: int,
) -> Float[Tensor, "..."]:
    """Return consecutive rows with heads reduced or selected, `step` of the chain's `groups` channels at a time.

    Each channel stands for `repeat` equal heads. Returns (batch, [head,] row, key).
    """
    parts = [slice(start, min(start + step, groups)) for start in range(0, groups, step)]
    if isinstance(heads, str):
        total: Tensor | None = None
        for part in parts:
            found = REDUCTIONS[heads](by_head(block_of(chain, groups, rows, like, part)))
            if len(parts) > 1 and heads in ("mean", "abs-mean"):
                found = found * ((part.stop - part.start) / groups)
            total = found if total is None else JOINS[heads](total, found)
        assert total is not None
        return total**repeat if heads == "product" else total
    chosen = chosen_heads(heads, groups * repeat)
    kept: Tensor | None = None
    for part in parts:
        here = [at for at, head in enumerate(chosen) if part.start <= head // repeat < part.stop]
        if not here and part.stop < groups:
            continue
        found = by_head(block_of(chain, groups, rows, like, part))
        if kept is None:
            kept = found.new_empty(found.shape[0], len(chosen), *found.shape[2:])
        kept.index_copy_(1, _index(here, found), _picked(found, [chosen[at] // repeat - part.start for at in here]))
    assert kept is not None
    return kept.squeeze(1) if isinstance(heads, int) else kept


def reduced_rows(rows: Float[Tensor, "batch head row key"], heads: Checked, repeat: int) -> Float[Tensor, "..."]:
    """Reduce or select the head axis, each of whose entries stands for `repeat` equal ones."""
    if isinstance(heads, str):
        reduced = REDUCTIONS[heads](rows)
        return reduced**repeat if heads == "product" else reduced
    picked = _picked(rows, [head // repeat for head in chosen_heads(heads, rows.shape[1] * repeat)])
    return picked.squeeze(1) if isinstance(heads, int) else picked


def _picked(rows: Float[Tensor, "batch head row key"], heads: Sequence[int]) -> Float[Tensor, "batch picked row key"]:
    return rows.index_select(1, _index(heads, rows))


def _index(heads: Sequence[int], like: Tensor) -> Int[Tensor, " head"]:
    return torch.tensor(heads, dtype=torch.long, device=like.device)


def by_head(columns: Inexact[Tensor, "batch key group row"]) -> Float[Tensor, "batch group row key"]:
    """Put the axes of rows in order; of a complex mode the real part is kept: what it passes from input to output."""
    return columns.real.permute(0, 2, 3, 1)
