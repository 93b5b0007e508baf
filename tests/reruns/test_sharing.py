"""Models whose sequences of a batch share something: changed copies of a sequence run one at a time."""

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn.errors import UncoveredError
from unilinattn.reruns.rerun import repeats
from unilinattn.testing import relative_error

CAPACITY = 2
"""Tokens that an expert takes of all sequences, those that come first."""


class Experts(nn.Module):
    """A layer of two experts that take a number of tokens of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, expert = self.router(tokens).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, 2)
        taken = chosen * (chosen.cumsum(0) <= CAPACITY)
        outputs = torch.stack([expert(tokens) for expert in self.experts], -1)
        return x + ((outputs * taken[:, None, :]).sum(-1) * share[:, None]).view_as(x)


class Largest(nn.Module):
    """Divides vectors by the largest number of all sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().abs().amax()


def sharing(layer: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    model = Model(Block(added), layer(), Block(added)).double().eval()
    for parameter in model.parameters():
        parameter.data *= 2
    return model


@pytest.mark.parametrize("layer", [Experts, Largest])
def test_a_token_is_cut_as_in_a_run_by_itself(layer: type[nn.Module]) -> None:
    model, sequence = sharing(layer), ids(batch=1)
    trace = ula.trace(model, sequence, progress=False)
    assert not repeats(trace)
    scores = ula.explain(trace, method="knockout", target=-1, logit=3, progress=False).scores[0]
    with torch.no_grad():
        logit, length = model(sequence).logits[0, -1, 3], sequence.shape[1]
        falls = []
        for token in range(length):
            with ula.cut(model, [(query, token) for query in range(token + 1, length)]):
                falls.append(logit - model(sequence).logits[0, -1, 3])
    assert relative_error(scores[None], torch.stack(falls)[None]) < 1e-12
    assert bool((scores[:-1] != 0).all())


def test_sequences_that_differ_by_themselves_are_explained_one_at_a_time() -> None:
    trace = ula.trace(sharing(Experts), ids(batch=2), progress=False)
    with pytest.raises(UncoveredError, match="trace one sequence at a time"):
        ula.explain(trace, method="knockout", target=-1, logit=3, progress=False)


def test_sequences_that_share_nothing_run_in_copies() -> None:
    torch.manual_seed(0)
    assert repeats(ula.trace(Model(Block(added), Block(added)).double(), ids(), progress=False))
