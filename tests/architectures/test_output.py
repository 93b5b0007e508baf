"""The law `output`: a trace returns what the model returns to its user, whatever mask the user gives."""

import copy

import pytest
import torch
from torch import Tensor

from unilinattn import trace
from unilinattn.testing import LawViolation
from unilinattn.testing.host_laws import own_output
from unilinattn.testing.hosts import host

DECODERS = ("gpt2", "gpt neox, parallel", "llama, grouped queries", "gemma 3, sliding window")


def pairs(ids: Tensor, *, causal: bool) -> Tensor:
    """A boolean mask (batch, 1, query, key) that hides the third token of the first sequence from all others."""
    batch, length = ids.shape
    seen = torch.ones(batch, 1, length, length, dtype=torch.bool)
    seen[0, :, :, 2] = False
    return (seen.tril() if causal else seen) | torch.eye(length, dtype=torch.bool)


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
def test_a_batch_padded_on_the_right_returns_what_the_user_gets(name: str) -> None:
    check(name, padded(name, slice(-3, None)))


@pytest.mark.parametrize(
    "name", ["mamba", *DECODERS[1:], *(pytest.param(name, marks=FILLED) for name in ("gpt2", "bert"))]
)
def test_a_batch_padded_on_the_left_returns_what_the_user_gets(name: str) -> None:
    check(name, padded(name, slice(0, 3)))


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_a_boolean_mask_of_pairs_returns_what_the_user_gets(name: str) -> None:
    check(name, pairs(host(name).inputs(), causal=name in DECODERS))


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_a_mask_of_pairs_that_is_added_returns_what_the_user_gets(name: str) -> None:
    seen = pairs(host(name).inputs(), causal=name in DECODERS)
    check(name, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min))


def test_a_model_that_cannot_be_called_as_given_is_told() -> None:
    from unilinattn.testing.hosts.recurrent import HOSTS

    entry = next(entry for entry in HOSTS if entry.name == "xlstm")
    model, ids = entry.model(), entry.inputs()
    model.config.use_cache = True
    failure = own_output(model, copy.deepcopy(model).double(), ids, trace(model, ids))
    assert failure is not None and failure.startswith("RuntimeError: ")
