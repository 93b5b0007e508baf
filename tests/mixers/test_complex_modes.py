"""Complex modes: a Toeplitz core with complex kernels and values, as in S5."""

import pytest
import torch

from unilinattn.mixers import Toeplitz
from unilinattn.models.s5 import S5
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Matrix, Mix, Scale, ToComplex, ToReal

BATCH, MODES = 2, 4


def real_inner(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.conj() * y).real.sum())


@pytest.mark.parametrize("length", [1, 3, 65, 130])
@pytest.mark.parametrize("taps", [5, 200])
def test_every_operation_is_one_complex_matrix(taps: int, length: int) -> None:
    decay = torch.polar(0.8 + 0.2 * torch.rand(MODES).double(), torch.randn(MODES).double())
    mixer = Toeplitz(decay[:, None] ** torch.arange(taps), batch=BATCH, length=length)
    matrix = mixer.materialize()
    value, grad = torch.randn(2, BATCH, length, MODES, 3, dtype=torch.complex128)
    torch.testing.assert_close(mixer.apply(value), torch.einsum("bhij,bjhp->bihp", matrix, value))
    torch.testing.assert_close(mixer.adjoint(grad), torch.einsum("bhij,bihp->bjhp", matrix.conj(), grad))
    assert real_inner(mixer.apply(value), grad) == pytest.approx(real_inner(value, mixer.adjoint(grad)), rel=1e-11)
    index = torch.full((BATCH, 1), length - 1)
    torch.testing.assert_close(mixer.rows(index)[:, :, 0], matrix[:, :, -1])


def test_s5_is_a_chain_over_complex_modes() -> None:
    width, length = 6, 70
    model = S5(width, d_state=8).double().seq
    modes = model.modes()
    x = torch.randn(BATCH, length, width, dtype=torch.float64)
    kernel = modes.decay.detach()[:, None] ** torch.arange(length)
    core = (
        ToComplex("input"),
        Matrix("input", modes.inputs.detach()),
        Mix("core", Toeplitz(kernel, batch=BATCH, length=length)),
        Matrix("output", modes.outputs.detach()),
        ToReal("output"),
    )
    chain = (Branch("core", (core, (Scale("skip", model.D.detach()[None, None]),))),)
    operator = MixerOperator({"x": chain}, inputs={"x": x}, output=model(x).detach())
    assert operator.reconstruction_error() <= 1e-12
    y = torch.randn_like(x)
    assert float((operator.apply(x) * y).sum()) == pytest.approx(float((x * operator.adjoint(y)).sum()), rel=1e-11)
    matrix = operator.matrix()
    lag = torch.arange(length)[:, None] - torch.arange(length)
    expected = (kernel.real.mean(0)[lag.clamp_min(0)] * (lag >= 0)).expand(BATCH, -1, -1)
    torch.testing.assert_close(matrix, expected)
    rows = torch.randn(BATCH, 3, length, dtype=torch.float64)
    torch.testing.assert_close(operator.left_multiply(rows), rows @ matrix)
    shares = operator.contributions(50)
    torch.testing.assert_close(shares.sum(1), operator.apply(x)[:, 50])
