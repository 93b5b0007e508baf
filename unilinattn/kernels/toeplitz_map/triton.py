"""The reduced map of convolutions on a GPU: tiles of pairs, summed over heads in registers; see README.md."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.launch import factor, on
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.toeplitz_map.triton_kernels import weighted_tiles


def toeplitz_rows(
    kernel: Float[Tensor, "head tap"],
    left: Float[Tensor, "#batch #length #channel"] | None,
    taps: Taps | None,
    query: Float[Tensor, "batch length group rank"] | None = None,
    key: Float[Tensor, "batch length group rank"] | None = None,
    *,
    batch: int,
    length: int,
    blocks: Iterable[slice],
) -> Iterator[Float[Tensor, "batch row key"]]:
    """Yield blocks of rows, in any order, of sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c].

    alpha[i, j] = K[i - j], times q_i . k_j if they are given; consecutive heads share their groups. The blocks are
    float32. Memory: the block.
    """
    heads, unit = kernel.shape[0], kernel.new_ones(1, 1, 1)
    weights = {lag: tap for lag, tap in (taps or {0: unit}).items() if lag < length}
    reading = unit if left is None else left
    channels = max([heads, reading.shape[2], *(tap.shape[2] for tap in weights.values())])
    shape = (batch, length, channels)
    reading = reading.expand(shape)
    per_group, rank = (heads, 0) if query is None else (heads // query.shape[2], query.shape[3])
    for tokens in blocks:
        rows = tokens.stop - tokens.start
        block = torch.zeros(batch, rows, length, dtype=torch.float32, device=kernel.device)
        for lag, tap in weights.items():
            landing = tap.expand(shape)

            def grid(sizes: dict[str, int], rows: int = rows) -> tuple[int, int, int]:
                return -(-length // sizes["COLS"]), -(-rows // sizes["ROWS"]), batch

            with on(block):
                weighted_tiles[grid](
                    factor(kernel, "head last"),
                    factor(reading, "batch token last"),
                    factor(landing, "batch token last"),
                    None if query is None else factor(query),
                    None if key is None else factor(key),
                    block,
                    heads,
                    per_group,
                    rank,
                    channels // heads,
                    kernel.shape[1],
                    rows,
                    tokens.start,
                    length,
                    lag,
                    *block.stride()[:2],
                )
        yield block
