"""Bands: chains of scales and short convolutions as coefficients by lag, y_m = sum_lag c_lag[m] x_{m - lag}."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.groups import repeat_groups
from unilinattn.mixers import Toeplitz
from unilinattn.operator.stages import Branch, Mix, Scale, Stage

Band = Mapping[int, Tensor]
"""Coefficients by lag, each (batch or 1, length or 1, channel or group)."""


def band(chain: Sequence[Stage]) -> Band | None:
    """Return the coefficients of a chain, None if it has other stages than scales and short convolutions."""
    total: Band = {0: torch.ones(1, 1, 1, device="cpu")}
    for stage in chain:
        coefficients = _stage_band(stage)
        if coefficients is None:
            return None
        total = _composed(coefficients, total)
    return total


def shifted(x: Float[Tensor, "batch length channel"], lag: int) -> Float[Tensor, "batch length channel"]:
    """Move each token `lag` positions later; the last `lag` tokens are dropped."""
    count = max(x.shape[1] - lag, 0)
    return functional.pad(x[:, :count], (0, 0, x.shape[1] - count, 0))


def add_band(
    block: Float[Tensor, "batch *channel row col"],
    rows: slice,
    first: int,
    lag: int,
    factor: Float[Tensor, "#batch *#channel #length"],
) -> None:
    """Add `factor` of each row i at column i - lag, in place, to a block of `rows` whose first column is `first`."""
    offset = rows.start - first - lag
    if not -block.shape[-2] < offset < block.shape[-1]:
        return
    diagonal = block.diagonal(offset, -2, -1)
    start = max(rows.start, first + lag)
    diagonal += factor if factor.shape[-1] == 1 else factor[..., start : start + diagonal.shape[-1]]


def _stage_band(stage: Stage) -> Band | None:
    if isinstance(stage, Scale):
        return {0: stage.scale}
    if isinstance(stage, Mix) and isinstance(stage.mixer, Toeplitz) and stage.mixer.is_short:
        return {lag: tap[None, None] for lag, tap in enumerate(stage.mixer.taps.unbind(1))}
    if isinstance(stage, Branch):
        total: dict[int, Tensor] = {}
        for chain in stage.chains:
            coefficients = band(chain)
            if coefficients is None:
                return None
            for lag, factor in coefficients.items():
                _accumulate(total, lag, factor)
        return total
    return None


def _composed(outer: Band, inner: Band) -> Band:
    total: dict[int, Tensor] = {}
    for lag, factor in outer.items():
        for inner_lag, earlier in inner.items():
            moved = earlier.to(factor)
            if lag and earlier.shape[1] > 1:
                moved = shifted(moved, lag)
            _accumulate(total, lag + inner_lag, _at_one_width(torch.mul, factor, moved))
    return total


def _accumulate(total: dict[int, Tensor], lag: int, factor: Tensor) -> None:
    total[lag] = _at_one_width(torch.add, total[lag], factor) if lag in total else factor


def _at_one_width(operation: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Repeat the factor with fewer groups, then combine both."""
    width = max(a.shape[-1], b.shape[-1])
    return operation(repeat_groups(a, width), repeat_groups(b, width))
