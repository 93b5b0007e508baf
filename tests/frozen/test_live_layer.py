"""The frozen run by the half rule: conservation on every host, and relevances of models detached by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, MambaForCausalLM

import unilinattn as ula
from tests.frozen.detached import (
    llama_model,
    mamba_model,
    rms,
    scalar_of,
    selective_scan,
    token_ids,
)
from tests.hosts import STRUCTURES, every, of_turn, tables
from tests.shared import exact_trace
from unilinattn.errors import UncoveredError
from unilinattn.frozen import passes
from unilinattn.frozen.layers import frozen_output
from unilinattn.frozen.passes import FREEZE, HALF, HALF_WITH_EDGES, Rule
from unilinattn.frozen.run import frozen
from unilinattn.frozen.shares import Shares
from unilinattn.mixers import DiagonalDecay
from unilinattn.rules.forms import carried
from unilinattn.rules.freezing import Freezing
from unilinattn.testing import Host, promoted

QUICK = (
    "basic/mamba2",
    "basic/gpt2",
    "delta/qwen3 next",
    "recurrent/rwkv, one token",
    "recurrent/recurrent gemma",
    "recurrent/lfm2, biases",
    "reference/vim",
    "reference/h3",
    "reference/hyena, order 3",
)

HOSTS = {f"{name}/{host.name}": host for name, table in tables().items() for host in table}

CASES = [
    pytest.param(host, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, host in HOSTS.items()
    if name in QUICK or host.name in {*STRUCTURES, *of_turn(every(), 2)}
]

WITHOUT_BIASES = {"basic/mamba, no conv bias", "basic/llama, grouped queries", "recurrent/xlstm"}
"""Hosts without biases and without added constants; xLSTM has sigmoid gates."""


def _relevance(host: Host, rule: Rule = HALF) -> Shares:
    trace = exact_trace(host)
    with promoted():
        return frozen(trace, rule=rule).shares(-1, scalar_of(trace))


@pytest.mark.parametrize("host", CASES)
def test_relevance_is_conserved(host: Host) -> None:
    relevance = _relevance(host)
    assert float((relevance.gap / relevance.size).max()) <= 1e-12
    # Zero relevance would be conserved too, with the whole logit in the bias.
    assert bool((relevance.tokens != 0).any())


def _relevance_of_biases(name: str) -> float:
    relevance = _relevance(HOSTS[name])
    return float((relevance.bias.abs() / relevance.size).max())


@pytest.mark.parametrize("name", sorted(WITHOUT_BIASES))
def test_tokens_have_the_whole_relevance_in_models_without_biases(name: str) -> None:
    assert _relevance_of_biases(name) <= 1e-12


def test_a_sigmoid_gate_with_half_of_the_relevance_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Freezing.rank
    monkeypatch.setattr(Freezing, "rank", lambda mode, tensor: min(rank(mode, tensor), 1))
    assert _relevance_of_biases("recurrent/xlstm") > 1e-2


def _relevant_mamba(model: MambaForCausalLM, x: Tensor) -> Tensor:
    """Return the logits of the last token by the rules of MambaLRP (Jafari et al., 2024), detached by hand.

    SiLU is x times a constant, step sizes, B, C and norms are constants, and each factor of a gate gets half.
    """
    for block in model.backbone.layers:
        mixer = block.mixer
        inner, gate = mixer.in_proj(rms(block.norm, x)).chunk(2, -1)
        x = x + mixer.out_proj(_halved(selective_scan(mixer, inner), gate * torch.sigmoid(gate.detach())))
    return model.lm_head(rms(model.backbone.norm_f, x)[:, -1])


def _relevant_llama(model: LlamaForCausalLM, x: Tensor) -> Tensor:
    """Return the logits of the last token with attention weights, slopes and scales detached, and the GLU halved."""
    with torch.no_grad():
        weights = model(token_ids(), output_attentions=True).attentions
    for block, attention in zip(model.model.layers, weights, strict=True):
        value = block.self_attn.v_proj(rms(block.input_layernorm, x))[:, None]
        x = x + block.self_attn.o_proj((attention @ value).transpose(1, 2).flatten(2))
        normed = rms(block.post_attention_layernorm, x)
        gate = block.mlp.gate_proj(normed)
        x = x + block.mlp.down_proj(_halved(block.mlp.up_proj(normed), gate * torch.sigmoid(gate.detach())))
    return model.lm_head(rms(model.model.norm, x)[:, -1])


def _halved(value: Tensor, gate: Tensor) -> Tensor:
    """Return a product whose gradient is half of the product rule's (the half rule of MambaLRP)."""
    product = value * gate
    return product / 2 + product.detach() / 2


