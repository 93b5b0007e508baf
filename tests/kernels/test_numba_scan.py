"""Values and gradients of the compiled scans against their definition in float64, and the choice of Numba."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from unilinattn.errors import UnilinattnError
from unilinattn.kernels import backend
from unilinattn.kernels.backend import LEAST, BackendError, implementation, using
from unilinattn.kernels.scan import tiled
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.scan.naive import decay_scan
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import host

form = pytest.importorskip("unilinattn.kernels.scan.numba", reason="the extra `cpu` (numba) is not installed")

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("poisoned")

CHANNELS = (1, 65, form.loops.PIECE + 3)
LENGTHS = (1, form.loops.GROUP - 1, 2 * form.loops.GROUP + 3)


def inputs_of(length: int, channels: int, *, reset: bool = False, strong: float = 1.0) -> list[Tensor | None]:
    """Query, key, log-decay, scale, rate, reset and value of a selective state space."""
    torch.manual_seed(length)
    step = torch.rand(2, length, channels).pow(6) * strong
    begins = torch.rand(2, length) < 0.2 if reset else None
    rate = torch.rand(channels, 5) * 4
    query, key = torch.randn(2, length, 1, 5), torch.randn(2, length, 1, 5)
    scale, value = torch.randn(2, length, channels), torch.randn(2, length, channels, 1)
    return [query, key, -step.unsqueeze(3), scale, rate, begins, value]


def defined(inputs: list[Tensor | None]) -> Tensor:
    """The recurrence token by token, in float64."""
    query, key, log_decay, scale, rate, reset, value = inputs
    decay = log_decay * rate
    if reset is not None:
        decay = decay.masked_fill(reset[..., None, None], -torch.inf)
    return decay_scan(query.expand_as(decay), key * scale.unsqueeze(3), decay, value)


def wide(inputs: list[Tensor | None]) -> list[Tensor | None]:
    return [t.double() if t is not None and t.is_floating_point() else t for t in inputs]


def scan(module: ModuleType, *inputs: Tensor | None) -> Tensor:
    return module.diagonal_scan(Diagonal(*inputs[:6]), inputs[6])


def transposed_scan(module: ModuleType, *inputs: Tensor | None) -> Tensor:
    return module.diagonal_scan_adjoint(Diagonal(*inputs[:6]), inputs[6])


def error(actual: Tensor, expected: Tensor) -> float:
    return relative_error(actual.double(), expected)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_both_passes_are_the_recurrence(length: int, channels: int, reset: bool) -> None:
    inputs = inputs_of(length, channels, reset=reset)
    expected = defined(wide(inputs))
    assert error(scan(form, *inputs), expected) < 2e-6
    # <w, A v> = <A^T w, v> for every v, by the gradient of the definition.
    weight, value = torch.randn_like(expected), inputs[6].double().requires_grad_()
    (transposed,) = torch.autograd.grad((defined([*wide(inputs)[:6], value]) * weight).sum(), value)
    assert error(transposed_scan(form, *inputs[:6], weight.float()), transposed) < 2e-6


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_gradients_are_those_of_the_recurrence(length: int, channels: int, reset: bool) -> None:
    inputs = inputs_of(length, channels, reset=reset)
    weight = torch.randn(2, length, channels, 1)

    def gradients(run: Callable[..., Tensor], given: list[Tensor | None], by: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given if t is not None and t.is_floating_point()]
        return list(torch.autograd.grad((run(*leaves[:5], given[5], leaves[5]) * by).sum(), leaves))

    expected = gradients(lambda *given: defined(list(given)), wide(inputs), weight.double())
    compiled, plain = (gradients(partial(scan, module), inputs, weight) for module in (form, tiled))
    names = ("query", "key", "log_decay", "scale", "rate", "value")
    for name, actual, rounded, exact in zip(names, compiled, plain, expected, strict=True):
        # A sum over channels may cancel; rounding in the form of torch shows by how much.
        assert error(actual, exact) < max(5e-6, 4 * error(rounded, exact)), name


@pytest.mark.parametrize("alone", [0, 1, 2, 3, 4, 6])
def test_the_gradient_of_one_factor_needs_no_other(alone: int) -> None:
    inputs = inputs_of(40, 70)
    weight = torch.randn(2, 40, 70, 1)
    given, reference = list(inputs), wide(inputs)
    given[alone], reference[alone] = (t[alone].clone().requires_grad_() for t in (given, reference))
    (actual,) = torch.autograd.grad((scan(form, *given) * weight).sum(), given[alone])
    (expected,) = torch.autograd.grad((defined(reference) * weight.double()).sum(), reference[alone])
    assert error(actual, expected) < 5e-6


def test_a_differentiated_transpose_has_its_gradient() -> None:
    inputs, weight = inputs_of(40, 70), torch.randn(2, 40, 70, 1)
    results = []
    for module, given, by in ((form, inputs, weight), (tiled, wide(inputs), weight.double())):
        query = given[0].clone().requires_grad_()
        passed = transposed_scan(module, query, *given[1:])
        results.append(torch.autograd.grad((passed * by).sum(), query)[0])
    assert error(*results) < 2e-6


@pytest.mark.parametrize("strong", [1e2, 1e4])
def test_tokens_after_a_strong_decay_are_accurate(strong: float) -> None:
    inputs = inputs_of(130, 70, strong=strong)
    assert error(scan(form, *inputs), defined(wide(inputs))) < 2e-6


def test_states_that_grow_are_accurate_and_overflow_to_infinity() -> None:
    inputs = inputs_of(12, 70)
    inputs[2] = -inputs[2]
    assert error(scan(form, *inputs), defined(wide(inputs))) < 2e-6
    inputs[2] = torch.full_like(inputs[2], 40.0)
    out, expected = scan(form, *inputs), scan(tiled, *inputs)
    assert torch.equal(out.isfinite(), expected.isfinite()) and not out.isfinite().all()


def test_states_below_the_normal_numbers_are_zero() -> None:
    # Each step keeps 2^-43 of the state: after three steps it would be subnormal, 2^-129.
    length = 6
    one, step = torch.ones(1, length, 1, 1), torch.full((1, length, 1, 1), -1.0)
    write = torch.zeros(1, length, 1, 1)
    write[0, 0] = 1
    rate = torch.full((1, 1), 43 * torch.tensor(2.0).log().item())
    out = scan(form, one, one, step, torch.ones(1, length, 1), rate, None, write).flatten()
    assert [round(x) for x in out[:3].log2().tolist()] == [0, -43, -86]
    assert out[3:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_reaches_every_later_output_of_its_channel(bad: float) -> None:
    inputs = inputs_of(40, 70)
    inputs[6][1, 20, 3] = bad
    out, expected = scan(form, *inputs), scan(tiled, *inputs)
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert not out[1, 20:, 3].isfinite().any() and out[:, :, :3].isfinite().all()
    back = [transposed_scan(module, *inputs).isfinite() for module in (form, tiled)]
    assert torch.equal(*back) and not back[0].all()
    leaves = [t.clone().requires_grad_() for t in inputs if t is not None]
    grads = torch.autograd.grad(scan(form, *leaves[:5], None, leaves[5]).sum(), leaves)
    assert not grads[0][1].isfinite().all() and grads[0][0].isfinite().all()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    inputs, threads = inputs_of(70, 3 * form.loops.PIECE + 7), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() if t is not None else None for t in inputs]
            out = scan(form, *leaves)
            grads = torch.autograd.grad(out.square().sum(), [t for t in leaves if t is not None])
            results.append([out.detach(), transposed_scan(form, *inputs), *grads])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_other_structures_use_the_form_of_torch() -> None:
    query, key, log_decay, scale, rate, reset, value = inputs_of(20, 6)
    two = value.expand(-1, -1, -1, 2)
    for given in (
        (query, key, log_decay, scale, rate, reset, two),
        (query, key, log_decay * rate, scale, None, reset, value),
        (query, key, log_decay, None, rate, reset, value),
        (query.expand(-1, -1, 6, -1), key, log_decay, scale, rate, reset, value),
        (query, key, log_decay, scale, rate, reset, value.double()),
    ):
        assert torch.equal(scan(form, *given), scan(tiled, *given))
        assert torch.equal(transposed_scan(form, *given), transposed_scan(tiled, *given))


def test_large_float32_work_is_compiled() -> None:
    large, small = torch.zeros(LEAST["scan"]), torch.zeros(LEAST["scan"] - 1)
    assert implementation("scan", large).__name__.endswith(".numba")
    assert implementation("scan", small).__name__.endswith(".tiled")
    assert implementation("scan", large.double()).__name__.endswith(".tiled")
    assert implementation("scalar_map", large).__name__.endswith(".tiled")
    with using("torch"):
        assert implementation("scan", large).__name__.endswith(".tiled")
    with using("numba"):
        assert implementation("scan", small).__name__.endswith(".numba")
        assert implementation("scalar_map", small).__name__.endswith(".tiled")


def test_numba_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with using("numba"), pytest.raises(BackendError, match=r"torch.float64 on cpu; they take torch.float32 on the CPU"):
        implementation("scan", torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(backend, "_installed", lambda package: False)
    assert implementation("scan", torch.zeros(LEAST["scan"])).__name__.endswith(".tiled")
    with using("numba"), pytest.raises(BackendError, match=r"numba is not installed.*unilinattn\[cpu\]"):
        implementation("scan", torch.zeros(1))


@pytest.mark.parametrize("method", ["rollout", "attribution", "latim", "logit", "lrp", "contribution"])
def test_methods_agree_with_the_form_of_torch(method: str) -> None:
    mamba = host("mamba")
    scores = []
    for kernels in ("numba", "torch"):
        with using(kernels):
            try:
                scores.append(ula.explain(mamba.model(), mamba.inputs(), method=method, target=-1).scores)
            except UnilinattnError as refused:
                pytest.fail(f"{kernels}: {refused}")
    assert relative_error(scores[0], scores[1]) < 1e-4


@pytest.mark.slow
def test_loops_are_compiled_where_no_folder_can_be_written() -> None:
    code = """
from numba.core.caching import CompileResultCacheImpl
CompileResultCacheImpl._locator_classes = []  # the folders that Numba tries
from tests.kernels.test_numba_scan import defined, error, form, inputs_of, scan, wide
assert error(scan(form, *inputs_of(3, 2)), defined(wide(inputs_of(3, 2)))) < 2e-6
assert not form.loops.scan.stats.cache_path
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
