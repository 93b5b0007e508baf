"""Tensors whose rows have channels of several tokens, or other channels than other rows, as values with these rows.

An axis of channels that becomes one of tokens, as in the shuffle of channels to pixels, and an axis of tokens that
becomes one of channels, as in the merging of patches, are sums of selections, which are exact.
"""

from contextlib import suppress
from functools import reduce

import torch

from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import Matrix, Scale
from unilinattn.recording.layout import Carried, added

SELECTIONS = 256
"""Largest number of selections that are added."""


def summed(first: Carried, second: Carried) -> Carried:
    """Return the sum of two carried tensors of one shape, whatever their layouts.

    Of one token in two places, for instance, two tokens are joined, and their axis may have been taken for channels.
    Raises `UncoveredError` if the axes that are tokens in one are neither tokens nor channels in the other.
    """
    try:
        return added(first, second)
    except UncoveredError:
        for carried, other in ((first, second), (second, first)):
            with suppress(UncoveredError):
                return added(_like(carried, other), other)
        raise


def _like(carried: Carried, other: Carried) -> Carried:
    """Return a tensor with the tokens and channels along the axes where another one has them."""
    split = [axis for axes in other.layout.split for axis in axes]
    shape = [size for size, _ in split]
    order = sorted(range(len(split)), key=lambda axis: not split[axis][1])
    rows = sum(is_row for _, is_row in split)
    value = by_row(carried.moved(carried.index.reshape(shape).permute(order)), rows)
    back = [order.index(axis) for axis in range(len(order))]
    return value.moved(value.index.permute(back).reshape(carried.index.shape))


def by_row(carried: Carried, rows: int) -> Carried:
    """Return a tensor whose first `rows` axes number tokens and whose others number channels, in its own order.

    Raises `UncoveredError` for rows that read from several sequences, and for more than `SELECTIONS` different
    selections of channels.
    """
    batch, length, width = carried.shape
    shape = carried.index.shape
    index = carried.index.reshape(shape[:rows].numel(), -1)
    order = torch.argsort(index[:, 0] // width // length, stable=True)
    index = index[order]
    source, channel = index // width, index % width
    sequences = torch.arange(batch, device=order.device)[:, None]
    if len(index) % batch or bool(((source // length).view(batch, -1) != sequences).any()):
        raise UncoveredError("values of several sequences are joined, or the sequences have different numbers of rows")
    # Columns that come from one token in every row are one selection for the rows with the same channels of it.
    _, groups = torch.unique(source, dim=1, return_inverse=True)
    terms: list[Carried] = []
    for group in groups.unique():
        columns = (groups == group).nonzero()[:, 0]
        term = carried.with_tokens((source[:, columns[0]] % length).view(batch, -1))
        kinds, kind = torch.unique(channel[:, columns], dim=0, return_inverse=True)
        if len(terms) + len(kinds) > SELECTIONS:
            raise UncoveredError(f"its rows have more than {SELECTIONS} different selections of channels")
        for number, channels in enumerate(kinds):
            ones = carried.like.new_zeros(index.shape[1], width)
            ones[columns, channels] = 1
            of_rows = Scale("gate", (kind == number).to(ones).view(batch, -1, 1))
            selected = term if len(kinds) == 1 else term.then(of_rows)
            terms.append(selected.then(Matrix("input", ones), channels=len(ones)))
    total = reduce(added, terms)
    rows_in_order = torch.argsort(order)
    return total.moved(total.index.flatten(0, 1)[rows_in_order].reshape(shape))
