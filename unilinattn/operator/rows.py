"""Rows of the matrix of a per-channel chain."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.mixers import Toeplitz
from unilinattn.operator.selection import as_slice
from unilinattn.operator.stages import Branch, Mix, Scale, Stage, run_adjoint, walk


def rows_of(
    chain: Sequence[Stage], groups: int, index: Int[Tensor, "batch row"], like: Float[Tensor, "batch length _"]
) -> Inexact[Tensor, "batch key group row"]:
    """Return the rows at the positions `index`.

    The rows of the last mixer are scaled by the stages after it and multiplied from the right by those before it.
    `like` has the length, dtype and device of the chain's output.
    """
    return _rows_of(chain, groups, index, like, as_slice(index), slice(0, groups))


def block_of(
    chain: Sequence[Stage], groups: int, rows: slice, like: Float[Tensor, "batch length _"], channels: slice
) -> Inexact[Tensor, "batch key group row"]:
    """Return consecutive rows for some of the chain's `groups` channels, whole multiples of `channel_unit`."""
    index = torch.arange(rows.start, rows.stop, device=like.device).expand(like.shape[0], -1)
    return _rows_of(chain, groups, index, like, rows, channels)


def channel_unit(chain: Sequence[Stage], groups: int) -> int:
    """Return the least number of consecutive channels that `block_of` can compute separately.

    These are the channels of one head of the last mixer; all channels if another mixer than a convolution precedes it.
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
    """Return rows for some channels; `block` is `index` as a slice, None if it is not consecutive."""
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
    last = mixing[-1] if mixing else -1
    weight = like.new_ones(*index.shape, channels.stop - channels.start)
    for stage in chain[last + 1 :]:
        weight = _of_channels(stage.at(index), groups, channels).apply(weight, bias=False)
    weight = weight.transpose(1, 2).unsqueeze(1)
    if not mixing:
        identity = like.new_zeros(*like.shape[:2], 1, index.shape[1]).scatter_(1, index[:, None, None, :], 1.0)
        return identity * weight
    stage = chain[last]
    if isinstance(stage, Branch):
        columns = _rows_of(stage.chains[0], groups, index, like, block, channels)
        for inner in stage.chains[1:]:
            columns = columns + _rows_of(inner, groups, index, like, block, channels)
    else:
        assert isinstance(stage, Mix)
        per_head = groups // stage.mixer.heads
        heads = slice(channels.start // per_head, channels.stop // per_head)
        rows = stage.mixer.rows(index)[:, heads] if block is None else stage.mixer.tile(rows=block, heads=heads)
        columns = (rows if per_head == 1 else rows.repeat_interleave(per_head, dim=1)).permute(0, 3, 1, 2)
    # The adjoint conjugates complex stages, and the product of rows and stages does not.
    before = [_of_channels(stage, groups, channels) for stage in chain[:last]]
    return run_adjoint(before, (columns * weight).conj()).conj()


def _of_channels(stage: Stage, groups: int, channels: slice) -> Stage:
    """Return a per-channel stage restricted to some of a chain's channels."""
    if channels == slice(0, groups):
        return stage
    index = torch.arange(channels.start, channels.stop, device="cpu")
    if isinstance(stage, Scale):
        scale = stage.scale
        return Scale(stage.role, scale[..., (index // (groups // scale.shape[-1])).to(scale.device)])
    if isinstance(stage, Branch):
        return replace(stage, chains=tuple(tuple(_of_channels(s, groups, channels) for s in c) for c in stage.chains))
    assert isinstance(stage, Mix) and isinstance(stage.mixer, Toeplitz)
    batch, heads, length, _ = stage.mixer.shape
    kernel = stage.mixer.taps[(index // (groups // heads)).to(stage.mixer.taps.device)]
    return Mix(stage.role, Toeplitz(kernel, batch=batch, length=length))
