"""Adapters of flash-linear-attention: against the package's kernels in float32, and the papers' recurrences in float64.

The kernels always compute in float32, so in float64 each operator, built from the same weights, is compared with a
token-by-token recurrence of each sequence. The laws of operators are tested in float64.
"""

import copy
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor, nn

from tests.fla.recurrences import frozen
from tools.coverage_runs import models
from unilinattn import registry, trace
from unilinattn.errors import UncoveredError
from unilinattn.frozen.passes import HALF
from unilinattn.frozen.run import FrozenRun
from unilinattn.testing import HOST_LAWS, OPERATOR_LAWS, Host, relative_error, tolerance
from unilinattn.testing.checks import fresh, left_as_found, variant
from unilinattn.testing.hosts.fla import HOSTS
from unilinattn.testing.hosts.fla_models import fla_model
from unilinattn.testing.laws import padding as padding_law
from unilinattn.testing.promote import promoted
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

# Ordered by host, so that the tests of one host share its cached trace.
every_host = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name, scope="module")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:fla"),
    # LightNet's kernel subtracts two empty sums and does not use the result.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning:triton"),
]

FIRST = models(HOSTS)
"""One configuration of each model, on which more forms of a batch are tested, and the laws of its structure."""

HYBRIDS = {
    "samba": ["fla_mamba", "fla_attention"],
    "gated deltanet with attention between": ["fla_gated_deltanet", "fla_attention", "fla_gated_deltanet"],
}
"""The adapters of hosts with several kinds of layer, in order."""


BY_CODE = {
    "fla_mamba": "its scan is a loop",
    "fla_mamba2": "its scan is a loop",
    "fla_rwkv6_channel": "its core is the whole token shift",
    "fla_rwkv7": "its values of the first layer have a port",
    "fla_rwkv7_channel": "its core is the whole token shift",
}
"""Adapters that a recording does not equal, or not in the scope of the core, with the reason."""

GATED_INPUT = {"fla_hgrn"}
"""Adapters whose core has the gate of its input, which a recording has before the core."""

RECORDED = [host for host, entry in registry._hosts.items() if host.startswith("fla.") and entry.name not in BY_CODE]


@cache
def model(host: Host) -> nn.Module:
    return host.model()


