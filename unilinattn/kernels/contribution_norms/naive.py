"""The definition of the contribution norms, with every vector in float64: the reference of the fast implementations."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError

Order = Literal["alti", "dot"] | float
"""Reduction of a contribution T: its lp norm for a number p (infinity: the largest |T|); "alti",
||y||_1 - ||y - T||_1; or "dot", y . T."""

Kind = Literal["l1", "l2", "lp", "max", "alti", "dot"]


class Products(NamedTuple):
    """The contributions T = W v of pairs of tokens; without a weight T is v."""

    vectors: Float[Tensor, "group channel row col"]
    weight: Float[Tensor, "#group out channel"] | None


PairNorms = Float[Tensor, "group row col"]
"""A number for each pair of tokens."""


def kind_of(order: Order, reference: Tensor | None) -> tuple[Kind, float]:
    """Return the kind of an order and its p.

    Raises `OptionError` if the order is unknown, or needs a reference and has none, or the reverse.
    """
    if (order in ("alti", "dot")) != (reference is not None):
        raise OptionError(f"order {order!r} goes {'with' if reference is None else 'without'} a reference")
    if order == "alti" or order == "dot":
        return order, 2.0
    if not order > 0:
        raise OptionError(f"order {order!r} is no norm: 'alti', 'dot' or a number p > 0 is needed")
    named: dict[float, Kind] = {1.0: "l1", 2.0: "l2", float("inf"): "max"}
    return named.get(order, "lp"), 2.0 if order == float("inf") else float(order)


def norms(products: Products, *, order: Order, reference: Float[Tensor, "batch row out"] | None = None) -> PairNorms:
    """Reduce T = W v of each pair by `order`; without a weight T is v.

    `reference` is the y of `alti` and `dot`. Every sequence has the same number of consecutive groups.
    """
    kind, p = kind_of(order, reference)
    v, weight = products.vectors.double(), products.weight
    contributions = (
        v if weight is None else torch.einsum("goc,gcij->goij", weight.double().expand(v.shape[0], -1, -1), v)
    )
    if reference is not None:
        each = reference.double().transpose(1, 2).unsqueeze(-1)
        y = each.repeat_interleave(v.shape[0] // each.shape[0], dim=0)
        return (y * contributions).sum(1) if kind == "dot" else (y.abs() - (y - contributions).abs()).sum(1)
    return torch.linalg.vector_norm(contributions, torch.inf if kind == "max" else p, dim=1)


def alti_norms(products: Products, reference: Float[Tensor, "batch row out"]) -> tuple[PairNorms, PairNorms]:
    """Return the orders "alti" and 1 of `norms`."""
    return norms(products, order="alti", reference=reference), norms(products, order=1.0)
