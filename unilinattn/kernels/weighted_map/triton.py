"""The weighted map on a GPU: the squares of all heads in one kernel, and the writes before them; see README.md."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.launch import Precision, factor, on, power
from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.weighted_map import tiled
from unilinattn.kernels.weighted_map.triton_kernels import SUB, head_squares, head_writes

STATES = 128
"""Coordinates of the largest state whose products have one block."""


def squares(
    memory: Diagonal,
    tokens: slice,
    left: Float[Tensor, "#batch #length head"] | None,
    taps: Taps,
    *,
    precision: Precision = "tf32x3",
) -> tuple[Float[Tensor, "batch head row landed"], Float[Tensor, "batch head row state"]]:
    """Return the weights of a block of rows on its tokens, and its readers of the state before it, in float32.

    Columns begin `max(taps)` tokens before the block, for taps that land in it. `precision` is that of the products'
    inputs; the pairs of 16 rows are float32.
    """
    if not _is_covered(memory, taps):
        return tiled.squares(memory, tokens, left, taps)
    query, key, decay = memory.at(tokens)
    batch, rows, heads, state = *decay.shape[:3], query.shape[-1]
    reach = max(taps)
    near = torch.zeros(batch, heads, rows, rows + reach, dtype=torch.float32, device=decay.device)
    read = torch.empty(batch, heads, rows, state, dtype=torch.float32, device=decay.device)
    shape = (batch, rows, heads, state)
    reading = None if left is None else of_tokens(left, tokens).expand(batch, rows, heads)
    with on(near):
        head_squares[(heads * -(-rows // SUB), batch)](
            factor(query.expand(shape)),
            factor(key.expand(shape)),
            factor(decay.expand(shape)),
            None if reading is None else factor(reading, "batch token head"),
            factor(_stacked(taps, tokens, shape, near)),
            near,
            read,
            heads,
            state,
            rows,
            REACH=reach,
            PRECISION=precision,
            STATES=power(state, 16),
            PAIRS=min(16, power(state)),
        )
    return near, read


def writes(
    memory: Diagonal, tokens: slice, cut: int, taps: Taps, width: int, *, precision: Precision = "tf32x3"
) -> Float[Tensor, "batch head col state"]:
    """Return what the first `width` of `tokens` write, through their taps, into the state before token `cut`.

    `tokens` end before `cut`; taps land only in them. `precision` is that of the products' inputs.
    """
    if not _is_covered(memory, taps):
        return tiled.writes(memory, tokens, cut, taps, width)
    query, key, decay = memory.at(tokens)
    batch, count, heads, state = *decay.shape[:3], query.shape[-1]
    shape = (batch, count, heads, state)
    write = torch.empty(batch, heads, width, state, dtype=torch.float32, device=decay.device)
    with on(write):
        head_writes[(heads, batch)](
            factor(key.expand(shape)),
            factor(decay.expand(shape)),
            factor(_stacked(taps, tokens, shape, write)),
            factor(_crossed(memory, slice(tokens.stop, cut)).expand(batch, heads, state), "batch head last"),
            write,
            heads,
            state,
            count,
            width,
            -(-max(count, width) // SUB),
            REACH=max(taps),
            PRECISION=precision,
            STATES=power(state, 16),
            num_warps=1 if state <= 32 else 4,
        )
    return write


def held_elements(rows: int, cols: int, shape: tuple[int, int, int, int], lags: int) -> int:
    """Return the elements of the squares of `rows` rows, and of the writes of `cols` columns with their factors.

    `shape` is (batch, length, head, state), `lags` the number of taps.
    """
    batch, length, heads, state = shape
    reach = max(0, lags - 1)
    block = rows * (rows + reach + state)
    # Keys, log-decays and their product with a rate, and the taps of each token with a copy.
    factors = 3 * state + 2 * lags
    before = cols * state + min(cols + reach, length) * factors
    return batch * heads * (block + max(rows * factors, before))


def _is_covered(memory: Diagonal, taps: Taps) -> bool:
    """Whether a sub-block holds the largest lag, and one block the state."""
    return max(taps) <= SUB and memory.query.shape[-1] <= STATES


def _stacked(
    taps: Taps, tokens: slice, shape: tuple[int, int, int, int], like: Tensor
) -> Float[Tensor, "batch token head lag"]:
    """Return the taps of some tokens by lag, zero where none is given."""
    nothing = like.new_zeros(()).expand(shape[:3])
    some = {lag: of_tokens(tap, tokens).expand(shape[:3]) for lag, tap in taps.items()}
    return torch.stack([some.get(lag, nothing) for lag in range(max(taps) + 1)], dim=-1)


def _crossed(memory: Diagonal, tokens: slice) -> Float[Tensor, "batch head state"]:
    """Return the log-decay across some tokens, -inf if a segment begins among them."""
    total = memory.log_decay[:, tokens].sum(1)
    if memory.rate is not None:
        total = total * memory.rate
    if memory.reset is not None:
        total = total.masked_fill(memory.reset[:, tokens].any(1)[:, None, None], -torch.inf)
    return total
