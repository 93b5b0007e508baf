"""Mamba-Attribution against its equation, with gradients from hooks on the host."""

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
from tests.methods.refused import hiera
from unilinattn.methods import attribution
from unilinattn.methods.attribution import gradient_weights
from unilinattn.options import weighted
from unilinattn.testing.hosts import randomize
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import Trace, trace


def host_gradients(name: str, padding: str, scalar: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """E_d(d logit / d y'^d) of each layer, y' the input of the host's output projection (HMA ACL Eq. 24)."""
    host, model, captured = HOSTS[name], HOSTS[name].model(), []
    for mixer in host.mixers(model):
        host.projection(mixer).register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    with promoted():
        logits = model(**host_inputs(name, padding)).logits
        gradients = torch.autograd.grad(scalar(logits), captured)
    # S4D projects with a convolution, whose channels are dimension 1.
    return [g.mean(1) if name == "s4d" else g.mean(-1) for g in gradients]


def predictions_at(positions: Tensor) -> Callable[[Tensor], Tensor]:
    def scalar(logits: Tensor) -> Tensor:
        return logits[torch.arange(len(positions)), positions].max(-1).values.sum()

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


def explained(host_trace: Trace, **options: Any) -> Any:
    with promoted():
        return attribution(host_trace, **options)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_gradient_is_that_of_the_host(name: str, padding: str) -> None:
    host_trace = traced(name, padding)
    positions = host_trace.positions(-2)
    with promoted():
        weights = next(gradient_weights(host_trace, host_trace.layers, [-2], weighted.Attribution()))
    for layer, expected in zip(
        host_trace.layers, host_gradients(name, padding, predictions_at(positions)), strict=True
    ):
        assert close(weights[layer.name].values * real_tokens(padding), expected * real_tokens(padding))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_the_gradient_agrees_with_central_differences(name: str) -> None:
    """A step along all channels of one token's y' changes the logit by the sum of its gradient."""
    host, model, step = HOSTS[name], HOSTS[name].model(), 1e-5
    token, layer, positions = 2, 0, torch.tensor([LENGTH - 1] * BATCH)
    logits = []
    with torch.no_grad(), promoted():
        chosen = model(**inputs()).logits[0, positions[0]].argmax()
        for sign in (1, -1):

            def push(_: Any, args: tuple, sign: int = sign) -> tuple:
                shifted = args[0].clone()
                shifted[(0, slice(None), token) if name == "s4d" else (0, token)] += sign * step
                return (shifted,)

            hook = host.projection(host.mixers(model)[layer]).register_forward_pre_hook(push)
            logits.append(model(**inputs()).logits[0, positions[0], chosen])
            hook.remove()
    host_trace = traced(name)
    with promoted():
        weight = next(gradient_weights(host_trace, host_trace.layers, [-1], weighted.Attribution()))[
            host_trace.layers[layer].name
        ].values[0, token]
    width = host.projection(host.mixers(model)[layer]).weight.shape[1]
    assert float((logits[0] - logits[1]) / (2 * step * width)) == pytest.approx(float(weight), rel=1e-6)


@pytest.mark.parametrize("target", [-1, 1, [2, -2]])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_a_target_selects_its_row_of_the_product(name: str, padding: str, target: Any) -> None:
    host_trace = traced(name, padding)
    positions = host_trace.positions(target)
    expected = product(name, padding, host_gradients(name, padding, predictions_at(positions)))
    result = explained(host_trace, target=target)
    assert result.dims == ("batch", "key")
    assert close(result.scores, expected[torch.arange(BATCH), positions])


@pytest.mark.long
@pytest.mark.parametrize(("name", "padding"), [("mamba", "none"), ("mamba2", "left"), ("gpt2", "right")])
def test_without_a_target_each_row_uses_the_gradient_of_its_query(name: str, padding: str) -> None:
    host_trace = traced(name, padding)
    expected = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        positions = torch.tensor([i] * BATCH)
        expected[:, i] = product(name, padding, host_gradients(name, padding, predictions_at(positions)))[:, i]
    result = explained(host_trace)
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, expected * real_map(padding))


