"""Contribution norms of a tile in torch: one product forms all its vectors, sums over channels reduce them."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms.naive import Order, kind_of


def norms(
    read: Float[Tensor, "batch row channel state"],
    write: Float[Tensor, "batch col channel state"],
    weight: Float[Tensor, "out channel"],
    *,
    order: Order,
    reference: Tensor | None = None,
) -> Float[Tensor, "batch row col"]:
    """Reduce T_ij = W v_ij for all pairs, v_ijc = sum_n read_icn write_jcn."""
    return _of(read.transpose(1, 2) @ write.permute(0, 2, 3, 1), weight, order, reference)


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
    each = alpha.repeat_interleave(value.shape[2] // alpha.shape[1], dim=1) * value.transpose(1, 2).unsqueeze(2)
    return _of(each if left is None else each * left.transpose(1, 2).unsqueeze(3), weight, order, reference)


def reduced_vectors(
    vectors: Float[Tensor, "batch out row col"], order: Order, reference: Tensor | None = None
) -> Float[Tensor, "batch row col"]:
    """Reduce vectors that are there already (LaTIM Eq. 5 for a norm, the numerator of Eq. 6 for `alti`).

    torch's own norm is slow over an axis that is not the innermost: sums of the whole tile stand in for it there.
    """
    kind, p = kind_of(order, reference)
    if kind == "dot":
        return torch.einsum("bdij,d->bij", vectors, reference)
    if kind == "alti":
        assert reference is not None
        y = reference.transpose(1, 2).unsqueeze(3)
        # |y| - |y - T| without the difference, which leaves only rounding of a small T.
        along = torch.where(y < 0, -1, 1) * vectors
        return torch.minimum(along, 2 * y.abs() - along, out=along).sum(1)
    if kind == "l1" or p == 1:
        return vectors.abs().sum(1)
    if kind == "max":
        return vectors.abs().amax(1)
    if p == 2 and vectors.stride(1) != 1:
        return vectors.square().sum(1).sqrt()
    return torch.linalg.vector_norm(vectors, ord=p, dim=1)


def _of(vectors: Tensor, weight: Tensor, order: Order, reference: Tensor | None) -> Tensor:
    found = (weight @ vectors.flatten(2)).unflatten(2, vectors.shape[2:])
    return reduced_vectors(found, order, reference)
