"""Mamba-Attribution against its equation, with gradients from hooks of our own on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.methods.hosts import (
    BATCH,
    CASES,
    HOSTS,
    LENGTH,
    VOCABULARY,
    close,
    host_inputs,
    inputs,
    real_map,
    real_tokens,
    references,
    traced,
)
from unilinattn.methods import attribution
from unilinattn.methods.attribution import gradient_weights
from unilinattn.testing.hosts import randomize
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import Trace, trace


def own_gradients(name: str, padding: str, scalar: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """E_d(d logit / d y'^d) of each layer, y' the input of the host's own output projection (HMA ACL Eq. 24)."""
    host, model, captured = HOSTS[name], HOSTS[name].model(), []
    for mixer in host.mixers(model):
        host.projection(mixer).register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    with promoted():
        logits = model(**host_inputs(name, padding)).logits
        gradients = torch.autograd.grad(scalar(logits), captured)
    # The convolution that S4D projects with has its channels second.
    return [g.mean(1) if name == "s4d" else g.mean(-1) for g in gradients]


def predictions_at(places: Tensor) -> Callable[[Tensor], Tensor]:
    def scalar(logits: Tensor) -> Tensor:
        return logits[torch.arange(len(places)), places].max(-1).values.sum()

    return scalar


def product(name: str, padding: str, gradients: list[Tensor], clamp=torch.relu) -> Tensor:
    """rho = B_n ... B_1 with B = I + (g_i abar_ij)^+ (HMA ACL Eq. 24)."""
    rho = torch.eye(LENGTH, dtype=torch.float64).repeat(BATCH, 1, 1)
    for reference, g in zip(references(name, padding), gradients, strict=True):
        beta = torch.eye(LENGTH, dtype=torch.float64).repeat(BATCH, 1, 1)
        abar = reference.alpha.mean(1)
        for i in range(LENGTH):
            for j in range(LENGTH):
                beta[:, i, j] += clamp(g[:, i] * abar[:, i, j]) * real_map(padding)[:, i, j]
        rho = beta @ rho
    return rho * real_map(padding)


def explained(found: Trace, **options: Any) -> Any:
    with promoted():
        return attribution(found, **options)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_gradient_is_the_host_s_own(name: str, padding: str) -> None:
    found = traced(name, padding)
    places = found.positions(-2)
    with promoted():
        weights = next(gradient_weights(found, found.layers, [-2], None))
    for layer, expected in zip(found.layers, own_gradients(name, padding, predictions_at(places)), strict=True):
        assert close(weights[layer.name] * real_tokens(padding), expected * real_tokens(padding))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_the_gradient_is_what_a_small_step_does(name: str) -> None:
    """Central differences: a step along all channels of one token's y' moves the logit by the sum of its gradient."""
    host, model, step = HOSTS[name], HOSTS[name].model(), 1e-5
    token, layer, places = 2, 0, torch.tensor([LENGTH - 1] * BATCH)
    moved = []
    with torch.no_grad(), promoted():
        chosen = model(**inputs()).logits[0, places[0]].argmax()
        for sign in (1, -1):

            def push(_: Any, args: tuple, sign: int = sign) -> tuple:
                pushed = args[0].clone()
                pushed[(0, slice(None), token) if name == "s4d" else (0, token)] += sign * step
                return (pushed,)

            hook = host.projection(host.mixers(model)[layer]).register_forward_pre_hook(push)
            moved.append(model(**inputs()).logits[0, places[0], chosen])
            hook.remove()
    found = traced(name)
    with promoted():
        weight = next(gradient_weights(found, found.layers, [-1], None))[found.layers[layer].name][0, token]
    width = host.projection(host.mixers(model)[layer]).weight.shape[1]
    assert float((moved[0] - moved[1]) / (2 * step * width)) == pytest.approx(float(weight), rel=1e-6)


@pytest.mark.parametrize("target", [-1, 1, [2, -2]])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_a_target_is_its_row_of_the_product(name: str, padding: str, target: Any) -> None:
    found = traced(name, padding)
    places = found.positions(target)
    expected = product(name, padding, own_gradients(name, padding, predictions_at(places)))
    result = explained(found, target=target)
    assert result.dims == ("batch", "key")
    assert close(result.scores, expected[torch.arange(BATCH), places])


@pytest.mark.parametrize(("name", "padding"), [("mamba", "none"), ("mamba2", "left"), ("gpt2", "right")])
def test_without_a_target_each_row_has_its_own_gradient(name: str, padding: str) -> None:
    found = traced(name, padding)
    expected = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        places = torch.tensor([i] * BATCH)
        expected[:, i] = product(name, padding, own_gradients(name, padding, predictions_at(places)))[:, i]
    result = explained(found)
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, expected * real_map(padding))


