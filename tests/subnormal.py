"""Counts the subnormal operands of products, which some processors multiply fifty times slower than other numbers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {
    *("mm", "bmm", "mv", "dot", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addmv", "_addmm_activation"),
    *("convolution", "convolution_overrideable", "linalg_solve_triangular", "_linalg_det", "linalg_lu_solve"),
}
"""Operations that implement einsum, matmul and linear, convolutions, and triangular solves."""


class SubnormalOperands(TorchDispatchMode):
    """While active, counts the operands of products and their subnormal entries.

    The summand of a product (the first argument of `baddbmm`) is counted as an operand. Elementwise products are not
    counted: they read each entry once, a matrix product reads it once per column of the other operand.

    Attributes:
        operands: number of operands.
        found: number of subnormal entries by the name of the product.
    """

    def __init__(self) -> None:
        """Start with zero counts."""
        super().__init__()
        self.operands = 0
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Count before the product runs, because it may write to an operand."""
        name = func._overloadpacket.__name__
        if name in PRODUCTS:
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            for operand in tree_leaves((args, read)):
                if isinstance(operand, Tensor) and (operand.is_floating_point() or operand.is_complex()):
                    self.operands += 1
                    if count := subnormals(operand):
                        self.found[name] += count
        return func(*args, **(kwargs or {}))


def subnormals(tensor: Tensor) -> int:
    """Count the entries that are not zero and below the smallest normal number of their dtype."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    size = parts.detach().abs()
    return int(((size > 0) & (size < torch.finfo(size.dtype).tiny)).sum())


def counted(run: Callable[[], Any]) -> SubnormalOperands:
    """Run a function and return the counts of its products."""
    with SubnormalOperands() as counts:
        run()
    return counts
