"""The live run: relevances of models rewritten by hand with plain autograd."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.frozen.detached import scalar_of, token_ids, worst
from tests.frozen.relevant import MODELS, PASSES, relevance
from tests.hosts import STRUCTURES, every, of_turn, tables
from tests.shared import exact_trace
from tests.tracing.models import TokenWise
from unilinattn.errors import UncoveredError
from unilinattn.frozen.live import LiveRun, Relevances
from unilinattn.frozen.run import frozen
from unilinattn.rules import live as rules
from unilinattn.testing import Host, promoted, tolerance


@cache
def _relevances(name: str, split: str = "halves") -> Relevances:
    model = MODELS[name]()
    with promoted():
        trace = ula.trace(model, token_ids(), progress=False)
        return LiveRun(trace).relevances(-1, 3, split)  # type: ignore[arg-type]


@cache
def _by_hand(name: str, split: str = "halves") -> dict[str, Tensor]:
    model = MODELS[name]()
    return {part: relevance(model, weights) for part, weights in PASSES[split].items()}


def _require_equal(name: str, split: str) -> None:
    relevances, expected = _relevances(name, split), _by_hand(name, split)
    assert worst(relevances.tokens, expected["tokens"]) <= 1e-10
    assert worst(relevances.content, expected["content"]) <= 1e-10
    assert worst(relevances.control, expected["tokens"] - expected["sent"]) <= 1e-10
    # No two of the three are equal to the accepted digits, so that each comparison could fail.
    for first, other in [("tokens", "sent"), ("tokens", "content"), ("sent", "content")]:
        assert worst(expected[first], expected[other]) > 1e-6


@pytest.mark.parametrize("split", PASSES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3 next, experts"])
def test_relevances_equal_those_of_transformers_rewritten_by_hand(name: str, split: str) -> None:
    _require_equal(name, split)


@pytest.mark.parametrize("split", PASSES)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3 next, hybrid"])
def test_relevances_equal_those_of_recurrences_rewritten_by_hand(name: str, split: str) -> None:
    _require_equal(name, split)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_split_changes_all_but_content(name: str) -> None:
    halves, thirds = _relevances(name), _relevances(name, "thirds")
    assert torch.equal(halves.content, thirds.content)
    assert worst(halves.tokens, thirds.tokens) > 1e-6 and worst(halves.control, thirds.control) > 1e-6


QUICK = (
    "basic/mamba2",
    "basic/gpt2",
    "basic/vit",
    "delta/qwen3 next",
    "recurrent/rwkv, one token",
    "recurrent/lfm2, biases",
)

HOSTS = [
    pytest.param(host, id=f"{name}/{host.name}", marks=() if f"{name}/{host.name}" in QUICK else pytest.mark.slow)
    for name, table in tables().items()
    for host in table
    if f"{name}/{host.name}" in QUICK or host.name in {*STRUCTURES, *of_turn(every(), 0)}
]


@pytest.mark.parametrize("host", HOSTS)
def test_content_equals_the_shares_of_the_frozen_run(host: Host) -> None:
    trace = exact_trace(host)
    with promoted():
        content = LiveRun(trace).relevances(-1, scalar_of(trace)).content
        shares = frozen(trace).shares(-1, scalar_of(trace))
    assert float((content - shares.tokens).abs().max() / shares.size.max()) <= 1e-10
    assert bool((content != 0).any())


def _trace(model: Any, inputs: Any = None) -> ula.Trace:
    return ula.trace(model, token_ids() if inputs is None else inputs, progress=False)


def _llama(implementation: str) -> Any:
    model = MODELS["llama"]()
    model.set_attn_implementation(implementation)
    return model


def _require_same(first: Relevances, other: Relevances, limit: float = 1e-10) -> None:
    for part in ("tokens", "content", "control"):
        assert worst(getattr(first, part), getattr(other, part)) <= limit, part


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("split", PASSES)
def test_attention_implementations_have_equal_relevances(implementation: str, split: str) -> None:
    model = _llama(implementation)
    with promoted():
        relevances = LiveRun(_trace(model)).relevances(-1, 3, split)  # type: ignore[arg-type]
    _require_same(relevances, _relevances("llama", split))


@pytest.mark.parametrize("split", PASSES)
def test_masks_that_tokens_decide_are_factors(split: str) -> None:
    relevances, logits = [], []
    for implementation in ("eager", "sdpa"):
        model = MODELS["doge"]()
        model.set_attn_implementation(implementation)
        with promoted():
            trace = _trace(model)
            relevances.append(LiveRun(trace).relevances(-1, 3, split))  # type: ignore[arg-type]
            assert worst(relevances[-1].content, frozen(trace).shares(-1, 3).tokens) <= 1e-10
        logits.append(trace.output.logits)
    if not torch.allclose(*logits):
        pytest.skip("eager attention of Doge computes another function in this version of transformers")
    _require_same(*relevances)


class _Pooling(nn.Module):
    """Softmax attention of a learned query, which no token decides."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        key, value = x.flip(-1)[:, None], x[:, None]
        query = self.query.expand_as(key)
        if self.written_out:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            weights = torch.softmax((query @ key.mT / 8**0.5).masked_fill(future, -torch.inf), -1)
            return (weights @ value)[:, 0]
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


