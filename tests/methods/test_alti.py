"""ALTI against its equation, computed entry by entry."""

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
from unilinattn.errors import OptionError, UncoveredError
from unilinattn.methods import alti
from unilinattn.testing.promote import promoted
from unilinattn.tracing.layer import Step
from unilinattn.tracing.trace import Trace, trace


def mixing(shares: Tensor, residual: Tensor, y: Tensor, padding: str) -> Tensor:
    """C_ij = [||y_i||_1 - ||y_i - T_ij||_1]^+ over its row's sum, T_ii with the residual (LaTIM Eq. 6)."""
    rows = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.float64)
    real = real_tokens(padding)
    for b in range(BATCH):
        for i in range(LENGTH):
            if not real[b, i]:
                continue
            for j in range(LENGTH):
                share = shares[b, i, j] + (residual[b, i] if i == j else 0)
                gain = float(y[b, i].abs().sum() - (y[b, i] - share).abs().sum())
                rows[b, i, j] = max(gain, 0.0) if real[b, j] else 0.0
            total = rows[b, i].sum()
            rows[b, i] = rows[b, i] / total if total > 0 else torch.eye(LENGTH)[i]
    return rows


def maps(layers: tuple[Reference, ...], padding: str) -> list[Tensor]:
    return [mixing(r.shares, r.residual, r.residual + r.output, padding) for r in layers]


def retraced(name: str) -> Trace:
    """Trace without the cache of `traced`, for tests that modify the trace."""
    model = HOSTS[name].model()
    with promoted():
        host_trace = trace(model, inputs())
        assert all(layer.operator for layer in host_trace.layers)
    return host_trace


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_scores_are_those_of_the_equation(name: str, padding: str) -> None:
    result = alti(traced(name, padding))
    assert result.dims == ("layer", "batch", "query", "key")
    assert close(result.scores, torch.stack(maps(references(name, padding), padding)))


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_real_rows_sum_to_one(name: str, padding: str) -> None:
    for options in ({}, {"compose": "rollout"}):
        scores = alti(traced(name, padding), **options).scores
        sums = scores.sum(-1)
        real = real_tokens(padding).expand_as(sums)
        assert (sums[real] - 1).abs().max() <= 1e-12
        assert (scores >= 0).all()
        assert (scores * ~real_map(padding) == 0).all()


def test_outputs_are_scaled_by_the_residual_multiplier() -> None:
    host_trace = part_added()
    for layer, rows in zip(host_trace.layers, alti(host_trace).scores, strict=True):
        whole, residual = layer.operator.contributions(range(LENGTH)), layer.residual
        assert residual is not None
        assert close(rows, mixing(PART * whole, residual, residual + PART * layer.output, "none"))
        assert not close(rows, mixing(whole, residual, residual + layer.output, "none"))


def test_rows_sum_to_one_in_float32() -> None:
    host_trace = trace(HOSTS["mamba"].model().float(), inputs())
    scores = alti(host_trace).scores
    assert scores.dtype == torch.float32
    assert (scores.sum(-1) - 1).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_perturbed_equations_give_other_scores(name: str, padding: str) -> None:
    scores = alti(traced(name, padding)).scores
    layers = references(name, padding)
    without = [mixing(r.shares, r.residual * 0, r.residual + r.output, padding) for r in layers]
    output_only = [mixing(r.shares, r.residual * 0, r.output, padding) for r in layers]
    squared = [mixing(r.shares * 1.01, r.residual, r.residual + r.output, padding) for r in layers]
    for wrong in (without, output_only, squared):
        assert not close(scores, torch.stack(wrong))
    if any(r.bias.abs().max() > 0 for r in layers):
        biasless = [mixing(r.shares, r.residual, r.residual + r.output - r.bias, padding) for r in layers]
        assert not close(scores, torch.stack(biasless))


@pytest.mark.parametrize(("name", "padding"), [*CASES, ("delta rule", "none"), ("hybrid", "none")])
def test_the_rollout_multiplies_maps_without_the_identity(name: str, padding: str) -> None:
    host_trace = traced(name, padding)
    first, second = maps(references(name, padding), padding)
    result = alti(host_trace, compose="rollout")
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, second @ first)
    assert not close(result.scores, second @ first + first)
    row = alti(host_trace, compose="rollout", target=-1)
    assert row.dims == ("batch", "key")
    assert close(row.scores, (second @ first)[torch.arange(BATCH), host_trace.positions(-1)])
    last = alti(host_trace, compose="rollout", layers=[1])
    assert close(last.scores, second)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_without_residual_the_equation_uses_only_the_output(name: str, padding: str) -> None:
    layers = references(name, padding)
    result = alti(traced(name, padding), residual=False)
    output_only = [mixing(r.shares, r.residual * 0, r.output, padding) for r in layers]
    assert close(result.scores, torch.stack(output_only))
    assert not close(result.scores, torch.stack(maps(layers, padding)))
    assert not result.stream_error


def test_a_rollout_without_residual_is_refused() -> None:
    with pytest.raises(OptionError, match="compose='rollout' multiplies maps along the residual stream"):
        alti(traced("mamba"), residual=False, compose="rollout")


def test_activation_silu_is_the_split_of_the_paper() -> None:
    expected = [mixing(r.split_shares, r.residual, r.residual + r.output, "left") for r in references("mamba2", "left")]
    assert close(alti(traced("mamba2", "left"), activation="silu").scores, torch.stack(expected))


def test_a_row_with_everything_clipped_is_its_own_token() -> None:
    found = retraced("mamba2")
    layer = found.layers[0]
    # With a stream that cancels the output, y_i is zero and no share brings anything closer.
    layer.stream, layer.next_stream = -layer.output, torch.zeros_like(layer.output)
    scores = alti(found, layers=[0]).scores[0]
    assert torch.equal(scores, torch.eye(LENGTH, dtype=torch.float64).expand_as(scores))


def test_parallel_layers_are_one_map() -> None:
    host_trace = retraced("mamba")
    host_trace.steps = (Step(host_trace.layers),)
    first, second = references("mamba")
    y = first.residual + first.output + second.output
    expected = mixing(first.shares + second.shares, first.residual, y, "none")
    assert close(alti(host_trace, compose="rollout").scores, expected)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_cancellation_is_the_sum_of_norms_over_the_norm_of_the_sum(name: str, padding: str) -> None:
    ratios = [r.shares.abs().sum((2, 3)) / r.shares.sum(2).abs().sum(2) for r in references(name, padding)]
    host_trace, expected = traced(name, padding), torch.stack(ratios).masked_fill(~real_tokens(padding), 0)
    whole = alti(host_trace)
    assert close(whole.extras["cancellation"], expected)
    assert close(alti(host_trace, compose="rollout").extras["cancellation"], expected)
    rows = torch.arange(BATCH), host_trace.positions(-1)
    for options in ({}, {"compose": "rollout"}, {"residual": False}):
        assert close(alti(host_trace, target=-1, **options).extras["cancellation"], expected[:, *rows])
    # Neither the stream nor the bias counts.
    wrong = [r.shares.abs().sum((2, 3)) / (r.residual + r.output).abs().sum(2) for r in references(name, padding)]
    assert not close(whole.extras["cancellation"], torch.stack(wrong).masked_fill(~real_tokens(padding), 0))


def test_an_unknown_stream_is_refused_by_name() -> None:
    host_trace = retraced("mamba")
    host_trace.layers[1].stream = None
    with pytest.raises(UncoveredError, match=r"alti needs .* backbone\.layers\.1\.mixer"):
        alti(host_trace)
    alti(host_trace, layers=[0])
