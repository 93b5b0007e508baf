"""The definition of the contribution norms, every vector formed in float64: what faster forms are tested against."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError

Order = Literal["alti", "dot"] | float
"""What is left of a contribution T beside y: its lp norm for a number p (infinity: its largest size);
||y||_1 - ||y - T||_1; or y . T."""

Kind = Literal["l1", "l2", "lp", "max", "alti", "dot"]


def kind_of(order: Order, reference: Tensor | None) -> tuple[Kind, float]:
    """Return what an order asks for, and its p; raise `OptionError` where the reference does not fit it."""
    if (order in ("alti", "dot")) != (reference is not None):
        raise OptionError(f"order {order!r} goes {'with' if reference is None else 'without'} a reference")
    if order == "alti" or order == "dot":
        return order, 2.0
    if not order > 0:
        raise OptionError(f"order {order!r} is no norm: 'alti', 'dot' or a number p > 0 is needed")
    named: dict[float, Kind] = {1.0: "l1", 2.0: "l2", float("inf"): "max"}
    return named.get(order, "lp"), 2.0 if order == float("inf") else float(order)


def norms(
    vectors: Float[Tensor, "group channel row col"],
    weight: Float[Tensor, "#group out channel"] | None,
    *,
    order: Order,
    reference: Float[Tensor, "batch row out"] | None = None,
) -> Float[Tensor, "group row col"]:
    """Reduce T = W v of each pair; without a weight T is v.

    `reference` holds the y of `alti` and `dot`; a sequence has as many consecutive groups as the others.
    """
    kind, p = kind_of(order, reference)
    v = vectors.double()
    found = v if weight is None else torch.einsum("goc,gcij->goij", weight.double().expand(v.shape[0], -1, -1), v)
    if reference is not None:
        each = reference.double().transpose(1, 2).unsqueeze(-1)
        y = each.repeat_interleave(v.shape[0] // each.shape[0], dim=0)
        return (y * found).sum(1) if kind == "dot" else (y.abs() - (y - found).abs()).sum(1)
    return torch.linalg.vector_norm(found, torch.inf if kind == "max" else p, dim=1)
