"""Negative controls: broken mixers, which the laws must refuse by name."""

import pytest
import torch
from torch import Tensor

from unilinattn.mixers import CoreMixer, Dense, ScalarDecay
from unilinattn.testing import (
    MIXER_LAWS,
    LawViolation,
    batch_is_a_loop,
    check_mixer,
    gradients_are_finite,
    mixer_passes,
    require_linear_memory,
)

ALL = slice(None)


class Lower(Dense):
    """A causal mixer of random weights, the base of the broken ones."""

    causal = True

    def __init__(self, length: int = 6) -> None:
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.randn(2, 3, length, length, generator=generator, dtype=torch.float64).tril())


class ScaledApply(Lower):
    def apply(self, value: Tensor) -> Tensor:
        return 1.001 * super().apply(value)


class AdjointLikeApply(Lower):
    def adjoint(self, grad: Tensor) -> Tensor:
        return self.apply(grad)


class TileOfAllHeads(Lower):
    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Tensor:
        return super().tile(rows, cols, slice(heads.start, heads.stop))


class NextRows(Lower):
    def rows(self, index: Tensor) -> Tensor:
        return super().rows((index + 1) % self.shape[2])


class DiagonalBelow(Lower):
    def diagonal(self) -> Tensor:
        return torch.nn.functional.pad(self.weights.diagonal(offset=-1, dim1=-2, dim2=-1), (1, 0))


class Transposed(Lower):
    """The transposed matrix: consistent, but every row reads the future."""

    def apply(self, value: Tensor) -> Tensor:
        return super().adjoint(value)

    def adjoint(self, grad: Tensor) -> Tensor:
        return super().apply(grad)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Tensor:
        return super().tile(cols, rows, heads).mT

    def rows(self, index: Tensor) -> Tensor:
        return CoreMixer.rows(self, index)


class FillsItsMatrix(Lower):
    def apply(self, value: Tensor) -> Tensor:
        return torch.einsum("bhij,bjhp->bihp", self.materialize(), value)


BROKEN = {
    "apply": (ScaledApply, r"apply\(v\) against materialize\(\) @ v: relative error 1.0e-03"),
    "adjoint": (AdjointLikeApply, r"<A v, g> against <v, A\* g>"),
    "tile": (TileOfAllHeads, r"tile\(-2:, :, ::2\) .*shape \(2, 3, 2, 6\) instead of \(2, 2, 2, 6\)"),
    "rows": (NextRows, r"rows\(index\) against the matrix"),
    "diagonal": (DiagonalBelow, r"diagonal\(\) against the matrix's diagonal"),
    "causality": (Transposed, "the matrix has weights above the diagonal"),
    "matrix-free": (FillsItsMatrix, "FillsItsMatrix fills its matrix where a pass over the sequence is needed"),
}


def test_every_law_of_one_mixer_has_a_control() -> None:
    assert BROKEN.keys() == MIXER_LAWS.keys()


def test_the_correct_mixer_passes() -> None:
    check_mixer(Lower())


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_mixer_is_refused_by_name(law: str) -> None:
    broken, message = BROKEN[law]
    with pytest.raises(LawViolation, match=message) as caught:
        check_mixer(broken())
    assert caught.value.law == law


def test_a_leak_into_the_past_is_refused_even_where_the_matrix_hides_it() -> None:
    class Leaks(Lower):
        def apply(self, value: Tensor) -> Tensor:
            return super().apply(value) + 1e-14 * value.sum(1, keepdim=True)

    with pytest.raises(LawViolation, match="apply: tokens later change what they must not") as caught:
        check_mixer(Leaks())
    assert caught.value.law == "causality"


def test_a_batch_that_mixes_is_refused() -> None:
    mixed = Lower()
    singles = [Dense(mixed.weights[b : b + 1]) for b in range(2)]
    batch_is_a_loop(mixed, singles, 1e-12)
    with pytest.raises(LawViolation, match="apply of a batch against the single sequences") as caught:
        batch_is_a_loop(Dense(mixed.weights.flip(0)), singles, 1e-12)
    assert caught.value.law == "batch"


def test_an_exponential_before_the_mask_is_refused() -> None:
    class LateMask(ScalarDecay):
        def materialize(self) -> Tensor:
            total = self.log_decay.cumsum(1).transpose(1, 2)
            grown = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp()
            return torch.where(torch.ones_like(grown).tril() == 1, grown, 0.0)

    factors = {
        "query": torch.ones(1, 4, 1, 2),
        "key": torch.ones(1, 4, 1, 2),
        "log_decay": torch.full((1, 4, 2), -200.0),
    }
    gradients_are_finite(ScalarDecay, factors)
    with pytest.raises(LawViolation, match=r"the gradient of materialize in \['log_decay'\] is not finite") as caught:
        gradients_are_finite(LateMask, factors)
    assert caught.value.law == "gradient"


def test_a_pass_that_grows_with_the_square_of_the_length_is_refused() -> None:
    with pytest.raises(
        LawViolation, match=r"adjoint allocates [34]\.\d+ times as much at 128 tokens as at 64"
    ) as caught:
        require_linear_memory(lambda length: mixer_passes(_Quadratic(length)), 64)
    assert caught.value.law == "memory"


class _Quadratic(Lower):
    def adjoint(self, grad: Tensor) -> Tensor:
        return torch.einsum("bhij,bihp->bjhp", 1.0 * self.weights, grad)
