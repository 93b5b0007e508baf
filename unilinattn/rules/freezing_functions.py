"""Rules of `rules.freezing` for functions that consist of others, which the mode's rules compute."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.call.nested import mapped
from unilinattn.mixers.base import checked_factors
from unilinattn.rules.forms import carried


def _addcmul(frozen: Any, x: Any, first: Any, other: Any, *, value: int | float = 1) -> Any:
    product = frozen._mul(first, other) if carried((first, other)) else first * other
    return frozen._add(x, product, alpha=value)


def _addcdiv(frozen: Any, x: Any, first: Any, other: Any, *, value: int | float = 1) -> Any:
    quotient = frozen._div(first, other) if carried((first, other)) else first / other
    return frozen._add(x, quotient, alpha=value)


def _lerp(frozen: Any, x: Any, end: Any, weight: Any) -> Any:
    return frozen._add(x, frozen._mul(frozen._sub(end, x), weight))


def _scatter(frozen: Any, x: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Any:
    mask = torch.zeros_like(x, dtype=torch.bool).scatter(dim, index, True)
    if isinstance(src, Tensor):
        src = torch.zeros_like(x).scatter(dim, index, frozen._source(src, x if carried(x) else src))
    return frozen._masked_fill(x, mask, value if src is None else src)


def _pad(frozen: Any, x: Tensor, pad: Sequence[int], mode: str = "constant", value: int | float | None = None) -> Any:
    padded = functional.pad(x, pad, mode=mode)
    if value:
        padded = padded + frozen._as_source(functional.pad(torch.zeros_like(x), pad, value=value), x)
    return frozen._ranked(padded, frozen.rank(x))


def _glu(frozen: Any, x: Tensor, dim: int = -1) -> Any:
    value, gate = x.chunk(2, dim)
    return frozen._ranked(value * torch.sigmoid(gate.detach()), 1)


def _constant_factors(frozen: Any, **factors: Tensor | None) -> tuple[Any, ...]:
    # The matrix of a token mixer is a frozen factor as a whole.
    return checked_factors(**mapped(factors, torch.detach))


RULES: dict[str, Callable[..., Any]] = {
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "scatter": _scatter,
    "pad": _pad,
    "glu": _glu,
    "checked_factors": _constant_factors,
}
"""Rules by the name of torch's function; their first argument is the mode."""
