"""`estimate` against counted bytes, within a factor of two for every method and host."""

import gc
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

import unilinattn as ula
from tests.memory.hosts import NAMES, linear, new_trace, traced
from unilinattn.errors import InputError, MemoryLimitError, OptionError, UncoveredError
from unilinattn.models.vim import VisionMamba
from unilinattn.scoring.maps import Weight
from unilinattn.testing.hosts import host
from unilinattn.testing.peak import Peak, peak_of
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

LENGTH = 192
SHORT = {"gpt2": 40, "s4d": 40}
"""Length for `PASSES` without a target, which take a pass for each token: 16, except for hosts with few channels."""
PASSES = ("attention_grad", "attn_lrp", "attribution", "logit", "lrp", "transformer_attribution")
"""Methods that compute gradients for each row."""
MATRICES = ("attention_grad", "transformer_attribution")
"""Methods that weight the matrices of all heads."""
METHODS = ("alti", *PASSES, "latim", "raw", "rollout")


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the gradients by ones: `max_memory` does not bound the run of the model."""

    def ones(trace: Trace, layers: Sequence[Layer], targets: Sequence[Any], options: Any) -> Iterator[dict[str, Any]]:
        for _ in targets:
            yield {layer.name: Weight(torch.ones(layer.output.shape[:2])) for layer in layers}

    monkeypatch.setattr(import_module("unilinattn.methods.attribution"), "gradient_weights", ones)


def measured(trace: Trace, **arguments: Any) -> tuple[int, Peak]:
    """The bytes of a result, and the counts of the computation."""
    results: list[ula.Attribution] = []
    counted = peak_of(lambda: results.append(ula.explain(trace, **arguments)))
    (result,) = results
    return result.scores.nbytes + sum(extra.nbytes for extra in result.extras.values()), counted


def compared(name: str, length: int, **arguments: Any) -> None:
    estimate = ula.estimate(traced(name, length), **arguments)
    # A new trace, because an estimate includes the check of every layer, which a trace caches.
    result, counted = measured(new_trace(name, length), **arguments)
    assert estimate.result == result
    assert 0.5 <= estimate.beside / (counted.peak - result) <= 2, (estimate.beside, counted.peak - result)


# Gradients and relevances of S4D recompute its kernel, which the estimate omits: see the next test.
COUNTED = [
    (name, method, target)
    for name in NAMES
    for method in METHODS
    for target in (None, -1)
    if name != "s4d" or method not in ("attribution", "attn_lrp", "lrp")
]


@pytest.mark.parametrize(("name", "method", "target"), COUNTED)
def test_estimates_agree_with_counts(name: str, method: str, target: int | None) -> None:
    length = SHORT.get(name, 16) if method in PASSES and target is None else LENGTH
    compared(name, length, method=method, target=target)


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("mamba2", "contribution", {"target": -1}),
        ("mamba", "contribution", {"target": -1, "sign": "keep"}),
        ("mamba2", "attribution", {"target": -1, "gradient": "per-head"}),
        ("gpt2", "attribution", {"target": -1, "gradient_axis": "key"}),
        ("mamba", "contribution", {}),
        ("gpt2", "contribution", {}),
        ("mamba", "attribution", {"gradient": "per-head"}),
    ],
)
def test_estimates_of_variants_agree_with_counts(name: str, method: str, options: dict[str, Any]) -> None:
    compared(name, LENGTH if "target" in options else SHORT.get(name, 16), method=method, **options)


@pytest.mark.parametrize("method", ["raw", "rollout", "attribution"])
def test_estimates_of_the_released_code_agree_with_counts(method: str) -> None:
    host = VisionMamba(img_size=48, patch_size=4, in_chans=1, num_classes=5, embed_dim=16, depth=4, d_state=4).eval()
    pixels = torch.randn(1, 1, 48, 48)
    traces = [ula.trace(host, pixels, progress=False) for _ in range(2)]
    for trace in traces:
        for layer in trace.layers:
            layer.operator.apply(layer.input)
    arguments: dict[str, Any] = {"method": method, "target": "cls", "variant": "published-code"}
    estimate = ula.estimate(traces[0], **arguments)
    result, counted = measured(traces[1], **arguments)
    assert estimate.result == result
    assert 0.5 <= estimate.beside / (counted.peak - result) <= 2, (estimate.beside, counted.peak - result)


@pytest.mark.parametrize("target", [None, -1])
def test_attribution_without_its_gradients_agrees_with_counts(target: int | None, gradients: None) -> None:
    trace = traced("s4d", SHORT["s4d"] if target is None else LENGTH)
    estimate = ula.estimate(trace, method="attribution", target=target)
    result, counted = measured(trace, method="attribution", target=target)
    parallel = estimate.held + max(layer.bytes for layer in estimate.layers[1:])
    assert 0.5 <= parallel / (counted.peak - result) <= 2, (parallel, counted.peak - result)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("raw", {"layers": "mean"}),
        ("raw", {"layers": [0], "heads": "max"}),
        ("raw", {"normalize": "rows", "discard": 0.3}),
        ("rollout", {"sign": "abs"}),
        ("rollout", {"scope": "unified", "start_layer": 1}),
        ("latim", {"layers": [-1], "p": 1, "bias": "query"}),
        ("alti", {"compose": "rollout"}),
        ("latim", {"compose": "rollout"}),
        ("raw", {"compose": "rollout", "layers": [1]}),
        ("alti_logit", {"logit": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_options_are_taken_into_account(name: str, method: str, options: dict[str, Any]) -> None:
    compared(name, LENGTH, method=method, **options)


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("mamba2", "raw", {}),
        ("mamba", "raw", {"heads": [1], "target": -1}),
        ("mamba", "latim", {}),
        ("gpt2", "latim", {}),
        ("mamba2", "latim", {"heads": [1, 0], "target": -1}),
        ("mamba2", "alti", {"heads": [1, 0]}),
        ("gpt2", "alti", {"target": -1}),
        *[
            (name, method, {"heads": [0, 2]})
            for name in ("mamba", "mamba2", "gpt2")
            for method in ("raw", "latim", "alti")
        ],
    ],
    ids=str,
)
def test_the_head_axis_is_taken_into_account(name: str, method: str, options: dict[str, Any]) -> None:
    compared(name, LENGTH, method=method, by_head=True, **options)


@pytest.mark.parametrize("limit", [3 << 18, 3 << 19])
@pytest.mark.parametrize("target", [None, -1])
# The other methods of `PASSES` run the model, whose memory `max_memory` does not bound.
@pytest.mark.parametrize("method", ["attribution", *(method for method in METHODS if method not in PASSES)])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_stays_within_the_limit_or_is_refused(
    name: str, method: str, target: int | None, limit: int, gradients: None
) -> None:
    trace = traced(name, 40 if (method, target) == ("attribution", None) else LENGTH)
    try:
        result, counted = measured(trace, method=method, target=target, max_memory=limit)
    except MemoryLimitError:
        # Only the smallest limits refuse, for results that cannot be computed in parts.
        assert limit == 3 << 18
        return
    assert counted.peak - result <= limit + linear(trace)


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_and_its_operators_are_counted(name: str) -> None:
    # Indices of blocks are cached in the process by the first trace of a length.
    new_trace(name, LENGTH).layers[-1].reconstruction_error()
    with torch.no_grad(), Peak() as counted:
        trace = new_trace(name, LENGTH)
        for layer in trace.layers:
            layer.reconstruction_error()
        gc.collect()
    live = counted.live - sum(weight.nbytes for weight in trace.host.parameters())
    assert 0.9 * live <= ula.estimate(trace, method="rollout").trace <= live


@pytest.mark.parametrize("method", METHODS)
def test_an_estimate_allocates_almost_nothing(method: str) -> None:
    trace = traced("mamba2", LENGTH)
    # The check of the operators, one pass each, is cached in the trace.
    for layer in trace.layers:
        layer.reconstruction_error()
    assert peak_of(lambda: ula.estimate(trace, method=method)).peak <= linear(trace)


def test_an_estimate_is_printed_as_a_table() -> None:
    estimate = ula.estimate(traced("mamba", LENGTH), method="raw")
    lines = repr(estimate).splitlines()
    assert lines[0].startswith("Estimate of raw: result (2, 1, 192, 192), 288.0 KiB; ")
    assert "; trace and operators 215.1 KiB; " in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert all(line.endswith("Mamba-1 (S6)") for line in lines[1:])
    assert "all along" in repr(ula.estimate(traced("mamba", LENGTH), method="alti", compose="rollout"))
    assert "forward and backward pass" in repr(ula.estimate(traced("mamba", LENGTH)))
    with pytest.raises(AttributeError):
        estimate.result = 1  # type: ignore[misc]  # refused, as tested


def test_an_estimate_above_the_limit_is_not_refused() -> None:
    estimate = ula.estimate(traced("mamba", LENGTH), method="rollout", max_memory=1000)
    assert estimate.allowed == 1000
    assert estimate.result == 4 * LENGTH**2


@pytest.mark.parametrize("method", ["raw", "latim", "alti"])
def test_a_target_is_any_position_of_each_sequence(method: str) -> None:
    entry = host("mamba")
    trace = ula.trace(entry.model(), entry.inputs())
    expected = ula.estimate(trace, method=method, target=-1)
    for target in (0, torch.tensor([0, 3])):
        assert ula.estimate(trace, method=method, target=target).layers == expected.layers


def test_a_model_is_traced_for_its_estimate() -> None:
    entry = host("mamba")
    assert ula.estimate(entry.model(), entry.inputs()).shape == (2, 13, 13)


def test_wrong_arguments_are_refused() -> None:
    host_trace = traced("mamba", LENGTH)
    with pytest.raises(OptionError, match="did you mean 'rollout'"):
        ula.estimate(host_trace, method="rolout")
    with pytest.raises(OptionError, match="lrp takes no option 'scop'"):
        ula.estimate(host_trace, scop="core")
    with pytest.raises(InputError, match="needs inputs"):
        ula.estimate(host("mamba").model())


@pytest.mark.parametrize("method", ["gradient", "knockout"])
def test_methods_that_only_run_the_model_have_no_estimate(method: str) -> None:
    with pytest.raises(UncoveredError, match=rf"{method} has no estimate, .* that have an estimate: .*rollout"):
        ula.estimate(host("mamba").model(), method=method)
