"""ALTI-Logit against its formula, by loops over layers and tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, Gemma2Config, Gemma2ForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

import unilinattn as ula
from tests.hosts import named
from tests.methods.hosts import (
    BATCH,
    HOSTS,
    LENGTH,
    PART,
    Reference,
    close,
    host_inputs,
    inputs,
    part_added,
    real_tokens,
    references,
    traced,
)
from tests.methods.test_alti import mixing
from unilinattn.errors import ExactnessError, InputError, OptionError, UncoveredError
from unilinattn.frozen.run import FrozenRun, frozen
from unilinattn.frozen.shares import Unembedding
from unilinattn.testing import promoted, relative_error
from unilinattn.tracing.trace import trace

CASES = [(name, "none") for name in HOSTS] + [("mamba", "left"), ("llama", "right")]


def explained(name: str, padding: str = "none", **options: Any) -> ula.Attribution:
    """Explain a host whose frozen run computes in float64 too."""
    with promoted():
        return ula.explain(traced(name, padding), method="alti_logit", **options)


def unembedded(name: str, padding: str, token: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last stream, U of one token at every position, and the bias of norm and head, by hand."""
    host = HOSTS[name]
    model, seen = host.model(), []
    norm = host.norm(model)
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with promoted(), torch.no_grad():
        model(**host_inputs(name, padding))
    (stream,) = seen
    row, weight = model.lm_head.weight[token].detach(), norm.weight.detach()
    weight = 1 + weight if "Qwen3Next" in type(norm).__name__ else weight
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(norm, torch.nn.LayerNorm):
        return stream, row * weight / (stream.pow(2).mean(-1, keepdim=True) + eps).sqrt(), torch.zeros(())
    scale = 1 / (stream.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    slope = row * weight * scale
    return stream, slope - slope.mean(-1, keepdim=True), row @ norm.bias.detach()


def by_hand(
    layers: tuple[Reference, ...], stream: Tensor, u: Tensor, padding: str, *, with_residual: bool = False
) -> tuple[Tensor, Tensor]:
    """Return C (batch, query, key) and the part of the layers' biases (batch, query), from the first layer up."""
    maps = [mixing(r.shares, r.residual, r.residual + r.output, padding) for r in layers]
    real = real_tokens(padding)
    scores, biases = torch.zeros(BATCH, LENGTH, LENGTH, dtype=u.dtype), torch.zeros(BATCH, LENGTH, dtype=u.dtype)
    for b in range(BATCH):
        rho = torch.eye(LENGTH, dtype=u.dtype)
        for i in range(LENGTH):
            scores[b, i, i] += layers[0].residual[b, i] @ u[b, i]
        for k, r in enumerate(layers):
            for i in range(LENGTH):
                for j in range(LENGTH):
                    direct = r.shares[b, i, j] + (r.residual[b, i] if with_residual and i == j else 0)
                    scores[b, i] += (direct @ u[b, i]) * rho[j]
                biases[b, i] += r.bias[b, i] @ u[b, i]
            rho = maps[k][b] @ rho
            after = layers[k + 1].residual if k + 1 < len(layers) else stream
            for i in range(LENGTH):
                scores[b, i] += (after[b, i] - r.residual[b, i] - r.output[b, i]) @ u[b, i] * rho[i]
    return scores * real[:, :, None] * real[:, None, :], biases * real


@pytest.mark.long
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_scores_are_those_of_the_formula(name: str, padding: str) -> None:
    host_trace, token, real = traced(name, padding), 3, real_tokens(padding)
    stream, u, constant = unembedded(name, padding, token)
    expected, biases = by_hand(references(name, padding), stream, u, padding)
    result = explained(name, padding, logit=token)
    assert result.dims == ("batch", "query", "key") and result.scope == "layer"
    assert close(result.scores, expected)
    assert close(result.extras["bias"], (biases + constant) * real)
    logits = host_trace.output.logits[..., token].double()
    assert relative_error(result.extras["logit"], logits * real) <= 1e-12
    # Completeness: rows of R sum to 1, and these hosts mask their padding.
    size = expected.abs().sum(-1) + result.extras["bias"].abs()
    assert close(result.extras["cancellation"] * logits.abs(), size)
    assert (result.extras["gap"] <= 1e-10 * size)[real].all()
    assert relative_error((expected.sum(-1) + biases + constant) * real, logits * real) <= 1e-10
    last = explained(name, padding, logit=token, target=-1)
    places = torch.arange(BATCH), host_trace.positions(-1)
    assert last.dims == ("batch", "key")
    assert close(last.scores, expected[places])
    assert close(last.extras["bias"], (biases + constant)[places])
    assert float(last.extras["gap"].max()) <= 1e-10 * float(size.max())


@pytest.mark.parametrize("name", ["mamba", "llama", "hybrid"])
def test_a_perturbed_formula_gives_other_scores(name: str) -> None:
    stream, u, _ = unembedded(name, "none", 3)
    layers, scores = references(name), explained(name, logit=3).scores
    other = unembedded(name, "none", 4)[1]
    raw_head = HOSTS[name].model().lm_head.weight[3].detach().expand_as(u)
    wrong = [
        by_hand(layers, stream, u, "none", with_residual=True)[0],
        by_hand(layers[::-1], stream, u, "none")[0],
        by_hand(layers, stream, other, "none")[0],
        by_hand(layers, stream, raw_head, "none")[0],
    ]
    for expected in wrong:
        assert not close(scores, expected)


@pytest.mark.long
def test_a_lost_bias_or_stream_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    host_trace, unembedding = traced("gpt2"), FrozenRun.unembedding

    def without_bias(run: FrozenRun, *given: Any) -> Unembedding:
        part = unembedding(run, *given)
        return Unembedding(part.stream, part.gradient, part.bias * 0, part.remainder, part.value)

    def other_stream(run: FrozenRun, *given: Any) -> Unembedding:
        part = unembedding(run, *given)
        return Unembedding(part.stream * 1.1, part.gradient, part.bias, part.remainder, part.value)

    for broken in (without_bias, other_stream):
        monkeypatch.setattr(FrozenRun, "unembedding", broken)
        with pytest.raises(ExactnessError, match="alti_logit: scores and biases miss the logit by"):
            ula.explain(host_trace, method="alti_logit", target=-1)


def test_a_gap_counts_relative_to_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    host_trace, unembedding = traced("gpt2"), FrozenRun.unembedding

    def large_remainder(run: FrozenRun, *given: Any) -> Unembedding:
        part = unembedding(run, *given)
        return Unembedding(part.stream, part.gradient, part.bias, part.remainder + 1e7, part.value + 1e7 + 1)

    monkeypatch.setattr(FrozenRun, "unembedding", large_remainder)
    assert ula.explain(host_trace, method="alti_logit", target=-1).extras["gap"].min() > 0.5


def test_padding_that_reaches_real_tokens_is_part_of_the_gap() -> None:
    model = named("recurrent gemma").model().double()
    with promoted(), pytest.warns(UserWarning, match="left padding reaches real tokens"):
        result = ula.explain(model, inputs("left"), method="alti_logit", target=-1)
    size = result.scores.abs().sum(-1) + result.extras["bias"].abs()
    unpadded, padded = (result.extras["gap"] / size).tolist()
    assert unpadded <= 1e-10 < 1e-4 < padded


@pytest.mark.long
def test_a_pair_is_the_difference_and_the_prediction_the_default() -> None:
    first, second, pair = (explained("mamba2", target=-1, logit=logit) for logit in (2, 5, (2, 5)))
    assert close(pair.scores, first.scores - second.scores)
    logits = traced("mamba2").output.logits[:, -1]
    default = explained("mamba2", target=-1)
    assert torch.allclose(default.extras["logit"], logits.max(-1).values.double())


def test_a_function_of_the_output_reports_its_remainder() -> None:
    def surprisal(output: Any) -> Tensor:
        return -output.logits[:, -2:].log_softmax(-1)[..., 3].sum(-1)

    # Two positions depend on the stream: their contributions add up.
    result = explained("llama", logit=surprisal)
    assert result.dims == ("batch", "key")
    assert torch.allclose(result.extras["logit"], surprisal(traced("llama").output).double(), rtol=1e-12)
    assert (result.extras["remainder"].abs() > 1e-3).all()
    assert float(result.extras["gap"].max()) <= 1e-10


@pytest.mark.long
def test_outputs_are_scaled_by_the_residual_multiplier() -> None:
    host_trace = part_added()
    with promoted():
        result = ula.explain(host_trace, method="alti_logit", target=-1)
        part = frozen(host_trace).unembedding(-1)
    size = result.scores.abs().sum(-1) + result.extras["bias"].abs()
    assert (result.extras["gap"] <= 1e-10 * size).all()
    biases = sum(PART * (layer.operator.bias * part.gradient).sum((1, 2)) for layer in host_trace.layers)
    assert close(result.extras["bias"], biases + part.bias)


@pytest.mark.parametrize("target", [None, -1])
def test_the_gap_is_the_largest_distance_relative_to_the_logit(target: int | None) -> None:
    # In float32 sums lie above and below logits of both signs.
    result = ula.explain(HOSTS["mamba"].model().float(), inputs(), method="alti_logit", target=target, logit=3)
    extras, logit = result.extras, result.extras["logit"]
    missing = result.scores.double().sum(-1) + extras["bias"] + extras["remainder"] - logit
    assert bool((logit < 0).any())
    assert torch.equal(extras["gap"], missing.abs())
    assert result.completeness_gap == float((missing / logit).abs().max())
    if target is None:
        assert bool((missing < 0).any()) and bool((missing > 0).any())


def test_float32_scores_are_complete() -> None:
    for name in ("mamba", "llama"):
        result = ula.explain(HOSTS[name].model().float(), inputs(), method="alti_logit", target=-1)
        size = result.scores.abs().sum(-1) + result.extras["bias"].abs()
        assert float((result.extras["gap"] / size).max()) <= 1e-5


def _bert() -> BertLMHeadModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return BertLMHeadModel(BertConfig(vocab_size=17, is_decoder=True, **sizes)).eval()


def _minimax() -> MiniMaxForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    experts = dict(num_local_experts=2, num_experts_per_tok=1)
    return MiniMaxForCausalLM(MiniMaxConfig(vocab_size=17, head_dim=4, **sizes, **experts)).eval()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_bert, r"attention contains its residual, so the streams before and after it are related by more than a sum"),
        (_minimax, "MiniMaxForCausalLM norms or multiplies its residual stream between its layers"),
    ],
)
def test_a_stream_that_is_normed_between_layers_is_refused(build: Any, message: str) -> None:
    host_trace = trace(build(), inputs()["input_ids"])
    with pytest.raises(UncoveredError, match=message):
        ula.explain(host_trace, method="alti_logit", target=-1)
    assert ula.explain(host_trace, method="logit", target=-1, logit=3).method == "logit"


def test_norms_between_layers_and_the_stream_are_part_of_the_contributions() -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=17, head_dim=4, pad_token_id=None, **sizes)).eval()
    result = ula.explain(trace(model, inputs()["input_ids"]), method="alti_logit", target=-1)
    assert result.completeness_gap < 1e-4


def test_invalid_options_are_refused() -> None:
    host_trace = traced("mamba2")
    with pytest.raises(OptionError, match="alti_logit takes no option 'activation'"):
        ula.explain(host_trace, method="alti_logit", activation="silu")
    with pytest.raises(InputError, match="logit 999 is out of range"):
        ula.explain(host_trace, method="alti_logit", target=-1, logit=999)
    with pytest.raises(InputError, match="returns no logits"):
        ula.explain(HOSTS["mamba2"].model().base_model, inputs(), method="alti_logit", logit=3)