@pytest.mark.parametrize("sign", ["keep", "clamp", "abs"])
def test_the_sign_of_the_weighed_map_is_treated(sign: str) -> None:
    places = torch.tensor([LENGTH - 1] * BATCH)
    gradients = own_gradients("mamba2", "none", predictions_at(places))
    clamp = {"keep": lambda a: a, "clamp": torch.relu, "abs": torch.abs}[sign]
    expected = product("mamba2", "none", gradients, clamp)[:, -1]
    assert close(explained(traced("mamba2"), target=-1, sign=sign).scores, expected)
    whole = explained(traced("mamba2"), sign=sign).scores
    assert close(whole[:, -1], expected)


def frozen_gradients(name: str) -> list[Tensor]:
    """Gradients through the frozen layers: every mixer's output replaced by its operator on the same input."""
    host, model, captured = HOSTS[name], HOSTS[name].model(), []
    for mixer, layer in zip(host.mixers(model), traced(name).layers, strict=True):
        host.projection(mixer).register_forward_pre_hook(lambda _, args: captured.append(args[0]))
        mixer.register_forward_hook(lambda _, args, __, layer=layer: layer.operator.apply(args[0]).requires_grad_())
    outputs: list[Tensor] = []
    for mixer in host.mixers(model):
        mixer.register_forward_hook(lambda _, __, output: outputs.append(output))
    with promoted():
        logits = model(**inputs()).logits
        gradients = torch.autograd.grad(logits[:, -1].max(-1).values.sum(), outputs)
    return [
        (g @ host.projection(mixer).weight).mean(-1) for g, mixer in zip(gradients, host.mixers(model), strict=True)
    ]


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_perturbed_definitions_are_told_apart(name: str) -> None:
    found = explained(traced(name), target=-1).scores
    gradients = own_gradients(name, "none", lambda logits: logits[:, -1].max(-1).values.sum())
    assert close(found, product(name, "none", gradients)[:, -1])
    first, second = (
        torch.relu(g[:, :, None] * r.alpha.mean(1)) for g, r in zip(gradients, references(name), strict=True)
    )
    assert not close(found, (second @ first)[:, -1]), "without the identity"
    assert not close(found, product(name, "none", gradients, lambda a: a)[:, -1]), "without the clamp"
    assert not close(found, product(name, "none", [torch.ones_like(g) for g in gradients])[:, -1]), "no gradient"
    columns = product(name, "none", [g.flip(1) for g in gradients])
    assert not close(found, columns[:, -1]), "another token's gradient"
    frozen = frozen_gradients(name)
    assert close(frozen[1], gradients[1]), "nothing mixes after the last layer"
    assert not close(frozen[0], gradients[0])
    assert not close(found, product(name, "none", frozen)[:, -1]), "the frozen model's gradient"


def test_the_logit_can_be_a_token_a_difference_or_a_function() -> None:
    found = traced("mamba")

    def expected(scalar: Callable[[Tensor], Tensor]) -> Tensor:
        return product("mamba", "none", own_gradients("mamba", "none", scalar))

    token = explained(found, target=-1, logit=4)
    assert close(token.scores, expected(lambda logits: logits[:, -1, 4].sum())[:, -1])
    pair = explained(found, target=-1, logit=(4, 2))
    assert close(pair.scores, expected(lambda logits: (logits[:, -1, 4] - logits[:, -1, 2]).sum())[:, -1])
    assert pair.options["logit"] == [4, 2]

    def total(output: Any) -> Tensor:
        return output.logits.square().sum()

    assert close(explained(found, target=0, logit=total).scores, expected(lambda x: x.square().sum())[:, 0])
    whole = explained(found, logit=total)
    assert close(whole.scores, expected(lambda x: x.square().sum()))
    assert whole.options["logit"].endswith("total")


def test_a_class_has_one_gradient_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    found = trace(randomize(transformers.BertForSequenceClassification(config).eval()), inputs("right"))
    calls: list[Any] = []
    real = found.gradients
    monkeypatch.setattr(found, "gradients", lambda targets, logit: calls.extend(targets) or real(targets, logit))
    whole = attribution(found)
    assert len(calls) == 1
    for target in (0, -1):
        places = found.positions(target)
        row = attribution(found, target=target).scores
        assert torch.allclose(row, whole.scores[torch.arange(BATCH), places], rtol=1e-5)


def test_a_model_without_logits_needs_a_function() -> None:
    host = HOSTS["mamba"].model().backbone
    found = trace(host, inputs())
    with pytest.raises(ValueError, match="give `logit` as a function"):
        attribution(found, target=-1)
    attribution(found, target=-1, logit=lambda output: output.last_hidden_state[:, -1].sum())
