"""The row product on a GPU: each tile of the map stays in registers and is summed per column; see README.md."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.launch import Precision
from unilinattn.kernels.reduced_map import triton as reduced
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.reduced_map.triton import Panel, RowBlock, launch_far
from unilinattn.kernels.row_product import tiled
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.memory import parts

ROWS = 512
"""Rows per block."""

NUMBERS = 1 << 25
"""Elements of each factor per panel; a panel has all heads, because `sign` applies after their sum."""

LEAST = 32
"""Rows of the smallest tuned tile; each tile writes a separate sum."""


def row_product(
    head_map: HeadMap,
    row: Float[Tensor, "batch length"],
    weight: Float[Tensor, "batch length"] | None = None,
    *,
    sign: Sign = "keep",
    rows: int = ROWS,
    precision: Precision = "tf32x3",
) -> Float[Tensor, "batch length"]:
    """Return out_j = sum_i row_i sign(weight_i m_ij) for the map m of `reduced_rows`, in float32.

    Time: that of the map. Memory: the factors of a block of rows and of some columns for all heads, and of the map
    only the part of each row in its own chunk and the one before.
    """
    chunk = reduced.CHUNK
    if head_map.reach > chunk:
        return tiled.row_product(head_map, row, weight, sign=sign, rows=rows).float()
    batch, length, heads, state = head_map.shape
    scale = torch.ones_like(row) if weight is None else weight
    total = torch.zeros(batch, length, dtype=torch.float32, device=row.device)
    max_rows = max(1, NUMBERS // max(1, batch * heads * state * chunk)) * chunk
    rows = max(1, min(rows, max_rows))
    for tokens in parts(length, rows):
        padded = -(-(tokens.stop - tokens.start) // chunk) * chunk
        near = total.new_zeros(batch, padded, 2 * chunk)
        block = RowBlock(head_map, tokens, slice(0, heads), precision)
        for panel in block.panels(max_rows):
            launch_far(near, panel, padded, "band")
            _fold(total, panel, row[:, tokens], scale[:, tokens], sign)
        block.add_diagonal(near, band=True)
        _fold_near(total, near, tokens, row[:, tokens], scale[:, tokens], sign)
    return total


def _fold(
    total: Float[Tensor, "batch length"],
    panel: Panel,
    row: Float[Tensor, "batch row"],
    scale: Float[Tensor, "batch row"],
    sign: Sign,
) -> None:
    """Add the part of the rows more than one chunk before their own."""
    batch, padded, _ = panel.read.shape
    stop = panel.block.rows.stop
    if panel.chunks[0] >= panel.block.row + padded // reduced.CHUNK - 2:
        return
    sums = total.new_zeros(batch, padded // LEAST, stop)
    launch_far(sums, panel, row.shape[1], "fold", weight=row, scale=scale, sign=sign)
    total[:, :stop] += sums.sum(1)


def _fold_near(
    total: Float[Tensor, "batch length"],
    near: Float[Tensor, "batch padded two"],
    tokens: slice,
    row: Float[Tensor, "batch row"],
    scale: Float[Tensor, "batch row"],
    sign: Sign,
) -> None:
    """Add the part of the rows in their own chunk and the one before."""
    count, chunk = row.shape[1], near.shape[2] // 2
    rest = near.shape[1] - count
    row, scale = (torch.nn.functional.pad(t.float(), (0, rest)).unsqueeze(-1) for t in (row, scale))
    sums = (row * apply_sign(sign, scale * near)).unflatten(1, (-1, chunk)).sum(2)
    joined = sums.new_zeros(sums.shape[0], sums.shape[1] + 1, chunk)
    joined[:, :-1] += sums[..., :chunk]
    joined[:, 1:] += sums[..., chunk:]
    begin = tokens.start - chunk
    total[:, max(0, begin) : tokens.stop] += joined.flatten(1)[:, max(0, -begin) : tokens.stop - begin]
