"""The frozen run: completeness of shares and biases on every host, and the choice of frozen factors."""

from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import unilinattn as ula
from tests.frozen.detached import (
    BY_HAND,
    LENGTH,
    detached_model,
    llama_model,
    mamba_model,
    misses,
    run_by_the_rules,
    scalar_of,
    token_ids,
    worst,
)
from tests.hosts import cases, tables
from tests.shared import exact_trace
from unilinattn.errors import ExactnessError, OptionError
from unilinattn.frozen.passes import Rule
from unilinattn.frozen.run import frozen
from unilinattn.rules import freezing
from unilinattn.rules.forms import as_source, carried
from unilinattn.rules.freezing import Freezing
from unilinattn.testing import Host, promoted

HOSTS = [case for name, table in tables().items() for case in cases(table, prefix=f"{name}/", turn=1)]


@pytest.mark.parametrize("host", HOSTS)
def test_shares_and_biases_add_up(host: Host) -> None:
    trace = exact_trace(host)
    with promoted():
        run = frozen(trace)
        shares = run.shares(-1, scalar_of(trace))
    assert float((shares.gap / shares.size).max()) <= 1e-12
    assert float(shares.remainder.abs().max() / shares.size.max()) <= 1e-12
    # Zero shares would be complete too, with the whole logit in the bias.
    assert bool((shares.tokens != 0).any())
    assert not run.shared, "two factors of equal rank shared a product"


@pytest.mark.parametrize("name", BY_HAND)
def test_shares_equal_those_of_detached_models(name: str) -> None:
    assert misses(name) <= 1e-12


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("by", ["depth", "layer"])
def test_shares_by_depth_and_by_layer_equal_those_of_detached_models(name: str, by: Any) -> None:
    model, logit, _, _, steps = detached_model(name)
    tokens, bias, value = [], [], []
    for k in range(2):
        if by == "depth":
            (grad,) = torch.autograd.grad(logit.sum(), steps.streams[k], retain_graph=True)
            source, total = steps.streams[k], logit
        else:
            (at,) = torch.autograd.grad(logit.sum(), steps.outputs[k], retain_graph=True)
            (grad,) = torch.autograd.grad(steps.outputs[k], steps.inputs[k], at, retain_graph=True)
            source, total = steps.inputs[k], (at * steps.outputs[k]).flatten(1).sum(1)
        tokens.append((grad * source).sum(-1).detach())
        bias.append(total.detach() - tokens[-1].sum(1))
        value.append(total.detach())
    with promoted():
        parts = frozen(ula.trace(model, token_ids(), progress=False)).complete_shares(-1, 3, by=by).parts
    assert parts is not None and parts.tokens.shape == (2, 2, LENGTH)
    assert worst(parts.tokens, torch.stack(tokens)) <= 1e-12
    assert worst(parts.bias, torch.stack(bias)) <= 1e-12
    assert worst(parts.value, torch.stack(value)) <= 1e-12
    assert worst(parts.tokens[0], parts.tokens[1]) > 1e-3


@pytest.mark.parametrize("name", BY_HAND)
def test_biases_by_source_equal_gradients_at_the_biases(name: str) -> None:
    model, logit, _, _, _ = detached_model(name)
    expected = {}
    for module, constants in BY_HAND[name].biases(model).items():
        grads = [torch.autograd.grad(one, constants, retain_graph=True) for one in logit]
        expected[module] = torch.stack(
            [sum((g * c).sum() for g, c in zip(row, constants, strict=True)).detach() for row in grads]
        )
    with promoted():
        run = frozen(ula.trace(model, token_ids(), progress=False))
        shares, biases = run.shares(-1, 3), run.bias_by_source(-1, 3)
    assert set(biases) == set(expected)
    assert worst(torch.stack([biases[m] for m in expected]), torch.stack(list(expected.values()))) <= 1e-12
    assert worst(torch.stack(list(biases.values())).sum(0), shares.bias) <= 1e-12


def test_a_model_that_feeds_its_embeddings_in_again_has_no_shares_by_depth() -> None:
    host = next(case.values[0] for case in HOSTS if "zamba" in case.values[0].name.lower())
    run = frozen(ula.trace(host.model(), host.inputs(), progress=False))
    run.complete_shares(-1, 1, by="layer")
    with pytest.raises(ExactnessError, match=r"shares by depth miss .*tokens reach the logit beside the"):
        run.complete_shares(-1, 1, by="depth")


def test_a_wrong_frozen_factor_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Freezing._product

    def swapped(mode: Freezing, name: str, func: Any, x: Any, other: Any) -> Tensor:
        if carried(x) and carried(other) and mode.rank(x) > mode.rank(other):
            return func(x, other.detach())
        return product(mode, name, func, x, other)

    monkeypatch.setattr(Freezing, "_product", swapped)
    assert misses("llama") > 1e-3


def test_a_mixer_run_by_the_rules_instead_of_its_operator_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    run_by_the_rules(monkeypatch)
    assert misses("mamba") > 1e-3


def test_a_lost_bias_is_detected_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ula.trace(llama_model(), token_ids(), progress=False)
    # Biases of linear layers are added without a tangent.
    monkeypatch.setattr(freezing, "as_source", lambda x, *rest: x if isinstance(x, Tensor) else as_source(x, *rest))
    with pytest.raises(
        ExactnessError, match=r"miss the logit by .* not affine in the frozen run: model\.layers\.0\.mlp"
    ):
        frozen(trace).complete_shares(-1, 3)


def test_a_name_and_gamma_without_the_half_rule_are_refused() -> None:
    trace = ula.trace(mamba_model(), token_ids(), progress=False)
    # With checked signatures the name is refused before.
    with pytest.raises((OptionError, TypeCheckError), match="half"):
        frozen(trace, rule="half")
    with pytest.raises(OptionError, match="give FREEZE, HALF or Rule"):
        frozen(trace, rule=Rule(gamma=0.25))


def test_unknown_shares_are_an_error() -> None:
    # With checked signatures the literal is refused before.
    with pytest.raises((OptionError, TypeCheckError), match="'layers'"):
        frozen(ula.trace(mamba_model(), token_ids(), progress=False)).shares(by="layers")
