"""The frozen run: completeness of shares and biases on every host, and the choice of frozen factors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import unilinattn as ula
from tests.hosts import cases, tables
from unilinattn.errors import ExactnessError, OptionError, UncoveredError
from unilinattn.testing import Host, promoted
from unilinattn.tracing import freezing
from unilinattn.tracing.freezing import Freezing
from unilinattn.tracing.frozen import FrozenRun
from unilinattn.tracing.frozen_forms import as_source

HOSTS = [case for name, table in tables().items() for case in cases(table, prefix=f"{name}/")]

LENGTH = 13


def _scalar(trace: ula.Trace) -> Any:
    """Return a logit of the trace's model, or a linear function of its output for a model without logits."""
    output = trace.output
    if isinstance(output, Tensor) or hasattr(output, "logits"):
        return 1
    return lambda out: out.last_hidden_state[:, -1, :3].sum(-1)


@pytest.mark.parametrize("host", HOSTS)
def test_shares_and_biases_add_up(host: Host) -> None:
    inputs = host.inputs()
    inputs = inputs.double() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs
    with promoted():
        trace = ula.trace(host.model().double(), inputs, progress=False)
        run = trace.frozen()
        shares = run.shares(-1, _scalar(trace))
    assert float((shares.gap / shares.size).max()) <= 1e-12
    assert float(shares.remainder.abs().max() / shares.size.max()) <= 1e-12
    # Zero shares would be complete too, with the whole logit in the bias.
    assert bool((shares.tokens != 0).any())
    assert not run.shared, "two factors of equal rank shared a product"


def _mamba(layers: int = 2) -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=17, hidden_size=8, state_size=4, num_hidden_layers=layers, use_bias=True, residual_in_fp32=False
    )
    model = MambaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _ids() -> Tensor:
    return torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _rms(norm: nn.Module, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)


def _frozen_mamba(model: MambaForCausalLM, x: Tensor) -> Tensor:
    """Return the logits of the last token with step sizes, B, C, slopes, gates and scales detached by hand."""
    for block in model.backbone.layers:
        mixer = block.mixer
        inner, gate = mixer.in_proj(_rms(block.norm, x)).chunk(2, -1)
        taps = functional.conv1d(
            functional.pad(inner.mT, (mixer.conv_kernel_size - 1, 0)),
            mixer.conv1d.weight,
            mixer.conv1d.bias,
            groups=inner.shape[-1],
        ).mT
        u = taps * torch.sigmoid(taps.detach())
        steps, key, query = mixer.x_proj(u.detach()).split(
            [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], -1
        )
        step = functional.softplus(mixer.dt_proj(steps))
        decay = torch.exp(step[..., None] * -torch.exp(mixer.A_log))
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (step[:, t] * u[:, t])[..., None] * key[:, t, None]
            outputs.append((state * query[:, t, None]).sum(-1))
        y = torch.stack(outputs, 1) + mixer.D * u
        x = x + mixer.out_proj(y * functional.silu(gate.detach()))
    return model.lm_head(_rms(model.backbone.norm_f, x)[:, -1])


def _frozen_llama(model: LlamaForCausalLM, x: Tensor) -> Tensor:
    """Return the logits of the last token with attention weights, activated halves and scales detached by hand."""
    with torch.no_grad():
        weights = model(_ids(), output_attentions=True).attentions
    for block, attention in zip(model.model.layers, weights, strict=True):
        value = block.self_attn.v_proj(_rms(block.input_layernorm, x))[:, None]
        x = x + block.self_attn.o_proj((attention @ value).transpose(1, 2).flatten(2))
        normed = _rms(block.post_attention_layernorm, x)
        active = functional.silu(block.mlp.gate_proj(normed)).detach()
        x = x + block.mlp.down_proj(active * block.mlp.up_proj(normed))
    return model.lm_head(_rms(model.model.norm, x)[:, -1])


BY_HAND: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "mamba": (_mamba, _frozen_mamba),
    "llama": (_llama, _frozen_llama),
}


