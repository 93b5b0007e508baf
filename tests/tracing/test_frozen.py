"""The frozen run: completeness of shares and biases on every host, and the choice of frozen factors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

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


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = (
        GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=LENGTH)).double().eval()
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _ids() -> Tensor:
    return torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _rms(norm: nn.Module, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)


class _Steps(NamedTuple):
    """The stream that enters each block, and the input and output of each mixer, of a model detached by hand."""

    streams: list[Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]


def _frozen_mamba(model: MambaForCausalLM, x: Tensor, steps: _Steps) -> Tensor:
    """Return the logits of the last token with step sizes, B, C, slopes, gates and scales detached by hand."""
    for block in model.backbone.layers:
        mixer = block.mixer
        steps.streams.append(x)
        steps.inputs.append(_rms(block.norm, x))
        inner, gate = mixer.in_proj(steps.inputs[-1]).chunk(2, -1)
        taps = functional.conv1d(
            functional.pad(inner.mT, (mixer.conv_kernel_size - 1, 0)),
            mixer.conv1d.weight,
            mixer.conv1d.bias,
            groups=inner.shape[-1],
        ).mT
        u = taps * torch.sigmoid(taps.detach())
        raw, key, query = mixer.x_proj(u.detach()).split(
            [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], -1
        )
        step = functional.softplus(mixer.dt_proj(raw).detach())
        decay = torch.exp(step[..., None] * -torch.exp(mixer.A_log))
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (step[:, t] * u[:, t])[..., None] * key[:, t, None]
            outputs.append((state * query[:, t, None]).sum(-1))
        y = torch.stack(outputs, 1) + mixer.D * u
        steps.outputs.append(mixer.out_proj(y * functional.silu(gate.detach())))
        x = x + steps.outputs[-1]
    return model.lm_head(_rms(model.backbone.norm_f, x)[:, -1])


def _frozen_llama(model: LlamaForCausalLM, x: Tensor, steps: _Steps) -> Tensor:
    """Return the logits of the last token with attention weights, activated halves and scales detached by hand."""
    with torch.no_grad():
        weights = model(_ids(), output_attentions=True).attentions
    for block, attention in zip(model.model.layers, weights, strict=True):
        steps.streams.append(x)
        steps.inputs.append(_rms(block.input_layernorm, x))
        value = block.self_attn.v_proj(steps.inputs[-1])[:, None]
        steps.outputs.append(block.self_attn.o_proj((attention @ value).transpose(1, 2).flatten(2)))
        x = x + steps.outputs[-1]
        normed = _rms(block.post_attention_layernorm, x)
        active = functional.silu(block.mlp.gate_proj(normed)).detach()
        x = x + block.mlp.down_proj(active * block.mlp.up_proj(normed))
    return model.lm_head(_rms(model.model.norm, x)[:, -1])


def _frozen_gpt2(model: GPT2LMHeadModel, x: Tensor, steps: _Steps) -> Tensor:
    """Return the logits of the last token with attention weights, GELU's slopes and deviations detached by hand."""
    with torch.no_grad():
        weights = model(_ids(), output_attentions=True).attentions
    for block, attention in zip(model.transformer.h, weights, strict=True):
        steps.streams.append(x)
        steps.inputs.append(_layer_norm(block.ln_1, x))
        value = block.attn.c_attn(steps.inputs[-1])[..., 16:].unflatten(-1, (2, 4)).transpose(1, 2)
        steps.outputs.append(block.attn.c_proj((attention @ value).transpose(1, 2).flatten(2)))
        x = x + steps.outputs[-1]
        inner = block.mlp.c_fc(_layer_norm(block.ln_2, x))
        x = x + block.mlp.c_proj(inner * (block.mlp.act(inner) / inner).detach())
    return model.lm_head(_layer_norm(model.transformer.ln_f, x)[:, -1])


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred * torch.rsqrt(centred.detach().square().mean(-1, keepdim=True) + norm.eps) + norm.bias


class _ByHand(NamedTuple):
    """A model, its frozen form, and the constants in that form by the module whose share they are."""

    build: Callable[[], Any]
    logits: Callable[[Any, Tensor, _Steps], Tensor]
    biases: Callable[[Any], dict[str, list[Tensor]]]


def _mamba_biases(model: MambaForCausalLM) -> dict[str, list[Tensor]]:
    blocks = enumerate(model.backbone.layers)
    return {
        f"backbone.layers.{k}.mixer": [getattr(block.mixer, name).bias for name in ("in_proj", "conv1d", "out_proj")]
        for k, block in blocks
    }


def _llama_biases(model: LlamaForCausalLM) -> dict[str, list[Tensor]]:
    biases = {}
    for k, block in enumerate(model.model.layers):
        biases[f"model.layers.{k}.self_attn"] = [block.self_attn.v_proj.bias, block.self_attn.o_proj.bias]
        for name in ("up_proj", "down_proj"):
            biases[f"model.layers.{k}.mlp.{name}"] = [getattr(block.mlp, name).bias]
    return biases


