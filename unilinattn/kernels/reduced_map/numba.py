"""The reduced map on a CPU with Numba: that of torch, with larger leaves, which compiled loops fill."""

from functools import partial

from torch import Tensor

from unilinattn.kernels import loops
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.tiled import held_elements
from unilinattn.kernels.threads import in_pieces

__all__ = ["held_elements", "reduced_rows"]

LEAF = 32
"""Rows of a block on the diagonal."""


def fill_leaves(*tensors: Tensor) -> None:
    """Fill blocks on the diagonal, as `tiled.fill_leaves` does."""
    *factors, leaves = tensors
    in_pieces(loops.fill_leaf, len(leaves), *(t.flatten(-2).numpy() for t in factors), leaves.numpy())


reduced_rows = partial(tiled.reduced_rows, leaf=LEAF, fill=fill_leaves)