def _misses(name: str) -> float:
    """Return the largest difference of shares and biases from those of the detached model, relative to the largest."""
    build, by_hand = BY_HAND[name]
    model = build()
    model.config._attn_implementation = "eager"
    x = model.get_input_embeddings()(_ids()).detach().requires_grad_()
    with promoted():
        logit = by_hand(model, x)[:, 3]
    (grad,) = torch.autograd.grad(logit.sum(), x)
    expected = (grad * x).sum(-1).detach()
    with promoted():
        shares = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    assert torch.allclose(logit.detach(), shares.value, rtol=1e-9)
    bias = logit.detach() - expected.sum(1)
    worst = torch.maximum((shares.tokens - expected).abs().max(), (shares.bias - bias).abs().max())
    return float(worst / expected.abs().max())


@pytest.mark.parametrize("name", BY_HAND)
def test_shares_equal_those_of_detached_models(name: str) -> None:
    assert _misses(name) <= 1e-12


def test_a_wrong_frozen_factor_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Freezing._product

    def swapped(mode: Freezing, name: str, func: Any, x: Any, other: Any) -> Tensor:
        if freezing.carried(x) and freezing.carried(other) and mode.rank(x) > mode.rank(other):
            return func(x, other.detach())
        return product(mode, name, func, x, other)

    monkeypatch.setattr(Freezing, "_product", swapped)
    assert _misses("llama") > 1e-3


def test_a_mixer_run_by_the_rules_instead_of_its_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(run: FrozenRun, layer: Any, arguments: Any) -> Any:
        return type(layer.module).forward(layer.module, **arguments)

    monkeypatch.setattr(FrozenRun, "_layer", live)
    with pytest.raises(UncoveredError, match=r"mixer \(MambaMixer\) adds the output of 'softplus'"):
        _misses("mamba")


def test_a_lost_bias_is_detected_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ula.trace(_llama(), _ids(), progress=False)
    # Biases of linear layers are added without a tangent.
    monkeypatch.setattr(freezing, "as_source", lambda x, like: x if isinstance(x, Tensor) else as_source(x, like))
    with pytest.raises(
        ExactnessError, match=r"miss the logit by .* not affine in the frozen run: model\.layers\.0\.mlp"
    ):
        trace.frozen().complete_shares(-1, 3)


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
    model = _llama()
    model.model.layers[1].post_attention_layernorm = _Odd()
    trace = ula.trace(model, _ids(), progress=False)
    with pytest.raises(UncoveredError, match=r"post_attention_layernorm \(_Odd\) calls '.*bessel_j0'"):
        trace.frozen()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()