BY_HAND: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "mamba": (mamba_model, _relevant_mamba),
    "llama": (llama_model, _relevant_llama),
}


def _misses(name: str) -> float:
    """Return the largest difference of relevances and biases from the detached model's, relative to the largest."""
    build, by_hand = BY_HAND[name]
    model = build()
    model.config._attn_implementation = "eager"
    x = model.get_input_embeddings()(token_ids()).detach().requires_grad_()
    with promoted():
        logit = by_hand(model, x)[:, 3]
    (grad,) = torch.autograd.grad(logit.sum(), x)
    expected = (grad * x).sum(-1).detach()
    with promoted():
        relevance = frozen(ula.trace(model, token_ids(), progress=False), rule=HALF).shares(-1, 3)
    assert torch.allclose(logit.detach(), relevance.value, rtol=1e-9)
    bias = logit.detach() - expected.sum(1)
    worst = torch.maximum((relevance.tokens - expected).abs().max(), (relevance.bias - bias).abs().max())
    return float(worst / expected.abs().max())


@pytest.mark.parametrize("name", BY_HAND)
def test_relevances_equal_those_of_detached_models(name: str) -> None:
    assert _misses(name) <= 1e-12


def test_a_frozen_gate_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate_frozen(layer: Any, arguments: Any, gamma: float, edges: bool) -> tuple[Tensor, list[Tensor]]:
        with torch._C.DisableTorchFunction():
            return frozen_output(layer, arguments), []

    monkeypatch.setattr(passes, "live_output", gate_frozen)
    assert _misses("mamba") > 1e-3


def test_a_frozen_half_of_a_glu_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Freezing._product

    def frozen_half(mode: Freezing, name: str, func: Any, x: Any, other: Any) -> Tensor:
        mode._half = False
        return product(mode, name, func, x, other)

    monkeypatch.setattr(Freezing, "_product", frozen_half)
    assert _misses("llama") > 1e-3


@pytest.mark.parametrize("name", ["basic/gpt2", "reference/h3, three heads", "reference/multi-head hyena", "basic/s4d"])
def test_models_without_a_gate_to_share_with_have_the_shares_of_the_freeze_rule(name: str) -> None:
    # GPT-2 writes GELU out in code, H3 gates inside of its core, and S4D gates by a sigmoid.
    shares = _relevance(HOSTS[name], FREEZE)
    for rule in (HALF, HALF_WITH_EDGES):
        assert torch.allclose(_relevance(HOSTS[name], rule).tokens, shares.tokens, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["basic/llama, one value head, biases", "basic/bert", "basic/mamba2"])
def test_edges_after_the_cores_leave_the_relevance(name: str) -> None:
    with_edges, without = (_relevance(HOSTS[name], rule) for rule in (HALF_WITH_EDGES, HALF))
    for part in ("tokens", "embedding", "bias"):
        assert torch.allclose(getattr(with_edges, part), getattr(without, part), rtol=1e-10, atol=1e-13)


def test_float32_relevance_is_conserved() -> None:
    trace = ula.trace(HOSTS["basic/mamba2"].model(), HOSTS["basic/mamba2"].inputs(), progress=False)
    relevance = frozen(trace, rule=HALF).complete_shares(-1, 1)
    assert float((relevance.gap / relevance.size).max()) <= 1e-6


def test_the_culprit_of_a_gap_is_found_by_the_same_rule() -> None:
    run = frozen(ula.trace(mamba_model(), token_ids(), progress=False), rule=HALF)
    assert run.culprit() is None
    assert len(run.outputs) == len(run.mixed) == 2


@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="Mamba of transformers 5.6.2 gates by its own module")
def test_a_gate_with_an_unknown_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ula.trace(mamba_model(), token_ids(), progress=False)
    for layer in trace.layers:
        _ = layer.operator
    monkeypatch.setattr("unilinattn.architectures.mamba.silu", torch.special.bessel_j0)
    with pytest.raises(UncoveredError, match=r"mixer \(MambaMixer\) calls '.*bessel_j0'"):
        frozen(trace, rule=HALF)


def test_factors_of_mixers_are_constants_only_in_a_frozen_run() -> None:
    def mixer() -> DiagonalDecay:
        query, key, decay = torch.rand(3, 1, 2, 1, 2, requires_grad=True)
        return DiagonalDecay(query, key, log_decay=-decay)

    with Freezing(lambda: "here", lambda func, args, result: result):
        assert not any(carried(factor) for factor in (mixer().query, mixer().log_decay))
    assert carried(mixer().query) and carried(mixer().log_decay)
