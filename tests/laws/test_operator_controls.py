"""Negative controls: broken operators, which the laws must refuse by name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from tests.laws.operators import operator
from tests.laws.structures import STRUCTURES, Draw
from unilinattn.mixers import CoreMixer, ScalarDecay
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Mix, Scale, Stage
from unilinattn.testing import HOST_LAWS, OPERATOR_LAWS, LawViolation, check_operator, relative_error
from unilinattn.testing.checks import edited, variant
from unilinattn.testing.laws import padding, recurrence

SCALAR = next(structure for structure in STRUCTURES if structure.build is ScalarDecay)


def correct() -> MixerOperator:
    return operator("mamba", SCALAR, Draw(1, 2, 9, torch.float64))


def changed(edit: Callable[[Stage], Stage | None]) -> MixerOperator:
    """An operator with other stages and the inputs and output of the correct one."""
    op = correct()
    return variant(op, chains={"x": edited(op.chains["x"], edit)})


def of_class(cls: type[MixerOperator]) -> MixerOperator:
    op = correct()
    return cls(op.chains, inputs=op.inputs, output=op.output, name=op.name)


class Wrapped(CoreMixer):
    """A mixer that wraps another one."""

    structure, causal, data_controlled = "wrapped", True, True

    def __init__(self, inner: CoreMixer) -> None:
        self.inner = inner

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.inner.shape

    def apply(self, value: Tensor) -> Tensor:
        return self.inner.apply(value)

    def adjoint(self, grad: Tensor) -> Tensor:
        return self.inner.adjoint(grad)

    def tile(self, rows: slice = slice(None), cols: slice = slice(None), heads: slice = slice(None)) -> Tensor:
        return self.inner.tile(rows, cols, heads)

    def diagonal(self) -> Tensor:
        return self.inner.diagonal()

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self.inner.zeros(shape)


class Transposed(Wrapped):
    def apply(self, value: Tensor) -> Tensor:
        return self.inner.adjoint(value)

    def adjoint(self, grad: Tensor) -> Tensor:
        return self.inner.apply(grad)

    def tile(self, rows: slice = slice(None), cols: slice = slice(None), heads: slice = slice(None)) -> Tensor:
        return self.inner.tile(cols, rows, heads).mT


class TwiceApplied(Wrapped):
    def apply(self, value: Tensor) -> Tensor:
        return 2 * self.inner.apply(value)

    def adjoint(self, grad: Tensor) -> Tensor:
        return 2 * self.inner.adjoint(grad)


class FromItsMatrix(Wrapped):
    def apply(self, value: Tensor) -> Tensor:
        return torch.einsum("bhij,bjhp->bihp", self.materialize(), value)


def with_core(wrap: type[Wrapped]) -> MixerOperator:
    return changed(lambda s: replace(s, mixer=wrap(s.mixer)) if isinstance(s, Mix) and s.role == "core" else s)


class SharesSumToTwo(MixerOperator):
    def contributions(self, index, **options):  # type: ignore[no-untyped-def, override]  # a control
        return 2 * super().contributions(index, **options)


class SharesOfTheNextToken(MixerOperator):
    """Contributions shifted by one token: they sum to the same output, so completeness holds."""

    def contributions(self, index, **options):  # type: ignore[no-untyped-def, override]  # a control
        return super().contributions(index, **options).roll(1, dims=-2)


class ScaledAdjoint(MixerOperator):
    def adjoint(self, g: Tensor, *, port: str | None = None) -> Tensor:
        return 1.001 * super().adjoint(g, port=port)


class Squares(MixerOperator):
    def apply(self, x, *, bias: bool = True):  # type: ignore[no-untyped-def, override]  # a control
        y = super().apply(x, bias=bias)
        return y + 1e-3 * y * y


class TransposedMatrix(MixerOperator):
    def matrix(self, *arguments, **options):  # type: ignore[no-untyped-def, override]  # a control
        return super().matrix(*arguments, **options).mT


class BiasIsTheRest(MixerOperator):
    """The bias is y - T x, which is exact on the observed input for any T."""

    @property
    def bias(self) -> Tensor:
        return self.output - super().apply(self.inputs, bias=False)

    def apply(self, x, *, bias: bool = True):  # type: ignore[no-untyped-def, override]  # a control
        return super().apply(x, bias=False) + (self.bias if bias else 0)

    def reconstruction_error(self) -> float:
        return relative_error(self.apply(self.inputs), self.output)


class Noisy(MixerOperator):
    calls: Iterator[int] = count()

    def adjoint(self, g: Tensor, *, port: str | None = None) -> Tensor:
        return super().adjoint(g, port=port) * (1 + 1e-14 * (next(self.calls) % 2))


def half_precision(stage: Stage) -> Stage:
    return replace(stage, factor=stage.scale.half()) if isinstance(stage, Scale) and stage.role == "skip" else stage


def without_skip(stage: Stage) -> Stage:
    return replace(stage, chains=stage.chains[:1]) if isinstance(stage, Branch) else stage


BROKEN: dict[str, tuple[Callable[[], MixerOperator], str]] = {
    "reconstruction": (lambda: changed(without_skip), "the operator on the host's input against the host's output"),
    "completeness": (lambda: of_class(SharesSumToTwo), r"contributions and bias at rows \[0, 1, 3, 4, 8\] against"),
    "adjoint": (lambda: of_class(ScaledAdjoint), r"<A x, g> against <x, A\* g> at port 'x'"),
    "linearity": (lambda: of_class(Squares), r"A\(2x - 3y\) against 2 Ax - 3 Ay"),
    "dense": (lambda: with_core(TwiceApplied), "a fresh input against the product of dense stages"),
    "contributions": (lambda: of_class(SharesOfTheNextToken), "against the operator on token 0 alone"),
    "scopes": (lambda: of_class(TransposedMatrix), "core: the matrix against one-hot tokens run forward"),
    "bias": (lambda: of_class(BiasIsTheRest), "it changes with the recorded output of the host"),
    "causality": (lambda: with_core(Transposed), "of future tokens reach"),
    "matrix-free": (lambda: with_core(FromItsMatrix), "FromItsMatrix fills its matrix"),
    "repeatability": (lambda: of_class(Noisy), "adjoint differs from one call to the next"),
    "precision": (lambda: changed(half_precision), "skip: Scale.scale is torch.float16, not torch.float64"),
}


def test_every_law_of_operators_has_a_control() -> None:
    assert BROKEN.keys() == {**HOST_LAWS, **OPERATOR_LAWS}.keys()


def test_the_correct_operator_passes() -> None:
    check_operator(correct())


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_operator_is_refused_by_name(law: str) -> None:
    build, message = BROKEN[law]
    with pytest.raises(LawViolation, match=message) as caught:
        {**HOST_LAWS, **OPERATOR_LAWS}[law](build(), 1e-12)
    assert caught.value.law == law
    with pytest.raises(LawViolation):
        check_operator(build())


def test_only_the_law_of_the_bias_detects_a_residual_bias() -> None:
    op = changed(without_skip)
    cheat = BiasIsTheRest(op.chains, inputs=op.inputs, output=op.output)
    assert cheat.reconstruction_error() < 1e-15
    for law in HOST_LAWS.values():
        law(cheat, 1e-10)
    with pytest.raises(LawViolation) as caught:
        OPERATOR_LAWS["bias"](cheat, 1e-12)
    assert caught.value.law == "bias"


def test_a_bias_that_follows_the_recorded_input_is_refused() -> None:
    class FollowsInput(MixerOperator):
        @property
        def bias(self) -> Tensor:
            return super().bias + 1e-6 * self.inputs["x"].sum()

    with pytest.raises(LawViolation, match="it changes with the recorded input of the host"):
        OPERATOR_LAWS["bias"](of_class(FollowsInput), 1e-12)


def test_padding_that_contributes_is_refused() -> None:
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    masked = changed(lambda s: replace(s, factor=s.scale * real[..., None]) if s.role == "input" and _scales(s) else s)
    padding(masked, real, 1e-12)
    with pytest.raises(LawViolation, match="contributions of padded tokens to real ones") as caught:
        padding(correct(), real, 1e-12)
    assert caught.value.law == "padding"


def test_another_recurrence_is_refused() -> None:
    op, other = correct(), changed(without_skip)
    recurrence(op, op.apply, 1e-12)
    with pytest.raises(LawViolation, match="a fresh input against the frozen recurrence") as caught:
        recurrence(op, other.apply, 1e-12)
    assert caught.value.law == "recurrence"


def test_an_error_that_is_not_finite_is_no_pass() -> None:
    op = correct()
    op.output = torch.full_like(op.output, torch.nan)
    with pytest.raises(LawViolation, match="relative error inf"):
        HOST_LAWS["reconstruction"](op, 1e-5)


def _scales(stage: Stage) -> bool:
    return isinstance(stage, Scale)