@pytest.mark.parametrize("sign", ["keep", "clamp", "abs"])
def test_sign_applies_to_the_weighted_map(sign: str) -> None:
    positions = torch.tensor([LENGTH - 1] * BATCH)
    gradients = host_gradients("mamba2", "none", predictions_at(positions))
    clamp = {"keep": lambda a: a, "clamp": torch.relu, "abs": torch.abs}[sign]
    expected = product("mamba2", "none", gradients, clamp)[:, -1]
    assert close(explained(traced("mamba2"), target=-1, sign=sign).scores, expected)
    whole = explained(traced("mamba2"), sign=sign).scores
    assert close(whole[:, -1], expected)


def frozen_gradients(name: str) -> list[Tensor]:
    """Gradients through the frozen operators, which replace the mixers."""
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
def test_perturbed_definitions_give_other_scores(name: str) -> None:
    scores = explained(traced(name), target=-1).scores
    gradients = host_gradients(name, "none", lambda logits: logits[:, -1].max(-1).values.sum())
    assert close(scores, product(name, "none", gradients)[:, -1])
    first, second = (
        torch.relu(g[:, :, None] * r.alpha.mean(1)) for g, r in zip(gradients, references(name), strict=True)
    )
    assert not close(scores, (second @ first)[:, -1]), "without the identity"
    assert not close(scores, product(name, "none", gradients, lambda a: a)[:, -1]), "without the clamp"
    assert not close(scores, product(name, "none", [torch.ones_like(g) for g in gradients])[:, -1]), "no gradient"
    columns = product(name, "none", [g.flip(1) for g in gradients])
    assert not close(scores, columns[:, -1]), "another token's gradient"
    frozen = frozen_gradients(name)
    assert close(frozen[1], gradients[1]), "no layer mixes tokens after the last one"
    assert not close(frozen[0], gradients[0])
    assert not close(scores, product(name, "none", frozen)[:, -1]), "the frozen model's gradient"


def test_the_logit_can_be_a_token_a_difference_or_a_function() -> None:
    host_trace = traced("mamba")

    def expected(scalar: Callable[[Tensor], Tensor]) -> Tensor:
        return product("mamba", "none", host_gradients("mamba", "none", scalar))

    token = explained(host_trace, target=-1, logit=4)
    assert close(token.scores, expected(lambda logits: logits[:, -1, 4].sum())[:, -1])
    pair = explained(host_trace, target=-1, logit=(4, 2))
    assert close(pair.scores, expected(lambda logits: (logits[:, -1, 4] - logits[:, -1, 2]).sum())[:, -1])
    assert pair.options["logit"] == [4, 2]

    def total(output: Any) -> Tensor:
        return output.logits.square().sum()

    assert close(explained(host_trace, target=0, logit=total).scores, expected(lambda x: x.square().sum())[:, 0])
    whole = explained(host_trace, logit=total)
    assert close(whole.scores, expected(lambda x: x.square().sum()))
    assert whole.options["logit"].endswith("total")


def test_a_classifier_takes_one_gradient_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    host_trace = trace(randomize(transformers.BertForSequenceClassification(config).eval()), inputs("right"))
    calls: list[Any] = []
    real = host_trace.gradients
    monkeypatch.setattr(host_trace, "gradients", lambda targets, logit: calls.extend(targets) or real(targets, logit))
    whole = attribution(host_trace)
    assert len(calls) == 1
    for target in (0, -1):
        positions = host_trace.positions(target)
        row = attribution(host_trace, target=target).scores
        assert torch.allclose(row, whole.scores[torch.arange(BATCH), positions], rtol=1e-5)


def test_a_model_without_logits_needs_a_function() -> None:
    host = HOSTS["mamba"].model().backbone
    host_trace = trace(host, inputs())
    with pytest.raises(ValueError, match="give `logit` as a function"):
        attribution(host_trace, target=-1)
    attribution(host_trace, target=-1, logit=lambda output: output.last_hidden_state[:, -1].sum())


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"sign": "abs"}, {"sign": "keep"}, {"sign": "abs", "discard": 0.5}], ids=str)
def test_a_classifier_of_several_grids_has_a_row_for_each_token_of_the_last(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, image = hiera()
    with promoted():
        hiera_trace = trace(model.double().eval(), image.double())
        whole = explained(hiera_trace, **options).scores
        rows = [explained(hiera_trace, target=i, **options).scores for i in range(4)]
    assert whole.shape == (1, 4, 256 + 64 + 16 + 4)
    assert torch.allclose(whole, torch.stack(rows, dim=1), rtol=1e-9, atol=0)
    assert options.get("sign") is None or bool((whole.abs().sum(-1) > 0).all())