@pytest.mark.parametrize("split", PASSES)
def test_a_constant_query_leaves_the_matrix_to_the_keys(split: str) -> None:
    relevances = []
    for written_out in (False, True):
        model = MODELS["llama"]()
        model.model.layers[0].mlp = _Pooling(written_out=written_out)
        with promoted():
            relevances.append(LiveRun(_trace(model)).relevances(-1, 3, split))  # type: ignore[arg-type]
    _require_same(*relevances)


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3 next, hybrid"])
def test_a_batch_equals_its_sequences(name: str) -> None:
    model, ids = MODELS[name](), token_ids()
    with promoted():
        singles = [LiveRun(_trace(model, row[None])).relevances(-1, 3) for row in ids]
    for part in ("tokens", "content", "control"):
        assert worst(torch.cat([getattr(s, part) for s in singles]), getattr(_relevances(name), part)) <= 1e-10


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_padding_changes_no_relevance(name: str, side: str) -> None:
    # Mamba-2 of transformers 5.6.2 masks no batch of one.
    model, ids = MODELS[name](), token_ids()[:2]
    width = (3, 0) if side == "left" else (0, 3)
    padded = functional.pad(ids, width, value=5)
    mask = functional.pad(torch.ones_like(ids), width)
    with promoted():
        trace = _trace(model, {"input_ids": padded, "attention_mask": mask})
        relevances = LiveRun(trace).relevances(-1, 3)
        expected = LiveRun(_trace(model, ids)).relevances(-1, 3)
    real = mask[0].bool()
    for part in ("tokens", "content", "control"):
        actual = getattr(relevances, part)
        assert worst(actual[:, real], getattr(expected, part)) <= 1e-10, part
        assert not actual[:, ~real].any()


