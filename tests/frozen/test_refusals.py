"""The frozen run: code without a rule, values that are no biases, and inputs that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.frozen.detached import llama_model, mamba_model, token_ids
from tests.tracing.models import TokenWise
from unilinattn.errors import ExactnessError, ExactnessWarning, UncoveredError
from unilinattn.frozen.run import frozen
from unilinattn.frozen.shares import Shares, doubt_of
from unilinattn.testing import promoted


class _Odd(nn.Module):
    """A submodule that calls a function without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


class _Hidden(nn.Module):
    """A submodule that computes in a custom autograd function."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x * x

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * tangent

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    def forward(self, x: Tensor) -> Tensor:
        return self.Square.apply(x)


def test_a_function_without_a_rule_is_refused_by_name() -> None:
    model = llama_model()
    model.model.layers[1].post_attention_layernorm = _Odd()
    trace = ula.trace(model, token_ids(), progress=False)
    with pytest.raises(UncoveredError, match=r"post_attention_layernorm \(_Odd\) calls '.*bessel_j0'"):
        frozen(trace)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + (torch.eye(x.shape[-1])[x.argmax(-1)] - x).detach(), "adds the output of 'argmax'"),
        (lambda x: x + x.softmax(-1), "adds the output of 'softmax'"),
        (lambda x: torch.eye(x.shape[-1])[torch.cdist(x, x[:, :4]).argmin(-1)], "adds the output of 'cdist'"),
        (lambda x: functional.one_hot(x.argmax(-1), x.shape[-1]).to(x), "adds the output of 'argmax'"),
        (lambda x: torch.from_numpy(2 * x.detach().numpy()), r"computes outside of torch \('numpy'\)"),
        (lambda x: x.new_tensor(x.tolist()), r"computes outside of torch \('tolist'\)"),
    ],
    ids=["straight-through", "softmax", "cdist", "argmax", "numpy", "list"],
)
def test_a_value_that_depends_on_the_tokens_is_no_bias(function: Callable[[Tensor], Tensor], message: str) -> None:
    model = llama_model()
    model.model.layers[0].mlp = TokenWise(function)
    with pytest.raises(UncoveredError, match=message):
        frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3)


class Stopping(nn.Module):
    """Attention, a gate and a head whose gradients the host may stop."""

    def __init__(self, stop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mixer, self.head, self.stop = TokenWise(lambda x: stop(x) + stop(x.cumsum(1))), nn.Linear(8, 9), stop

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.stop(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + self.mixer(x)
        return self.head(x * self.stop(x.sigmoid()))


class Inline(Stopping):
    """Attention in the model's own forward, a region of it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.stop((x @ x.mT).softmax(-1) @ self.stop(x))
        return self.head(self.stop(x))


class Coded(Stopping):
    """Has a codebook of parameters, whose nearest entries take the place of values."""

    def __init__(self, far: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(torch.clone)
        self.codes, self.far = nn.Parameter(torch.randn(5, 8)), far

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + (self.codes[self.far(x, self.codes).argmin(-1)] - x).detach())


