"""The states between chunks, in torch and by Triton's interpreter, against their definition in values and gradients."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.chunk_states import naive, tiled, triton
from unilinattn.testing import relative_error

BATCH, HEADS = 2, 3
SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


def transitions(kind: str, chunks: int, size: int) -> Tensor:
    """Contractions, some of which forget everything."""
    shape = (BATCH, chunks, HEADS)
    if kind == "matrix":
        orthogonal = torch.linalg.qr(torch.randn(*shape, size, size, dtype=torch.float64)).Q
        return orthogonal * torch.rand(*shape, 1, 1, dtype=torch.float64)
    decay = torch.rand(*shape, size if kind == "coordinate" else 1, 1, dtype=torch.float64)
    return decay.where(decay > 0.1, 0)


def run(
    form: ModuleType, dtype: torch.dtype, tensors: list[Tensor | None], weight: Tensor, reverse: bool
) -> list[Tensor]:
    cast = [None if t is None else t.to(dtype).requires_grad_() for t in tensors]
    states = form.chunk_states(*cast, reverse=reverse)
    given = [t for t in cast if t is not None]
    return [states, *torch.autograd.grad((states * weight.to(dtype)).sum(), given)]


@pytest.mark.parametrize("form", [tiled, triton], ids=["tiled", "triton"])
@pytest.mark.parametrize("kind", ["matrix", "coordinate", "head"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("chunks", "size", "channels"),
    [(1, 1, 1), (3, 5, 2), (4, 70, 34), pytest.param(2, 33, 1, marks=SLOW), pytest.param(2, 260, 20, marks=SLOW)],
)
@pytest.mark.parametrize("begun", [False, True])
def test_states_and_gradients_equal_the_definition(
    form: ModuleType, kind: str, reverse: bool, chunks: int, size: int, channels: int, begun: bool
) -> None:
    torch.manual_seed(size)
    written = torch.randn(BATCH, chunks, HEADS, size, channels, dtype=torch.float64)
    tensors = [transitions(kind, chunks, size), written, torch.randn_like(written[:, 0]) if begun else None]
    # Triton's form takes any strides.
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    weight = torch.randn(BATCH, chunks + 1, HEADS, size, channels, dtype=torch.float64)
    dtype, limit = (torch.float64, 1e-13) if form is tiled else (torch.float32, 1e-5)
    expected = run(naive, torch.float64, tensors, weight, reverse)
    actual = run(form, dtype, tensors, weight, reverse)
    for what, one, other in zip(("states", "transition", "written", "initial"), actual, expected, strict=False):
        assert one.dtype == dtype, what
        assert one.shape == other.shape, what
        assert relative_error(one, other) < limit, what


def test_gradients_of_transitions_and_of_written_states_alone() -> None:
    tensors = [transitions("matrix", 3, 5), torch.randn(BATCH, 3, HEADS, 5, 2, dtype=torch.float64)]
    for wanted in (0, 1):
        gradients = []
        for form, dtype in ((naive, torch.float64), (triton, torch.float32)):
            cast = [t.detach().to(dtype) for t in tensors]
            cast[wanted].requires_grad_()
            (gradient,) = torch.autograd.grad(form.chunk_states(*cast).square().sum(), cast[wanted])
            gradients.append(gradient)
        assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_bfloat16_is_carried_in_float32() -> None:
    written = torch.randn(1, 40, HEADS, 4, 2).bfloat16()
    transition = torch.rand(1, 40, HEADS, 4, 1).bfloat16()
    states = triton.chunk_states(transition, written)
    assert states.dtype == torch.bfloat16
    # Each state is rounded once, and the rounding is not carried on.
    expected = naive.chunk_states(transition, written)
    assert (states.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
