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
    product = frozen.mul(first, other) if carried((first, other)) else first * other
    return frozen.add(x, product, alpha=value)


def _addcdiv(frozen: Any, x: Any, first: Any, other: Any, *, value: int | float = 1) -> Any:
    quotient = frozen.div(first, other) if carried((first, other)) else first / other
    return frozen.add(x, quotient, alpha=value)


def _lerp(frozen: Any, x: Any, end: Any, weight: Any) -> Any:
    return frozen.add(x, frozen.mul(frozen.sub(end, x), weight))


def _square(frozen: Any, x: Tensor) -> Any:
    return frozen.ranked(x.detach() * x, frozen.rank(x))


def _pow(frozen: Any, x: Any, exponent: Any) -> Any:
    if not carried(x) or isinstance(exponent, Tensor) or exponent < 1:
        return torch.pow(*mapped((x, exponent), torch.detach))
    # Below 1 the factor x^(n - 1) would have a pole at zero, so the power is a factor as a whole.
    return frozen.ranked(x.detach().pow(exponent - 1) * x, frozen.rank(x))


def _scatter(frozen: Any, x: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Any:
    mask = torch.zeros_like(x, dtype=torch.bool).scatter(dim, index, True)
    if isinstance(src, Tensor):
        src = torch.zeros_like(x).scatter(dim, index, frozen.source(src, x if carried(x) else src))
    return frozen.masked_fill(x, mask, value if src is None else src)


def _pad(frozen: Any, x: Tensor, pad: Sequence[int], mode: str = "constant", value: int | float | None = None) -> Any:
    padded = functional.pad(x, pad, mode=mode)
    if value:
        padded = padded + frozen.constant(functional.pad(torch.zeros_like(x), pad, value=value), x)
    return frozen.ranked(padded, frozen.rank(x))


def _glu(frozen: Any, x: Tensor, dim: int = -1) -> Any:
    value, gate = x.chunk(2, dim)
    return frozen.ranked(value * torch.sigmoid(gate.detach()), 1)


def _constant_factors(frozen: Any, **factors: Tensor | None) -> tuple[Any, ...]:
    # The matrix of a token mixer is a frozen factor as a whole.
    return checked_factors(**mapped(factors, torch.detach))


RULES: dict[str, Callable[..., Any]] = {
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "square": _square,
    "pow": _pow,
    "scatter": _scatter,
    "pad": _pad,
    "glu": _glu,
    "checked_factors": _constant_factors,
}
"""Rules by the name of torch's function; their first argument is the mode."""
