"""Checks of every structure, on a case of drawn factors, constructor and definition."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from unilinattn.mixers.base import CoreMixer
from unilinattn.testing import check_mixer, gradients_are_finite, tolerance

LENGTHS = (1, 3, 63, 64, 65, 130)
"""Lengths around those of a chunk and of a block."""

PRECISION = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Largest relative error against the definition."""

Factors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A structure with its definition and its factors by name, drawn in float64."""

    draw: Callable[[int], Factors]
    build: Callable[[Factors], CoreMixer]
    define: Callable[[Factors, Tensor], Tensor]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error; 0 if both tensors are zero, infinite for NaN and infinite entries."""
    if not torch.isfinite(actual).all():
        return float("inf")
    difference = float((actual.double() - expected.double()).norm())
    return difference and difference / float(expected.double().norm())


def same(block: Tensor, expected: Tensor, whole: Tensor) -> bool:
    """Whether a block agrees with the matrix up to the rounding of the whole matrix.

    Entries that cancel to less than the rounding of their terms have no correct digits.
    """
    negligible = float((block - expected).norm()) <= 1e-16 * float(whole.norm())
    return negligible or error(block, expected) <= tolerance("law", torch.float64)


def values(mixer: CoreMixer, channels: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    batch, heads, _, keys = mixer.shape
    return torch.randn(batch, keys, heads, channels, dtype=torch.float64).to(dtype)


def cast(factors: Factors, dtype: torch.dtype) -> Factors:
    return {name: factor.to(dtype) for name, factor in factors.items()}


def check_definition(case: Case, factors: Factors, dtype: torch.dtype) -> None:
    """`apply` is the token-by-token recurrence in float64 with the factors in the mixer's dtype."""
    factors = cast(factors, dtype)
    mixer = case.build(factors)
    value = values(mixer, dtype=dtype)
    actual = mixer.apply(value)
    assert actual.dtype == dtype
    worst = error(actual, case.define(factors, value))
    assert worst <= PRECISION[dtype], f"apply is not the recurrence: {worst:.1e}"


def check_forms(mixer: CoreMixer) -> None:
    """Every law of mixers holds, and tiles, blocks and reductions agree with the matrix."""
    check_mixer(mixer)
    matrix = mixer.materialize()
    _, heads, queries, _ = mixer.shape
    third = max(1, queries // 3)
    slices = [slice(None), slice(third, 2 * third), slice(0, 1), slice(queries - 1, None), slice(1, None, 5)]
    for rows, cols in product(slices, slices):
        for chosen in (slice(None), slice(heads - 1, heads)):
            block, expected = mixer.tile(rows, cols, chosen), matrix[:, chosen, rows, cols]
            assert block.shape == expected.shape
            assert same(block, expected, matrix), f"tile {rows}, {cols} is not the matrix's"
    for channels in (1, 2):
        check_reductions(mixer, channels)


def check_reductions(mixer: CoreMixer, channels: int) -> None:
    """Blocks, reduced rows and weighted blocks agree with the matrix, with and without weights and taps."""
    batch, heads, queries, keys = mixer.shape
    matrix, width, limit = mixer.materialize(), heads * channels, tolerance("law", torch.float64)
    left = torch.randn(batch, queries, width, dtype=torch.float64)
    taps = {lag: torch.randn(batch, keys, width, dtype=torch.float64) for lag in (0, 1, 3) if lag < keys}
    taps[2] = torch.randn(1, 1, width, dtype=torch.float64)
    wide = matrix.repeat_interleave(channels, dim=1) * left.transpose(1, 2).unsqueeze(-1)
    expected = torch.zeros_like(wide)
    for lag, tap in taps.items():
        landed = wide * tap.transpose(1, 2).unsqueeze(2)
        expected[..., : max(keys - lag, 0)] += landed[..., lag:]
    for rows in (5, 64, 200):
        plain, weighed = (list(mixer.reduced_rows(rows, *weights)) for weights in ((), (left, taps)))
        assert [block.shape[1] for block in plain] == [min(rows, queries - at) for at in range(0, queries, rows)]
        assert error(torch.cat(plain, dim=1), matrix.sum(1)) <= limit, f"the sum over heads, {rows} rows a block"
        assert error(torch.cat(weighed, dim=1), expected.sum(1)) <= limit, f"the weighted sum, {rows} rows a block"
    blocks = [slice(queries // 2, queries), slice(0, queries // 2)]
    for block, part in zip(mixer.reduced_parts(blocks, left, taps), blocks, strict=True):
        assert error(block, expected.sum(1)[:, part]) <= limit, f"the weighted sum, {part}"
    begun = 0
    weighted = mixer.weighted_blocks(16, left, taps)
    for part, block in mixer.blocks(16):
        same_part, weigh = next(weighted)
        assert same_part == part
        assert part.start == begun
        begun = part.stop
        for cols in (slice(0, keys), slice(0, 7), slice(keys // 3, keys // 2)):
            cols = slice(cols.start, min(cols.stop, keys))
            assert same(block(cols), matrix[:, :, part, cols], matrix), f"block {part}, {cols}"
            assert same(weigh(cols), expected[:, :, part, cols], expected), f"weighted block {part}, {cols}"
    assert begun == queries


def check_gradients(case: Case, factors: Factors) -> None:
    """Gradients of every factor and of the values are those of the recurrence."""

    def gradients(run: Callable[[Factors, Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = {name: factor.clone().requires_grad_() for name, factor in factors.items()}
        x = value.clone().requires_grad_()
        (run(leaves, x) * weight).sum().backward()
        return {name: leaf.grad for name, leaf in {**leaves, "value": x}.items()}

    value = values(case.build(factors))
    weight = torch.randn_like(case.define(factors, value))
    actual, expected = gradients(lambda f, v: case.build(f).apply(v)), gradients(case.define)
    for name, gradient in expected.items():
        assert error(actual[name], gradient) <= 1e-10, f"the gradient by {name} is not the recurrence's"


def check_finite_gradients(case: Case, factors: Factors) -> None:
    """All operations have finite gradients in float32."""
    gradients_are_finite(lambda **cast_factors: case.build(cast_factors), cast(factors, torch.float32))


def check_causal(case: Case, length: int) -> None:
    """Values and factors of later tokens do not change earlier outputs by a single bit."""
    factors, other = case.draw(length), case.draw(length)
    cut = length // 2
    mixed = {
        name: torch.cat([factor[:, :cut], other[name][:, cut:]], dim=1) if factor.ndim > 2 else factor
        for name, factor in factors.items()
    }
    mixer, altered = case.build(factors), case.build(mixed)
    value = values(mixer)
    future = torch.cat([value[:, :cut], torch.randn_like(value[:, cut:])], dim=1)
    assert torch.equal(mixer.apply(value)[:, :cut], altered.apply(future)[:, :cut])
