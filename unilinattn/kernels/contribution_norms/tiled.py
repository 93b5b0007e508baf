"""Contribution norms of a tile in torch: vectors are formed in parts and reduced in cache."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms.naive import Kind, Order, PairNorms, Products, kind_of

PART = 1 << 19
"""Elements of T that are formed at a time."""


def norms(products: Products, *, order: Order, reference: Float[Tensor, "batch row out"] | None = None) -> PairNorms:
    """Reduce T = W v of each pair (LaTIM Eq. 5 for a norm, the numerator of Eq. 6 for `alti`); without W, T is v."""
    vectors = products.vectors
    result = vectors.new_empty(vectors.shape[0], *vectors.shape[2:])
    kind, p = kind_of(order, reference)
    y = None if reference is None else _by_channel(reference)
    sign_and_size = None if y is None or kind == "dot" else _sign_and_size(y)
    for group, row, inner, formed in _formed(products):
        if sign_and_size is not None:
            sign, size = (_of_groups(factor[:, :, row], group, len(vectors)) for factor in sign_and_size)
            result[group, row] = _alti(inner, sign, size, formed)[0]
        elif y is not None:
            result[group, row] = torch.mul(inner, _of_groups(y[:, :, row], group, len(vectors)), out=formed).sum(1)
        else:
            result[group, row] = _norm(inner, kind, p, formed)
    return result


def alti_norms(products: Products, reference: Float[Tensor, "batch row out"]) -> tuple[PairNorms, PairNorms]:
    """Return the orders "alti" and 1 of `norms`, with one product W v for both."""
    vectors = products.vectors
    scores = vectors.new_empty(vectors.shape[0], *vectors.shape[2:])
    norms = torch.empty_like(scores)
    sign_and_size = _sign_and_size(_by_channel(reference))
    for group, row, inner, formed in _formed(products):
        sign, size = (_of_groups(factor[:, :, row], group, len(vectors)) for factor in sign_and_size)
        scores[group, row], norms[group, row] = _alti(inner, sign, size, formed)
    return scores, norms


def held_elements(shape: Sequence[int], outs: int) -> int:
    """Return the elements that `norms` allocates besides its result; `shape` is (group, channel, row, col)."""
    groups, _, rows, cols = shape
    return min(groups * rows * cols * outs, max(PART, cols * outs))


def _formed(
    products: Products,
) -> Iterator[tuple[slice, slice, Float[Tensor, "part out row col"], Float[Tensor, "part out row col"] | None]]:
    """Yield parts of groups and rows, their T, and T again where it is a workspace: the product with W, not v."""
    vectors, weight = products
    groups, channels, rows, cols = vectors.shape
    outs = channels if weight is None else weight.shape[1]
    room: Tensor | None = None
    for group, row in _parts((groups, rows, cols), outs):
        inner = vectors[group, :, row]
        if weight is None:
            yield group, row, inner, None
            continue
        if room is None:
            # The first part is the largest; mapping fresh pages for each of them is slow.
            room = inner.new_empty(inner.shape[0] * outs * inner.shape[2] * cols)
        matrix = (weight if weight.shape[0] == 1 else weight[group]).expand(inner.shape[0], -1, -1)
        formed = room[: inner.shape[0] * outs * inner.shape[2] * cols].view(inner.shape[0], outs, -1)
        formed = torch.bmm(matrix, inner.flatten(2), out=formed).unflatten(2, inner.shape[2:])
        yield group, row, formed, formed


def _parts(shape: tuple[int, int, int], outs: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of groups and rows whose vectors stay in cache."""
    groups, rows, cols = shape
    row_step = max(1, min(rows, PART // max(1, outs * cols)))
    group_step = max(1, PART // max(1, outs * cols * row_step))
    for group in range(0, groups, group_step):
        for row in range(0, rows, row_step):
            yield slice(group, min(group + group_step, groups)), slice(row, min(row + row_step, rows))


def _by_channel(reference: Float[Tensor, "batch row out"]) -> Float[Tensor, "batch out row 1"]:
    """Return a copy in the layout of the vectors: with another one, elementwise operations take ten times as long."""
    return reference.transpose(1, 2).unsqueeze(-1).contiguous()


def _sign_and_size(y: Float[Tensor, "batch out row 1"]) -> tuple[Tensor, Tensor]:
    """Return the sign, 1 or -1, and the absolute value of y."""
    return torch.ones_like(y).copysign_(y), y.abs()


def _of_groups(factor: Float[Tensor, "batch out row 1"], group: slice, groups: int) -> Float[Tensor, "#part out row 1"]:
    """Return the factors of the sequences of a slice of groups."""
    if factor.shape[0] == 1:
        return factor
    owner = torch.arange(group.start, group.stop, device=factor.device) // (groups // factor.shape[0])
    return factor[owner]


def _norm(vectors: Float[Tensor, "part out row col"], kind: Kind, p: float, room: Tensor | None) -> Tensor:
    """Return the norms (part, row, col) of vectors; the workspace `room` may be the vectors themselves."""
    # torch's norms are slow over any axis but the innermost, so sums replace them.
    if kind == "l1":
        return torch.abs(vectors, out=room).sum(1)
    if kind == "max":
        return torch.abs(vectors, out=room).amax(1)
    if kind == "l2":
        return torch.square(vectors, out=room).sum(1).sqrt_()
    return torch.linalg.vector_norm(vectors, ord=p, dim=1)


def _alti(
    vectors: Float[Tensor, "part out row col"],
    sign: Float[Tensor, "#part out row 1"],
    size: Float[Tensor, "#part out row 1"],
    room: Tensor | None,
) -> tuple[Float[Tensor, "part row col"], Float[Tensor, "part row col"]]:
    """Return ||y||_1 - ||y - T||_1 and ||T||_1 for y of a sign and a size; `room` may be the vectors themselves."""
    along = torch.mul(vectors, sign, out=room)
    total = along.sum(1)
    positive = along.clamp_min_(0).sum(1)
    # |y| - |y - T| without the difference, which would leave only rounding for small T: T along y, reflected where it
    # goes beyond.
    return total - 2 * along.sub_(size).clamp_min_(0).sum(1), 2 * positive - total
