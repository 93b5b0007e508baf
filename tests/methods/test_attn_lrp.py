"""The method `attn_lrp`: its scores are the relevances of the live run, for every row, scalar and kind of model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForSequenceClassification

import unilinattn as ula
from tests.frozen.detached import token_ids
from tests.frozen.relevant import MODELS
from tests.hosts import named
from tests.methods.hosts import traced
from tests.methods.test_streams import arguments, model_of
from unilinattn.frozen.live import LiveRun
from unilinattn.testing import promoted

PARTS = {"content", "control", "logit"}


def _explain(trace: Any, **options: Any) -> ula.Attribution:
    return ula.explain(trace, method="attn_lrp", progress=False, **options)


@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_scores_and_extras_are_those_of_the_live_run(name: str) -> None:
    trace = traced(name)
    result = _explain(trace, target=-1, logit=(2, 5))
    relevances = LiveRun(trace).relevances(-1, (2, 5))
    assert result.dims == ("batch", "key") and result.method == "attn_lrp" and set(result.extras) == PARTS
    assert torch.allclose(result.scores.double(), relevances.tokens, rtol=1e-9, atol=0)
    assert torch.allclose(result.extras["content"], relevances.content, rtol=1e-9, atol=0)
    assert torch.allclose(result.extras["control"], relevances.control, rtol=1e-9, atol=1e-12)
    logits = trace.output.logits[:, -1].double()
    assert torch.allclose(result.extras["logit"], logits[:, 2] - logits[:, 5])
    assert bool((result.extras["control"].abs().amax(1) > 0).all())


@pytest.mark.parametrize("name", ["mamba2", "gpt2"])
def test_content_has_the_scores_of_logit(name: str) -> None:
    trace = traced(name)
    result = _explain(trace, target=-1, logit=3, measure="logit")
    shares = ula.explain(trace, method="logit", target=-1, logit=3)
    assert torch.allclose(result.extras["content"], shares.scores.double(), rtol=1e-6, atol=1e-9)
    assert torch.allclose(result.extras["logit"], shares.extras["logit"])


def test_each_row_is_the_target_at_its_position() -> None:
    trace = traced("mamba", "left")
    every = _explain(trace)
    rows = trace.positions(-2)
    single = _explain(trace, target=-2)
    assert every.dims == ("batch", "query", "key")
    batch = torch.arange(len(rows))
    assert torch.allclose(single.scores, every.scores[batch, rows], rtol=1e-9, atol=1e-12)
    for name in PARTS:
        assert torch.allclose(single.extras[name], every.extras[name][batch, rows], rtol=1e-9, atol=1e-12), name
    assert not every.scores.triu(1).any() and not every.extras["control"].triu(1).any()


def test_centring_takes_away_the_relevance_of_the_mean_logit() -> None:
    trace = traced("llama")
    with promoted():
        centered, plain = _explain(trace, target=-1, logit=3), _explain(trace, target=-1, logit=3, measure="logit")
        mean = _explain(trace, target=-1, logit=lambda output: output.logits[:, -1].mean(-1))
    for name in ("content", "control", "logit"):
        difference = plain.extras[name] - mean.extras[name]
        assert torch.allclose(centered.extras[name], difference, rtol=1e-8, atol=1e-11), name
    assert torch.allclose(centered.scores, plain.scores - mean.scores, rtol=1e-5, atol=1e-9)
    assert mean.scores.abs().max() > 1e-3 * plain.scores.abs().max()


def test_centring_changes_no_pair_of_logits() -> None:
    pairs = [_explain(traced("llama"), target=-1, logit=(2, 5), measure=measure) for measure in ("centered", "logit")]
    assert torch.equal(pairs[0].scores, pairs[1].scores)


def test_class_logits_have_relevances() -> None:
    trace = ula.trace(_classifier(labels=3), token_ids(), progress=False)
    result = _explain(trace, logit=1, measure="logit")
    assert result.dims == ("batch", "key")
    assert torch.allclose(result.extras["logit"], trace.output.logits[:, 1].double())
    shares = ula.explain(trace, method="logit", logit=1).scores.double()
    assert torch.allclose(result.extras["content"], shares, rtol=1e-6, atol=1e-9)


def test_a_single_logit_is_not_centred() -> None:
    trace = ula.trace(_classifier(labels=1), token_ids(), progress=False)
    # The only logit is its mean, so that nothing would be left.
    centered, plain = (_explain(trace, logit=0, measure=measure) for measure in ("centered", "logit"))
    assert torch.equal(centered.scores, plain.scores) and bool(plain.scores.any())
    assert torch.allclose(centered.extras["logit"], trace.output.logits[:, 0].double())


def test_an_image_has_a_grid() -> None:
    host = named("vit")
    trace = ula.trace(host.model(), host.inputs(), progress=False)
    grid = ula.explain(trace, logit=1).grid
    result = _explain(trace, logit=1)
    assert grid is not None and result.grid == grid


@pytest.mark.long
def test_both_streams_of_an_encoder_decoder_have_relevances() -> None:
    model = model_of("t5")
    with promoted():
        trace = ula.trace(model, arguments("t5"), progress=False)
        result = _explain(trace, target=-1, logit=5, measure="logit")
        shares = ula.explain(trace, method="logit", target=-1, logit=5)
    assert result.streams == shares.streams and result.streams["key"] == {"encoder": 6, "decoder": 4}
    assert torch.allclose(result.extras["content"], shares.scores.double(), rtol=1e-6, atol=1e-9)
    assert result.extras["control"].any()


def test_a_result_is_saved_with_its_parts(tmp_path: Path) -> None:
    result = _explain(traced("llama"), target=-1)
    result.save(tmp_path / "result.safetensors")
    loaded = ula.Attribution.load(tmp_path / "result.safetensors")
    assert loaded.options == result.options and torch.equal(loaded.scores, result.scores)
    assert all(torch.equal(loaded.extras[name], result.extras[name]) for name in PARTS)


def _classifier(labels: int) -> nn.Module:
    config = MODELS["llama"]().config
    config.num_labels, config.pad_token_id = labels, 16
    torch.manual_seed(2)
    model = LlamaForSequenceClassification(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model