def _state(model: nn.Module) -> Any:
    flags = [parameter.requires_grad for parameter in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
    return flags, hooks, {name: value.clone() for name, value in model.state_dict().items()}


def _require_restored(model: nn.Module, before: Any) -> None:
    after = _state(model)
    assert after[:2] == before[:2]
    assert all(torch.equal(value, before[2][name]) for name, value in after[2].items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_model_is_left_as_it_was() -> None:
    model = MODELS["qwen3 next, hybrid"]()
    model.lm_head.weight.requires_grad_(False)
    trace, before = _trace(model), _state(model)
    LiveRun(trace).relevances(-1, 3)
    _require_restored(model, before)


def test_a_model_is_left_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["qwen3 next, hybrid"]()
    trace, before = _trace(model), _state(model)

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rules.Live, "product", fails)
        with pytest.raises(KeyboardInterrupt):
            LiveRun(trace)
    _require_restored(model, before)
    LiveRun(trace).relevances(-1, 3)


def test_targets_of_one_run_are_those_of_separate_runs() -> None:
    trace = _trace(MODELS["qwen3 next, hybrid"]())
    run = LiveRun(trace)
    first, _, again = run.relevances(-1, 3), run.relevances(4, 7), run.relevances(-1, 3)
    for part in ("tokens", "content", "control", "value"):
        assert torch.equal(getattr(first, part), getattr(again, part))
    _require_same(run.relevances(4, 7), LiveRun(trace, [4]).relevances(4, 7))
    assert worst(run.relevances(4, 7).tokens, first.tokens) > 1e-3


class _Multiply(torch.autograd.Function):
    """A product of two tensors that torch does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, other)
        return x * other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, other = ctx.saved_tensors
        return grad * other, grad * x


def _with_mlp(function: Callable[[Tensor], Tensor]) -> Any:
    model = MODELS["llama"]()
    model.model.layers[0].mlp = TokenWise(function)
    return model


def test_an_autograd_function_of_two_tensors_is_refused_by_name() -> None:
    model = _with_mlp(lambda x: _Multiply.apply(x, x + 1))
    with pytest.raises(UncoveredError, match=r"LlamaForCausalLM computes in .*\._Multiply, an autograd function"):
        LiveRun(_trace(model))


def test_a_recurrent_kernel_is_refused_by_name() -> None:
    model = _with_mlp(None)
    lstm = nn.LSTM(8, 8, batch_first=True).double()
    model.model.layers[0].mlp = TokenWise(lambda x: lstm(x.flatten(0, 1)[:, None])[0].reshape(x.shape))
    with pytest.raises(UncoveredError, match=r"mlp \(TokenWise\) calls 'lstm', whose products"):
        LiveRun(_trace(model))


def _swiglu(x: Tensor) -> Tensor:
    return functional.silu(x.flip(-1)) * x / (1 + x.detach().abs().sum(-1, keepdim=True))


def _swiglu_in_place(x: Tensor) -> Tensor:
    gated = x.clone()
    gated.mul_(functional.silu(x.flip(-1)))
    gated /= 1 + x.detach().abs().sum(-1, keepdim=True)
    return gated


def _rewritten(x: Tensor) -> Tensor:
    return x * x.flip(-1) * functional.silu(x)


def _rewritten_in_place(x: Tensor) -> Tensor:
    product, active = 1.0 * x, functional.silu(x)
    product *= x.flip(-1)
    return product * active


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) * x.flip(-1)


def _softmax_in_place(x: Tensor) -> Tensor:
    weights = x - x.detach().amax(-1, keepdim=True)
    weights.exp_()
    weights /= weights.sum(-1, keepdim=True)
    return weights * x.flip(-1)


def _tanh(x: Tensor) -> Tensor:
    return (3 * torch.tanh(x / 3)) * x.flip(-1)


def _tanh_in_place(x: Tensor) -> Tensor:
    capped = x / 3
    capped.tanh_()
    capped *= 3
    capped *= x.flip(-1)
    return capped


def _exp(x: Tensor) -> Tensor:
    return x - 2 * torch.exp(x / 2)


def _exp_in_place(x: Tensor) -> Tensor:
    scaled = x / 2
    scaled.exp_()
    scaled *= -2
    scaled += x
    return scaled


@pytest.mark.parametrize(
    ("plain", "in_place"),
    [(_swiglu, _swiglu_in_place), (_tanh, _tanh_in_place), (_rewritten, _rewritten_in_place), (_exp, _exp_in_place)],
    ids=["gate", "tanh", "written over", "exponential"],
)
def test_functions_in_place_have_the_rules_of_plain_ones(
    plain: Callable[[Tensor], Tensor], in_place: Callable[[Tensor], Tensor]
) -> None:
    models = [_with_mlp(function) for function in (plain, in_place)]
    with promoted():
        expected, actual = (LiveRun(_trace(model)).relevances(-1, 3) for model in models)
    _require_same(actual, expected)


def test_a_gate_with_the_derivative_of_its_activation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _relevances("mamba2").control
    monkeypatch.setattr(rules, "_slope", lambda name, func, x, *args, **kwargs: func(x, *args, **kwargs))
    model = MODELS["mamba2"]()
    with promoted():
        relevances = LiveRun(_trace(model)).relevances(-1, 3)
    assert worst(relevances.content, _by_hand("mamba2")["content"]) <= 1e-10
    assert worst(relevances.control, expected) > 1e-2


def test_a_softmax_in_place_has_the_relevances_of_softmax() -> None:
    models = [_with_mlp(function) for function in (_softmax, _softmax_in_place)]
    with promoted():
        expected, actual = (LiveRun(_trace(model)).relevances(-1, 3) for model in models)
    _require_same(actual, expected)


def _added_to_itself(x: Tensor) -> Tensor:
    for _ in range(50):
        x = 0.6 * x + 0.4 * x
    return x


MLPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear map of an activation": lambda x: functional.linear(functional.gelu(x), torch.eye(8).to(x)),
    "scale of a stream": lambda x: x * x.mean(-1, keepdim=True),
    "softplus": lambda x: functional.linear(functional.softplus(x), torch.eye(8).to(x)),
    "exponential": lambda x: x - 2 * torch.exp(x / 2),
    "a stream added to itself in fifty steps": lambda x: _added_to_itself(x + functional.softplus(x)),
    "xIELU": lambda x: torch.where(x > 0, 0.8 * x * x + x / 2, (torch.expm1(x.clamp_max(0)) - x) * 0.8 + x / 2),
}


@pytest.mark.parametrize("name", MLPS)
def test_content_of_an_mlp_is_its_share_in_a_frozen_run(name: str) -> None:
    model = MODELS["llama"]()
    model.model.layers[0].mlp = TokenWise(MLPS[name])
    with promoted():
        trace = _trace(model)
        content, shares = LiveRun(trace).relevances(-1, 3).content, frozen(trace).shares(-1, 3).tokens
    assert worst(content, shares) <= 1e-10


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_vectors_of_tokens_may_be_arguments(name: str) -> None:
    model = MODELS[name]()
    vectors = model.get_input_embeddings()(token_ids()).detach()
    with promoted():
        relevances = LiveRun(_trace(model, {"inputs_embeds": vectors})).relevances(-1, 3)
    _require_same(relevances, _relevances(name))


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_relevances_in_float16_are_finite(name: str) -> None:
    # The logits of Mamba-2 are float32 in any case, with gradients in float16 before them.
    relevances = LiveRun(_trace(MODELS[name]().half())).relevances(-1, 3)
    assert bool(relevances.tokens.isfinite().all()) and bool(relevances.tokens.any())
    assert worst(relevances.tokens, _relevances(name).tokens) <= tolerance("reconstruction", torch.float16)
