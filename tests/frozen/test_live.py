"""The live run: relevances of models rewritten by hand with plain autograd."""

from functools import cache

import pytest
from torch import Tensor

import unilinattn as ula
from tests.frozen.detached import token_ids, worst
from tests.frozen.relevant import MODELS, PASSES, relevance
from unilinattn.frozen.live import LiveRun, Relevances
from unilinattn.testing import promoted


@cache
def _relevances(name: str) -> Relevances:
    model = MODELS[name]()
    with promoted():
        trace = ula.trace(model, token_ids(), progress=False)
        return LiveRun(trace).relevances(-1, 3)


@cache
def _by_hand(name: str) -> dict[str, Tensor]:
    model = MODELS[name]()
    return {part: relevance(model, weights) for part, weights in PASSES.items()}


def _require_equal(name: str) -> None:
    relevances, expected = _relevances(name), _by_hand(name)
    assert worst(relevances.tokens, expected["tokens"]) <= 1e-10
    assert worst(relevances.content, expected["content"]) <= 1e-10
    assert worst(relevances.control, expected["tokens"] - expected["sent"]) <= 1e-10
    # No two of the three are equal, so that each comparison could fail.
    for first, other in [("tokens", "sent"), ("tokens", "content"), ("sent", "content")]:
        assert worst(expected[first], expected[other]) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3 next, experts"])
def test_relevances_equal_those_of_transformers_rewritten_by_hand(name: str) -> None:
    _require_equal(name)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3 next, hybrid"])
def test_relevances_equal_those_of_recurrences_rewritten_by_hand(name: str) -> None:
    _require_equal(name)