def _gpt2_biases(model: GPT2LMHeadModel) -> dict[str, list[Tensor]]:
    biases = {"transformer.ln_f": [model.transformer.ln_f.bias]}
    for k, block in enumerate(model.transformer.h):
        biases[f"transformer.h.{k}.attn"] = [block.attn.c_attn.bias, block.attn.c_proj.bias]
        for name in ("ln_1", "ln_2"):
            biases[f"transformer.h.{k}.{name}"] = [getattr(block, name).bias]
        for name in ("c_fc", "c_proj"):
            biases[f"transformer.h.{k}.mlp.{name}"] = [getattr(block.mlp, name).bias]
    return biases


BY_HAND = {
    "mamba": _ByHand(_mamba, _frozen_mamba, _mamba_biases),
    "llama": _ByHand(_llama, _frozen_llama, _llama_biases),
    "gpt2": _ByHand(_gpt2, _frozen_gpt2, _gpt2_biases),
}


def _detached(name: str) -> tuple[Any, Tensor, Tensor, Tensor, _Steps]:
    """Return a model, the logit of its form detached by hand, the tokens' vectors, their positions' part, and steps."""
    model = BY_HAND[name].build()
    model.config._attn_implementation = "eager"
    x = model.get_input_embeddings()(_ids()).detach()
    positions = model.transformer.wpe.weight[:LENGTH].detach() if name == "gpt2" else torch.zeros(())
    x = (x + positions).requires_grad_()
    steps = _Steps([], [], [])
    with promoted():
        logit = BY_HAND[name].logits(model, x, steps)[:, 3]
    return model, logit, x, positions.expand(x.shape), steps


def _worst(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _misses(name: str) -> float:
    """Return the largest difference of shares and biases from those of the detached model, relative to the largest."""
    model, logit, x, positions, _ = _detached(name)
    (grad,) = torch.autograd.grad(logit.sum(), x)
    expected = (grad * x).sum(-1).detach()
    with promoted():
        shares = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    assert torch.allclose(logit.detach(), shares.value, rtol=1e-9)
    bias = logit.detach() - expected.sum(1)
    parts = torch.cat([expected, bias[:, None], (grad * positions).sum(-1)], 1)
    return _worst(torch.cat([shares.tokens, shares.bias[:, None], shares.embedding], 1), parts)


@pytest.mark.parametrize("name", BY_HAND)
def test_shares_equal_those_of_detached_models(name: str) -> None:
    assert _misses(name) <= 1e-12


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("by", ["depth", "layer"])
def test_shares_by_depth_and_by_layer_equal_those_of_detached_models(name: str, by: Any) -> None:
    model, logit, _, _, steps = _detached(name)
    tokens, bias, value = [], [], []
    for k in range(2):
        if by == "depth":
            (grad,) = torch.autograd.grad(logit.sum(), steps.streams[k], retain_graph=True)
            source, total = steps.streams[k], logit
        else:
            (at,) = torch.autograd.grad(logit.sum(), steps.outputs[k], retain_graph=True)
            (grad,) = torch.autograd.grad(steps.outputs[k], steps.inputs[k], at, retain_graph=True)
            source, total = steps.inputs[k], (at * steps.outputs[k]).flatten(1).sum(1)
        tokens.append((grad * source).sum(-1).detach())
        bias.append(total.detach() - tokens[-1].sum(1))
        value.append(total.detach())
    with promoted():
        parts = ula.trace(model, _ids(), progress=False).frozen().complete_shares(-1, 3, by=by).parts
    assert parts is not None and parts.tokens.shape == (2, 2, LENGTH)
    assert _worst(parts.tokens, torch.stack(tokens)) <= 1e-12
    assert _worst(parts.bias, torch.stack(bias)) <= 1e-12
    assert _worst(parts.value, torch.stack(value)) <= 1e-12
    assert _worst(parts.tokens[0], parts.tokens[1]) > 1e-3


@pytest.mark.parametrize("name", BY_HAND)
def test_biases_by_source_equal_gradients_at_the_biases(name: str) -> None:
    model, logit, _, _, _ = _detached(name)
    expected = {}
    for module, constants in BY_HAND[name].biases(model).items():
        grads = [torch.autograd.grad(one, constants, retain_graph=True) for one in logit]
        expected[module] = torch.stack(
            [sum((g * c).sum() for g, c in zip(row, constants, strict=True)).detach() for row in grads]
        )
    with promoted():
        run = ula.trace(model, _ids(), progress=False).frozen()
        shares, biases = run.shares(-1, 3), run.bias_by_source(-1, 3)
    assert set(biases) == set(expected)
    assert _worst(torch.stack([biases[m] for m in expected]), torch.stack(list(expected.values()))) <= 1e-12
    assert _worst(torch.stack(list(biases.values())).sum(0), shares.bias) <= 1e-12


def test_a_model_that_feeds_its_embeddings_in_again_has_no_shares_by_depth() -> None:
    host = next(case.values[0] for case in HOSTS if "zamba" in case.values[0].name.lower())
    run = ula.trace(host.model(), host.inputs(), progress=False).frozen()
    run.complete_shares(-1, 1, by="layer")
    with pytest.raises(ExactnessError, match=r"shares by depth miss .*tokens reach the logit beside the"):
        run.complete_shares(-1, 1, by="depth")


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
    with pytest.raises(OptionError, match=r"unknown shares by 'layers'.*layer"):
        ula.trace(_mamba(), _ids(), progress=False).frozen().shares(by="layers")
