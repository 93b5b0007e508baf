"""LaTIM against norms of the vectors that the papers define."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.hosts import (
    BATCH,
    CASES,
    HOSTS,
    LENGTH,
    PART,
    Reference,
    close,
    inputs,
    part_added,
    real_map,
    real_tokens,
    references,
    traced,
)
from unilinattn.errors import MemoryLimitError, UncoveredError
from unilinattn.memory import max_memory
from unilinattn.methods import latim
from unilinattn.scoring.selection import StepRows
from unilinattn.scoring.vectors import cancellation
from unilinattn.testing.promote import promoted
from unilinattn.tracing.layer import Step
from unilinattn.tracing.trace import trace as trace_of

ORDERS = [1, 2.0, 3.5, float("inf")]


def norms(shares: Tensor, p: float, padding: str) -> Tensor:
    """C_ij = (sum_d |T_ijd|^p)^(1/p), the largest |T_ijd| for infinity (LaTIM Eq. 5)."""
    size = shares.abs()
    lengths = size.max(-1).values if p == float("inf") else size.pow(p).sum(-1).pow(1 / p)
    return lengths * real_map(padding)


def to_result(name: str, padding: str, p: float = 2.0, part: str = "shares") -> Tensor:
    return torch.stack([norms(getattr(r, part), p, padding) for r in references(name, padding)])


def add_diagonal(reference: Reference, vector: Tensor, part: str = "shares") -> Tensor:
    shares = getattr(reference, part).clone()
    for i in range(LENGTH):
        shares[:, i, i] += vector[:, i]
    return shares


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_scores_are_norms_of_the_contributions(name: str, padding: str, p: float) -> None:
    result = latim(traced(name, padding), p=p)
    assert result.dims == ("layer", "batch", "query", "key")
    assert close(result.scores, to_result(name, padding, p))
    assert result.scope == "layer"


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_exact_decomposition_is_complete(name: str, padding: str) -> None:
    result = latim(traced(name, padding))
    assert result.extras["decomposition_error"].shape == (2,)
    assert result.completeness_gap == result.extras["decomposition_error"].max()
    assert result.completeness_gap <= 1e-10
    assert max(result.reconstruction_error.values()) <= 1e-10
    bias = torch.stack([r.bias.norm(dim=-1) for r in references(name, padding)]) * real_tokens(padding)
    assert (result.extras["bias"] - bias).abs().max() <= 1e-12


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_activation_silu_is_the_split_of_the_paper(name: str, padding: str) -> None:
    result = latim(traced(name, padding), activation="silu")
    assert close(result.scores, to_result(name, padding, part="split_shares"))
    assert not close(result.scores, to_result(name, padding))
    real = real_tokens(padding)[..., None]
    for k, r in enumerate(references(name, padding)):
        assert r.split_shares is not None and r.split_bias is not None
        assert close(result.extras["bias"][k], r.split_bias.norm(dim=-1) * real_tokens(padding))
        missed = (r.split_shares.sum(2) + r.split_bias - r.output) * real
        ratio = max(float(missed[b].norm() / (r.output[b] * real[b]).norm()) for b in range(BATCH))
        assert ratio > 1e-3
        assert float(result.extras["decomposition_error"][k]) == pytest.approx(ratio, rel=1e-10)
    assert result.completeness_gap == pytest.approx(float(result.extras["decomposition_error"].max()))


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_bias_and_residual_can_be_added_to_the_query_s_token(name: str, padding: str) -> None:
    trace = traced(name, padding)
    for options, diagonal in (
        ({"bias": "query"}, lambda r: r.bias),
        ({"residual": True}, lambda r: r.residual),
        ({"bias": "query", "residual": True}, lambda r: r.bias + r.residual),
    ):
        result = latim(trace, p=1, **options)
        expected = [norms(add_diagonal(r, diagonal(r)), 1, padding) for r in references(name, padding)]
        assert close(result.scores, torch.stack(expected))
        assert ("bias" in result.extras) == ("bias" not in options)
        assert result.completeness_gap is not None and result.completeness_gap <= 1e-10


@pytest.mark.parametrize("bias", ["column", "query"])
def test_with_residual_contributions_are_scaled_by_the_residual_multiplier(bias: str) -> None:
    trace = part_added()
    for layer, rows in zip(trace.layers, latim(trace, residual=True, bias=bias).scores, strict=True):
        whole, residual = layer.operator.contributions(range(LENGTH)), layer.residual
        assert residual is not None
        for i in range(LENGTH):
            whole[:, i, i] += layer.operator.bias[:, i] if bias == "query" else 0
        for part, same in ((PART, True), (1.0, False)):
            shares = part * whole
            for i in range(LENGTH):
                shares[:, i, i] += residual[:, i]
            assert close(rows, norms(shares, 2, "none")) == same


@pytest.mark.parametrize("name", ["mamba", "mamba2", "llama"])
def test_perturbed_contributions_give_other_scores(name: str) -> None:
    scores = latim(traced(name)).scores
    assert close(scores, to_result(name, "none"))
    assert not close(scores, to_result(name, "none", p=1))
    assert not close(scores, to_result(name, "none").transpose(2, 3))
    attention = torch.stack([r.alpha.abs().mean(1) for r in references(name)])
    assert not close(scores, attention)
    with_residual = torch.stack([norms(add_diagonal(r, r.residual), 2, "none") for r in references(name)])
    assert not close(scores, with_residual)


def test_the_mean_over_layers_also_averages_the_bias() -> None:
    whole, mean = latim(traced("mamba")), latim(traced("mamba"), layers="mean")
    assert mean.dims == ("batch", "query", "key")
    assert close(mean.scores, whole.scores.mean(0))
    assert close(mean.extras["bias"], whole.extras["bias"].mean(0))
    assert mean.extras["decomposition_error"].shape == (2,)


@pytest.mark.parametrize("limit", [60_000, 200_000, None])
@pytest.mark.parametrize("activation", ["exact", "silu"])
def test_a_memory_limit_does_not_change_the_scores(limit: int | None, activation: str) -> None:
    trace = traced("mamba2", "left")
    whole = latim(trace, bias="query", residual=True, activation=activation)
    with max_memory(limit):
        blocks = latim(trace, bias="query", residual=True, activation=activation)
    assert close(blocks.scores, whole.scores)


def test_a_limit_below_one_row_is_refused_with_the_size_of_a_row() -> None:
    with max_memory(2000), pytest.raises(MemoryLimitError, match=r"one row of vectors T_i\(x_j\) takes .* KiB"):
        latim(traced("mamba2"))


def test_splitting_a_layer_without_an_activation_is_refused() -> None:
    with pytest.raises(UncoveredError, match="no convolution followed by an activation"):
        latim(traced("gpt2"), activation="silu")


def composed_map(r: Reference, padding: str, p: float = 2.0) -> Tensor:
    """||T_ij x_j + delta_ij x_i||_p over its row's sum."""
    rows = norms(add_diagonal(r, r.residual), p, padding)
    return rows / rows.sum(-1, keepdim=True).masked_fill(~real_tokens(padding)[..., None], 1)


