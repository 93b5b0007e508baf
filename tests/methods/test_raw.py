"""Raw attention maps against the definitions of the papers."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.methods.hosts import CASES, HOSTS, close, real_map, references, traced
from unilinattn.errors import ExactnessWarning
from unilinattn.methods import raw, rollout


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_raw_is_the_mean_over_heads_of_each_layer(name: str, padding: str) -> None:
    trace = traced(name, padding)
    result = raw(trace)
    expected = torch.stack([r.alpha.mean(1) * real_map(padding) for r in references(name, padding)])
    assert result.dims == ("layer", "batch", "query", "key")
    assert close(result.scores, expected)
    assert not close(result.scores, expected.flip(0))
    assert result.layers == tuple(layer.name for layer in trace.layers)


@pytest.mark.parametrize("scope", ["core", "mixer", "unified"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d", "llama"])
def test_the_scope_is_passed_to_the_operator_and_recorded(name: str, scope: str) -> None:
    result = raw(traced(name), scope=scope)
    expected = [layer.operator.matrix(scope) for layer in traced(name).layers]
    assert close(result.scores, torch.stack(expected))
    assert result.scope == result.options["scope"] == scope


def test_the_mean_over_layers_has_no_layer_axis() -> None:
    result = raw(traced("mamba2"), layers="mean")
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, raw(traced("mamba2")).scores.mean(0))
    assert len(result.layers) == 2


@pytest.mark.parametrize("layers", [[1], [-1], ["backbone.layers.1.mixer"]])
def test_layers_are_chosen_by_index_or_name(layers: list) -> None:
    result = raw(traced("mamba2"), layers=layers)
    assert close(result.scores, raw(traced("mamba2")).scores[1:])
    assert result.layers == ("backbone.layers.1.mixer",)
    assert len(result.kinds) == len(result.reconstruction_error) == 1


@pytest.mark.parametrize("sign", ["keep", "clamp", "abs"])
def test_sign_applies_after_the_reduction_over_heads(sign: str) -> None:
    scores = raw(traced("mamba2"), sign=sign).scores
    signed = raw(traced("mamba2")).scores
    assert (signed < 0).any()
    assert torch.equal(scores, {"keep": signed, "clamp": signed.clamp_min(0), "abs": signed.abs()}[sign])


@pytest.mark.parametrize("options", [{}, {"scope": "mixer", "sign": "abs", "discard": 0.3, "normalize": "rows"}])
@pytest.mark.parametrize("target", [None, -1])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_the_composed_maps_are_the_rollout(padding: str, target: int | None, options: dict) -> None:
    trace = traced("mamba2", padding)
    result = raw(trace, compose="rollout", target=target, **options)
    expected = rollout(trace, target=target, **options)
    assert result.dims == expected.dims
    assert torch.equal(result.scores, expected.scores)
    last = raw(trace, compose="rollout", target=target, layers=[1], **options)
    assert torch.equal(last.scores, rollout(trace, target=target, start_layer=1, **options).scores)
    assert not torch.equal(last.scores, result.scores)


@pytest.mark.parametrize("name", list(HOSTS))
def test_the_composed_maps_have_the_identity(name: str) -> None:
    first, second = (r.alpha.mean(1) for r in references(name))
    identity = torch.eye(first.shape[-1], dtype=first.dtype)
    assert close(raw(traced(name), compose="rollout").scores, (identity + second) @ (identity + first))


class Attention(nn.Module):
    """Causal attention, as a product with a matrix of weights or as a sum of products."""

    def __init__(self, by_matrix: bool) -> None:
        super().__init__()
        self.query, self.by_matrix = nn.Linear(4, 4), by_matrix

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.mT
        weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
        return weights @ x if self.by_matrix else (weights[..., None] * x[:, None]).sum(2)


@pytest.mark.parametrize("by_matrix", [True, False])
def test_a_map_without_the_weights_of_its_input_is_a_warning(by_matrix: bool) -> None:
    torch.manual_seed(0)
    trace = ula.trace(
        nn.Sequential(nn.Linear(4, 4), Attention(by_matrix), nn.Linear(4, 4)).eval(), torch.randn(1, 5, 4)
    )
    with nullcontext() if by_matrix else pytest.warns(ExactnessWarning, match="equal weights for all tokens"):
        result = ula.explain(trace, method="raw", progress=False)
    assert bool((result.scores == 1).all()) == (not by_matrix)
    assert len(result.warnings) == (not by_matrix)
    assert not ula.explain(trace, method="latim", progress=False).warnings
