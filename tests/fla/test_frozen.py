"""The frozen run on flash-linear-attention: shares against hand-placed detaches, and modules that differ."""

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.fla.recurrences import gla
from tests.fla.rwkv_recurrences import before, rwkv7, rwkv7_channel
from unilinattn.call.nested import tensors
from unilinattn.errors import ExactnessError, UncoveredError
from unilinattn.frozen.live import LiveRun
from unilinattn.frozen.run import frozen
from unilinattn.registry import architecture_of, overridden, plain_form_of
from unilinattn.testing import Host, relative_error, tolerance
from unilinattn.testing.hosts.fla import HOSTS
from unilinattn.tracing.trace import Trace

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:fla")


def _model(name: str) -> nn.Module:
    model = next(host for host in HOSTS if host.name == name).model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            # Ones and zeros in norms would hide a missing weight or bias.
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def _trace(model: nn.Module) -> Trace:
    ids = torch.randint(0, model.config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(1))
    return ula.trace(model, ids, progress=False)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Centre (in a layer norm) and divide by the detached deviation."""
    centred = x - x.mean(-1, keepdim=True) if "Layer" in type(norm).__name__ else x
    scale = torch.rsqrt(centred.detach().square().mean(-1, keepdim=True) + norm.eps)
    normed = centred * scale * norm.weight
    return normed if norm.bias is None else normed + norm.bias


def _frozen_gla(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.model.layers:
        normed = _norm(block.attn_norm, x)
        x = x + gla(block.attn, normed.detach(), normed)
        normed = _norm(block.mlp_norm, x)
        active = functional.silu(block.mlp.gate_proj(normed)).detach()
        x = x + block.mlp.down_proj(active * block.mlp.up_proj(normed))
    return model.lm_head(_norm(model.model.norm, x)[-1])


def _frozen_rwkv7(model: nn.Module, x: Tensor) -> Tensor:
    first = None
    for block in model.model.layers:
        x = _norm(block.pre_norm, x) if hasattr(block, "pre_norm") else x
        normed = _norm(block.attn_norm, x)
        if first is None:
            first = block.attn.v_proj(normed + (before(normed) - normed) * block.attn.x_v[0])
        x = x + rwkv7(block.attn, normed.detach(), normed, first.detach(), first)
        normed = _norm(block.ffn_norm, x)
        x = x + rwkv7_channel(block.ffn, normed.detach(), normed)
    return model.lm_head(_norm(model.model.norm, x)[-1])


@lru_cache
def _differences(name: str) -> tuple[float, float]:
    """Return the largest differences of shares and of the bias from those of the detached float64 model."""
    model = _model(name)
    shares = frozen(_trace(model)).shares(-1, 3)
    ids, model = _trace(model).ids, model.double()
    x = model.model.embeddings(ids)[0].detach().requires_grad_()
    logit = {"gla": _frozen_gla, "rwkv7": _frozen_rwkv7}[name](model, x)[3]
    (grad,) = torch.autograd.grad(logit, x)
    expected = (grad * x).sum(-1).detach()
    size = float(expected.abs().max())
    bias = float(logit.detach() - expected.sum())
    return float((shares.tokens[0] - expected).abs().max()) / size, abs(float(shares.bias) - bias) / size


@pytest.mark.parametrize("name", ["gla", "rwkv7"])
def test_shares_equal_those_of_detached_models(name: str) -> None:
    assert max(_differences(name)) <= tolerance("reconstruction", torch.float32)


def test_constant_values_of_the_first_layer_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = architecture_of(type(_model("rwkv7").model.layers[0].attn))
    values = architecture.shared_values
    constant = {**vars(architecture), "shared_values": lambda module, given: values(module, given).detach()}
    _differences.cache_clear()
    with overridden(type(architecture)(**constant)):
        assert max(_differences("rwkv7")) > 1e-2
    _differences.cache_clear()


def test_values_that_no_adapter_computes_are_refused_by_name() -> None:
    trace = _trace(_model("rwkv7"))
    architecture = architecture_of(type(trace.layers[0].module))
    without = type(architecture)(**{**vars(architecture), "shared_values": None})
    with overridden(without), pytest.raises(UncoveredError, match=r"layers\.1\.attn reads 'v_first', whose value is"):
        frozen(trace)


def test_a_module_that_differs_from_its_plain_form_is_refused() -> None:
    model = _model("gla")
    norm = model.model.layers[1].mlp_norm

    class Scaled(type(norm)):
        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
            normed, stream = super().forward(x, *args, **kwargs)
            return 1.001 * normed, stream

    norm.__class__ = Scaled
    with pytest.raises(ExactnessError, match=r"layers\.1\.mlp_norm \(Scaled\) differs from its plain form by 1\.0e-03"):
        frozen(_trace(model))


def test_an_activation_without_a_plain_form_is_refused() -> None:
    model = Host("powlu", "", lambda: _with_powlu()).model()
    with pytest.raises(UncoveredError, match=r"activation 'powlu' of GatedMLP has no plain form"):
        frozen(_trace(model))


def _with_powlu() -> nn.Module:
    model = _model("gla")
    model.model.layers[0].mlp.hidden_act = "powlu"
    return model


def _modules() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    from fla import modules

    residual = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(3))
    gate = {"g": residual + 1}
    stream = {"residual": residual, "prenorm": True}
    return {
        "rms norm with a stream": (modules.RMSNorm(12), stream),
        "rms norm without weights": (modules.RMSNorm(12, elementwise_affine=False), {}),
        "layer norm with a bias": (modules.LayerNorm(12, bias=True), {"prenorm": True, "residual_in_fp32": True}),
        "group norm": (modules.GroupNorm(3, 12, bias=True), {}),
        "rms group norm": (modules.GroupNorm(3, 12, is_rms_norm=True), stream),
        "gated rms norm": (modules.FusedRMSNormGated(12), gate),
        "rms norm with a sigmoid gate": (modules.FusedRMSNormGated(12, activation="sigmoid"), {**gate, **stream}),
        "gated layer norm": (modules.FusedLayerNormGated(12, bias=True), gate),
        "gated MLP": (modules.GatedMLP(12, intermediate_size=8), {}),
        "unfused gated MLP": (modules.GatedMLP(12, intermediate_size=8, fuse_swiglu=False), {}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_forms_equal_their_modules(dtype: torch.dtype) -> None:
    for name, (module, given) in _modules().items():
        generator = torch.Generator().manual_seed(4)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        x = torch.randn(2, 5, 12, generator=generator).to(dtype)
        given = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in given.items()}
        form = plain_form_of(type(module))
        with torch.no_grad():
            own, plain = (call(x, **given) for call in (module.to(dtype), partial(form, module)))
        for expected, actual in zip(tensors(own), tensors(plain), strict=True):
            assert actual.dtype == expected.dtype, name
            assert relative_error(actual, expected) <= tolerance("stream", dtype), name


def test_lrp_is_the_default_of_explain() -> None:
    result = ula.explain(_trace(_model("gla")), target=-1)
    assert result.method == "lrp" and result.completeness_gap < tolerance("reconstruction", torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "gla",
        "deltanet",
        "gated deltanet",
        "linear attention",
        "lightnet",
        "rwkv7",
        "rwkv7, three layers, unfused norms",
    ],
)
def test_content_of_a_live_run_equals_the_shares(name: str) -> None:
    trace = _trace(_model(name))
    content, shares = LiveRun(trace).relevances(-1, 3).content, frozen(trace).shares(-1, 3)
    assert relative_error(content, shares.tokens) <= tolerance("reconstruction", torch.float32)
