"""`attention_grad` and `transformer_attribution` against autograd through explicit attention matrices.

The references run each host with mixers written as plain products alpha v, whose matrices autograd differentiates.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.hosts import named as host
from tests.methods.explicit import FIVE, MIXERS, Explicit, detached
from tests.methods.hosts import HOSTS, close, inputs, leaking, real_map, traced
from unilinattn.errors import UncoveredError
from unilinattn.methods import transformer_attribution
from unilinattn.operator.flow import evaluated_by
from unilinattn.operator.stages import walk
from unilinattn.scoring import gradient_maps
from unilinattn.scoring.cores import cores
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import trace


def host_gradients(model: nn.Module, given: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(alpha, d logit / d alpha) of each layer of a host; its recurrent mixers run as explicit ones.

    The other layers are softmax attention, which returns its weights.
    """
    explicit, matrices = Explicit(), []

    def replaced(module: nn.Module) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, **_: Any) -> Any:
            out = MIXERS[type(module).__name__](explicit, module, hidden_states)
            matrices.append(explicit.matrices[-1])
            return out

        return forward

    def attended(module: nn.Module, args: Any, output: Any) -> None:
        matrices.append(output[1])

    for module in model.modules():
        if type(module).__name__ in MIXERS:
            module.forward = replaced(module)
        elif type(module).__name__.endswith("Attention"):
            module.register_forward_hook(attended)
    for config in {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values():
        config._attn_implementation = "eager"
    with promoted():
        logits = model(**given, use_cache=False).logits[:, -1]
        gradients = torch.autograd.grad(logits.max(-1).values.sum(), matrices)
    return [(alpha.detach(), g) for alpha, g in zip(matrices, gradients, strict=True)]


def rolled(products: list[Tensor]) -> Tensor:
    """rho = B_n ... B_1 with B = I + mean_h (product_h)^+."""
    rho = torch.eye(products[0].shape[-1], dtype=torch.float64).expand(products[0].shape[0], -1, -1)
    for product in products:
        rho = rho + product.clamp_min(0).mean(1) @ rho
    return rho


def explained(model: nn.Module, method: str, given: dict[str, Tensor], **options: Any) -> ula.Attribution:
    with promoted():
        return ula.explain(trace(model, given, progress=False), method=method, **options)


CASES: dict[str, Callable[[], nn.Module]] = {
    **{name: HOSTS[name].model for name in (*FIVE, "gpt2")},
    "gated attention": lambda: host("qwen3 next, a value head a key head, no experts").model().double(),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_grad_is_its_formula(name: str) -> None:
    expected = rolled([alpha * g for alpha, g in host_gradients(CASES[name](), inputs())])[:, -1]
    result = explained(CASES[name](), "attention_grad", inputs(), target=-1)
    assert result.dims == ("batch", "key")
    assert float((result.scores - expected).abs().max()) <= 1e-8 * float(expected.abs().max())


def expected_attribution(name: str) -> Tensor:
    true, relevant = host_gradients(HOSTS[name].model(), inputs()), detached(name, "half").matrices
    # R = alpha d / 2 for the gradient d with respect to alpha in the detached model.
    return rolled([g * alpha * d / 2 for (alpha, g), (_, d) in zip(true, relevant, strict=True)])


@pytest.mark.parametrize("name", FIVE)
def test_transformer_attribution_is_its_formula(name: str) -> None:
    expected = expected_attribution(name)[:, -1]
    result = explained(HOSTS[name].model(), "transformer_attribution", inputs(), target=-1)
    assert float((result.scores - expected).abs().max()) <= 1e-8 * float(expected.abs().max())
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-9


def test_the_completeness_gap_is_the_largest_of_lrp() -> None:
    host_trace = trace(HOSTS["mamba"].model().float(), inputs(), progress=False)
    relevance = ula.explain(host_trace, method="lrp")
    result = ula.explain(host_trace, method="transformer_attribution")
    gaps = (relevance.extras["gap"] / relevance.extras["logit"].abs()).amax(0)
    assert float(gaps.min()) < float(gaps.max())
    assert result.completeness_gap == pytest.approx(float(gaps.max()), rel=1e-6)


@pytest.mark.parametrize("method", ["attention_grad", "transformer_attribution"])
def test_layers_before_start_layer_are_the_identity(method: str) -> None:
    pairs, relevant = host_gradients(HOSTS["mamba"].model(), inputs()), detached("mamba", "half").matrices
    (alpha, g), (_, d) = pairs[1], relevant[1]
    product = alpha * g * (d / 2 if method == "transformer_attribution" else 1)
    result = explained(HOSTS["mamba"].model(), method, inputs(), target=-1, start_layer=1)
    assert close(result.scores, rolled([product])[:, -1])
    assert result.layers == (traced("mamba").layers[1].name,)


def test_weighted_maps_are_zero_at_padding() -> None:
    host_trace, real = leaking(), real_map("left")
    layer = host_trace.layers[0]
    gradients = layer.core_pullback()(torch.ones_like(layer.output))
    for rows, block in gradient_maps.weighted_blocks(host_trace, layer, [gradients], "keep"):
        assert not bool((block * ~real[:, rows]).any())
        assert bool((block * real[:, rows]).any())


def test_two_directions_add_up_before_the_clamp() -> None:
    entry = host("vim")
    host_trace = trace(entry.model(), entry.inputs(), progress=False)
    layer = host_trace.layers[0]
    gradients = layer.core_pullback()(torch.randn(layer.output.shape, generator=torch.Generator().manual_seed(0)))
    products = []
    for core, g in zip(cores(layer), gradients, strict=True):
        by_head = g.unflatten(-1, (core.mixer.heads, -1))
        products.append(core.mixer.tile() * torch.einsum("bihp,bjhp->bhij", by_head, core.value))
    assert len(products) == 2
    blocks = [block for _, block in gradient_maps.weighted_blocks(host_trace, layer, [gradients], "clamp")]
    expected = (products[0] + products[1]).clamp_min(0).mean(1)
    assert torch.allclose(torch.cat(blocks, 1), expected, rtol=1e-5, atol=1e-7)
    apart = sum(product.clamp_min(0).mean(1) for product in products)
    assert float((apart - expected).abs().max()) > 1e-3 * float(expected.abs().max())


def test_a_function_has_one_gradient_for_all_rows() -> None:
    host_trace = traced("mamba")
    with promoted():
        scalar = {"logit": lambda output: output.logits[:, -1].max(-1).values}
        whole = ula.explain(host_trace, method="attention_grad", **scalar)
        row = ula.explain(host_trace, method="attention_grad", target=-1)
    assert close(whole.scores[:, -1], row.scores)


def test_blocks_of_heads_and_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host_trace = traced("mamba")
    with promoted():
        whole = ula.explain(host_trace, method="transformer_attribution", target=-1)
        monkeypatch.setattr(gradient_maps, "block_shape", lambda layer, mixers: (4, 5))
        assert close(ula.explain(host_trace, method="transformer_attribution", target=-1).scores, whole.scores)


@pytest.mark.long
def test_perturbed_definitions_give_other_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = host_gradients(HOSTS["mamba"].model(), inputs())
    scores = explained(HOSTS["mamba"].model(), "attention_grad", inputs(), target=-1).scores
    assert close(scores, rolled([alpha * g for alpha, g in pairs])[:, -1])
    mean_first = [(alpha * g).mean(1, keepdim=True) for alpha, g in pairs]
    assert not close(scores, rolled(mean_first)[:, -1]), "clamped after the mean over heads"
    frozen = [alpha * d for alpha, d in detached("mamba", "half").matrices]
    assert not close(scores, rolled(frozen)[:, -1]), "the frozen model's gradient"
    expected = expected_attribution("mamba")[:, -1]
    module = __import__("sys").modules[transformer_attribution.__module__]
    monkeypatch.setattr(module, "MATRIX_SHARE", 1.0)
    whole = explained(HOSTS["mamba"].model(), "transformer_attribution", inputs(), target=-1).scores
    assert not close(whole, expected), "all of the relevance to alpha"


@pytest.mark.parametrize("name", ["vim", "gss", "s4d", "recurrent gemma", "lfm2", "rwkv, one token"])
def test_core_gradients_agree_with_central_differences(name: str) -> None:
    """A step along a core's output changes the layer's output, whose norms and gates read it, by the gradient."""
    entry, step = host(name), 1e-5
    x = entry.inputs()
    x = x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
    with promoted():
        layer = trace(entry.model().double(), x, progress=False).layers[0]
        grad = torch.randn(layer.output.shape, dtype=torch.float64)
        pulled = layer.core_pullback()(grad)
        for at, g in enumerate(pulled):
            direction = torch.randn_like(g)
            outputs = [_pushed(layer, len(pulled), at, sign * step * direction) for sign in (1, -1)]
            change = ((outputs[0] - outputs[1]) * grad).sum() / (2 * step)
            assert float(change) == pytest.approx(float((g * direction).sum()), rel=1e-6)
        assert len(pulled) == len(cores(layer))


def _pushed(layer: Any, count: int, at: int, by: Tensor) -> Tensor:
    """Return the output of a layer whose core `at`, counted from the last of `count`, has another output."""
    calls: list[Tensor] = []

    def pushed(stages: Any, x: Tensor) -> Tensor:
        for stage in stages:
            x = stage.apply(x)
            if any(inner.role == "core" and inner.mixes for inner in walk([stage])):
                calls.append(x)
                x = x + by if len(calls) == at + 1 else x
        return x

    with torch.no_grad(), evaluated_by(pushed):
        output = layer.flow(layer.input).value
    assert len(calls) == count
    return output


def test_cores_in_series_and_complex_cores_are_refused() -> None:
    for name, message in (("hyena, order 3", "several cores in series"), ("s5", "matrices are complex")):
        entry = host(name)
        with pytest.raises(UncoveredError, match=message):
            ula.explain(entry.model(), entry.inputs(), method="attention_grad", target=-1)