@pytest.mark.parametrize("far", [torch.cdist, lambda x, codes: (x[..., None, :] - codes).pow(2).sum(-1)])
def test_the_nearest_entry_of_a_codebook_is_no_bias(far: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Its gradient is stopped behind it, so that all of the logit would be a bias."""
    trace = ula.trace(Coded(far).double().eval(), torch.arange(7)[None], progress=False)
    with pytest.raises(UncoveredError, match=r"adds the output of '(cdist|argmin)'"):
        frozen(trace).shares(-1, 3)


@pytest.mark.parametrize("build", [Stopping, Inline])
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp"])
def test_values_whose_gradient_a_host_stops_reach_the_output(
    method: str, build: Callable[[Callable[[Tensor], Tensor]], nn.Module]
) -> None:
    """A detector stops the gradient of its queries, for its training: the function that it computes is the same."""
    ids = torch.arange(7)[None]
    results = []
    for stop in (torch.detach, Tensor.clone, Tensor.detach):
        model = build(stop).double().eval()
        results.append(ula.explain(model, ids, method=method, target=-1, progress=False))
    first, expected, other = (result.scores for result in results)
    assert float(expected.abs().sum()) > 0
    assert torch.allclose(first, expected, rtol=1e-12, atol=0) and torch.equal(first, other)


@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp"])
def test_a_straight_through_estimator_is_the_function_that_it_computes(method: str) -> None:
    ids = torch.arange(7)[None]
    first, expected = (
        ula.explain(Stopping(stop).double().eval(), ids, method=method, target=-1, progress=False).scores
        for stop in (lambda x: x + ((8 * x).round() / 8 - x).detach(), lambda x: (8 * x).round() / 8)
    )
    assert float(expected.abs().sum()) > 0 and torch.allclose(first, expected, rtol=1e-10, atol=1e-14)


class Boxes(nn.Module):
    """Logits of classes, and corners of boxes that are refined in logarithms, as those of a detector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head, self.corners, self.position = nn.Linear(8, 9), nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        corners = self.corners(x).sigmoid()
        refined = (corners + torch.log(corners / (1 - corners.flip(-1)))).sigmoid()
        logits = self.head(x * self.position(refined).sigmoid())
        return {"logits": logits, "boxes": refined, "both": torch.cat([logits, refined], -1)}


def test_a_factor_that_is_added_is_refused_where_the_explained_number_depends_on_it() -> None:
    ids = torch.arange(7)[None]
    model = Boxes().double().eval()
    result = ula.explain(model, ids, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-12
    shares = frozen(ula.trace(model, ids, progress=False))
    both = shares.shares(-1, logit=lambda output: output["both"][:, -1, 3])
    assert torch.equal(both.tokens, shares.shares(-1, 3).tokens)
    for explained in ("boxes", "both"):
        with pytest.raises(UncoveredError, match=r"the model \(Boxes\) adds the output of 'log'"):
            shares.shares(-1, logit=lambda output, name=explained: output[name][:, -1, -1])


def test_a_factor_that_depends_on_the_tokens_is_frozen() -> None:
    model = llama_model()
    model.model.layers[0].mlp = TokenWise(lambda x: x * functional.softplus(x) / x.detach().abs().amax(-1, True))
    with promoted():
        shares = frozen(ula.trace(model.double(), token_ids(), progress=False)).shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-14


def test_a_log_softmax_by_hand_is_frozen_as_a_whole() -> None:
    results = []
    for weights in (lambda x: x.log_softmax(-1).exp(), lambda x: (x - x.logsumexp(-1, keepdim=True)).exp()):
        model = llama_model()
        model.model.layers[0].mlp = TokenWise(lambda x, weights=weights: x * weights(x))
        with promoted():
            results.append(frozen(ula.trace(model.double(), token_ids(), progress=False)).shares(-1, 3))
    assert float((results[0].tokens - results[1].tokens).abs().max()) < 1e-14
    assert float((results[1].gap / results[1].size).max()) < 1e-14


@pytest.mark.long
def test_a_hook_that_requires_gradients_changes_nothing() -> None:
    # As transformers' `enable_input_require_grads` does for gradient checkpointing.
    plain, hooked = llama_model(), llama_model()
    hooked.enable_input_require_grads()
    shares = [frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3) for model in (plain, hooked)]
    assert torch.equal(shares[0].tokens, shares[1].tokens) and torch.equal(shares[0].bias, shares[1].bias)


def test_tokens_that_the_model_adds_have_shares() -> None:
    model, plain = llama_model(), llama_model()
    embed, prompt = model.model.embed_tokens, torch.randn(1, 3, 8, dtype=torch.float64)

    def prompted(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        vectors = embed(kwargs.pop("input_ids"))
        return args, {**kwargs, "inputs_embeds": torch.cat([prompt.expand(len(vectors), -1, -1), vectors], 1)}

    model.register_forward_pre_hook(prompted, with_kwargs=True)
    shares = frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3)
    with torch.no_grad():
        vectors = torch.cat([prompt.expand(len(token_ids()), -1, -1), embed(token_ids())], 1)
    inside = frozen(ula.trace(plain, {"inputs_embeds": vectors}, progress=False)).shares(-1, 3)
    assert shares.tokens.shape[1] == 16
    torch.testing.assert_close(shares.tokens, inside.tokens, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(shares.bias, inside.bias, rtol=1e-6, atol=1e-9)


def test_a_custom_autograd_function_is_detected_and_named() -> None:
    model = llama_model()
    model.model.layers[1].post_attention_layernorm = _Hidden()
    trace = ula.trace(model, token_ids(), progress=False)
    with pytest.raises(ExactnessError, match=r"model\.layers\.1\.post_attention_layernorm \(_Hidden\)"):
        frozen(trace).complete_shares(-1, 3)


def test_a_function_without_a_forward_mode_derivative_is_an_error_that_names_its_module() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fused.apply(x + 1)

    model = llama_model()
    model.model.layers[1].post_attention_layernorm = Norm()
    with pytest.raises(UncoveredError, match=r"layers\.1\.post_attention_layernorm \(Norm\) computes in a function"):
        ula.explain(model, token_ids(), method="logit", target=-1)
    assert not torch.overrides._get_current_function_mode_stack()


def test_nan_shares_are_refused() -> None:
    model = llama_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(ExactnessError, match="miss the logit by nan of their size"):
        frozen(ula.trace(model, token_ids(), progress=False)).complete_shares(-1, 3)


def test_shares_that_cancel_to_less_than_their_rounding_are_refused() -> None:
    def doubt(size: float, gap: float, value: float = 1.0) -> str | None:
        zero = torch.zeros(1, dtype=torch.float64)
        tokens = torch.tensor([[size, value + gap - size]], dtype=torch.float64)
        shares = Shares(tokens, torch.zeros_like(tokens), zero, zero, zero + value, zero + 1)
        return doubt_of(shares, "tokens", (), 1e-3, lambda: None)

    assert doubt(1e9, 1e-4) is None and doubt(1e2, 1e-2) is None
    # A difference of two logits of size 1 may be near zero by chance.
    assert doubt(10, 1e-4, value=1e-5) is None
    message = doubt(1e9, 1e-1)
    assert message is not None and "2.0e+09 times as large as the logit" in message


def test_copied_and_flattened_ids_are_looked_up() -> None:
    class Copied(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.clamp(min=0).view(-1)).view(*ids.shape, -1)

    model = llama_model()
    expected = ula.explain(model, token_ids(), target=-1)
    model.model.embed_tokens.__class__ = Copied
    assert torch.equal(ula.explain(model, token_ids(), target=-1).scores, expected.scores)


@pytest.mark.parametrize("method", ["logit", "attn_lrp", "gradient", "occlusion"])
def test_ids_that_are_not_looked_up_have_the_vectors_that_enter_the_first_block(method: str) -> None:
    class OneHot(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return functional.one_hot(ids, len(self.weight)).to(self.weight) @ self.weight

    model = llama_model()
    expected = ula.explain(model, token_ids(), method=method, target=-1)
    model.model.embed_tokens.__class__ = OneHot
    actual = ula.explain(model, token_ids(), method=method, target=-1)
    assert torch.allclose(actual.scores, expected.scores, rtol=1e-4, atol=1e-6)


def test_ids_that_reach_a_block_beside_the_first_one_are_an_error() -> None:
    class Beside(nn.Module):
        def __init__(self, mlp: nn.Module, ids: Tensor) -> None:
            super().__init__()
            self.mlp, self.ids = mlp, ids

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) + functional.one_hot(self.ids % 4, x.shape[-1]).to(x)

    class Hashed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            model.model.layers[1].mlp.ids = ids
            return functional.one_hot(ids, len(self.weight)).to(self.weight) @ self.weight

    model = llama_model()
    model.model.layers[1].mlp = Beside(model.model.layers[1].mlp, token_ids())
    model.model.embed_tokens.__class__ = Hashed
    with pytest.raises(UncoveredError, match="does not look up its token ids"):
        frozen(ula.trace(model, token_ids(), progress=False))


def test_padding_has_no_share_and_does_not_change_shares() -> None:
    model, ids = llama_model(), token_ids()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with promoted():
        padded = frozen(ula.trace(model, {"input_ids": ids, "attention_mask": mask}, progress=False)).shares(-1, 3)
        single = frozen(ula.trace(model, ids[1:, 4:], progress=False)).shares(-1, 3)
    assert bool((padded.tokens[1, :4] == 0).all())
    assert torch.allclose(padded.tokens[1, 4:], single.tokens[0], rtol=1e-10)
    assert torch.allclose(padded.bias[1], single.bias[0], rtol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_shares_do_not_depend_on_the_gradient_mode(mode: Any) -> None:
    model = mamba_model()
    expected = frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3)
    with mode():
        shares = frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3)
    assert torch.equal(shares.tokens, expected.tokens) and torch.equal(shares.bias, expected.bias)
    assert not shares.tokens.requires_grad


def test_a_result_of_zeros_says_so() -> None:
    """The codes that a straight-through estimator chooses do not move with the tokens."""
    model, ids = Stopping(torch.detach).double().eval(), torch.arange(7)[None]
    assert not ula.explain(model, ids, method="attn_lrp", target=-1, progress=False).warnings
    codes = torch.randn(5, 8, dtype=torch.float64)
    model.stop = lambda x: x + (codes[(x @ codes.T).argmax(-1)] - x).detach()
    with pytest.warns(ExactnessWarning, match="every score of attn_lrp is zero"):
        result = ula.explain(model, ids, method="attn_lrp", target=-1, progress=False)
    assert not result.scores.any() and "only by choices, such as codes" in result.warnings[0]


class Ending(Inline):
    """Returns a function of its logits."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__(torch.clone)
        self.end = end

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.end(super().forward(input_ids))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda y: y.softmax(-1), "returns probabilities, .* return its logits, the values before the softmax"),
        (lambda y: y.mean(1).softmax(-1), "returns probabilities"),
        (lambda y: y.log_softmax(-1), "returns log probabilities, .* before the log_softmax"),
        (lambda y: y.softmax(-1) * 2, "a result of 'softmax', which is a constant of the frozen run"),
        (lambda y: y.logsumexp(1), "a result of 'logsumexp', .* by method='input_x_gradient' or method='knockout'"),
        (lambda y: y.exp().mean(1).log(), "return the values before 'exp'"),
        (lambda y: (y**3).mean(1) ** (1 / 3), "a result of 'pow'"),
        (lambda y: torch.ones_like(y), r"depends on its tokens\."),
    ],
)
def test_a_model_that_returns_constants_of_the_frozen_run_is_told_so(
    end: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(UncoveredError, match=message):
        ula.explain(Ending(end).eval(), torch.arange(7)[None], method="logit", target=-1, progress=False)
