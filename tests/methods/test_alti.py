"""ALTI against its equation, written out."""

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


def maps(found: tuple[Reference, ...], padding: str) -> list[Tensor]:
    return [mixing(r.shares, r.residual, r.residual + r.output, padding) for r in found]


def retraced(name: str) -> Trace:
    """Trace anew, for tests that change the trace."""
    model = HOSTS[name].model()
    with promoted():
        found = trace(model, inputs())
        assert all(layer.operator for layer in found.layers)
    return found


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_alti_is_its_equation(name: str, padding: str) -> None:
    result = alti(traced(name, padding))
    assert result.dims == ("layer", "batch", "query", "key")
    assert close(result.scores, torch.stack(maps(references(name, padding), padding)))


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_real_rows_sum_to_one(name: str, padding: str) -> None:
    for options in ({}, {"rollout": True}):
        scores = alti(traced(name, padding), **options).scores
        sums = scores.sum(-1)
        real = real_tokens(padding).expand_as(sums)
        assert (sums[real] - 1).abs().max() <= 1e-12
        assert (scores >= 0).all()
        assert (scores * ~real_map(padding) == 0).all()


def test_a_layer_counts_as_often_as_the_host_adds_it() -> None:
    found = part_added()
    for layer, rows in zip(found.layers, alti(found).scores, strict=True):
        whole, residual = layer.operator.contributions(range(LENGTH)), layer.residual
        assert residual is not None
        assert close(rows, mixing(PART * whole, residual, residual + PART * layer.output, "none"))
        assert not close(rows, mixing(whole, residual, residual + layer.output, "none"))


def test_rows_sum_to_one_in_float32() -> None:
    found = trace(HOSTS["mamba"].model().float(), inputs())
    scores = alti(found).scores
    assert scores.dtype == torch.float32
    assert (scores.sum(-1) - 1).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_perturbed_equations_are_told_apart(name: str, padding: str) -> None:
    scores = alti(traced(name, padding)).scores
    found = references(name, padding)
    without = [mixing(r.shares, r.residual * 0, r.residual + r.output, padding) for r in found]
    layer_alone = [mixing(r.shares, r.residual * 0, r.output, padding) for r in found]
    squared = [mixing(r.shares * 1.01, r.residual, r.residual + r.output, padding) for r in found]
    for wrong in (without, layer_alone, squared):
        assert not close(scores, torch.stack(wrong))
    if any(r.bias.abs().max() > 0 for r in found):
        biasless = [mixing(r.shares, r.residual, r.residual + r.output - r.bias, padding) for r in found]
        assert not close(scores, torch.stack(biasless))


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_rollout_multiplies_without_a_further_identity(name: str, padding: str) -> None:
    found = traced(name, padding)
    first, second = maps(references(name, padding), padding)
    result = alti(found, rollout=True)
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, second @ first)
    assert not close(result.scores, second @ first + first)
    lone = alti(found, rollout=True, target=-1)
    assert lone.dims == ("batch", "key")
    assert close(lone.scores, (second @ first)[torch.arange(BATCH), found.positions(-1)])
    only = alti(found, rollout=True, layers=[1])
    assert close(only.scores, second)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_without_the_stream_it_is_the_equation_of_the_output(name: str, padding: str) -> None:
    found = references(name, padding)
    result = alti(traced(name, padding), residual=False)
    alone = [mixing(r.shares, r.residual * 0, r.output, padding) for r in found]
    assert close(result.scores, torch.stack(alone))
    assert not close(result.scores, torch.stack(maps(found, padding)))
    assert not result.stream_error


def test_a_rollout_needs_the_stream() -> None:
    with pytest.raises(OptionError, match="rollout=True composes the layers along the residual stream"):
        alti(traced("mamba"), residual=False, rollout=True)


def test_a_target_is_that_row() -> None:
    for padding in ("none", "left", "right"):
        found = traced("mamba2", padding)
        places = found.positions(-1)
        whole = alti(found).scores
        assert close(alti(found, target=-1).scores, whole[:, torch.arange(BATCH), places])


def test_the_paper_s_split_of_silu() -> None:
    found = [mixing(r.split_shares, r.residual, r.residual + r.output, "left") for r in references("mamba2", "left")]
    assert close(alti(traced("mamba2", "left"), activation="silu").scores, torch.stack(found))


def test_a_row_with_everything_clipped_is_its_own_token() -> None:
    found = retraced("mamba2")
    layer = found.layers[0]
    # With a stream that cancels the output, y_i is zero and no share brings anything closer.
    layer.stream, layer.next_stream = -layer.output, torch.zeros_like(layer.output)
    scores = alti(found, layers=[0]).scores[0]
    assert torch.equal(scores, torch.eye(LENGTH, dtype=torch.float64).expand_as(scores))


def test_parallel_layers_share_a_row() -> None:
    found = retraced("mamba")
    found.steps = (Step(found.layers),)
    first, second = references("mamba")
    y = first.residual + first.output + second.output
    expected = mixing(first.shares + second.shares, first.residual, y, "none")
    assert close(alti(found, rollout=True).scores, expected)


def test_an_unknown_stream_is_refused_by_name() -> None:
    found = retraced("mamba")
    found.layers[1].stream = None
    with pytest.raises(UncoveredError, match=r"alti needs .* backbone\.layers\.1\.mixer"):
        alti(found)
    alti(found, layers=[0])
