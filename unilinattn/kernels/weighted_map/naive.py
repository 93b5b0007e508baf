"""The definition of squares and writes, pair by pair in float64: the reference of the fast implementations."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.naive import decay_map


def squares(
    query: Float[Tensor, "batch row head state"],
    key: Float[Tensor, "batch row head state"],
    log_decay: Float[Tensor, "batch row head state"],
    left: Float[Tensor, "batch row head"],
    taps: Mapping[int, Float[Tensor, "batch row head"]],
) -> tuple[Float[Tensor, "batch head row landed"], Float[Tensor, "batch head row state"]]:
    """Return left_ih sum_lag alpha_h[i, j + lag] tap_lag[j + lag, h] for taps that land in a block, and its readers.

    The factors are those of the block's tokens. Columns j begin `max(taps)` tokens before the block. A reader is
    left_ih q_in times the decay from before the block to token i.
    """
    alpha, reach = decay_map(query, key, log_decay), max(taps)
    batch, rows, heads, state = query.shape
    near = alpha.new_zeros(batch, heads, rows, rows + reach)
    read = alpha.new_zeros(batch, heads, rows, state)
    for i in range(rows):
        weight = left[:, i].double()
        for lag, tap in taps.items():
            for j in range(i + 1):
                near[:, :, i, j - lag + reach] += weight * alpha[:, :, i, j] * tap[:, j].double()
        read[:, :, i] = weight.unsqueeze(-1) * query[:, i].double() * log_decay[:, : i + 1].double().exp().prod(1)
    return near, read


def writes(
    key: Float[Tensor, "batch token head state"],
    log_decay: Float[Tensor, "batch cuttoken head state"],
    taps: Mapping[int, Float[Tensor, "batch token head"]],
    width: int,
) -> Float[Tensor, "batch head col state"]:
    """Return what the first `width` of some tokens write, through their taps, into the state before a cut.

    `key` and `taps` are those of the tokens whose writes count, `log_decay` that of all tokens from the first of them
    to the cut. w_jn = sum_lag tap_lag[j + lag] k_{j + lag, n} times the decay from after token j + lag to the cut.
    """
    batch, tokens, heads, state = key.shape
    write = key.double().new_zeros(batch, heads, width, state)
    for token in range(tokens):
        faded = key[:, token].double() * log_decay[:, token + 1 :].double().exp().prod(1)
        for lag, tap in taps.items():
            if 0 <= token - lag < width:
                write[:, :, token - lag] += tap[:, token].double().unsqueeze(-1) * faded
    return write
