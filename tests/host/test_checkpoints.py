"""Models that call torch's checkpoint themselves are explained as those that call the function."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import unilinattn as ula
from tests.tracing.models import Block, Model, TokenWise, added, ids
from unilinattn.call import functions

METHODS = ("logit", "lrp", "attribution", "integrated_gradients")


def through(call: Callable[..., Tensor]) -> Model:
    """A model with a registered mixer and a token-wise function in each block, which `call` calls."""
    torch.manual_seed(0)
    silu = TokenWise(torch.nn.functional.silu)

    def around(block: Any, x: Tensor) -> Tensor:
        x = call(partial(added, block), x)
        return x + call(silu, x)

    return Model(Block(around), Block(around)).eval()


FORMS: dict[str, Callable[..., Tensor]] = {
    "by its name": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "in torch": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False),
    "reentrant, with an option": lambda function, x: checkpoint(
        function, x, use_reentrant=True, preserve_rng_state=False
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_the_function(form: str) -> None:
    for method in METHODS:
        plain = ula.explain(through(lambda function, x: function(x)), ids(), method=method, target=-1, progress=False)
        result = ula.explain(through(FORMS[form]), ids(), method=method, target=-1, progress=False)
        assert torch.equal(result.scores, plain.scores)
    assert torch.utils.checkpoint.checkpoint is checkpoint is functions.CHECKPOINT


def test_other_threads_and_later_calls_keep_their_checkpoints() -> None:
    counts: list[int] = []

    def counted(call: Callable[..., Tensor]) -> int:
        runs: list[object] = []
        x = torch.ones(2, requires_grad=True)

        def function(value: Tensor) -> Tensor:
            runs.append(value)
            return value * value

        call(function, x, use_reentrant=False).sum().backward()
        return len(runs)

    with functions.plain_functions(Model()):
        replaced = torch.utils.checkpoint.checkpoint
        thread = threading.Thread(target=lambda: counts.append(counted(replaced)))
        thread.start()
        thread.join()
        assert replaced is not functions.CHECKPOINT and counted(replaced) == 1
    assert counts == [2] and counted(replaced) == 2
