"""Refusals: what a method declares to need decides whether it works, and every call that an error recommends works."""

import ast
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ReformerConfig, ReformerModelWithLMHead

import unilinattn as ula
from tests.methods.refused import HOSTS, LENGTH, ids, prompted, recommended, t5
from unilinattn.errors import InputError, UncoveredError, UnilinattnError
from unilinattn.methods import needs
from unilinattn.methods.needs import TRIED, Needs
from unilinattn.methods.run import run_method
from unilinattn.registry import Method, list_methods, overridden
from unilinattn.testing.hosts import randomize

SOURCES = Path(ula.__file__).parent
REFUSALS = ("UncoveredError", "ExactnessError", "StreamError")
QUICK = ("prompt tuning", "Doge", "BLOOM without logits")
WITH_TARGET = [(name, -1) for name in QUICK]
CASES = [
    *WITH_TARGET,
    *(
        pytest.param(name, target, marks=pytest.mark.slow)
        for at, name in enumerate(HOSTS)
        if (name, target := (-1, None)[at % 2]) not in WITH_TARGET
    ),
]
"""Few hosts with a target, and slow ones in turn with and without it."""


@cache
def traced(name: str) -> ula.Trace:
    torch.manual_seed(0)
    model, inputs = HOSTS[name]()
    return ula.trace(model.eval(), inputs)


@pytest.mark.long
@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_method_works_where_its_declared_needs_are_met(name: str, target: int | None) -> None:
    works = set()
    for method, entry in list_methods().items():
        try:
            run_method(entry, traced(name), target, {})
        except UnilinattnError:
            continue
        works.add(method)
    assert set(Needs(traced(name), target, None, "all").methods()) == works


@pytest.mark.long
@pytest.mark.parametrize(("name", "target"), CASES)
@pytest.mark.filterwarnings("ignore:every score of:unilinattn.errors.ExactnessWarning")
def test_every_recommended_call_works(name: str, target: int | None) -> None:
    calls: dict[str, tuple[str, dict[str, Any]]] = {}
    for method in ("alti_logit", "rollout", "logit"):
        try:
            ula.explain(traced(name), method=method, target=target)
        except UnilinattnError as refusal:
            calls |= {repr(call): call for call in recommended(str(refusal)) if call[1] or call[0] != method}
    for method, options in calls.values():
        assert ula.explain(traced(name), method=method, target=target, **options).method == method


def test_methods_that_only_run_the_model_are_recommended_too() -> None:
    with pytest.raises(UncoveredError, match=r"calls 'special_bessel_j0'") as refused:
        ula.explain(traced("a function without a rule"), method="logit", target=-1)
    names = {name for name, _ in recommended(str(refused.value))}
    assert {"knockout", "occlusion", "input_x_gradient"} <= names and not {"logit", "lrp", "alti_logit"} & names


@pytest.mark.long
def test_layers_of_two_streams_are_not_stacked() -> None:
    with pytest.raises(UncoveredError, match=r"compose='rollout' multiplies the layers of all streams.*'rollout'"):
        ula.explain(traced("T5"), method="alti", target=-1)
    # The other way: the encoder by itself.
    model, inputs = t5()
    assert ula.explain(model.eval().get_encoder(), {"input_ids": inputs["input_ids"]}).method == "alti"


@pytest.mark.long
def test_patches_in_place_of_ids_are_tokens_of_the_text() -> None:
    result = ula.explain(traced("LLaVA"), method="logit", target=-1)
    assert result.completeness_gap < 1e-5


