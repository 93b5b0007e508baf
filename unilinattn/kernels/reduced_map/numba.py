"""The reduced map on a CPU with Numba: that of torch, with larger leaves, which compiled loops fill."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels import loops
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.tiled import held_elements
from unilinattn.kernels.threads import in_pieces

__all__ = ["held_elements", "reduced_rows"]

LEAF = 32
"""Rows of a block on the diagonal."""


def fill_leaves(
    steps: Float[Tensor, "leaf token head state"],
    query: Float[Tensor, "leaf token head state"],
    entering: Float[Tensor, "leaf token landing head state"],
    write: Float[Tensor, "leaf landed head state"],
    read: Float[Tensor, "leaf token head state"],
    passed: Float[Tensor, "leaf head state"],
    leaves: Float[Tensor, "leaf token landed"],
) -> None:
    """Fill blocks on the diagonal, as `tiled.fill_leaves` does."""
    tensors = [t.flatten(-2).numpy() for t in (steps, query, entering, write, read, passed)]
    in_pieces(loops.fill_leaf, len(leaves), *tensors, leaves.numpy())


reduced_rows = partial(tiled.reduced_rows, leaf=LEAF, fill=fill_leaves)
