"""Numbers as a fraction times a power of two, which keep products in the range of their dtype."""

from functools import cache
from math import frexp

import torch
from jaxtyping import Float, Int
from torch import Tensor

Scaled = tuple[Float[Tensor, "*axes"], Int[Tensor, "*axes"]]
"""Fractions of absolute value in [0.5, 1), or zero, and exponents: fraction * 2**exponent."""

PRODUCT_ELEMENTS = 12
"""Elements that `scaled_product` and its users hold for each entry of the product, beside an eighth of the factors."""


def exponent_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the exponents of the smallest normal and of the largest number, as `frexp` gives them."""
    info = torch.finfo(dtype)
    return frexp(info.tiny)[1], frexp(info.max)[1]


def times_power_of_two(x: Float[Tensor, "*axes"], exponent: Int[Tensor, "*#axes"]) -> Float[Tensor, "*axes"]:
    """Return x 2**exponent, exact where it is a normal number; the exponents may exceed the range of the dtype."""
    low, high = exponent_range(x.dtype)
    powers = _powers(x.dtype).to(x.device)
    first = exponent.clamp(low - 1, high - 1)
    second = (exponent - first).clamp(low - 1, high - 1)
    return x * powers[first - (low - 1)] * powers[second - (low - 1)]


def flush_(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Set subnormal numbers to zero in place: products read them with few digits, and slowly."""
    info = torch.finfo(x.dtype)
    largest_subnormal = info.tiny * (1 - info.eps)
    return torch.hardshrink(x, largest_subnormal, out=x)


def scaled_product(factors: Float[Tensor, "first factor *rest"]) -> Scaled:
    """Return the product over the second axis, which neither underflows nor overflows.

    It holds fractions and exponents of an eighth of the factors, or of a single one.
    """
    # The product of n fractions is at least 2**-n.
    low, _ = exponent_range(factors.dtype)
    count = max(1, min(-low - 1, factors.shape[1] // 8))
    total: Scaled | None = None
    for block in factors.split(count, dim=1):
        fraction, exponent = torch.frexp(block)
        product = _normal(fraction.prod(1), exponent.sum(1, dtype=torch.int32))
        total = product if total is None else multiply(total, product)
    assert total is not None
    return total


def multiply(a: Scaled, b: Scaled) -> Scaled:
    """Return the product of two scaled numbers."""
    return _normal(a[0] * b[0], a[1] + b[1])


def power(base: Scaled, exponent: int) -> Scaled:
    """Return a scaled number to the power of a positive integer."""
    if exponent == 1:
        return base
    half = power(base, exponent // 2)
    square = multiply(half, half)
    return multiply(square, base) if exponent % 2 else square


def signed_root(number: Scaled, degree: int) -> Float[Tensor, "*axes"]:
    """Return sign(x) |x|**(1 / degree) of scaled numbers x, by their logarithms."""
    fraction, exponent = number
    whole = exponent.div(degree, rounding_mode="floor")
    root = torch.exp2((fraction.abs().log2() + (exponent - whole * degree)) / degree)
    return times_power_of_two(fraction.sign() * root, whole)


def _normal(fraction: Float[Tensor, "*axes"], exponent: Int[Tensor, "*axes"]) -> Scaled:
    fraction, more = torch.frexp(fraction)
    return fraction, exponent + more


@cache
def _powers(dtype: torch.dtype) -> Float[Tensor, " power"]:
    """Return the normal powers of two in ascending order, exactly."""
    low, high = exponent_range(dtype)
    return torch.tensor([2.0**exponent for exponent in range(low - 1, high)], dtype=dtype, device="cpu")
