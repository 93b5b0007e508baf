"""`contribution` and the variants of `attribution` against their equations, on hosts of five kinds.

Gradients come from hooks on the host, maps and contributions from the references of `tests.methods.hosts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.methods.hosts import (
    BATCH,
    HOSTS,
    LENGTH,
    host_inputs,
    inputs,
    leaking,
    real_map,
    real_tokens,
    references,
    traced,
)
from unilinattn import explain
from unilinattn.errors import InputError, OptionError
from unilinattn.methods.contribution import _product
from unilinattn.testing import promoted, relative_error

LIMIT = 1e-8
KINDS = [("mamba", "none"), ("mamba2", "left"), ("llama", "right"), ("delta rule", "none"), ("hybrid", "left")]


@dataclass(frozen=True)
class Plain:
    """alpha (batch, head, query, key) and T_ij x_j (batch, query, key, out) of a layer, and two gradients."""

    alpha: Tensor
    shares: Tensor
    inner: Tensor
    outer: Tensor


@cache
def plain_layers(name: str, padding: str, target: int) -> tuple[Plain, ...]:
    """The layers with the gradients of the predicted logit at `target` for y' and for the mixer's output."""
    host, model = HOSTS[name], HOSTS[name].model()
    inner: list[Tensor] = []
    outer: list[Tensor] = []
    for mixer in host.mixers(model):
        host.projection(mixer).register_forward_pre_hook(lambda _, args: inner.append(args[0]))
        mixer.register_forward_hook(lambda *a: outer.append(a[-1][0] if isinstance(a[-1], tuple) else a[-1]))
    positions = traced(name, padding).positions(target)
    with promoted():
        logits = model(**host_inputs(name, padding)).logits
        best = logits[torch.arange(BATCH), positions].max(-1).values.sum()
        grads = [grad.detach() for grad in torch.autograd.grad(best, [*inner, *outer])]
    maps = zip(references(name, padding), grads[: len(inner)], grads[len(inner) :], strict=True)
    return tuple(Plain(reference.alpha, reference.shares, *pair) for reference, *pair in maps)


def composed(layers: tuple[Plain, ...], padding: str, beta: Callable[[Plain], Tensor]) -> Tensor:
    """rho = B_n ... B_1 with B = I + beta at pairs of real tokens."""
    real = real_map(padding)
    rho = torch.eye(LENGTH, dtype=torch.float64).repeat(BATCH, 1, 1)
    for layer in layers:
        rho = rho + (beta(layer) * real) @ rho
    return rho * real


def contributed(layer: Plain, clamp: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    return clamp(torch.einsum("bio,bijo->bij", layer.outer, layer.shares))


def per_head(layer: Plain) -> Tensor:
    heads = layer.alpha.shape[1]
    total = torch.zeros_like(layer.alpha[:, 0])
    for h, channels in enumerate(layer.inner.split(layer.inner.shape[-1] // heads, dim=-1)):
        total = total + torch.relu(channels.mean(-1)[:, :, None] * layer.alpha[:, h])
    return total / heads


def by_key(layer: Plain) -> Tensor:
    return torch.relu(layer.inner.mean(-1)[:, None] * layer.alpha.mean(1))


FORMS: dict[str, tuple[str, dict[str, Any], Callable[[Plain, str], Tensor]]] = {
    "contribution": ("contribution", {}, lambda layer, _: contributed(layer)),
    "contribution, signed": ("contribution", {"sign": "keep"}, lambda layer, _: contributed(layer, lambda a: a)),
    "contribution, absolute": ("contribution", {"sign": "abs"}, lambda layer, _: contributed(layer, torch.abs)),
    "per head": ("attribution", {"gradient": "per-head"}, lambda layer, _: per_head(layer)),
    "key": ("attribution", {"gradient_axis": "key"}, lambda layer, _: by_key(layer)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "padding"), KINDS)
def test_scores_equal_their_equation(name: str, padding: str, form: str) -> None:
    found, (method, options, beta) = traced(name, padding), FORMS[form]
    for target in (-1, 1):
        expected = composed(plain_layers(name, padding, target), padding, lambda layer: beta(layer, padding))
        with promoted():
            result = explain(found, method=method, target=target, **options)
        assert result.dims == ("batch", "key")
        assert relative_error(result.scores, expected[torch.arange(BATCH), found.positions(target)]) <= LIMIT


@pytest.mark.parametrize("form", ["contribution", "contribution, signed", "per head", "key"])
def test_without_a_target_each_row_has_its_gradient(form: str) -> None:
    method, options, beta = FORMS[form]
    expected = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        layers = plain_layers("mamba2", "none", i)
        expected[:, i] = composed(layers, "none", lambda layer: beta(layer, "none"))[:, i]
    with promoted():
        result = explain(traced("mamba2"), method=method, **options)
    assert result.dims == ("batch", "query", "key")
    assert relative_error(result.scores, expected) <= LIMIT


def test_other_definitions_give_other_scores() -> None:
    layers = plain_layers("mamba2", "none", -1)
    forms = [
        composed(layers, "none", lambda layer, beta=beta: beta(layer, "none"))[:, -1] for *_, beta in FORMS.values()
    ]
    forms.append(composed(layers, "none", lambda a: torch.relu(a.inner.mean(-1)[:, :, None] * a.alpha.mean(1)))[:, -1])
    for at, one in enumerate(forms):
        assert all(relative_error(one, other) > 1e-3 for other in forms[:at])
    unclamped = composed(layers, "none", lambda a: contributed(a, lambda x: x))[:, -1]
    assert relative_error(forms[0], unclamped) > 1e-3


@pytest.mark.parametrize("method", ["contribution", "attribution"])
def test_one_gradient_for_all_rows(method: str) -> None:
    """A function of the output has one gradient, and a row of its map is that of a target."""
    options: dict[str, Any] = {} if method == "contribution" else {"gradient": "per-head"}

    def total(output: Any) -> Tensor:
        return output.logits.square().sum()

    with promoted():
        whole = explain(traced("llama", "right"), method=method, logit=total, **options)
        for target in (0, -1):
            row = explain(traced("llama", "right"), method=method, logit=total, target=target, **options).scores
            at = torch.arange(BATCH), traced("llama", "right").positions(target)
            assert relative_error(whole.scores[at], row) <= LIMIT


def test_normalisation_follows_the_mean_over_heads() -> None:
    layers = plain_layers("mamba2", "none", -1)
    for normalize, scaled in {
        "rows": lambda beta: beta / beta.sum(-1, keepdim=True).clamp_min(1e-300),
        "min-max": lambda beta: (beta - beta.amin((1, 2), True)) / (beta.amax((1, 2), True) - beta.amin((1, 2), True)),
    }.items():
        expected = composed(layers, "none", lambda layer, scaled=scaled: scaled(per_head(layer)))[:, -1]
        with promoted():
            options = {"gradient": "per-head", "normalize": normalize}
            result = explain(traced("mamba2"), method="attribution", target=-1, **options)
        assert relative_error(result.scores, expected) <= LIMIT


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("sign", "count"), [("clamp", 1), ("keep", 1), ("keep", 3)])
def test_padding_takes_no_part_in_a_layer(sign: Any, count: int, side: str) -> None:
    found, real = leaking() if side == "left" else traced("llama", side), real_tokens(side)
    layer = found.layers[0]
    rows, changed = torch.rand(2, BATCH, count, LENGTH, dtype=torch.float64)
    changed = torch.where(real[:, None], rows, changed)
    product = _product(rows, found, layer, torch.ones_like(layer.output), sign)
    assert not bool((product * ~real[:, None]).any()) and bool((product * real[:, None]).any())
    assert torch.equal(_product(changed, found, layer, torch.ones_like(layer.output), sign), product)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("attribution", {"variant": "published"}, r"variant='published'; did you mean 'published-code'\?"),
    ("attribution", {"gradient": "per-head", "heads": "max"}, "takes the mean over heads after the product"),
    ("contribution", {"scope": "core"}, "contribution takes no option 'scope'"),
    ("contribution", {"start_layer": 2}, "start_layer=2 leaves no layer"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD)
def test_bad_options_say_what_is_accepted(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explain(traced("mamba2"), method=method, target=-1, **options)


def test_a_model_without_logits_needs_a_function() -> None:
    model = HOSTS["mamba"].model().backbone
    with pytest.raises(InputError, match="give `logit` as a function"):
        explain(model, inputs(), method="contribution", target=-1)
