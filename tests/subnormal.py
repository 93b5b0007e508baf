"""Counts the subnormal numbers that products read, which some processors multiply fifty times slower than others."""

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
"""Products of two tensors below einsum, matmul and linear, convolutions, and triangular solves."""


class SubnormalOperands(TorchDispatchMode):
    """Counts, while it is entered, the operands of products and the subnormal numbers among their entries.

    What a product adds to (the first argument of `baddbmm`) is counted with its factors. Elementwise products are
    not counted: a number passes one of them once, and a matrix product as often as the other side has columns.

    Attributes:
        operands: how many operands were looked at.
        found: subnormal entries by the product's name.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.operands = 0
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Look at the operands before the product, which may write to one of them."""
        name = func._overloadpacket.__name__
        if name in PRODUCTS:
            read = {key: given for key, given in (kwargs or {}).items() if key != "out"}
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
    """Run a function and return what its products read."""
    with SubnormalOperands() as found:
        run()
    return found
