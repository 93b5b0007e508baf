"""Functions of complex numbers in recorded modules, by the functions of their real and imaginary parts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recording.modules import WIDTH
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import WHOLE
from unilinattn.recording import complex_numbers

LENGTH = 7


class Complex(nn.Module):
    """Turns tokens and their sums into complex numbers, and reads a part of a function of them."""

    def __init__(self, step: "Step") -> None:
        super().__init__()
        self.step, self.first = step, nn.Linear(WIDTH, WIDTH)
        numbers = ((WIDTH, WIDTH, 2), (WIDTH, 2), (WIDTH, 1, 3, 2))
        self.matrix, self.vector, self.taps = (nn.Parameter(draw(*shape, seed=3)) for shape in numbers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = torch.view_as_complex(torch.stack([x, x.cumsum(1)], -1))
        return self.step(z, *map(torch.view_as_complex, (self.matrix, self.vector, self.taps)))


Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def written(z: Tensor) -> Tensor:
    y = torch.zeros_like(z)
    y[:, 1:] = z[:, :-1]
    y[:, 0] = z[:, 1]
    return y


def filled(z: Tensor) -> Tensor:
    y = z.clone()
    y[:, 2] = 0
    return y.fill_(0) + z


STEPS: dict[str, Step] = {
    "linear": lambda z, w, b, k: functional.linear(z, w, b).real,
    "convolution": lambda z, w, b, k: functional.conv1d(z.mT, k, b, 1, 2, 2, WIDTH).mT.imag,
    "convolution by names": lambda z, w, b, k: functional.conv1d(z.mT, k, bias=b, padding=1, groups=WIDTH).mT.real,
    "product": lambda z, w, b, k: (z @ w).imag,
    "product from the left": lambda z, w, b, k: (w @ z.mT).mT.imag,
    "adjoint": lambda z, w, b, k: (w @ z.mH).mT.imag,
    "names in another order": lambda z, w, b, k: torch.complex(imag=z.real, real=z.imag).imag,
    "sum with a factor": lambda z, w, b, k: torch.add(z, z.conj(), alpha=2).imag,
    "numbers": lambda z, w, b, k: ((1j - z) * 1j - (2 + z) / (1 - 2j)).imag,
    "rotation": lambda z, w, b, k: (z * torch.exp(1j * torch.sigmoid(z.real))).real,
    "size": lambda z, w, b, k: (z / (1 + z.abs())).imag,
    "quotient": lambda z, w, b, k: (z / b).real,
    "in place": lambda z, w, b, k: z.clone().mul_(b).sub_(z).real,
    "joined": lambda z, w, b, k: torch.view_as_real(torch.cat([z, z.conj()], -1)).flatten(2),
    "tokens": lambda z, w, b, k: torch.stack([token * 1j for token in z.unbind(1)], 1).real,
    "chosen": lambda z, w, b, k: torch.where(z.real > 0, z, 0).masked_fill(z.imag > 0, 1j).imag,
    "mean": lambda z, w, b, k: (z.mean(1, keepdim=True) + z.cumsum(1).flip(1)).imag,
    "padded": lambda z, w, b, k: functional.pad(z, (0, 0, 1, -1)).imag,
    "written": lambda z, w, b, k: written(z.roll(1, 1)).imag,
    "filled": lambda z, w, b, k: filled(z).real,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_function_of_complex_numbers_is_exact(name: str) -> None:
    require_complete(operator(Complex(STEPS[name]), draw(2, LENGTH, WIDTH)))


@pytest.mark.parametrize("name", ["product", "linear", "rotation"])
def test_a_small_error_of_the_parts_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are compared with what the module itself computes."""
    right = complex_numbers._product

    def wrong(*arguments: object) -> complex_numbers.Parts:
        real, imaginary = right(*arguments)  # type: ignore[arg-type]
        return real * (1 + 1e-4), None if imaginary is None else imaginary * (1 + 1e-4)

    monkeypatch.setattr(complex_numbers, "_product", wrong)
    with pytest.raises(UncoveredError, match="give its output with an error of"):
        operator(Complex(STEPS[name]), draw(2, LENGTH, WIDTH))


@pytest.mark.parametrize(
    ("step", "roles"),
    [
        (lambda z, w, b, k: torch.lerp(z, z.conj(), 0.3).imag, [WHOLE]),
        (lambda z, w, b, k: functional.pad(z, (0, 0, 1, -1), value=1.0).imag, ["input", "core"]),
        (lambda z, w, b, k: torch.view_as_real(z**2).sum(-1), [WHOLE]),
    ],
    ids=["lerp", "padded by ones", "square"],
)
def test_functions_without_parts_make_one_stage(step: Step, roles: list[str]) -> None:
    op = operator(Complex(step), draw(2, LENGTH, WIDTH))
    assert [stage.role for stage in op.chains["x"]] == roles and op.reconstruction_error() < LIMIT


def test_a_part_that_is_written_through_a_view_is_refused() -> None:
    def step(z: Tensor, *_: Tensor) -> Tensor:
        y = z.clone()
        y.real.mul_(2)
        return y.real

    with pytest.raises(UncoveredError, match="error of"):
        operator(Complex(step), draw(2, LENGTH, WIDTH))
