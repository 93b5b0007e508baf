"""Inner matrices and query, key and history factors against loops over HMA ACL Eq. 14-20."""

import math

import pytest
import torch
from torch import Tensor

from tests.analysis.plain import image, softplus_inverse
from tests.hosts import named
from tests.methods.hosts import close, references, traced
from unilinattn import analysis, trace
from unilinattn.analysis.cores import core_of
from unilinattn.errors import InputError, MemoryLimitError, OptionError, UncoveredError
from unilinattn.memory import max_memory
from unilinattn.testing.promote import promoted

HEAD = 2


def double_trace(name: str):
    host = named(name)
    with promoted():
        traced = trace(host.model().double(), host.inputs().double() if host.image else host.inputs())
        assert all(layer.operator.reconstruction_error() < 1e-10 for layer in traced.layers)
    return traced


def eq_16(layer, *, relu: bool = False) -> Tensor:
    """The N inner matrices of S6 as loops over queries, keys, states and steps."""
    mixer = core_of(layer, 0).mixer
    step, rate = mixer.key_scale[:, :, HEAD], mixer.rate[HEAD]
    batch, length, count = step.shape[0], step.shape[1], mixer.query.shape[-1]
    matrices = torch.zeros(batch, count, length, length, dtype=torch.float64)
    for b in range(batch):
        steps = step[b].tolist()
        if relu:
            steps = [max(0.0, softplus_inverse(value)) for value in steps]
        for n in range(count):
            for i in range(length):
                for j in range(i + 1):
                    decay = math.prod(math.exp(steps[k] * rate[n]) for k in range(j + 1, i + 1))
                    matrices[b, n, i, j] = mixer.query[b, i, 0, n] * decay * steps[j] * mixer.key[b, j, 0, n]
    return matrices


def test_inner_matrices_of_s6_are_those_of_the_equation() -> None:
    for layer, reference in zip(traced("mamba").layers, references("mamba"), strict=True):
        found = analysis.inner_matrices(layer, HEAD)
        assert close(found.matrices, eq_16(layer))
        # The matrix of the reference is made of the host's weights.
        assert close(found.matrices.sum(1), reference.alpha[:, HEAD])
        assert not close(found.matrices[:, 1:].sum(1), reference.alpha[:, HEAD])


CASES = {
    "mamba": lambda: traced("mamba"),
    "mamba2": lambda: traced("mamba2"),
    "delta rule": lambda: double_trace("qwen3 next"),
}


@pytest.mark.parametrize("name", CASES)
def test_inner_matrices_add_up_to_the_map(name: str) -> None:
    for layer in CASES[name]().layers:
        if layer.operator.num_heads() <= HEAD or not hasattr(core_of(layer, 0).mixer, "query"):
            continue
        matrix = layer.operator.matrix(heads=HEAD)
        found = analysis.inner_matrices(layer, HEAD).matrices
        assert (found.sum(1) - matrix).abs().max() <= 1e-12 * matrix.abs().max()
        assert found.shape[1] > 1


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_the_factors_multiply_to_the_map(name: str) -> None:
    for layer in traced(name).layers:
        factors = analysis.query_key_history(layer, HEAD)
        matrix = layer.operator.matrix(heads=HEAD)
        assert (factors.matrix - matrix).abs().max() <= 1e-12 * matrix.abs().max()
        inner = torch.einsum("bin,bijn,bjn->bnij", factors.query, factors.history, factors.key)
        assert close(inner, analysis.inner_matrices(layer, HEAD).matrices)


def test_both_directions_of_vim() -> None:
    layer = double_trace("vim").layers[0]
    total = 0.0
    for core in range(2):
        factors = analysis.query_key_history(layer, HEAD, core=core)
        assert close(factors.matrix, core_of(layer, core).mixer.materialize()[:, HEAD])
        assert close(factors.matrix, analysis.inner_matrices(layer, HEAD, core=core).matrices.sum(1))
        assert bool(factors.history.permute(3, 0, 1, 2)[0].triu(1).any()) == (core == 1)
        total = total + factors.matrix
    assert close(total, layer.operator.matrix(heads=HEAD))


def test_relu_steps_are_the_papers_approximation() -> None:
    layer = traced("mamba").layers[0]
    approximate = analysis.query_key_history(layer, HEAD, step="relu").matrix
    assert approximate.abs().max() > 0
    assert close(approximate, eq_16(layer, relu=True).sum(1))
    assert not close(approximate, layer.operator.matrix(heads=HEAD))
    # Mamba-2's decays are stored as products with the rate.
    mixer = core_of(traced("mamba2").layers[0], 0).mixer
    factors = analysis.query_key_history(traced("mamba2").layers[0], HEAD, step="relu")
    steps = mixer.key_scale[0, :, HEAD].tolist()
    ratio = [max(0.0, softplus_inverse(step)) / step for step in steps]
    decay = [float(g) * r for g, r in zip(mixer.log_decay[0, :, HEAD], ratio, strict=True)]
    assert abs(float(factors.history[0, 4, 1, 0]) - math.exp(sum(decay[2:5]))) < 1e-12
    assert abs(float(factors.key[0, 3, 0]) - float(mixer.key[0, 3, 1, 0]) * steps[3] * ratio[3]) < 1e-12


def test_bad_requests_are_named() -> None:
    layer = traced("mamba").layers[0]
    with pytest.raises(OptionError, match=r"head=12 is out of range: .* has 12 heads"):
        analysis.inner_matrices(layer, 12)
    with pytest.raises(OptionError, match=r"core=1 is out of range: .* has 1 core"):
        analysis.inner_matrices(layer, 0, core=1)
    with pytest.raises(OptionError, match="did you mean 'relu'"):
        analysis.query_key_history(layer, 0, step="rely")
    with max_memory(1000), pytest.raises(MemoryLimitError, match="inner matrices of a head of backbone"):
        analysis.inner_matrices(layer, 0)
    with max_memory(1000), pytest.raises(MemoryLimitError, match="trace fewer tokens"):
        analysis.query_key_history(layer, 0)
    for name, structure in (("llama", "dense"), ("s4d", "Toeplitz")):
        with pytest.raises(UncoveredError, match=f"structure '{structure}' has no factor `query`"):
            analysis.inner_matrices(traced(name).layers[0], 0)
    delta = double_trace("qwen3 next").layers[0]
    with pytest.raises(UncoveredError, match="'delta rule' is no sum of products"):
        analysis.query_key_history(delta, 0)
    query = core_of(layer, 0).mixer.query
    with pytest.raises(InputError, match="query has shape"):
        core_of(layer, 0).mixer.with_query(query[:, 1:])


def test_relu_needs_step_sizes() -> None:
    layer = double_trace("recurrent gemma").layers[0]
    assert analysis.query_key_history(layer, 0).history.shape[-1] == 1
    with pytest.raises(UncoveredError, match="not made of common step sizes"):
        analysis.query_key_history(layer, 0, step="relu")


@pytest.mark.long
def test_the_pictures(tmp_path) -> None:
    layer = traced("mamba").layers[0]
    analysis.inner_matrices(layer, HEAD).plot(tmp_path / "inner.png")
    analysis.query_key_history(layer, HEAD).plot(tmp_path / "factors.png")
    assert image(tmp_path / "inner.png") and image(tmp_path / "factors.png")
    with pytest.raises(OptionError, match="has 4 panels, which one axes cannot hold"):
        from matplotlib.figure import Figure

        analysis.query_key_history(layer, HEAD).plot(Figure().subplots())
