"""Checkpointed gradients: memory of one block at a time, estimates, and equality with plain autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.hosts import named
from unilinattn.errors import ModelStateError
from unilinattn.host.substitution import through_operators
from unilinattn.kernels.backend import using
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize, transformers_model
from unilinattn.testing.peak import Peak, peak_of
from unilinattn.tracing.trace import Trace, trace

IDS = dict(vocab_size=31, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def build(name: str, layers: int = 2) -> nn.Module:
    models = {
        "mamba": ("MambaForCausalLM", "MambaConfig", dict(hidden_size=64, num_hidden_layers=layers)),
        "mamba2": (
            "Mamba2ForCausalLM",
            "Mamba2Config",
            dict(hidden_size=64, num_hidden_layers=layers, state_size=32, num_heads=4, head_dim=32, n_groups=1),
        ),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=64, n_layer=layers, n_head=4)),
    }
    model, config, options = models[name]
    torch.manual_seed(0)
    return transformers_model(model, config, **options, **IDS)().eval()


def traced(name: str, length: int, layers: int = 2) -> Trace:
    host_trace = trace(build(name, layers), torch.randint(31, (1, length)), progress=False)
    for layer in host_trace.layers:
        assert layer.operator.chains
    return host_trace


def counted(host_trace: Trace) -> Peak:
    return peak_of(lambda: next(host_trace.gradients([-1])))


@contextmanager
def plain_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute gradients by plain autograd, which stores the intermediate values of every layer."""
    with monkeypatch.context() as patch:
        patch.setattr(import_module("unilinattn.tracing.gradients"), "recomputing", through_operators)
        yield


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_memory_grows_little_with_depth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = traced(name, 96, 2), traced(name, 96, 6)
    grown = counted(many).peak - counted(few).peak
    with plain_gradients(monkeypatch):
        whole = counted(many).peak - counted(few).peak
    vectors = 4 * 96 * 64 * 4
    assert grown <= 4 * vectors
    assert whole > 3 * grown


@pytest.mark.parametrize("length", [96, 192])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_the_estimate_counts_the_backward_pass(name: str, length: int) -> None:
    host_trace = traced(name, length)
    estimate, peak = ula.estimate(host_trace, method="attribution", target=-1), counted(host_trace)
    (first, *_) = estimate.layers
    assert (first.name, first.kind) == ("gradients", "forward and backward pass")
    assert 0.5 <= first.bytes / peak.peak <= 2, (first.bytes, peak.peak)
    assert "gradients" in repr(estimate)


@pytest.mark.parametrize("length", [96, 400])
def test_the_estimate_counts_the_states_that_compiled_loops_save(length: int) -> None:
    pytest.importorskip("numba", reason="the extra `cpu` (numba) is not installed")
    host_trace = traced("mamba", length)
    with using("numba"):
        (first, *_), peak = ula.estimate(host_trace, method="attribution", target=-1).layers, counted(host_trace)
    assert 0.5 <= first.bytes / peak.peak <= 2, (first.bytes, peak.peak)


@pytest.mark.parametrize(
    "name", ["mamba", "mamba2", "gpt2", "zamba", "zamba2", "jamba", "falcon h1", "qwen3 next", "s4d"]
)
def test_gradients_equal_those_of_plain_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = named(name)
    model, x = entry.model().double(), entry.inputs()
    host_trace = trace(model, x)
    targets: list[Any] = [-1, 1, -1]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    several = list(host_trace.gradients(targets))
    with plain_gradients(monkeypatch):
        whole = list(host_trace.gradients(targets))
    for actual, expected in zip(several, whole, strict=True):
        assert max(relative_error(one, two) for one, two in zip(actual, expected, strict=True)) <= 1e-12
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert any(float(grad.norm()) > 0 for grad in several[1])


def test_a_slice_of_a_stream_is_computed_again_with_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """LED pads a text to windows of four tokens, and its layers read a slice of the padded stream."""
    sizes = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, attention_window=4)
    config = transformers.LEDConfig(vocab_size=31, **sizes, **heads)
    model = randomize(transformers.LEDForConditionalGeneration(config).double().eval())
    inputs = {"input_ids": torch.randint(3, 31, (2, 6)), "decoder_input_ids": torch.randint(3, 31, (2, 3))}
    host_trace = trace(model, inputs, progress=False)
    segmented = next(host_trace.gradients([-1]))
    with plain_gradients(monkeypatch):
        whole = next(host_trace.gradients([-1]))
    assert max(relative_error(a, b) for a, b in zip(segmented, whole, strict=True)) <= 1e-12
    assert len(whole) == 6 and all(float(gradient.norm()) > 0 for gradient in whole)


@pytest.mark.parametrize("name", ["mamba", "gpt2"])
def test_memory_does_not_grow_with_the_number_of_targets(name: str) -> None:
    host_trace = traced(name, 40)

    def peak(targets: int) -> int:
        def run() -> None:
            for grads in host_trace.gradients(range(targets)):
                del grads

        return peak_of(run).peak

    assert peak(8) <= 1.1 * peak(1)


def test_frozen_weights_do_not_matter() -> None:
    model = build("mamba").double()
    host_trace = trace(model, torch.randint(31, (1, 20)))
    live = host_trace.gradient(-1)
    model.requires_grad_(False)
    for one, two in zip(trace(model, host_trace.ids).gradient(-1), live, strict=True):
        assert relative_error(one, two) <= 1e-12


def test_a_weight_that_changes_between_targets_is_refused() -> None:
    model = build("mamba")
    gradients = trace(model, torch.randint(31, (1, 20))).gradients([3, 4])
    next(gradients)
    with torch.no_grad():
        model.backbone.layers[0].mixer.D.mul_(2)
    with pytest.raises(ModelStateError, match="this gradient would not be that of the traced model"):
        next(gradients)


def test_the_gradient_before_the_last_projection_builds_no_graph() -> None:
    host_trace = traced("mamba", 64)
    grads = host_trace.gradient(-1)
    layer = host_trace.layers[0]
    pulled: list[Tensor] = []
    peak = peak_of(lambda: pulled.append(layer.before_output(grads[0]))).peak
    # The product reads a copy without subnormal numbers.
    assert peak <= pulled[0].nbytes + grads[0].nbytes
    weight = host_trace.host.backbone.layers[0].mixer.out_proj.weight
    assert relative_error(pulled[0], grads[0] @ weight) <= 1e-6
