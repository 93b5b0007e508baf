"""Values and gradients of the Triton scans against their definition in float64, in the interpreter."""

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.backend import using
from unilinattn.kernels.scan import tiled, triton_diagonal_pass, triton_launch
from unilinattn.kernels.scan import triton as form
from unilinattn.kernels.scan.memories import Diagonal, Scalar
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.scalar_decay import ScalarDecay
from unilinattn.testing import relative_error

SIZES = (1, 3, 70)
"""Lengths of one segment, and of three with a short last one."""
SLOW = pytest.mark.slow


pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select short segments, so that several programs run."""
    monkeypatch.setattr(triton_launch, "LEAST", 32)
    monkeypatch.setattr(triton_diagonal_pass, "BLOCK_ELEMENTS", 128)


def strong(shape: tuple[int, ...]) -> Tensor:
    """Log-decays from 0 to a decay that rounds to 0."""
    return -torch.rand(shape).pow(6) * 300


def diagonal(length: int, columns: int, heads: int = 3, states: int = 3, groups: int = 1) -> dict[str, Tensor | None]:
    torch.manual_seed(length)
    return {
        "query": torch.randn(2, length, groups, states),
        "key": torch.randn(2, length, groups, states),
        "log_decay": strong((2, length, heads, states)),
        "key_scale": torch.randn(2, length, heads),
        "rate": None,
        "reset": None,
        "value": torch.randn(2, length, heads, columns),
    }


def scalar(length: int, columns: int = 5, states: int = 3) -> dict[str, Tensor | None]:
    torch.manual_seed(length)
    return {
        "query": torch.randn(2, length, 2, states),
        "key": torch.randn(2, length, 2, states),
        "log_decay": strong((2, length, 4)),
        "value": torch.randn(2, length, 4, columns),
    }


def called(module: object, name: str, inputs: dict[str, Tensor | None], **options: str) -> Tensor:
    *factors, value = inputs.values()
    if name.startswith("diagonal"):
        return getattr(module, name)(Diagonal(*factors), value, **options)
    return getattr(module, name)(Scalar(*factors, torch.ones_like(factors[2])), value, **options)


def compared(name: str, inputs: dict[str, Tensor | None], bound: float = 1e-5) -> None:
    """Compare value and gradients with the torch implementation in float64, which other tests check."""
    names = [key for key, t in inputs.items() if t is not None and t.is_floating_point()]
    weight = torch.randn_like(inputs["value"])

    def run(module: object, dtype: torch.dtype) -> list[Tensor]:
        cast = {key: t.detach().to(dtype).requires_grad_() if key in names else t for key, t in inputs.items()}
        out = called(module, name, cast)
        grads = torch.autograd.grad(
            (out * weight.to(dtype)).sum(), [cast[key] for key in names], allow_unused=True, materialize_grads=True
        )
        return [out, *grads]

    for what, actual, expected in zip(
        ["output", *names], run(form, torch.float32), run(tiled, torch.float64), strict=True
    ):
        assert torch.isfinite(actual).all(), what
        assert relative_error(actual, expected) < bound, what


@pytest.mark.long
@pytest.mark.parametrize("name", ["diagonal_scan", "diagonal_scan_adjoint"])
@pytest.mark.parametrize(
    ("length", "columns"), [(1, 1), (3, 5), *(pytest.param(*size, marks=SLOW) for size in ((20, 5), (70, 1)))]
)
def test_the_diagonal_scan_and_its_gradients(name: str, length: int, columns: int) -> None:
    compared(name, diagonal(length, columns))


@SLOW
@pytest.mark.parametrize("columns", [1, 3])
def test_a_rate_resets_and_groups(columns: int) -> None:
    inputs = diagonal(20, columns, heads=4, groups=2)
    inputs["log_decay"] = torch.rand(2, 20, 4, 1).pow(4) * 50
    inputs["rate"] = -torch.rand(4, 3)
    inputs["reset"] = torch.rand(2, 20) < 0.1
    compared("diagonal_scan", inputs)
    inputs["key_scale"] = None
    inputs["key"] = torch.randn(2, 20, 4, 3)
    compared("diagonal_scan_adjoint", inputs)


@SLOW
def test_factors_may_be_strided_and_shared() -> None:
    inputs = diagonal(40, 1, heads=4)
    inputs["query"] = torch.randn(1, 3, 40, 1).permute(0, 2, 3, 1).expand(2, -1, -1, -1)
    inputs["value"] = torch.randn(2, 40, 1, 1).expand(-1, -1, 4, 3)
    inputs["log_decay"] = inputs["log_decay"].transpose(1, 3).contiguous().transpose(1, 3)
    other = scalar(40)
    other["value"] = torch.randn(2, 5, 40, 1).permute(0, 2, 3, 1).expand(-1, -1, 4, -1)
    for name, narrow in (("diagonal_scan", inputs), ("scalar_scan", other)):
        wide = {key: t.double() if t is not None else None for key, t in narrow.items()}
        assert relative_error(called(form, name, narrow), called(tiled, name, wide)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", ["scalar_scan", "scalar_scan_adjoint"])
@pytest.mark.parametrize("length", SIZES)
def test_the_scalar_scan_and_its_gradients(name: str, length: int) -> None:
    compared(name, scalar(length))


@SLOW
def test_many_states_and_columns() -> None:
    compared("scalar_scan", scalar(33, columns=34, states=34))
    compared("diagonal_scan", diagonal(17, 1, heads=1, states=20))


@SLOW
@pytest.mark.parametrize("decay", [-20.0, -1e3, -1e6])
def test_tokens_after_a_strong_decay_are_accurate(decay: float) -> None:
    for inputs, name in ((diagonal(40, 1, heads=2), "diagonal_scan"), (scalar(40), "scalar_scan")):
        weak = -0.05 * torch.rand_like(inputs["log_decay"])
        inputs["log_decay"] = torch.where(torch.rand_like(weak) < 0.15, torch.tensor(decay), weak)
        compared(name, inputs, bound=3e-6)


@SLOW
def test_a_state_passes_through_a_whole_segment() -> None:
    # The decays of the other tests leave nothing of a state after 32 tokens.
    for inputs, name in ((diagonal(70, 1, heads=1), "diagonal_scan"), (scalar(70, columns=1), "scalar_scan")):
        compared(name, {**inputs, "log_decay": -0.05 * torch.rand_like(inputs["log_decay"])})


def test_a_low_precision_product_rounds_only_its_inputs() -> None:
    inputs = scalar(63)
    wide = called(tiled, "scalar_scan", {name: t.double() for name, t in inputs.items()})
    # Two products in a row; Triton's interpreter truncates the inputs of each to bfloat16, by up to 2^-7.
    assert 1e-4 < relative_error(called(form, "scalar_scan", inputs, precision="bf16"), wide) < 2 * 2 * 2**-7


@pytest.mark.long
def test_mixers_use_the_kernels() -> None:
    value = torch.randn(2, 20, 4, 3)
    factors = scalar(20)
    diagonal_mixer = DiagonalDecay(factors["query"], factors["key"], strong((2, 20, 4, 3)))
    scalar_mixer = ScalarDecay(factors["query"], factors["key"], factors["log_decay"])
    for mixer in (diagonal_mixer, scalar_mixer):
        for pass_ in (mixer.apply, mixer.adjoint):
            with using("triton"):
                actual = pass_(value)
            assert relative_error(actual, pass_(value)) < 1e-5
        with using("triton"):
            (actual,) = mixer.reduced_rows(20)
        assert relative_error(actual, mixer.materialize().sum(1)) < 1e-5
