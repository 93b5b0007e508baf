"""Operators hold no copies of a model's weights, and notice when the weights that they read change."""

import copy
import gc

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.hosts import named
from unilinattn.operator.stages import Matrix, walk
from unilinattn.testing.peak import Peak
from unilinattn.tracing.trace import Trace

LENGTH = 23
"""A prime that divides no width of the hosts: whatever depends on the input has a multiple of it of numbers."""

HOSTS = (
    *(
        "mamba",
        "mamba2",
        "falcon h1",
        "zamba, one head",
        "qwen3 next",
        "qwen3.5",
        "minimax",
        "rwkv",
        "s4d",
        "h3",
        "vim",
    ),
    *("gpt2", "llama, grouped queries", "bert", "deepseek 2", "gpt-j", "vit"),
)


def largest_constant(trace: Trace, counted: Peak) -> int:
    """Return the bytes of the largest tensor made in the block that does not depend on the number of tokens."""
    gc.collect()
    length = trace.layers[0].output.shape[1]
    inputs = {value.untyped_storage()._cdata for value in trace.arguments.values() if isinstance(value, Tensor)}
    storages = {key: storage for key, ref in counted._storages.items() if (storage := ref()) is not None}
    sizes = [storage.nbytes() for key, storage in storages.items() if key not in inputs]
    return max((size for size in sizes if size // 2 % length), default=0)


def smallest_matrix(trace: Trace) -> int:
    stages = [s for layer in trace.layers for chain in layer.operator.chains.values() for s in walk(chain)]
    return min(stage.shape.numel() for stage in stages if isinstance(stage, Matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HOSTS)
def test_a_trace_keeps_no_copy_of_a_weight(name: str, dtype: torch.dtype) -> None:
    host = named(name)
    model, inputs = host.model().to(dtype), host.inputs(LENGTH)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    # The model and torch keep tables of positions from the first run on.
    ula.trace(model, inputs)
    with torch.no_grad(), Peak() as counted:
        trace = ula.trace(model, inputs)
        for layer in trace.layers:
            layer.operator.apply(layer.input)
    allowed = smallest_matrix(trace) * dtype.itemsize
    assert largest_constant(trace, counted) < allowed
    with torch.no_grad(), counted:
        copies = [copy.deepcopy(layer.operator) for layer in trace.layers]
    assert largest_constant(trace, counted) >= allowed, copies