class _TokenWise(nn.Module):
    """A submodule that computes a given function of each token."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (functional.softplus, "adds the output of 'softplus'"),
        (lambda x: x + (x.round() - x).detach(), "adds the output of 'detach'"),
        (lambda x: functional.one_hot(x.argmax(-1), x.shape[-1]).to(x), "adds the output of 'argmax'"),
        (lambda x: torch.from_numpy(2 * x.detach().numpy()), r"computes outside of torch \('numpy'\)"),
        (lambda x: x.new_tensor(x.tolist()), r"computes outside of torch \('tolist'\)"),
    ],
    ids=["softplus", "straight-through", "argmax", "numpy", "list"],
)
def test_a_value_that_depends_on_the_tokens_is_no_bias(function: Callable[[Tensor], Tensor], message: str) -> None:
    model = _llama()
    model.model.layers[0].mlp = _TokenWise(function)
    with pytest.raises(UncoveredError, match=message):
        ula.trace(model, _ids(), progress=False).frozen()


def test_a_factor_that_depends_on_the_tokens_is_frozen() -> None:
    model = _llama()
    model.model.layers[0].mlp = _TokenWise(lambda x: x * functional.softplus(x) / x.detach().abs().amax(-1, True))
    with promoted():
        shares = ula.trace(model.double(), _ids(), progress=False).frozen().shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-14


def test_a_hook_that_requires_gradients_changes_nothing() -> None:
    # As transformers' `enable_input_require_grads` does for gradient checkpointing.
    plain, hooked = _llama(), _llama()
    hooked.enable_input_require_grads()
    shares = [ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3) for model in (plain, hooked)]
    assert torch.equal(shares[0].tokens, shares[1].tokens) and torch.equal(shares[0].bias, shares[1].bias)


def test_tokens_that_the_model_adds_are_refused() -> None:
    model = _llama()
    embed, prompt = model.model.embed_tokens, torch.randn(1, 3, 8, dtype=torch.float64)

    def prompted(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        vectors = embed(kwargs.pop("input_ids"))
        return args, {**kwargs, "inputs_embeds": torch.cat([prompt.expand(len(vectors), -1, -1), vectors], 1)}

    model.register_forward_pre_hook(prompted, with_kwargs=True)
    with pytest.raises(UncoveredError, match=r"have 16 tokens, and its input has 13 ids.*such as a tuned prompt"):
        ula.trace(model, _ids(), progress=False).frozen()


def test_a_custom_autograd_function_is_detected_and_named() -> None:
    model = _llama()
    model.model.layers[1].post_attention_layernorm = _Hidden()
    trace = ula.trace(model, _ids(), progress=False)
    with pytest.raises(ExactnessError, match=r"model\.layers\.1\.post_attention_layernorm \(_Hidden\)"):
        trace.frozen().complete_shares(-1, 3)


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

    model = _llama()
    model.model.layers[1].post_attention_layernorm = Norm()
    with pytest.raises(UncoveredError, match=r"layers\.1\.post_attention_layernorm \(Norm\) computes in a function"):
        ula.explain(model, _ids(), target=-1)
    assert not torch.overrides._get_current_function_mode_stack()


def test_nan_shares_are_refused() -> None:
    model = _llama()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(ExactnessError, match="miss the logit by nan of their size"):
        ula.trace(model, _ids(), progress=False).frozen().complete_shares(-1, 3)


def test_ids_that_are_not_looked_up_are_an_error() -> None:
    class Copied(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.clone())

    model = _llama()
    model.model.embed_tokens.__class__ = Copied
    with pytest.raises(UncoveredError, match="does not look up its token ids"):
        ula.trace(model, _ids(), progress=False).frozen()


def test_padding_has_no_share_and_does_not_change_shares() -> None:
    model, ids = _llama(), _ids()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with promoted():
        padded = ula.trace(model, {"input_ids": ids, "attention_mask": mask}, progress=False).frozen().shares(-1, 3)
        single = ula.trace(model, ids[1:, 4:], progress=False).frozen().shares(-1, 3)
    assert bool((padded.tokens[1, :4] == 0).all())
    assert torch.allclose(padded.tokens[1, 4:], single.tokens[0], rtol=1e-10)
    assert torch.allclose(padded.bias[1], single.bias[0], rtol=1e-10)


def test_shares_of_every_depth_are_complete_with_later_biases() -> None:
    shares = ula.trace(_mamba(), _ids(), progress=False).frozen().shares(-1, 3, depth=True)
    assert shares.depth is not None
    assert shares.depth.shape == (2, 2, LENGTH)
    # No bias precedes the first block.
    assert torch.allclose(shares.depth[0], shares.tokens)
    assert not torch.allclose(shares.depth[1], shares.tokens)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_shares_do_not_depend_on_the_gradient_mode(mode: Any) -> None:
    model = _mamba()
    expected = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    with mode():
        shares = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    assert torch.equal(shares.tokens, expected.tokens) and torch.equal(shares.bias, expected.bias)
    assert not shares.tokens.requires_grad


def test_an_unknown_rule_and_two_streams_are_errors() -> None:
    with pytest.raises(OptionError, match="unknown rule 'halves'"):
        ula.trace(_mamba(), _ids(), progress=False).frozen(rule="halves")
