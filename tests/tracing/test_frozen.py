"""The frozen run: shares and biases add up on every host, and each frozen factor is the right one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
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
    # Shares of nothing would add up too, if the bias took it all.
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
    """Return the logits of the last token with detaches by hand: steps, B, C, slopes, gates and scales."""
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
    """Return the logits of the last token with detaches by hand: attention weights, the activated half, scales."""
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
    """Return the largest difference of shares and biases from those of detaches by hand, relative to the largest."""
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
def test_shares_are_those_of_detaches_by_hand(name: str) -> None:
    assert _misses(name) <= 1e-12


def test_the_wrong_frozen_factor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Freezing._product

    def swapped(mode: Freezing, name: str, func: Any, x: Any, other: Any) -> Tensor:
        if freezing.carried(x) and freezing.carried(other) and mode.rank(x) > mode.rank(other):
            return func(x, other.detach())
        return product(mode, name, func, x, other)

    monkeypatch.setattr(Freezing, "_product", swapped)
    assert _misses("llama") > 1e-3


def test_a_mixer_that_the_rules_run_in_place_of_its_operator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(run: FrozenRun, layer: Any, arguments: Any) -> Any:
        return type(layer.module).forward(layer.module, **arguments)

    monkeypatch.setattr(FrozenRun, "_layer", live)
    assert _misses("mamba") > 1e-3


def test_a_lost_bias_is_caught_and_its_module_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ula.trace(_llama(), _ids(), progress=False)
    # Biases of linear layers are added without a tangent.
    monkeypatch.setattr(freezing, "as_source", lambda x, like: x if isinstance(x, Tensor) else as_source(x, like))
    with pytest.raises(
        ExactnessError, match=r"miss the logit by .* not affine in the frozen run: model\.layers\.0\.mlp"
    ):
        trace.frozen().complete_shares(-1, 3)


ROWS = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(1, 3, 4)

RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # The function, and its frozen form by hand: linear in its argument but for constants.
    "silu": (functional.silu, lambda x: x * torch.sigmoid(x.detach())),
    "gelu": (functional.gelu, lambda x: x * (1 + torch.erf(x.detach() / 2**0.5)) / 2),
    "tanh": (torch.tanh, lambda x: x * torch.tanh(x.detach()) / x.detach()),
    "sigmoid": (torch.sigmoid, lambda x: x * (torch.sigmoid(x.detach()) - 0.5) / x.detach() + 0.5),
    "relu": (torch.relu, lambda x: x * (x.detach() > 0)),
    "square": (torch.square, lambda x: x * x.detach()),
    "cube": (lambda x: x**3, lambda x: x * x.detach() ** 2),
    "root": (lambda x: x * (x * x + 1).sqrt(), lambda x: x * (x.detach() ** 2 + 1).sqrt()),
    "gated unit": (
        lambda x: functional.silu(x[..., :2]) * x[..., 2:],
        lambda x: functional.silu(x[..., :2].detach()) * x[..., 2:],
    ),
    "limited gated unit": (
        lambda x: functional.silu(x[..., :2].clamp(max=1)) * x[..., 2:].clamp(-1, 1),
        lambda x: (
            functional.silu(x[..., :2].detach().clamp(max=1))
            * (x[..., 2:] * x[..., 2:].detach().clamp(-1, 1) / x[..., 2:].detach())
        ),
    ),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), lambda x: x * torch.sigmoid(1.702 * x.detach())),
    "gelu written out": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: x * functional.gelu(x.detach(), approximate="tanh") / x.detach(),
    ),
    "glu": (functional.glu, lambda x: x[..., :2] * torch.sigmoid(x[..., 2:].detach())),
    "router": (
        lambda x: (x.softmax(-1)[..., :1] * x) / x.norm(),
        lambda x: x.detach().softmax(-1)[..., :1] * x / x.detach().norm(),
    ),
    "layer norm": (
        lambda x: functional.layer_norm(x, (4,), ROWS[0, 0] + 3, ROWS[0, 1]),
        lambda x: (
            (x - x.mean(-1, keepdim=True))
            / (x.detach().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            * (ROWS[0, 0] + 3)
            + ROWS[0, 1]
        ),
    ),
    "rms norm": (
        lambda x: functional.rms_norm(x, (4,), ROWS[0, 0], 1e-6),
        lambda x: x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6) * ROWS[0, 0],
    ),
    "group norm": (
        lambda x: functional.group_norm(x.mT, 2, ROWS[0, 0], ROWS[0, 1]).mT,
        lambda x: (
            torch.cat(
                [
                    (g - g.mean((1, 2), keepdim=True))
                    / (g.detach().var((1, 2), correction=0, keepdim=True) + 1e-5).sqrt()
                    for g in x.split(2, -1)
                ],
                -1,
            )
            * ROWS[0, 0]
            + ROWS[0, 1]
        ),
    ),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: (x.detach() @ x.detach().mT / 2).softmax(-1) @ x,
    ),
    "linear": (
        lambda x: functional.linear(x, ROWS[0], ROWS[0, :, 0]),
        lambda x: x @ ROWS[0].mT + ROWS[0, :, 0],
    ),
    "convolution": (
        lambda x: functional.conv1d(x, ROWS[0, :, None, :2], ROWS[0, :, 0], groups=3),
        lambda x: x[..., :-1] * ROWS[0, :, :1] + x[..., 1:] * ROWS[0, :, 1:2] + ROWS[0, :, :1],
    ),
    "constants": (lambda x: 1 - torch.cat([x + 2, ROWS], 1) * 3, lambda x: 1 - torch.cat([x + 2, ROWS], 1) * 3),
    "filled": (lambda x: x.masked_fill(ROWS > 0, 5.0), lambda x: torch.where(ROWS > 0, torch.full_like(ROWS, 5), x)),
    "mix": (
        lambda x: torch.lerp(x, x * 2, torch.sigmoid(x[..., :1])),
        lambda x: x + x * torch.sigmoid(x[..., :1].detach()),
    ),
}


def _through(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a function's value, the part from its argument as gradient x argument, and the part from constants."""
    x = (ROWS + 0.1).requires_grad_()
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)
    with forward_ad.dual_level(), torch.enable_grad():
        with Freezing(lambda: "here", lambda func, args, result: result):
            y = function(x.clone())
        tangent = forward_ad.unpack_dual(y).tangent
        (grad,) = torch.autograd.grad((y.flatten() * weight[: y.numel()]).sum(), x)
    return y.detach(), grad, torch.zeros_like(y) if tangent is None else tangent.detach()


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_its_frozen_form(name: str) -> None:
    function, by_hand = RULES[name]
    value, grad, constants = _through(function)
    x = (ROWS + 0.1).requires_grad_()
    expected = by_hand(x)
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((expected.flatten() * weight[: expected.numel()]).sum(), x)
    assert torch.allclose(value, function(x).detach(), rtol=1e-12)
    assert torch.allclose(grad, wanted, rtol=1e-11, atol=1e-12)
    linear = torch.autograd.functional.jvp(by_hand, ROWS + 0.1, ROWS + 0.1)[1]
    assert torch.allclose(value - constants, linear, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("written", ["add_", "mul_", "setitem", "buffer", "relu", "copy_"])
def test_code_that_writes_in_place_adds_up(written: str) -> None:
    def function(x: Tensor) -> Tensor:
        if written == "add_":
            return x.add_(2.0).mul(3)
        if written == "mul_":
            x *= ROWS
            return x
        if written == "setitem":
            x[:, 1] = 4.0
            return x
        if written == "relu":
            return functional.relu(x - 1, inplace=True)
        out = torch.ones_like(ROWS)
        if written == "copy_":
            return out.copy_(x)
        out[:, :2] = x[:, 1:]
        return out

    value, grad, constants = _through(function)
    assert torch.allclose(value, function(ROWS + 0.1))
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)[: value.numel()]
    assert torch.allclose((grad * (ROWS + 0.1)).sum(), ((value - constants).flatten() * weight).sum(), rtol=1e-12)
    assert bool((grad != 0).any())


