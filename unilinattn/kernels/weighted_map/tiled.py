"""The squares of some heads at a time by recursive halving, and decayed keys, in torch on any device; see README.md."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import of_heads
from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.reduced_map.tiled import Buffers, square, square_rows
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.scan.pairs import from_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.memory import parts

HEADS = 128
"""Number of heads whose squares are filled at once."""

ALL = slice(None)


def squares(
    memory: Diagonal, tokens: slice, left: Float[Tensor, "#batch #length head"] | None, taps: Taps
) -> tuple[Float[Tensor, "batch head row landed"], Float[Tensor, "batch head row state"]]:
    """Return the weights of a block of rows on its tokens, and its readers of the state before it.

    Columns begin `max(taps)` tokens before the block, for taps that land in it.
    """
    batch, _, total, _ = memory.log_decay.shape
    count, state = tokens.stop - tokens.start, memory.query.shape[-1]
    near = memory.log_decay.new_zeros(batch, total, count, count + max(taps))
    read = near.new_zeros(batch, total, count, state)
    buffers = Buffers()
    for heads in parts(total, HEADS):
        query, key, decay = memory.at(tokens, heads)
        shape = decay.shape[:3]
        some = square(
            _as_batch(query.expand_as(decay)),
            _as_batch(key.expand_as(decay)),
            _as_batch(decay),
            None if left is None else _as_batch(of_tokens(left, tokens)[..., heads].expand(shape)),
            {lag: _as_batch(of_tokens(tap, tokens)[..., heads].expand(shape)) for lag, tap in taps.items()},
            buffers=buffers,
        )
        near[:, heads], read[:, heads] = (t.unflatten(0, (batch, -1)) for t in some)
    return near, read


def writes(memory: Diagonal, tokens: slice, cut: int, taps: Taps, width: int) -> Float[Tensor, "batch head col state"]:
    """Return what the first `width` of `tokens` write, through their taps, into the state before token `cut`.

    `tokens` end before `cut`; taps land only in them.
    """
    keys = decayed_keys(memory, tokens, cut)
    write = keys.new_zeros(keys.shape[0], width, *keys.shape[2:])
    for lag, tap in taps.items():
        # The tap of lag d moves token j + d to column j.
        landed_keys = keys[:, lag : lag + width]
        landed = of_tokens(tap, slice(tokens.start + lag, tokens.start + lag + landed_keys.shape[1])).unsqueeze(-1)
        write[:, : landed_keys.shape[1]].addcmul_(landed_keys, landed)
    return flushed_(write).transpose(1, 2)


def decayed_keys(
    memory: Diagonal, tokens: slice, cut: int, heads: slice = ALL
) -> Float[Tensor, "batch token head state"]:
    """Return the keys of `tokens`, decayed to the time just before token `cut`."""
    key = of_heads(memory.key[:, tokens], heads, memory.log_decay.shape[2])
    if memory.key_scale is not None:
        key = key * memory.key_scale[:, tokens, heads, None]
    crossed = memory.log_decay[:, tokens.stop : cut, heads].sum(1, keepdim=True)
    exponent = from_token(memory.log_decay[:, tokens, heads]) + crossed
    # Summing before the rates multiply takes one number per head instead of one per coordinate.
    decay = decays(exponent if memory.rate is None else exponent * memory.rate[heads])
    if memory.reset is not None:
        later = memory.reset[:, tokens.start : cut].flip(1).cumsum(1).flip(1)[:, 1:] > 0
        forgotten = torch.nn.functional.pad(later, (0, 1))[:, : key.shape[1]]
        decay = decay.masked_fill(forgotten[..., None, None], 0)
    return flushed_(decay * key)


def held_elements(rows: int, cols: int, shape: tuple[int, int, int, int], lags: int) -> int:
    """Return the elements of the squares of `rows` rows, and of the factors that fill them; `lags`: number of taps.

    `shape` is (batch, length, head, state). Writes are not counted.
    """
    batch, _, heads, state = shape
    size = square_rows(rows)
    factors = 2 * (size + lags) + (2 + lags) * state
    return batch * size * (heads * (size + lags + 3 * state) + min(heads, HEADS) * factors)


def _as_batch(factor: Float[Tensor, "batch token head *state"]) -> Float[Tensor, "batchhead token 1 *state"]:
    """Move heads into the batch: (batch, token, head, ...) to (batch x head, token, 1, ...)."""
    return factor.transpose(1, 2).flatten(0, 1).unsqueeze(2)
