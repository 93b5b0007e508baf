"""The method `logit`: completeness of shares by target, by row and for other scalars."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

import unilinattn as ula
from tests.methods.hosts import HOSTS, inputs, traced
from unilinattn.errors import ExactnessError, ExactnessWarning, InputError, OptionError
from unilinattn.examples import TASKS, load
from unilinattn.examples.tasks import HELD_OUT_SEED
from unilinattn.rules import freezing
from unilinattn.rules.forms import as_source

SIDES = ("none", "left")


@pytest.mark.parametrize("side", SIDES)
def test_each_row_is_the_target_at_its_position(side: str) -> None:
    trace = traced("mamba2", side)
    every = ula.explain(trace, method="logit")
    assert every.dims == ("batch", "query", "key") and every.scope is None
    for target in (0, -1):
        one = ula.explain(trace, method="logit", target=target)
        place = trace.positions(target)
        rows = torch.arange(len(place))
        assert one.dims == ("batch", "key")
        assert torch.allclose(one.scores, every.scores[rows, place], rtol=1e-9, atol=1e-12)
        for name in ("bias", "logit", "gap", "remainder"):
            assert torch.allclose(one.extras[name], every.extras[name][rows, place], rtol=1e-9, atol=1e-9)
    ratios = every.extras["gap"] / every.extras["logit"].abs().clamp_min(1e-300)
    assert every.completeness_gap == pytest.approx(float(ratios.max()), rel=1e-9, abs=0)
    assert float(ratios.min()) < float(ratios.max())
    # Later tokens have no share in an earlier logit.
    assert not every.scores.triu(1).any()
    total = every.scores.double().sum(-1) + every.extras["bias"] + every.extras["remainder"]
    assert torch.allclose(total, every.extras["logit"], rtol=1e-6, atol=1e-9)
    sizes = every.scores.double().abs().sum(-1) + every.extras["bias"].abs()
    cancellation = every.extras["cancellation"] * every.extras["logit"].abs()
    assert torch.allclose(cancellation, sizes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("by", ["depth", "layer"])
@pytest.mark.parametrize("side", SIDES)
def test_rows_by_depth_and_by_layer_add_up(side: str, by: str) -> None:
    trace = traced("llama", side)
    every = ula.explain(trace, method="logit", by=by)
    assert every.dims == ("layer", "batch", "query", "key") and len(every.layers) == every.sizes["layer"]
    one = ula.explain(trace, method="logit", by=by, target=-1)
    assert one.dims == ("layer", "batch", "key")
    place = trace.positions(-1)
    rows = torch.arange(len(place))
    assert torch.allclose(one.scores, every.scores[:, rows, place], rtol=1e-9, atol=1e-12)
    for name, values in one.extras.items():
        assert torch.allclose(values, every.extras[name][:, rows, place], rtol=1e-9, atol=1e-9)
    assert not every.scores.triu(1).any()
    extras = one.extras
    total = extras["part"] if by == "layer" else extras["logit"] - extras["remainder"]
    assert torch.allclose(one.scores.double().sum(-1) + extras["bias"], total, rtol=1e-6, atol=1e-9)
    plain = ula.explain(trace, method="logit", target=-1)
    assert torch.allclose(extras["logit"], plain.extras["logit"].expand_as(extras["logit"]))
    if by == "depth":
        # Llama adds nothing to the tokens' embeddings.
        assert torch.allclose(one.scores[0], plain.scores, rtol=1e-9)
        assert torch.allclose(extras["bias"][0], plain.extras["bias"])
        sizes = one.scores.double().abs().sum(-1) + extras["bias"].abs()
        assert torch.allclose(extras["cancellation"] * extras["logit"].abs(), sizes, rtol=1e-6, atol=1e-9)
    assert set(one.select(layer=0).extras) == set(extras)
    estimated = ula.estimate(trace, method="logit", by=by, target=-1)
    assert estimated.shape == tuple(one.scores.shape)
    assert estimated.result == sum(t.numel() * t.element_size() for t in (one.scores, *extras.values()))


def test_the_embedding_has_the_part_of_the_positions() -> None:
    trace = traced("gpt2")
    result = ula.explain(trace, method="logit", target=-1)
    assert result.extras["embedding"].shape == result.scores.shape
    assert bool((result.extras["embedding"] != 0).all())
    estimated = ula.estimate(trace, method="logit", target=-1)
    assert estimated.result == sum(t.numel() * t.element_size() for t in (result.scores, *result.extras.values()))
    assert not ula.explain(traced("mamba2"), target=-1).extras["embedding"].any()


def test_shares_that_miss_the_logit_are_kept_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("gpt2")
    monkeypatch.setattr(freezing, "as_source", lambda x, *rest: x if isinstance(x, Tensor) else as_source(x, *rest))
    with pytest.raises(ExactnessError, match=r"miss the logit by .* pass trust='warn' to get them with this warning"):
        ula.explain(trace, method="logit")
    with pytest.warns(ExactnessWarning, match="miss the logit by") as caught:
        result = ula.explain(trace, method="logit", trust="warn")
    assert len(caught) == 1 and [str(caught[0].message)] == list(result.warnings)
    assert result.completeness_gap is not None and result.completeness_gap > 1e-3
    assert "WARNING: shares and biases miss" in repr(result)


def test_the_logit_is_that_of_the_model() -> None:
    trace = traced("llama")
    logits = trace.output.logits[:, -1].double()
    assert torch.allclose(ula.explain(trace, method="logit", target=-1).extras["logit"], logits.max(-1).values)
    assert torch.allclose(ula.explain(trace, method="logit", target=-1, logit=2).extras["logit"], logits[:, 2])
    pair = ula.explain(trace, method="logit", target=-1, logit=(2, 5))
    assert torch.allclose(pair.extras["logit"], logits[:, 2] - logits[:, 5])
    apart = [ula.explain(trace, method="logit", target=-1, logit=token).scores for token in (2, 5)]
    assert torch.allclose(pair.scores, apart[0] - apart[1], atol=1e-9)


def test_a_scalar_that_is_not_linear_in_the_logits_reports_its_remainder() -> None:
    trace = traced("mamba2")

    def surprisal(output: Any) -> Tensor:
        return -output.logits[:, -1].log_softmax(-1)[:, 3]

    result = ula.explain(trace, logit=surprisal)
    assert result.dims == ("batch", "key")
    assert torch.allclose(result.extras["logit"], surprisal(trace.output).double())
    assert bool((result.extras["remainder"].abs() > 1e-3).all())
    assert result.completeness_gap is not None and result.completeness_gap < 1e-6
    by_depth = ula.explain(trace, logit=surprisal, by="depth")
    assert torch.equal(by_depth.extras["remainder"][1], result.extras["remainder"])
    assert by_depth.completeness_gap is not None and by_depth.completeness_gap < 1e-6


def _tiny(**more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=11, num_key_value_heads=2, pad_token_id=0, **sizes, **more)


def test_a_classifier_has_one_row() -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(_tiny(num_labels=3)).eval()
    result = ula.explain(model, torch.randint(1, 11, (2, 7)), method="logit", logit=2)
    assert result.dims == ("batch", "key")
    assert result.completeness_gap is not None and result.completeness_gap < 1e-5


def test_labels_change_nothing() -> None:
    model = HOSTS["mamba2"].model()
    given = inputs()
    plain = ula.explain(model, given, method="logit", target=-1)
    labelled = ula.explain(model, {**given, "labels": given["input_ids"]}, method="logit", target=-1)
    assert torch.allclose(plain.scores, labelled.scores, rtol=1e-12)


def test_every_target_runs_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, calls = traced("mamba2"), []
    norm = type(HOSTS["mamba2"].model().backbone.norm_f)
    forward = norm.forward

    def counted(module: nn.Module, *arguments: Any) -> Any:
        calls.append(module)
        return forward(module, *arguments)

    monkeypatch.setattr(norm, "forward", counted)
    ula.explain(trace, method="logit", target=-1)
    once = len(calls)
    calls.clear()
    ula.explain(trace, method="logit")
    assert len(calls) == once > 0


def test_invalid_inputs_are_refused() -> None:
    trace = traced("mamba2")
    with pytest.raises(OptionError, match="logit takes no option 'scope'"):
        ula.explain(trace, method="logit", scope="core")
    with pytest.raises(OptionError, match="logit does not accept by='head'"):
        ula.explain(trace, method="logit", by="head")
    with pytest.raises(InputError, match=r"logit 999 is out of range: the model has logits 0 to"):
        ula.explain(trace, method="logit", target=-1, logit=999)
    with pytest.raises(InputError, match="target 99 is out of range"):
        ula.explain(trace, method="logit", target=99)
    with pytest.raises(InputError, match="returns no logits; give `logit` as a function"):
        ula.explain(HOSTS["mamba2"].model().base_model, inputs(), method="logit", logit=3)


@pytest.mark.parametrize("model", ["mamba", "mamba2", "transformer"])
def test_the_answer_of_induction_is_ranked_first(model: str) -> None:
    batch = TASKS["induction"].sample(4, HELD_OUT_SEED)
    result = ula.explain(load("induction", model), batch.input_ids, method="logit")
    earlier = torch.ones(result.scores.shape[1:], dtype=torch.bool).tril(-1)
    asked = (batch.relevant & earlier).any(-1)
    best = result.scores.masked_fill(~earlier, -torch.inf).argmax(-1, keepdim=True)
    hits = batch.relevant.gather(-1, best).squeeze(-1)[asked]
    assert float(hits.float().mean()) >= 0.9
