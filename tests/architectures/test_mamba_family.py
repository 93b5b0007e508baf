"""Variants of Mamba-1 and Mamba-2 and their hybrids: shared blocks, parallel layers, and errors."""

import pytest
import torch

from tests.hosts import named
from unilinattn import trace
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.mixers import DiagonalDecay
from unilinattn.registry import architecture_of
from unilinattn.testing import check_mixer

SOFTMAX = "softmax attention"


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_each_call_of_a_shared_block_has_a_separate_operator(name: str) -> None:
    model = named(name).model()
    layers = trace(model, named(name).inputs()).layers
    shared = [layer for layer in layers if layer.kind == SOFTMAX]
    modules = dict(model.named_modules())
    weights = [modules[layer.name].v_proj.weight for layer in shared]
    assert len({weight.data_ptr() for weight in weights}) < len(weights)
    width = model.config.hidden_size
    for layer in shared:
        assert layer.input.shape[-1] == 2 * width
        assert layer.output.shape[-1] == width
        assert layer.residual is None
    assert not torch.equal(shared[0].input, shared[-1].input)
    assert not torch.equal(shared[0].operator.matrix(), shared[-1].operator.matrix())


def test_parallel_attention_and_state_space_are_one_step() -> None:
    steps = trace(named("falcon h1").model(), named("falcon h1").inputs()).steps
    assert [[layer.architecture for layer in step.layers] for step in steps] == [["falcon_h1", "attention"]] * 2


@pytest.mark.parametrize("name", ["zamba", "bamba"])
def test_packed_sequences_are_refused_by_name(name: str) -> None:
    # Without its CUDA kernels the host refuses packed sequences, so it cannot be traced here.
    module = named(name).model().model.layers[0].mamba
    x = torch.randn(2, 5, module.hidden_size)
    call = Call(module, "layers.0.mamba", {"hidden_states": x, "seq_idx": torch.zeros(2, 5, dtype=torch.int32)}, x)
    architecture = architecture_of(type(module))
    assert architecture is not None and architecture.check is not None
    with pytest.raises(UncoveredError, match=r"layers\.0\.mamba .* was called with 'seq_idx'"):
        architecture.check(call)


def test_heads_of_a_group_have_the_same_query_and_key() -> None:
    query, key = torch.randn(2, 2, 7, 3, 4, dtype=torch.float64)
    decay = -torch.rand(2, 7, 6, 4, dtype=torch.float64)
    grouped = DiagonalDecay(query, key, decay)
    check_mixer(grouped)
    repeated = DiagonalDecay(query.repeat_interleave(2, dim=2), key.repeat_interleave(2, dim=2), decay)
    assert torch.equal(grouped.materialize(), repeated.materialize())
