"""`attention_grad` and `transformer_attribution` against autograd through explicit attention matrices.

The references run each host with mixers written as plain products alpha v, whose matrices autograd differentiates.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.hosts import tables
from tests.methods.hosts import BATCH, HOSTS, LENGTH, close, inputs, real_map, traced
from tests.methods.references import mamba2_reference, mamba_reference
from unilinattn.errors import UncoveredError
from unilinattn.methods import gradient_maps, transformer_attribution
from unilinattn.operator.flow import evaluated_by
from unilinattn.operator.stages import walk
from unilinattn.testing import Host
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import trace


def host(name: str) -> Host:
    """Return a configuration of the tables of hosts."""
    return next(entry for table in tables().values() for entry in table if entry.name == name)


REAL = torch.ones(BATCH, LENGTH)


class Explicit:
    """Runs mixers as explicit matrices, which it collects: as they are, or with the rules of `lrp` by detaching."""

    def __init__(self, *, relevance: bool = False) -> None:
        self.relevance = relevance
        self.matrices: list[Tensor] = []

    def matrix(self, alpha: Tensor) -> Tensor:
        self.matrices.append(alpha.detach().requires_grad_() if self.relevance else alpha)
        return self.matrices[-1]

    def constant(self, factor: Tensor) -> Tensor:
        return factor.detach() if self.relevance else factor

    def silu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.constant(x))

    def gated(self, value: Tensor, gate: Tensor) -> Tensor:
        product = value * self.silu(gate)
        return product / 2 + product.detach() / 2 if self.relevance else product

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * x * torch.rsqrt(self.constant(x).pow(2).mean(-1, keepdim=True) + eps)

    def mamba(self, mixer: Any, x: Tensor) -> Tensor:
        alpha = self.matrix(mamba_reference(mixer, x, REAL)["alpha"])
        inner, gate = mixer.in_proj(x).chunk(2, -1)
        u = self.silu(_convolved(inner, mixer.conv1d))
        return mixer.out_proj(self.gated(torch.einsum("beij,bje->bie", alpha, u) + mixer.D * u, gate))

    def mamba2(self, mixer: Any, x: Tensor) -> Tensor:
        alpha = self.matrix(mamba2_reference(mixer, x, torch.ones(x.shape[:2]))["alpha"])
        inner, heads = mixer.intermediate_size, mixer.num_heads
        gate, xbc, _ = mixer.in_proj(x).split([inner, mixer.conv_dim, heads], -1)
        u = self.silu(_convolved(xbc, mixer.conv1d)[..., :inner]).unflatten(-1, (heads, -1))
        y = torch.einsum("bhij,bjhp->bihp", alpha, u) + mixer.D[:, None] * u
        gated = self.gated(y.flatten(2), gate)
        groups = inner // getattr(mixer.norm, "group_size", inner)
        normed = self.rms(gated.unflatten(-1, (groups, -1)), torch.ones(()), mixer.norm.variance_epsilon)
        return mixer.out_proj(mixer.norm.weight * normed.flatten(2))

    def delta(self, mixer: Any, x: Tensor) -> Tensor:
        """The gated delta rule of Qwen3-Next, whose memory holds the coefficients of every token's value."""
        groups, heads = mixer.num_k_heads, mixer.num_v_heads
        sizes = [mixer.head_k_dim] * 2 + [mixer.value_dim // groups] * 2
        query, key, value, gate = (
            part.flatten(2) for part in mixer.in_proj_qkvz(x).unflatten(-1, (groups, -1)).split(sizes, -1)
        )
        strength, step = mixer.in_proj_ba(x).unflatten(-1, (groups, -1)).chunk(2, -1)
        mixed = functional.silu(_convolved(torch.cat([query, key, value], -1), mixer.conv1d))
        query, key, value = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
        query, key = (
            (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // groups, 2)
            for t in (part.unflatten(-1, (groups, -1)) for part in (query, key))
        )
        beta = torch.sigmoid(strength.flatten(2))
        decay = torch.exp(-torch.exp(mixer.A_log) * functional.softplus(step.flatten(2) + mixer.dt_bias))
        length, memory, rows = x.shape[1], torch.zeros(*query.shape[:1], heads, x.shape[1], query.shape[-1]), []
        for t in range(length):
            memory = decay[:, t, :, None, None] * memory
            written = torch.eye(length)[t, None, None] - torch.einsum("bhjn,bhn->bhj", memory, key[:, t])
            memory = memory + (beta[:, t, :, None] * written)[..., None] * key[:, t, :, None]
            rows.append(torch.einsum("bhjn,bhn->bhj", memory, query[:, t] * query.shape[-1] ** -0.5))
        alpha = self.matrix(torch.stack(rows, 2))
        y = torch.einsum("bhij,bjhp->bihp", alpha, value.unflatten(-1, (heads, -1)))
        normed = self.rms(y, mixer.norm.weight, mixer.norm.variance_epsilon)
        return mixer.out_proj(normed.flatten(2) * functional.silu(gate))


def _convolved(x: Tensor, conv: nn.Conv1d) -> Tensor:
    padded = functional.pad(x.mT, (conv.kernel_size[0] - 1, 0))
    return functional.conv1d(padded, conv.weight, conv.bias, groups=conv.groups).mT


def host_gradients(model: nn.Module, mixers: dict[str, str], given: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(alpha, d logit / d alpha) of each layer of a host, its recurrent mixers replaced by explicit ones.

    `mixers`: methods of `Explicit` by the names of the hosts' classes; other layers return their attention weights.
    """
    explicit, matrices = Explicit(), []

    def replaced(module: nn.Module, name: str) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, **_: Any) -> Any:
            out = getattr(explicit, name)(module, hidden_states)
            matrices.append(explicit.matrices[-1])
            return out

        return forward

    def attended(module: nn.Module, args: Any, output: Any) -> None:
        matrices.append(output[1])

    for module in model.modules():
        if type(module).__name__ in mixers:
            module.forward = replaced(module, mixers[type(module).__name__])
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


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "mamba": (HOSTS["mamba"].model, {"MambaMixer": "mamba"}),
    "mamba2": (HOSTS["mamba2"].model, {"Mamba2Mixer": "mamba2"}),
    "llama": (HOSTS["llama"].model, {}),
    "gpt2": (HOSTS["gpt2"].model, {}),
    "delta rule and gated attention": (
        lambda: host("qwen3 next, a value head a key head, no experts").model().double(),
        {"Qwen3NextGatedDeltaNet": "delta"},
    ),
    "hybrid of mamba2 and attention": (
        lambda: host("bamba").model().double(),
        {"BambaMixer": "mamba2"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_grad_is_its_formula(name: str) -> None:
    build, mixers = CASES[name]
    given = {"input_ids": inputs()["input_ids"]}
    expected = rolled([alpha * g for alpha, g in host_gradients(build(), mixers, given)])[:, -1]
    result = explained(build(), "attention_grad", given, target=-1)
    assert result.dims == ("batch", "key")
    assert float((result.scores - expected).abs().max()) <= 1e-8 * float(expected.abs().max())


def relevances(name: str, *, relevance: bool) -> list[tuple[Tensor, Tensor]]:
    """(alpha, d logit / d alpha) in the model itself, or with `relevance` in the model detached by hand."""
    model, explicit = HOSTS[name].model(), Explicit(relevance=relevance)
    ids, given = inputs()["input_ids"], inputs()
    with promoted():
        x = model.get_input_embeddings()(ids)
        if name == "llama":
            # The attention weights of the run; their gradient in the detached model takes them as constants.
            weights = iter(model(**given, output_attentions=True).attentions)
        for block in HOSTS[name].blocks(model):
            norm = block.input_layernorm if name == "llama" else block.norm
            normed = explicit.rms(x, norm.weight, _eps(norm))
            if name == "llama":
                attention, heads = block.self_attn, 4
                value = attention.v_proj(normed).unflatten(-1, (2, -1)).repeat_interleave(heads // 2, 2)
                mixed = torch.einsum("bhij,bjhp->bihp", explicit.matrix(next(weights)), value)
                x = x + attention.o_proj(mixed.flatten(2))
                normed = explicit.rms(x, block.post_attention_layernorm.weight, _eps(norm))
                mlp = block.mlp
                x = x + mlp.down_proj(explicit.gated(mlp.up_proj(normed), mlp.gate_proj(normed)))
            else:
                x = x + getattr(explicit, name)(block.mixer, normed)
        norm = model.model.norm if name == "llama" else model.backbone.norm_f
        logits = model.lm_head(explicit.rms(x, norm.weight, _eps(norm)))[:, -1]
        gradients = torch.autograd.grad(logits.max(-1).values.sum(), explicit.matrices)
    return [(alpha.detach(), g) for alpha, g in zip(explicit.matrices, gradients, strict=True)]


def _eps(norm: Any) -> float:
    return norm.variance_epsilon


def expected_attribution(name: str) -> Tensor:
    true = host_gradients(HOSTS[name].model(), CASES[name][1], inputs())
    relevant = relevances(name, relevance=True)
    # R = alpha d / 2 for the gradient d with respect to alpha in the detached model.
    return rolled([g * alpha * d / 2 for (alpha, g), (_, d) in zip(true, relevant, strict=True)])


@pytest.mark.parametrize("name", ["mamba", "mamba2", "llama"])
def test_transformer_attribution_is_its_formula(name: str) -> None:
    expected = expected_attribution(name)[:, -1]
    result = explained(HOSTS[name].model(), "transformer_attribution", inputs(), target=-1)
    assert float((result.scores - expected).abs().max()) <= 1e-8 * float(expected.abs().max())
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-9


@pytest.mark.parametrize("method", ["attention_grad", "transformer_attribution"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_those_of_targets_with_padding(method: str, side: str) -> None:
    host_trace = traced("mamba2", side)
    with promoted():
        every = ula.explain(host_trace, method=method)
        for target in (0, -1):
            one = ula.explain(host_trace, method=method, target=target)
            place = host_trace.positions(target)
            assert close(one.scores, every.scores[torch.arange(BATCH), place])
    assert every.dims == ("batch", "query", "key")
    assert not bool((every.scores * ~real_map(side)).any())


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


def test_perturbed_definitions_give_other_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = host_gradients(HOSTS["mamba"].model(), CASES["mamba"][1], inputs())
    scores = explained(HOSTS["mamba"].model(), "attention_grad", inputs(), target=-1).scores
    assert close(scores, rolled([alpha * g for alpha, g in pairs])[:, -1])
    mean_first = [(alpha * g).mean(1, keepdim=True) for alpha, g in pairs]
    assert not close(scores, rolled(mean_first)[:, -1]), "clamped after the mean over heads"
    frozen = [(alpha, d) for alpha, d in relevances("mamba", relevance=True)]
    assert not close(scores, rolled([alpha * d for alpha, d in frozen])[:, -1]), "the frozen model's gradient"
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
        cores = gradient_maps._cores(layer)
        for at, g in enumerate(pulled):
            direction = torch.randn_like(g)
            outputs = [_pushed(layer, len(pulled), at, sign * step * direction) for sign in (1, -1)]
            change = ((outputs[0] - outputs[1]) * grad).sum() / (2 * step)
            assert float(change) == pytest.approx(float((g * direction).sum()), rel=1e-6)
    assert len(pulled) == len(cores)


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
