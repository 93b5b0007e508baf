"""Attention weights are computed again from queries and keys where those of all layers take too much memory."""

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import unilinattn as ula
from tests.hosts import named
from unilinattn.errors import ModelStateError
from unilinattn.mixers import Dense, dense
from unilinattn.operator.deferred import shapes_only
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing import promoted
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trace import Trace

LENGTH = 64

HOSTS = ("gpt2", "llama, grouped queries", "deepseek 2")


def mixers(trace: Trace) -> list[Dense]:
    stages = [s for layer in trace.layers for chain in layer.operator.chains.values() for s in walk(chain)]
    return [stage.mixer for stage in stages if isinstance(stage, Mix) and isinstance(stage.mixer, Dense)]


def retained(trace: Trace) -> list[bool]:
    return [mixer._weights is not None for mixer in mixers(trace)]


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release no weights of traces that other tests share."""
    monkeypatch.setattr(dense, "_latest", dense._Latest())


@pytest.fixture
def of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(dense, "RETAINED", 1)


@contextmanager
def rounding() -> Iterator[None]:
    """Round the products of a context, as autocast does."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "raw", "latim", "rollout"])
def test_results_do_not_depend_on_what_is_retained(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = named(name)
    model, inputs = host.model(), host.inputs(LENGTH)
    expected = ula.explain(ula.trace(model, inputs), method=method, target=-1)
    gc.collect()
    monkeypatch.setattr(dense, "RETAINED", 1)
    trace = ula.trace(model, inputs)
    result = ula.explain(trace, method=method, target=-1)
    assert torch.equal(result.scores, expected.scores)
    assert sum(retained(trace)) == 1 and len(retained(trace)) > 1


@pytest.mark.parametrize("name", HOSTS)
def test_weights_are_the_same_again(name: str, of_one_layer: None) -> None:
    host = named(name)
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    first = mixers(trace)[0]
    weights = first.weights
    first.release()
    with rounding(), torch.inference_mode():
        again = first.weights
    assert torch.equal(again, weights) and again.data_ptr() != weights.data_ptr()
    assert not again.requires_grad and not again.is_inference()


IDS = torch.arange(256)[None] % 16


def deep_model(layers: int) -> LlamaForCausalLM:
    """Return a model whose attention weights take more memory than all else."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 16, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def deep_trace(layers: int) -> Trace:
    return ula.trace(deep_model(layers), IDS)


def test_the_weights_that_were_used_last_are_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = deep_trace(3)
    first, second, third = mixers(trace)
    gc.collect()
    monkeypatch.setattr(dense, "RETAINED", 2 * first.weights.nbytes)
    _ = second.weights, first.weights, third.weights
    assert retained(trace) == [True, False, True]
    _ = second.weights
    assert retained(trace) == [False, True, True]
    del trace, second
    gc.collect()
    # The weights of a layer that is gone count no more.
    assert first.weights is first.weights and third._weights is not None


@pytest.mark.parametrize("of_model", [False, True])
def test_a_run_keeps_the_weights_of_a_few_layers(of_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 8 * 256 * 256 * 4

    def explain(layers: int) -> None:
        if of_model:
            ula.explain(deep_model(layers), IDS, method="logit", target=-1)
        else:
            ula.explain(deep_trace(layers), method="logit", target=-1)

    def growth() -> int:
        """Return the bytes that six more layers add to the peak."""
        peaks = []
        for layers in (2, 8):
            gc.collect()
            peaks.append(peak_of(lambda layers=layers: explain(layers)).peak)
        return peaks[1] - peaks[0]

    assert growth() > 6 * weights
    monkeypatch.setattr(dense, "RETAINED", weights)
    # Vectors of the stream and of the graph remain.
    assert growth() < 1.5 * weights


def test_released_weights_have_a_shape_without_being_computed() -> None:
    mixer = mixers(deep_trace(1))[0]
    values = torch.ones(1, 256, 8, 2)
    expected = mixer.apply(values)
    with shapes_only():
        mixer.release()
        assert mixer.apply(values).shape == expected.shape and mixer._weights is None
    assert torch.equal(mixer.apply(values), expected)


def test_copies_hold_their_weights(of_one_layer: None) -> None:
    host = named("gpt2")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    first = mixers(trace)[0]
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    for other in copies:
        other.release()
        assert torch.equal(other.weights, first.weights) and other.weights is not first.weights


def test_queries_that_changed_are_an_error(of_one_layer: None) -> None:
    host = named("gpt2")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    layer = trace.layers[0]
    mixer = mixers(trace)[0]
    mixer.release()
    layer.seen[0].record.query.mul_(2)
    with pytest.raises(ModelStateError, match=r"the queries, keys or mask of its attention were written into"):
        _ = mixer.weights


def test_weights_that_parameters_of_the_module_decide_are_retained(of_one_layer: None) -> None:
    host = named("hy 4, gated, sinks, selected keys")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    assert len(mixers(trace)) > 1 and all(retained(trace))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_weights_that_a_mode_changed_are_retained(device: str | None, of_one_layer: None) -> None:
    host = named("llama, grouped queries")
    model, inputs = host.model().double(), host.inputs(LENGTH)
    with promoted() if device is None else torch.device(device):
        trace = ula.trace(model, inputs)
        first, *others = mixers(trace)
    assert others and sum(retained(trace)) == (len(others) + 1 if device is None else 1)
    # The host's softmax is in float32 outside of `promoted`.
    sums = first.weights.sum(-1) - 1
    assert (float(sums.abs().max()) < 1e-14) == (device is None)
