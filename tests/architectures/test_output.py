"""The output of a trace equals that of a direct call, for any mask."""

import copy

import pytest
import torch
from torch import Tensor

from tests.hosts import named
from unilinattn import trace
from unilinattn.testing import LawViolation
from unilinattn.testing.host_laws import own_output
from unilinattn.testing.hosts import host

DECODERS = ("gpt2", "gpt neox, parallel", "llama, grouped queries", "gemma 3, sliding window")


def pairs(ids: Tensor, *, causal: bool) -> Tensor:
    """A boolean mask (batch, 1, query, key) in which no other token of the first sequence reads the third."""
    batch, length = ids.shape
    visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
    visible[0, :, :, 2] = False
    return (visible.tril() if causal else visible) | torch.eye(length, dtype=torch.bool)


def padded(name: str, where: slice) -> Tensor:
    mask = torch.ones_like(host(name).inputs())
    mask[-1, where] = 0
    return mask


def check(name: str, mask: Tensor) -> None:
    model = host(name).model()
    inputs = {"input_ids": host(name).inputs(), "attention_mask": mask}
    assert own_output(model, copy.deepcopy(model).double(), inputs, trace(model, inputs)) is None


FILLED = pytest.mark.xfail(
    strict=True,
    raises=LawViolation,
    reason="a trace fills in position_ids that count real tokens; called without them, these hosts count padding too",
)


@pytest.mark.parametrize("name", ["mamba", *DECODERS, "bert"])
def test_a_batch_padded_on_the_right(name: str) -> None:
    check(name, padded(name, slice(-3, None)))


@pytest.mark.parametrize(
    "name", ["mamba", *DECODERS[1:], *(pytest.param(name, marks=FILLED) for name in ("gpt2", "bert"))]
)
def test_a_batch_padded_on_the_left(name: str) -> None:
    check(name, padded(name, slice(0, 3)))


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_a_boolean_mask_of_pairs(name: str) -> None:
    check(name, pairs(host(name).inputs(), causal=name in DECODERS))


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_an_additive_mask_of_pairs(name: str) -> None:
    visible = pairs(host(name).inputs(), causal=name in DECODERS)
    check(name, torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min))


def test_a_model_that_cannot_be_called_with_the_inputs_is_refused() -> None:

    entry = named("xlstm")
    model, ids = entry.model(), entry.inputs()
    model.config.use_cache = True
    failure = own_output(model, copy.deepcopy(model).double(), ids, trace(model, ids))
    assert failure is not None and failure.startswith("RuntimeError: ")
