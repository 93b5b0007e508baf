"""The row product from blocks of rows of the reduced map, one at a time; see README.md."""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.tiled import HeadMap, reduced_rows
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.kernels.subnormal import flushed_
from unilinattn.memory import parts

ROWS = 512
"""Rows per block."""

MapRows = Callable[..., Iterator[tuple[slice, Float[Tensor, "batch row key"]]]]
"""The type of `reduced_rows`."""


def row_product(
    head_map: HeadMap,
    row: Float[Tensor, "batch length"],
    weight: Float[Tensor, "batch length"] | None = None,
    *,
    sign: Sign = "keep",
    rows: int = ROWS,
    map_rows: MapRows = reduced_rows,
) -> Float[Tensor, "batch length"]:
    """Return out_j = sum_i row_i sign(weight_i m_ij) for the map m of `map_rows`; a missing weight is one.

    Time: that of the map. Memory: linear in length, a block of rows.
    """
    blocks = (block for _, block in map_rows(head_map, parts(head_map.shape[1], rows)))
    return folded(blocks, head_map.shape[1], row, weight, sign)


def folded(
    blocks: Iterable[Float[Tensor, "batch row key"]],
    keys: int,
    row: Float[Tensor, "batch query"],
    weight: Float[Tensor, "batch query"] | None,
    sign: Sign,
) -> Float[Tensor, "batch key"]:
    """Return sum_i row_i sign(weight_i m_ij) for the consecutive blocks of rows of a map m with `keys` columns."""
    total, start = row.new_zeros(row.shape[0], keys), 0
    for block in blocks:
        rows = slice(start, start + block.shape[1])
        scaled = block if weight is None else block * weight[:, rows, None]
        total = total + torch.einsum("bi,bij->bj", row[:, rows], flushed_(apply_sign(sign, scaled)))
        start = rows.stop
    return total