def test_a_tuned_prompt_has_shares_as_vectors_of_the_model_inside_have() -> None:
    model, inputs = prompted()
    whole = ula.explain(model.eval(), inputs, target=-1)
    inside = model.get_base_model()
    vectors = torch.cat([model.get_prompt(1), inside.get_input_embeddings()(inputs)], 1).detach()
    result = ula.explain(inside, {"inputs_embeds": vectors}, target=-1)
    assert result.method == "attn_lrp" and result.scores.shape[-1] == LENGTH + 3
    torch.testing.assert_close(whole.scores, result.scores, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_without_a_residual_stream_alti_works_on_the_output() -> None:
    with pytest.raises(UncoveredError, match="Use residual=False for the layer's output without a stream"):
        ula.explain(traced("Doge"), method="alti", target=-1)
    assert ula.explain(traced("Doge"), method="alti", residual=False, target=-1).method == "alti"
    with pytest.raises(UncoveredError) as composed:
        ula.explain(traced("Doge"), method="alti", compose="rollout", target=-1)
    assert "residual=False" not in str(composed.value)


def test_a_model_without_logits_is_told_a_function_that_works() -> None:
    with pytest.raises(InputError, match=re.escape("lambda out: out.last_hidden_state[:, -1, 0]")):
        ula.explain(traced("ViT"), method="contribution", target=-1)

    def function(out: Any) -> torch.Tensor:
        return out.last_hidden_state[:, -1, 0]

    for name in ("contribution", "knockout", "occlusion"):
        assert ula.explain(traced("ViT"), method=name, logit=function, target=-1).method == name


def test_an_estimate_names_methods_that_have_one() -> None:
    with pytest.raises(UncoveredError) as refused:
        ula.estimate(traced("Doge"), method="alti", target=-1)
    for name, options in recommended(str(refused.value)):
        assert ula.estimate(traced("Doge"), method=name, target=-1, **options).method == name


@pytest.mark.long
@pytest.mark.parametrize("method", [None, "gradient", "contribution"])
def test_an_autograd_function_without_a_backward_pass_is_a_refusal(method: str | None) -> None:
    """Reformer runs its layers in an autograd function, whose backward pass refuses to run outside of training."""
    sizes = dict(vocab_size=23, hidden_size=16, feed_forward_size=16, num_attention_heads=2, attention_head_size=8)
    sizes |= dict(axial_pos_embds_dim=[8, 8], axial_pos_shape=[4, 4], local_attn_chunk_length=4, num_hashes=1)
    config = ReformerConfig(**sizes, attn_layers=["local", "local"], is_decoder=True, pad_token_id=0)
    model = randomize(ReformerModelWithLMHead(config).eval())
    with pytest.raises(UncoveredError) as refused:
        ula.explain(model, ids(16), method=method, target=-1)
    calls = list(recommended(str(refused.value)))
    assert ("knockout", {}) in calls and ("gradient", {}) not in calls
    for name, options in calls:
        assert ula.explain(model, ids(16), method=name, target=-1, **options).method == name


@pytest.mark.long
def test_a_comparison_and_a_generation_are_advised_too() -> None:
    with pytest.raises(UncoveredError, match="Methods that work here"):
        ula.compare({"doge": traced("Doge")}, methods=["alti"], target=-1)
    with pytest.raises(UncoveredError, match="Methods that work here"):
        ula.explain_generation(HOSTS["Doge"]()[0].eval(), ids(2), max_new_tokens=1, method="alti")


def test_knockout_of_one_side_has_the_tokens_that_its_layers_read() -> None:
    encoder = partial(ula.explain, traced("T5"), method="knockout", layers=[0, 1])
    assert encoder(target=-1).scores.shape == (1, LENGTH)
    assert encoder().scores.shape == (1, 4, LENGTH)


@pytest.mark.long
def test_what_is_not_tried_is_not_named() -> None:
    new_needs = partial(Needs, traced("Doge"), -1, None, "all")
    silent = Method("silent", "", list_methods()["raw"].function)
    with overridden(silent):
        assert "silent" not in new_needs().methods() and "raw" in new_needs().methods()
    long = ula.trace(traced("Doge").host, ids().repeat(TRIED // LENGTH + 1, 1))
    assert Needs(long, -1, None, "all").methods() == []


def test_the_layer_with_the_most_tokens_decides_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("T5")
    assert trace.layers[-1].output.shape[1] == 4 < LENGTH
    monkeypatch.setattr(needs, "TRIED", 4)
    assert Needs(trace, -1, None, "all").methods() == []


def test_a_refusal_below_the_methods_names_none_of_them() -> None:
    """Such code knows neither the trace nor the target. A trace in pieces names the only operation that it has."""
    methods = re.compile(rf"'({'|'.join(list_methods())})'")
    for room in ("call", "operator", "mixers", "architectures", "tracing"):
        for path in sorted((SOURCES / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and path.stem != "piecewise" and _raises(node) in REFUSALS:
                    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                    text = "".join(part for part in parts if isinstance(part, str))
                    assert not methods.search(text), f"{path}: {text}"


def _raises(node: ast.Raise) -> str | None:
    called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return called.id if isinstance(called, ast.Name) else None


class Shortened(nn.Module):
    """Convolves a long signal, and then one that is a hundredth of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv1d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.avg_pool1d(self.first(signal), 100)).mean(2)


def test_needs_are_not_tried_where_one_layer_has_many_tokens() -> None:
    torch.manual_seed(0)
    short, long = (ula.trace(Shortened().eval(), torch.randn(1, 4, size), progress=False) for size in (400, 4200))
    assert len(long.layers) == 3 and long.layers[-1].output.shape[1] == 42
    assert Needs(short, -1, 1, "all").methods() and not Needs(long, -1, 1, "all").methods()
