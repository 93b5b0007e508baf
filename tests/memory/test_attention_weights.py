"""Attention weights are computed from queries and keys where they are used, by blocks of queries."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import unilinattn as ula
from tests.hosts import named
from unilinattn.call.attention_interface import is_plain
from unilinattn.errors import ModelStateError
from unilinattn.mixers import CoreMixer, Dense, Softmax
from unilinattn.operator.deferred import shapes_only
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing import promoted
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trace import Trace

LENGTH = 64


def mixers(trace: Trace) -> list[CoreMixer]:
    stages = [s for layer in trace.layers for chain in layer.operator.chains.values() for s in walk(chain)]
    return [stage.mixer for stage in stages if isinstance(stage, Mix) and isinstance(stage.mixer, (Dense, Softmax))]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama, grouped queries", "deepseek 2", "gemma 3, sliding window", "t5, encoder"]
)
def test_weights_are_those_of_the_hosts_own_attention(name: str, implementation: str) -> None:
    host = named(name)
    model, ids = host.model().double(), host.inputs(LENGTH)
    model.set_attn_implementation(implementation)
    with promoted():
        trace = ula.trace(model, ids)
        weights = [mixer.materialize() for mixer in mixers(trace)]
        if implementation == "sdpa":
            assert all(isinstance(mixer, Softmax) for mixer in mixers(trace))
        model.set_attn_implementation("eager")
        output = model(**trace.arguments, output_attentions=True)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    expected = [x for name in names for x in getattr(output, name, None) or ()]
    assert len(weights) == len(expected) == host.layers
    for actual in weights:
        errors = [float((actual - x).abs().max()) for x in expected if x.shape == actual.shape]
        assert min(errors) < 1e-14


IDS = torch.arange(256)[None] % 16


def deep_model(layers: int, implementation: str = "sdpa") -> LlamaForCausalLM:
    """Return a model whose attention weights take more memory than all else."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 16, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(attn_implementation=implementation, **sizes, **heads)).eval()


def deep_trace(layers: int) -> Trace:
    return ula.trace(deep_model(layers), IDS)


@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_run_keeps_no_weights(implementation: str, of_model: bool) -> None:
    weights = 8 * 256 * 256 * 4

    def explain(layers: int) -> None:
        model = deep_model(layers, implementation)
        ula.explain(model if of_model else ula.trace(model, IDS), *[IDS][:of_model], method="logit", target=-1)

    explain(2)
    peaks = []
    for layers in (2, 8):
        gc.collect()
        peaks.append(peak_of(lambda layers=layers: explain(layers)).peak)
    # Vectors of the stream and of the graph remain of six layers.
    assert peaks[1] - peaks[0] < 3 * weights


def test_weights_have_a_shape_without_being_computed() -> None:
    mixer = mixers(deep_trace(1))[0]
    values = torch.ones(1, 256, 8, 2)
    with shapes_only():
        assert mixer.apply(values).shape == mixer.adjoint(values).shape == (1, 256, 8, 2)
        assert mixer.tile(slice(0, 3)).shape == (1, 8, 3, 256)


def test_copies_hold_queries_and_keys() -> None:
    host = named("gpt2")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    first = mixers(trace)[0]
    expected = first.materialize()
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    trace.layers[0].seen[0].record.query.mul_(2)
    for other in copies:
        assert torch.equal(other.materialize(), expected)


@pytest.mark.parametrize("operation", ["materialize", "rows"])
def test_queries_that_changed_are_an_error(operation: str) -> None:
    host = named("gpt2")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    mixer = mixers(trace)[0]
    trace.layers[0].seen[0].record.query.mul_(2)
    with pytest.raises(ModelStateError, match=r"the queries, keys or mask of its attention were written into"):
        getattr(mixer, operation)(*[torch.tensor([[0]])][: operation == "rows"])


def test_weights_that_parameters_of_the_module_decide_are_stored() -> None:
    host = named("hy 4, gated, sinks, selected keys")
    trace = ula.trace(host.model(), host.inputs(LENGTH))
    stored = [isinstance(mixer, Dense) for mixer in mixers(trace)]
    assert len(stored) > 1 and all(stored)


def test_a_softmax_is_plain_if_its_code_reads_nothing_else() -> None:
    query, mask = torch.zeros(1, 2, 3, 4), torch.ones(1, 1, 3, 3, dtype=torch.bool)

    def plain(
        package: Any, query: Tensor = query, mask: Tensor | None = None, fused: bool = False, **options: Any
    ) -> bool:
        return is_plain(package.eager_attention_forward, query, mask, options, fused=fused)

    assert plain(modeling_llama) and plain(modeling_gpt2) and plain(modeling_gemma2, softcap=2.0)
    assert not plain(modeling_gpt_oss)  # sinks
    assert plain(modeling_llama, mask=mask, fused=True) and not plain(modeling_llama, mask=mask)
    assert not plain(modeling_gemma2, softcap=2.0, fused=True)
    assert not plain(modeling_llama, dropout=0.1) and not plain(modeling_llama, s_aux=query)
    assert plain(modeling_llama, query.double(), fused=True) and not plain(modeling_llama, query.double())