class _Odd(nn.Module):
    """A block's part that calls a function that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


class _Hidden(nn.Module):
    """A block's part that computes outside of torch's functions, in an autograd function of its own."""

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


def test_a_function_without_a_rule_is_an_error_that_names_it() -> None:
    model = _llama()
    model.model.layers[1].post_attention_layernorm = _Odd()
    trace = ula.trace(model, _ids(), progress=False)
    with pytest.raises(UncoveredError, match=r"post_attention_layernorm \(_Odd\) calls '.*bessel_j0'"):
        trace.frozen()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_function_that_hides_what_it_computes_is_caught_and_named() -> None:
    model = _llama()
    model.model.layers[1].post_attention_layernorm = _Hidden()
    trace = ula.trace(model, _ids(), progress=False)
    with pytest.raises(ExactnessError, match=r"model\.layers\.1\.post_attention_layernorm \(_Hidden\)"):
        trace.frozen().complete_shares(-1, 3)


def test_padding_has_no_share_and_changes_none() -> None:
    model, ids = _llama(), _ids()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with promoted():
        padded = ula.trace(model, {"input_ids": ids, "attention_mask": mask}, progress=False).frozen().shares(-1, 3)
        single = ula.trace(model, ids[1:, 4:], progress=False).frozen().shares(-1, 3)
    assert bool((padded.tokens[1, :4] == 0).all())
    assert torch.allclose(padded.tokens[1, 4:], single.tokens[0], rtol=1e-10)
    assert torch.allclose(padded.bias[1], single.bias[0], rtol=1e-10)


def test_shares_of_every_depth_add_up_with_the_bias_that_follows() -> None:
    shares = ula.trace(_mamba(), _ids(), progress=False).frozen().shares(-1, 3, depth=True)
    assert shares.depth is not None
    assert shares.depth.shape == (2, 2, LENGTH)
    # No bias stands before the first block.
    assert torch.allclose(shares.depth[0], shares.tokens)
    assert not torch.allclose(shares.depth[1], shares.tokens)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_does_not_matter(mode: Any) -> None:
    model = _mamba()
    expected = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    with mode():
        shares = ula.trace(model, _ids(), progress=False).frozen().shares(-1, 3)
    assert torch.equal(shares.tokens, expected.tokens) and torch.equal(shares.bias, expected.bias)
    assert not shares.tokens.requires_grad


def test_an_unknown_rule_and_two_streams_are_errors() -> None:
    with pytest.raises(OptionError, match="unknown rule 'halves'"):
        ula.trace(_mamba(), _ids(), progress=False).frozen(rule="halves")  # type: ignore[arg-type]
