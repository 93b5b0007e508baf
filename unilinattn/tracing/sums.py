"""Tell whether tensors, each times a factor, add up to another one element by element, up to rounding."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor

SAMPLE = 1 << 12
"""Approximate number of elements to which factors are fitted."""

FEW = 64
"""Approximate number of elements by which most candidates are ruled out."""

CANDIDATES = (16, 128)
"""Candidates that are tried at once on few elements: at first, where most sums are, and later."""

NEGLIGIBLE = 1e-10
"""Factor of a part that a total lacks, as fitted in float64."""

BLOCK = 1 << 20
"""Elements compared in float64 at once."""

Candidate = tuple[Tensor, Tensor, Tensor | None]
"""A tensor that may be the sum of a stream, the layer's output and another output: (total, stream, other)."""


def possible_sums(candidates: Iterator[Candidate], added: Tensor) -> Iterator[Candidate]:
    """Yield the candidates that may be sums by a few of their elements: those that are none cost no fit of many."""
    # The elements of each tensor once, of which a candidate names some; the last row is that of no other output.
    numbers, samples, bounds = dict[int, int](), list[Any](), list[float]()

    def number(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(samples)
            samples.append(_sample(tensor, FEW).double().cpu().numpy())
            bounds.append(8 * 3 * _epsilon(tensor))
        return numbers[id(tensor)]

    counts = chain(CANDIDATES[:1], repeat(CANDIDATES[1]))
    while batch := list(islice(candidates, next(counts))):
        named = [[number(stream), number(added), -1 if x is None else number(x), number(t)] for t, stream, x in batch]
        elements = np.stack([*samples, np.zeros_like(samples[0])])[named]
        may_be = _may_be_sums(elements, np.array(bounds)[[row[3] for row in named]])
        yield from (candidate for candidate, is_possible in zip(batch, may_be, strict=True) if is_possible)


def _may_be_sums(elements: Any, bounds: Any) -> list[bool]:
    """Tell for each candidate whether a few elements of its three summands fit those of its total.

    Numpy has a tenth of torch's cost for a call, and these arrays are small: `elements` is (candidate, 4, element), the
    total last, and `bounds` has the rounding of each total.
    """
    finite = np.isfinite(elements).all((1, 2))
    elements = np.where(finite[:, None, None], elements, 0)
    size = np.abs(elements).sum(1, keepdims=True)
    elements = elements / np.where(size == 0, 1, size)
    basis, total = elements[:, :3], elements[:, 3]
    norms = np.linalg.norm(basis, axis=2)
    unit = basis / np.where(norms == 0, 1, norms)[..., None]
    # A summand of zeros has no direction, and its factor is zero.
    gram = unit @ unit.swapaxes(1, 2) + np.eye(3) * (norms == 0)[:, :, None]
    # Summands that differ by their rounding have no inverse of their products.
    dependent = np.linalg.det(gram) < NEGLIGIBLE
    gram[dependent] = np.eye(3)
    solution = np.linalg.solve(gram, unit @ total[..., None])[..., 0]
    if dependent.any():
        inverse = np.linalg.pinv(unit[dependent].swapaxes(1, 2))
        solution[dependent] = (inverse @ total[dependent][..., None])[..., 0]
    missed = np.sqrt(np.square(total - (solution[:, None] @ unit)[:, 0]).mean(1))
    factors = np.abs(solution) / np.where(norms == 0, 1, norms)
    # The factors of a sum leave at most its rounding on each element, and those fitted here leave less of it.
    agrees = missed <= bounds * factors.max(1).clip(1)
    # Many totals are the stream itself, of which the output is no part.
    needed = ((factors > NEGLIGIBLE) | (np.abs(basis).max(2) < NEGLIGIBLE**0.5)).all(1)
    possible: list[bool] = (~finite | (agrees & needed)).tolist()
    return possible


def fit_factors(total: Tensor, summands: Sequence[Tensor]) -> list[float] | None:
    """Return the factors with which parts add up to a total, None if they do not or if a part is not needed.

    Every element has to agree up to the rounding of its sum, since in a norm a few large channels would hide the rest.
    """
    if len(summands) == 2 and _is_plain_sum(total, *summands):
        return [1.0, 1.0]
    basis, wanted = _scaled([_sample(summand, SAMPLE) for summand in summands], _sample(total, SAMPLE))
    if not bool(torch.isfinite(basis).all() and torch.isfinite(wanted).all()):
        return None
    sizes = basis.norm(dim=0)
    if not bool((sizes > 0).all()):
        return None
    bound = len(summands) * _epsilon(total)
    solution = torch.linalg.lstsq((basis / sizes).cpu(), wanted[:, None].cpu()).solution[:, 0].to(sizes) / sizes
    # A factor within rounding of one is set to one.
    solution = torch.where((solution - 1).abs() <= 8 * bound / sizes, torch.ones_like(solution), solution)
    shares = (basis * solution).abs()
    needed = (shares > 4 * bound * (wanted.abs() + shares.sum(1))[:, None]).any(0)
    if not bool(needed.all()) or not _agrees(basis, wanted, solution, bound):
        return None
    columns, sums = [summand.detach().flatten() for summand in summands], total.detach().flatten()
    blocks = (slice(start, start + BLOCK) for start in range(0, sums.numel(), BLOCK))
    if not all(_agrees(*_scaled([c[rows] for c in columns], sums[rows]), solution, bound) for rows in blocks):
        return None
    return [float(factor) for factor in solution]


def _is_plain_sum(total: Tensor, first: Tensor, second: Tensor) -> bool:
    """Tell whether a total is the sum of two tensors to the bit, and neither of them without the other."""
    same = torch.equal(total, first.detach() + second.detach()) if first.dtype == second.dtype == total.dtype else False
    return same and not torch.equal(total, first) and not torch.equal(total, second)


def _epsilon(total: Tensor) -> float:
    """Return the rounding of a sum; some hosts keep the residual in float32 even in a float64 model."""
    return max(torch.finfo(total.dtype).eps, torch.finfo(torch.float32).eps)


def _sample(tensor: Tensor, count: int) -> Num[Tensor, " element"]:
    """Return about `count` elements of a tensor, in its order."""
    # An odd step samples every channel.
    numbers = slice(None, None, tensor.numel() // count | 1)
    if tensor.is_contiguous():
        return tensor.detach().flatten()[numbers]
    # A tensor whose memory has another order would be copied as a whole.
    places = torch.unravel_index(torch.arange(tensor.numel(), device="cpu")[numbers], tensor.shape)
    return tensor.detach()[tuple(place.to(tensor.device) for place in places)]


def _scaled(columns: Sequence[Tensor], sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns and their supposed sum in float64, every row divided by the sum of its absolute values."""
    basis, wanted = torch.stack([column.double() for column in columns], dim=1), sums.double()
    size = basis.abs().sum(1) + wanted.abs()
    size = size.masked_fill(size == 0, 1)
    return basis / size[:, None], wanted / size


def _agrees(basis: Tensor, wanted: Tensor, factors: Tensor, bound: float) -> bool:
    rounded = wanted.abs() + basis.abs() @ factors.abs()
    return bool(((wanted - basis @ factors).abs() <= bound * rounded).all())