def padded(host: Host) -> dict[str, Tensor]:
    """An unpadded sequence, one padded on the right, and one on the left."""
    ids = host.inputs(seed=1)[:1].repeat(3, 1)
    mask, length = torch.ones_like(ids), ids.shape[1]
    mask[1, length - length // 3 :] = 0
    mask[2, : length // 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def forms(host: Host, other: str) -> tuple[str, ...]:
    return ("padded", other) if host in FIRST else ("padded",)


@cache
def traced(host: Host, form: str) -> Trace:
    inputs = {"input_ids": host.inputs()} if form == "plain" else padded(host)
    if form == "alone":
        inputs = {name: t[-1:] for name, t in inputs.items()}
    return trace(model(host), inputs)


@lru_cache(maxsize=4)
def singles(host: Host) -> list[Trace]:
    """The two padded sequences of the padded batch one by one, without padding."""
    rows = zip(*(values[1:] for values in padded(host).values()), strict=True)
    return [trace(model(host), {"input_ids": ids[mask.bool()][None]}) for ids, mask in rows]


def doubled(layer: Layer) -> Layer:
    """The same layer with its operator in float64, also where the host casts to float32."""
    other = copy.copy(layer)
    vars(other).pop("operator", None)
    other.input, other.output = layer.input.double(), layer.output.double()
    with promoted():
        _ = other.operator
    return other


@every_host
def test_operators_reproduce_the_kernels(host: Host) -> None:
    with left_as_found(model(host)):
        host_trace = traced(host, "plain")
    expected = HYBRIDS.get(host.name, [host.architecture] * host.layers)
    if "rwkv" in host.architecture:
        expected = [host.architecture, f"{host.architecture}_channel"] * (host.layers // 2)
    assert [layer.architecture for layer in host_trace.layers] == expected
    for layer in host_trace.layers:
        exact = doubled(layer).operator
        for law in HOST_LAWS.values():
            law(layer.operator, tolerance("reconstruction", torch.float32))
            law(exact, tolerance("reconstruction", torch.float32))
        for law in OPERATOR_LAWS.values() if host in FIRST else ():
            law(exact, tolerance("law", torch.float64))


@every_host
def test_padding_is_kept_out_as_the_host_keeps_it_out(host: Host) -> None:
    for form in forms(host, "alone"):
        found = traced(host, form)
        mask = found.arguments["attention_mask"].bool()
        alone = singles(host)[-len(mask) :]
        for k, layer in enumerate(found.layers):
            for law in HOST_LAWS.values():
                law(layer.operator, tolerance("reconstruction", torch.float32))
            padding_law(layer.operator, mask, tolerance("law", torch.float32))
            for b, single in enumerate(alone, start=len(mask) - len(alone)):
                expected = single.layers[k].output
                assert relative_error(layer.output[b : b + 1, mask[b]], expected) <= tolerance("padding", torch.float32)


@every_host
def test_operators_equal_the_recurrence_of_the_paper_in_float64(host: Host) -> None:
    modules = dict(model(host).named_modules())
    for layer in (doubled(layer) for form in forms(host, "plain") for layer in traced(host, form).layers):
        op, module = layer.operator, modules[layer.name]
        real = torch.ones(op.output.shape[:2], dtype=torch.bool) if layer.mask is None else layer.mask
        for carried in (op.inputs, {port: fresh(x, 40) for port, x in op.inputs.items()}):
            paper = frozen(module, layer, carried)
            assert relative_error(op.apply(carried) * real[..., None], paper) <= 1e-10
        whole = variant(op, output=frozen(module, layer, op.inputs))
        for law in HOST_LAWS.values():
            law(whole, tolerance("reconstruction", torch.float64))


@pytest.mark.parametrize(
    "host",
    [host for host in FIRST if host.architecture not in BY_CODE],
    ids=lambda host: host.name,
)
def test_recorded_operators_equal_those_of_the_adapters(host: Host) -> None:
    with registry.overridden():
        for name in RECORDED:
            del registry._hosts[name]
        recorded = trace(host.model(), host.inputs())
        relevance = FrozenRun(recorded, rule=HALF).complete_shares(-1, 1).tokens
    written = traced(host, "plain")
    expected = FrozenRun(written, rule=HALF).complete_shares(-1, 1).tokens
    assert float((relevance - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert {layer.architecture for layer in recorded.layers} <= {"recorded", *BY_CODE}
    for one, other in zip(map(doubled, recorded.layers), map(doubled, written.layers), strict=True):
        ops = one.operator, other.operator
        x = fresh(ops[1].inputs["x"], 41)
        assert relative_error(*(op.apply(x, bias=False) for op in ops)) <= 1e-12
        assert torch.allclose(ops[0].bias, ops[1].bias, rtol=0, atol=1e-12)
        if other.architecture not in GATED_INPUT:
            assert relative_error(*(op.matrix("core", heads=None) for op in ops)) <= 1e-12


@every_host
def test_shares_add_up_to_the_logit(host: Host) -> None:
    for host_trace in (traced(host, form) for form in forms(host, "plain")):
        run = FrozenRun(host_trace)
        shares = run.complete_shares(-1, 1)
        assert float((shares.gap / shares.size).max()) <= tolerance("reconstruction", torch.float32)
        assert bool((shares.tokens != 0).any()) and not run.shared
        if host_trace.mask is not None:
            assert not shares.tokens[~host_trace.mask].any()


@every_host
def test_the_bias_depends_only_on_biases(host: Host) -> None:
    bare = copy.deepcopy(model(host))
    sizes = [layer.operator.bias.abs().amax() for layer in traced(host, "plain").layers]
    if not any(sizes):
        return
    with torch.no_grad():
        for name, parameter in bare.named_parameters():
            if "bias" in name.rsplit(".", 1)[-1]:
                parameter.zero_()
    for layer in trace(bare, host.inputs()).layers:
        assert not layer.operator.bias.any()


@cache
def small(name: str, **settings: object) -> nn.Module:
    return Host(name, "", fla_model(name, **settings)).model()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gla"])
def test_gradients_are_those_of_the_host(name: str) -> None:
    host = next(host for host in HOSTS if host.name == name)
    layers = traced(host, "plain").layers
    modules, outputs = dict(model(host).named_modules()), []

    def keep(module: nn.Module, args: tuple, result: tuple) -> tuple:
        outputs.append(result[0] if result[0].requires_grad else result[0].requires_grad_())
        return result

    hooks = [modules[layer.name].register_forward_hook(keep) for layer in layers]
    with torch.enable_grad():
        logit = model(host)(host.inputs(), use_cache=False).logits[:, -1, 3].sum()
    for hook in hooks:
        hook.remove()
    reference = torch.autograd.grad(logit, outputs)
    for actual, expected in zip(traced(host, "plain").gradient(-1, 3), reference, strict=True):
        assert relative_error(actual, expected) <= tolerance("reconstruction", torch.float32)


def test_padding_between_tokens_is_refused() -> None:
    ids = torch.arange(5)[None]
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    layer = trace(small("GLA"), {"input_ids": ids, "attention_mask": mask}).layers[0]
    with pytest.raises(UncoveredError, match=r"padding between real tokens.*pad on one side"):
        layer.operator  # noqa: B018  the property builds it


def test_padding_between_tokens_is_reproduced_for_hosts_that_only_mask() -> None:
    ids = torch.arange(5)[None]
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    for layer in trace(small("HGRN"), {"input_ids": ids, "attention_mask": mask}).layers:
        assert layer.operator.reconstruction_error() <= 1e-5


def test_packed_sequences_are_refused() -> None:
    ids = torch.arange(6)[None]
    layer = trace(small("GLA"), {"input_ids": ids, "cu_seqlens": torch.tensor([0, 2, 6])}).layers[0]
    with pytest.raises(UncoveredError, match="cu_seqlens"):
        layer.operator  # noqa: B018  the property builds it


def test_an_unknown_activation_is_refused_by_name() -> None:
    altered = copy.deepcopy(small("GLA", feature_map="relu"))
    altered.model.layers[0].attn.feature_map_fn = torch.tan
    with pytest.raises(UncoveredError, match=r"layers\.0\.attn.*'tan'.*Accepted"):
        trace(altered, torch.arange(3)[None]).layers[0].operator  # noqa: B018  the property builds it


def test_unsupported_rotations_are_refused() -> None:
    altered = copy.deepcopy(small("RetNet"))
    altered.model.layers[0].attn.rotary.interleaved = True
    with pytest.raises(UncoveredError, match="interleaved"):
        trace(altered, torch.arange(3)[None]).layers[0].operator  # noqa: B018  the property builds it


def test_a_missing_attribute_is_refused_with_the_version() -> None:
    altered = copy.deepcopy(small("HGRN"))
    layer = trace(altered, torch.arange(3)[None]).layers[0]
    del altered.model.layers[0].attn.use_short_conv
    with pytest.raises(UncoveredError, match=r"'use_short_conv' in fla \d"):
        layer.operator  # noqa: B018  the property builds it


def test_the_unified_matrix_contains_the_bonus_but_not_the_group_norm() -> None:
    """RWKV-7 adds its bonus after the group norm, whose centring is not a matrix per channel."""
    host = next(host for host in HOSTS if host.name == "rwkv7")
    for layer in map(doubled, traced(host, "plain").layers):
        op = layer.operator
        for port in op.ports if layer.architecture == "fla_rwkv7" else ():
            core, unified = (op.matrix(scope, heads=None, port=port) for scope in ("core", "unified"))
            assert core.shape[1] == 2 and unified.shape[1] == 16
            assert relative_error(op.matrix("mixer", heads=None, port=port), core) > 1e-2