@pytest.mark.parametrize(("name", "padding"), [*CASES, ("delta rule", "none"), ("hybrid", "none")])
def test_the_rollout_multiplies_normalised_norms_with_the_residual(name: str, padding: str) -> None:
    trace = traced(name, padding)
    first, second = (composed_map(r, padding) for r in references(name, padding))
    result = latim(trace, compose="rollout")
    assert result.dims == ("batch", "query", "key")
    assert result.options["residual"] is True and result.options["normalize"] == "rows"
    assert close(result.scores, second @ first)
    assert not close(result.scores, first @ second)
    without = [to_result(name, padding)[k] for k in range(2)]
    assert not close(result.scores, without[1] @ without[0])
    row = latim(trace, compose="rollout", target=-1)
    assert row.dims == ("batch", "key")
    assert close(row.scores, (second @ first)[torch.arange(BATCH), trace.positions(-1)])
    assert row.extras["bias"].shape == row.extras["cancellation"].shape == (2, BATCH)
    one = latim(trace, compose="rollout", p=1, layers=[1])
    assert close(one.scores, composed_map(references(name, padding)[1], padding, 1))


def test_the_rollout_sums_parallel_layers_before_the_norm() -> None:
    model = HOSTS["mamba"].model()
    with promoted():
        trace = trace_of(model, inputs())
        assert all(layer.operator for layer in trace.layers)
    trace.steps = (Step(trace.layers),)
    first, second = references("mamba")
    shares = first.shares + second.shares
    rows = norms(add_diagonal(replace(first, shares=shares), first.residual), 2, "none")
    result = latim(trace, compose="rollout", layers=[0, 1])
    assert close(result.scores, rows / rows.sum(-1, keepdim=True))
    assert close(result.extras["cancellation"][0], shares.norm(dim=-1).sum(-1) / shares.sum(2).norm(dim=-1))
    assert result.extras["decomposition_error"].shape == (1,) and result.completeness_gap <= 1e-10


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_cancellation_is_the_sum_of_norms_over_the_norm_of_the_sum(name: str, padding: str, p: float) -> None:
    trace, layers = traced(name, padding), references(name, padding)
    sizes = [torch.linalg.vector_norm(r.shares, p, dim=-1).sum(-1) for r in layers]
    sums = [torch.linalg.vector_norm(r.shares.sum(2), p, dim=-1) for r in layers]
    expected = (torch.stack(sizes) / torch.stack(sums)).masked_fill(~real_tokens(padding), 0)
    options = {"bias": "query", "residual": True}
    assert close(latim(trace, p=p).extras["cancellation"], expected)
    assert close(latim(trace, p=p, **options).extras["cancellation"], expected)
    assert (expected[:, real_tokens(padding)] >= 1 - 1e-12).all() and (expected > 1.001).any()


def test_cancellation_of_zero_vectors_is_one_and_of_vectors_that_cancel_infinite() -> None:
    trace = traced("mamba")
    rows = StepRows(trace, trace.layers[:1], torch.tensor([[0, 1, 2]] * BATCH))
    total = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]] * BATCH)
    ratio = cancellation(torch.tensor([[0.0, 10.0, 2.0]] * BATCH), total, 2.0, rows)
    assert ratio.tolist() == [[1.0, 2.0, float("inf")]] * BATCH
