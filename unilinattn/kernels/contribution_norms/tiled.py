"""Contribution norms of a tile in torch: vectors are formed in parts and reduced in cache."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms.naive import Order, kind_of

PART = 1 << 20
"""Elements of T that are formed at a time."""


def norms(
    vectors: Float[Tensor, "group channel row col"],
    weight: Float[Tensor, "#group out channel"] | None,
    *,
    order: Order,
    reference: Float[Tensor, "batch row out"] | None = None,
) -> Float[Tensor, "group row col"]:
    """Reduce T = W v of each pair (LaTIM Eq. 5 for a norm, the numerator of Eq. 6 for `alti`); without W, T is v."""
    result = vectors.new_empty(vectors.shape[0], *vectors.shape[2:])
    for group, row, part, formed in _formed(vectors, weight):
        y = None if reference is None else _of_groups(reference[:, row], group, len(vectors))
        result[group, row] = _reduced(part, order, y, formed)
    return result


def alti_norms(
    vectors: Float[Tensor, "group channel row col"],
    weight: Float[Tensor, "#group out channel"] | None,
    reference: Float[Tensor, "batch row out"],
) -> tuple[Float[Tensor, "group row col"], Float[Tensor, "group row col"]]:
    """Return the orders "alti" and 1 of `norms`, with one product W v for both."""
    scores = vectors.new_empty(vectors.shape[0], *vectors.shape[2:])
    sizes = torch.empty_like(scores)
    for group, row, part, formed in _formed(vectors, weight):
        y = _of_groups(reference[:, row], group, len(vectors))
        scores[group, row], sizes[group, row] = _alti(part, y, formed)
    return scores, sizes


def held_elements(shape: Sequence[int], outs: int) -> int:
    """Return the elements that `norms` allocates besides its result; `shape` is (group, channel, row, col)."""
    groups, _, rows, cols = shape
    return min(groups * rows * cols * outs, max(PART, cols * outs))


def _formed(
    vectors: Float[Tensor, "group channel row col"], weight: Float[Tensor, "#group out channel"] | None
) -> Iterator[tuple[slice, slice, Float[Tensor, "part out row col"], Float[Tensor, "part out row col"] | None]]:
    """Yield parts of groups and rows, their T, and T again where it is a workspace: the product with W, not v."""
    groups, channels, rows, cols = vectors.shape
    outs = channels if weight is None else weight.shape[1]
    for group, row in _parts((groups, rows, cols), outs):
        part = vectors[group, :, row]
        if weight is None:
            yield group, row, part, None
            continue
        matrix = weight if weight.shape[0] == 1 else weight[group]
        part = (matrix @ part.flatten(2)).unflatten(2, part.shape[2:])
        yield group, row, part, part


def _parts(shape: tuple[int, int, int], outs: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of groups and rows whose vectors stay in cache."""
    groups, rows, cols = shape
    row_step = max(1, min(rows, PART // max(1, outs * cols)))
    group_step = max(1, PART // max(1, outs * cols * row_step))
    for group in range(0, groups, group_step):
        for row in range(0, rows, row_step):
            yield slice(group, min(group + group_step, groups)), slice(row, min(row + row_step, rows))


def _of_groups(
    reference: Float[Tensor, "batch row out"], group: slice, groups: int
) -> Float[Tensor, "#part out row 1"]:
    """Return the reference of the sequences of a slice of groups."""
    y = reference.transpose(1, 2).unsqueeze(-1)
    if y.shape[0] == 1:
        return y
    owner = torch.arange(group.start, group.stop, device=y.device) // (groups // y.shape[0])
    return y[owner]


def _reduced(
    vectors: Float[Tensor, "part out row col"],
    order: Order,
    y: Float[Tensor, "#part out row 1"] | None,
    room: Tensor | None,
) -> Float[Tensor, "part row col"]:
    """Reduce vectors by `order`; the workspace `room` may be the vectors themselves."""
    kind, p = kind_of(order, y)
    if y is not None:
        return torch.mul(vectors, y, out=room).sum(1) if kind == "dot" else _alti(vectors, y, room)[0]
    # torch's norms are slow over any axis but the innermost, so sums replace them.
    if kind == "l1":
        return torch.abs(vectors, out=room).sum(1)
    if kind == "max":
        return torch.abs(vectors, out=room).amax(1)
    if kind == "l2":
        return torch.square(vectors, out=room).sum(1).sqrt_()
    return torch.linalg.vector_norm(vectors, ord=p, dim=1)


def _alti(
    vectors: Float[Tensor, "part out row col"], y: Float[Tensor, "#part out row 1"], room: Tensor | None
) -> tuple[Float[Tensor, "part row col"], Float[Tensor, "part row col"]]:
    """Return ||y||_1 - ||y - T||_1 and ||T||_1; the workspace `room` may be the vectors themselves."""
    along = torch.mul(vectors, torch.where(y < 0, -1, 1), out=room)
    total = along.sum(1)
    positive = along.clamp_min_(0).sum(1)
    # |y| - |y - T| without the difference, which would leave only rounding for small T: T along y, reflected where it
    # goes beyond.
    return total - 2 * along.sub_(y.abs()).clamp_min_(0).sum(1), 2 * positive - total
