"""The contribution norms on a GPU: vectors are multiplied by W and reduced in registers; see README.md."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms import tiled
from unilinattn.kernels.contribution_norms.naive import Kind, Order, PairNorms, Products, kind_of
from unilinattn.kernels.contribution_norms.triton_kernels import OUT, pair_norms
from unilinattn.kernels.launch import Precision, on


def norms(
    products: Products,
    *,
    order: Order,
    reference: Float[Tensor, "batch row out"] | None = None,
    precision: Precision = "tf32x3",
) -> PairNorms:
    """Reduce T = W v of each pair in float32 without storing T; without W, T is v and `tiled` reduces it.

    `reference` is the y of `alti` and `dot`. Every sequence has the same number of consecutive groups.
    Time: the product (pairs x channels)(channels x out). Memory: one number per pair and block of 128 outputs.
    """
    kind, p = kind_of(order, reference)
    if products.weight is None:
        return tiled.norms(products, order=order, reference=reference)
    (partial,) = _partial_norms(products, reference, kind, p, precision)
    if kind == "max":
        return partial.amax(0)
    total = partial.sum(0)
    return total if kind in ("l1", "alti", "dot") else total.pow_(1 / p)


def alti_norms(
    products: Products, reference: Float[Tensor, "batch row out"], *, precision: Precision = "tf32x3"
) -> tuple[PairNorms, PairNorms]:
    """Return the orders "alti" and 1 of `norms`, with one product W v for both."""
    if products.weight is None:
        return tiled.alti_norms(products, reference)
    scores, sizes = _partial_norms(products, reference, "alti and l1", 1.0, precision).sum(1)
    return scores, sizes


def held_elements(shape: Sequence[int], outs: int) -> int:
    """Return the elements that `norms` or `alti_norms` allocates, the result included.

    `shape` is (group, channel, row, col).
    """
    groups, _, rows, cols = shape
    return 2 * (-(-outs // OUT) + 1) * groups * rows * cols


def _partial_norms(
    products: Products,
    reference: Float[Tensor, "batch row out"] | None,
    kind: Kind | Literal["alti and l1"],
    p: float,
    precision: Precision,
) -> Float[Tensor, "number block group row col"]:
    """Return the norms over each block of outputs; one number of each pair, two for "alti and l1"."""
    vectors, weight = products
    assert weight is not None
    groups, channels, rows, cols = vectors.shape
    outs = weight.shape[1]
    y = vectors.new_empty(1, 1, 1).expand(groups, rows, outs) if reference is None else reference
    shape = 2 if kind == "alti and l1" else 1, -(-outs // OUT), groups, rows, cols
    partial = torch.empty(shape, dtype=torch.float32, device=vectors.device)

    def grid(sizes: dict[str, int]) -> tuple[int, int, int]:
        return -(-rows * cols // sizes["PAIRS"]), shape[1], groups

    with on(partial):
        pair_norms[grid](
            vectors,
            weight,
            y,
            partial,
            rows * cols,
            cols,
            channels,
            outs,
            groups // y.shape[0],
            p,
            *vectors.stride(),
            0 if weight.shape[0] == 1 else weight.stride(0),
            *weight.stride()[1:],
            *y.stride(),
            KIND=kind,
            PRECISION=precision,
            OUT=OUT,
        )
    return partial
