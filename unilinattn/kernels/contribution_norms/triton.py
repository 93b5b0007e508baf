"""The contribution norms on a GPU: vectors are multiplied by W and reduced in registers; see README.md."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms import tiled
from unilinattn.kernels.contribution_norms.naive import Order, PairNorms, Products, kind_of
from unilinattn.kernels.contribution_norms.triton_kernels import OUT, pair_norms
from unilinattn.kernels.launch import Precision, on


def norms(
    products: Products,
    *,
    order: Order,
    reference: Float[Tensor, "batch row out"] | None = None,
    precision: Precision = "ieee",
) -> PairNorms:
    """Reduce T = W v of each pair in float32 without storing T; without W, T is v and `tiled` reduces it.

    `reference` is the y of `alti` and `dot`. Every sequence has the same number of consecutive groups.
    Time: the product (pairs x channels)(channels x out). Memory: one number per pair and block of 128 outputs.
    """
    kind, p = kind_of(order, reference)
    vectors, weight = products
    if weight is None:
        return tiled.norms(products, order=order, reference=reference)
    groups, channels, rows, cols = vectors.shape
    outs = weight.shape[1]
    y = vectors.new_empty(1, 1, 1).expand(groups, rows, outs) if reference is None else reference
    blocks = -(-outs // OUT)
    partial = torch.empty(blocks, groups, rows, cols, dtype=torch.float32, device=vectors.device)

    def grid(sizes: dict[str, int]) -> tuple[int, int, int]:
        return -(-rows * cols // sizes["PAIRS"]), blocks, groups

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
    if kind == "max":
        return partial.amax(0)
    total = partial.sum(0)
    return total if kind in ("l1", "alti", "dot") else total.pow_(1 / p)


def alti_norms(products: Products, reference: Float[Tensor, "batch row out"]) -> tuple[PairNorms, PairNorms]:
    """Return the orders "alti" and 1 of `norms`, a product W v for each."""
    if products.weight is None:
        return tiled.alti_norms(products, reference)
    return norms(products, order="alti", reference=reference), norms(products, order=1.0)


def held_elements(shape: Sequence[int], outs: int) -> int:
    """Return the elements that `norms` allocates besides its result; `shape` is (group, channel, row, col)."""
    groups, _, rows, cols = shape
    return (-(-outs // OUT) + 1) * groups * rows * cols
