"""The compiled scan of scalar decays against its definition in float64, and the factors that it takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.backend import LEAST, using
from unilinattn.kernels.scan import tiled
from unilinattn.kernels.scan.memories import Scalar
from unilinattn.kernels.scan.naive import decay_scan
from unilinattn.mixers import ScalarDecay
from unilinattn.testing import relative_error

form = pytest.importorskip("unilinattn.kernels.scan.numba", reason="the extra `cpu` (numba) is not installed")

pytestmark = pytest.mark.usefixtures("poisoned")

BATCH, STATE = 3, 5

SHAPES = ((1, 1, 64), (4, 1, 33), (6, 2, 35), (2, 2, 130))
"""Heads, groups and channels: of one head, in blocks with idle lanes, in several pieces, and of a group each."""

LENGTHS = (1, form.loops.GROUP - 1, 2 * form.loops.GROUP + 3)

NAMES = ("query", "key", "log_decay", "key_scale", "value")


def factors(length: int, heads: int, groups: int, channels: int, state: int = STATE) -> list[Tensor]:
    """Query, key, log-decay, scale and value; decays are weak for most tokens and strong for some."""
    torch.manual_seed(length)
    query, key = torch.randn(BATCH, length, groups, state), torch.randn(BATCH, length, groups, state)
    log_decay = -torch.rand(BATCH, length, heads).pow(6) * 4
    return [query, key, log_decay, torch.randn(BATCH, length, heads), torch.randn(BATCH, length, heads, channels)]


def defined(query: Tensor, key: Tensor, log_decay: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    """The recurrence token by token, in float64."""
    heads = log_decay.shape[2]
    query, key = (t.double().repeat_interleave(heads // t.shape[2], 2) for t in (query, key))
    return decay_scan(query, key, log_decay.double()[..., None].expand_as(key), value * scale[..., None])


def compiled(*inputs: Tensor) -> Tensor:
    return form.scalar_scan(Scalar(*inputs[:4]), inputs[4])


def in_torch(*inputs: Tensor) -> Tensor:
    return tiled.scalar_scan(Scalar(*inputs[:4]), inputs[4])


def gradients(run: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    return list(torch.autograd.grad((run(*leaves) * weight).sum(), leaves))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_both_passes_are_the_recurrence_and_its_transpose(length: int, shape: tuple[int, int, int]) -> None:
    inputs = factors(length, *shape)
    memory, wide = Scalar(*inputs[:4]), [t.double() for t in inputs]
    assert form._is_short(memory, inputs[4])
    weight = torch.randn_like(inputs[4])
    transposed = gradients(defined, wide, weight.double())[-1]
    for module in (form, tiled):
        assert relative_error(module.scalar_scan(memory, inputs[4]).double(), defined(*wide)) < 2e-6
        assert relative_error(module.scalar_scan_adjoint(memory, weight).double(), transposed) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_gradients_are_those_of_the_recurrence(length: int, shape: tuple[int, int, int]) -> None:
    inputs = factors(length, *shape)
    weight = torch.randn_like(inputs[4])
    exact = gradients(defined, [t.double() for t in inputs], weight.double())
    results = gradients(compiled, inputs, weight), gradients(in_torch, inputs, weight)
    for name, actual, rounded, expected in zip(NAMES, *results, exact, strict=True):
        # A sum over channels may cancel; rounding in the form of torch shows by how much.
        limit = max(5e-6, 4 * relative_error(rounded.double(), expected))
        assert relative_error(actual.double(), expected) < limit, name


@pytest.mark.parametrize("length", [1, tiled.CHUNK - 1, tiled.CHUNK, tiled.CHUNK + 1, 3 * tiled.CHUNK + 2])
def test_the_form_of_torch_passes_states_between_chunks(length: int) -> None:
    inputs = [t.double() for t in factors(length, 4, 2, 3)]
    weight = torch.randn_like(inputs[4])
    assert relative_error(in_torch(*inputs), defined(*inputs)) < 1e-13
    exact = gradients(defined, inputs, weight)
    assert relative_error(tiled.scalar_scan_adjoint(Scalar(*inputs[:4]), weight), exact[-1]) < 1e-13
    for name, actual, expected in zip(NAMES, gradients(in_torch, inputs, weight), exact, strict=True):
        assert relative_error(actual, expected) < 1e-12, name


def test_a_differentiated_transpose_has_its_gradient() -> None:
    inputs = factors(40, 4, 2, 33)
    results = []
    for module, dtype in ((form, torch.float32), (tiled, torch.float64)):
        query, *others = (t.to(dtype) for t in inputs)
        query.requires_grad_()
        passed = module.scalar_scan_adjoint(Scalar(query, *others[:3]), others[3])
        results.append(torch.autograd.grad((passed * others[3]).sum(), query)[0].double())
    assert relative_error(*results) < 2e-6


@pytest.mark.parametrize("strength", [1e2, 1e4])
def test_tokens_after_a_strong_decay_are_accurate(strength: float) -> None:
    inputs = factors(130, 2, 1, 40)
    inputs[2] *= strength
    assert relative_error(compiled(*inputs).double(), defined(*inputs)) < 2e-6


@pytest.mark.parametrize(
    ("heads", "groups", "channels", "state", "dtype"),
    [
        (2, 1, 64, tiled.CHUNK + 1, torch.float32),
        (2, 2, 16, tiled.CHUNK // 4 + 1, torch.float32),
        (2, 1, 64, 8, torch.float64),
    ],
    ids=["many coordinates", "idle lanes", "float64"],
)
def test_other_factors_use_the_form_of_torch(
    heads: int, groups: int, channels: int, state: int, dtype: torch.dtype
) -> None:
    inputs = [t.to(dtype) for t in factors(20, heads, groups, channels, state)]
    memory, value = Scalar(*inputs[:4]), inputs[4]
    assert torch.equal(compiled(*inputs), in_torch(*inputs))
    assert torch.equal(form.scalar_scan_adjoint(memory, value), tiled.scalar_scan_adjoint(memory, value))


def test_mixers_run_the_compiled_scan_where_it_is_chosen() -> None:
    query, key, log_decay, scale, value = factors(64, 8, 1, 64)
    inputs, mixer = (query, key, log_decay, scale, value), ScalarDecay(query, key, log_decay, key_scale=scale)
    assert log_decay.numel() < LEAST["scan"]
    assert torch.equal(mixer.apply(value), in_torch(*inputs))
    with using("numba"):
        assert torch.equal(mixer.apply(value), compiled(*inputs))
        assert torch.equal(mixer.adjoint(value), form.scalar_scan_adjoint(Scalar(*inputs[:4]), value))
        assert not torch.equal(mixer.apply(value), in_torch(*inputs))
