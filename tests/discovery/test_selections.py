"""Choices by the values of tokens are those of the traced inputs in the search for what mixes tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.discovery.test_completeness import SIGNAL, WIDTH, Layers, Of
from unilinattn.errors import UncoveredError, UnknownArchitectureError


class Chosen(Layers):
    """The second layer reads the tokens with the largest first channel, as a detector's decoder does."""

    def __init__(self, choose: Callable[[Tensor], Tensor], leaks: bool = False) -> None:
        super().__init__()
        self.choose, self.leaks = choose, leaks

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        queries = x.gather(1, self.choose(x[..., 0])[..., None].expand(-1, -1, WIDTH))
        queries = queries + x.mean(1, keepdim=True) if self.leaks else queries
        return queries + self.second(queries)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x.topk(4, dim=1).indices,
    "topk by place": lambda x: torch.topk(x, 4, 1)[1],
    "sort": lambda x: x.sort(dim=1, descending=True)[1][:, :4],
    "argsort": lambda x: x.argsort(1)[:, :4],
    "topk and sort": lambda x: x.topk(4, dim=1)[1].sort(dim=1)[0],
    "largest of groups": lambda x: x.unflatten(1, (4, 3)).max(-1)[1] + torch.arange(0, 12, 3),
    "argmax": lambda x: x.unflatten(1, (4, 3)).argmax(-1) + torch.arange(0, 12, 3),
}


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_tokens_that_the_input_chooses_are_those_of_the_trace(name: str, leaks: bool) -> None:
    """The mean of all tokens that is added to the chosen ones is a layer, and the choice none."""
    layers = ula.trace(Chosen(CHOICES[name], leaks).eval(), SIGNAL).layers
    assert [layer.name for layer in layers] == ["first", *["region_0"] * leaks, "second"]
    assert [tuple(layer.output.shape) for layer in layers if layer.name != "region_0"] == [
        (2, 12, WIDTH),
        (2, 4, WIDTH),
    ]
    assert max(layer.operator.reconstruction_error() for layer in layers) < 1e-6


def routed(x: Tensor) -> Tensor:
    """Tokens sorted by the expert that a router chose for each, in one function (GraniteMoE)."""
    rows = x.flatten(0, 1)
    order = rows.topk(2, dim=1)[1].flatten().sort(0)[1]
    return rows.index_add(0, order // 2, rows[order // 2].tanh()).reshape(x.shape)


def test_the_values_of_a_choice_are_those_of_the_chosen_tokens() -> None:
    """As many values that change places, but not tokens, mix none."""
    assert len(ula.trace(Layers(between=Of(routed)).eval(), SIGNAL).layers) == 2
    for sort in (lambda x: x.topk(12, dim=1)[0], lambda x: torch.sort(x, 1)[0], lambda x: x.cummax(1)[0]):
        with pytest.raises((UncoveredError, UnknownArchitectureError)):
            ula.trace(Layers(between=Of(sort)).eval(), SIGNAL)
    for tokenwise in (lambda x: x * x.max(-1, keepdim=True)[0], lambda x: x * x.min(dim=-1)[0][..., None]):
        assert len(ula.trace(Layers(between=Of(tokenwise)).eval(), SIGNAL).layers) == 2
