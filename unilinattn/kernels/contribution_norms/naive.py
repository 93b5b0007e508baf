"""The definition of the contribution norms, every vector formed in float64: what faster forms are tested against."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError

Order = Literal["l1", "l2", "max", "alti", "dot"] | float
"""What is left of a contribution T: its l1, l2, largest or, for a number p, lp norm; ||y||_1 - ||y - T||_1; y . T."""

Kind = Literal["l1", "l2", "lp", "max", "alti", "dot"]


def kind_of(order: Order, reference: Tensor | None) -> tuple[Kind, float]:
    """Return what an order asks for, and its p; raise `OptionError` where the reference does not fit it."""
    if (order in ("alti", "dot")) != (reference is not None):
        raise OptionError(f"order {order!r} goes {'with' if reference is None else 'without'} a reference")
    if isinstance(order, str):
        return order, 2.0
    if not order > 0:
        raise OptionError(f"order {order!r} is no norm: p > 0 is needed")
    return ("max", 2.0) if order == float("inf") else ("lp", float(order))


def norms(
    read: Float[Tensor, "batch row channel state"],
    write: Float[Tensor, "batch col channel state"],
    weight: Float[Tensor, "out channel"],
    *,
    order: Order,
    reference: Tensor | None = None,
) -> Float[Tensor, "batch row col"]:
    """Reduce T_ij = W v_ij for all pairs, v_ijc = sum_n read_icn write_jcn.

    `reference` is y, (batch, row, out), for `alti` and
    one vector (out) for `dot`.
    """
    return _reduced(torch.einsum("bicn,bjcn->bijc", read.double(), write.double()), weight, order, reference)


def mapped_norms(
    alpha: Float[Tensor, "batch head row col"],
    value: Float[Tensor, "batch col channel"],
    weight: Float[Tensor, "out channel"],
    *,
    order: Order,
    left: Float[Tensor, "batch row channel"] | None = None,
    reference: Tensor | None = None,
) -> Float[Tensor, "batch row col"]:
    """Reduce T_ij = W v_ij for all pairs, v_ijc = left_ic alpha_hij value_jc, a head for consecutive channels."""
    each = alpha.double().repeat_interleave(value.shape[2] // alpha.shape[1], dim=1).permute(0, 2, 3, 1)
    vectors = each * value.double().unsqueeze(1)
    return _reduced(vectors if left is None else vectors * left.double().unsqueeze(2), weight, order, reference)


def _reduced(vectors: Tensor, weight: Tensor, order: Order, reference: Tensor | None) -> Tensor:
    kind, p = kind_of(order, reference)
    found = vectors @ weight.double().T
    if reference is not None and kind == "alti":
        y = reference.double().unsqueeze(2)
        return y.abs().sum(-1) - (y - found).abs().sum(-1)
    if reference is not None and kind == "dot":
        return found @ reference.double()
    return torch.linalg.vector_norm(found, {"l1": 1, "l2": 2, "max": torch.inf}.get(kind, p), dim=-1)
