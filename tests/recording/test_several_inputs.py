"""Modules that read several tensors: which of them carries the values, and which are weights and gates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recording.test_recorded import LIMIT, draw, operator
from unilinattn.architectures.recorded import OTHER
from unilinattn.testing import relative_error

LENGTH, WIDTH = 7, 6

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}


class Convolution(nn.Module):
    """Two convolutions on a graph, whose adjacency is an argument with a matrix for each sequence."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, normed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.activation, self.normed = activation, normed

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        if self.normed:
            adjacency = adjacency / adjacency.sum(-1, keepdim=True)
        hidden = self.activation(self.first(adjacency @ x))
        mixed: Tensor = self.last(torch.einsum("bij,bjc->bic", adjacency, hidden))
        return mixed


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_matrix_for_each_sequence_mixes_the_tokens(name: str, normed: bool) -> None:
    adjacency = (draw(2, LENGTH, LENGTH, seed=1) > 0).double() + torch.eye(LENGTH, dtype=torch.float64, device="cpu")
    op = operator(Convolution(ACTIVATIONS[name], normed=normed), draw(2, LENGTH, WIDTH), adjacency)
    assert op.ports == ("x",)
    assert op.reconstruction_error() <= LIMIT
    if name == "none":
        # Between tokens that no two edges join there is no contribution.
        joined = (adjacency @ adjacency)[:, 0] > 0
        assert torch.equal(op.contributions(0).norm(dim=-1) > 0, joined) and not joined.all()


class Gated(nn.Module):
    """Tokens of one or of two streams, times weights that depend on the tokens of the other."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value, self.both = nn.Linear(WIDTH, WIDTH), both

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self.value(other) * x.softmax(1)
        return result + x * other.softmax(1) if self.both else result


@pytest.mark.parametrize("both", [False, True])
def test_values_that_no_stage_mixes_may_be_those_of_another_stream(both: bool) -> None:
    x, other = draw(2, LENGTH, WIDTH), draw(2, LENGTH, WIDTH, seed=1)
    module = Gated(both)
    op = operator(module, x, other)
    assert set(op.ports) == ({"x", "other"} if both else {"other"})
    assert op.reconstruction_error() <= LIMIT
    assert relative_error(op.apply(op.inputs), module(x, other)) <= LIMIT


class Swapped(Convolution):
    """The same with its arguments in the other order."""

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, adjacency)


def test_an_argument_named_as_the_port_of_the_input_is_another_port() -> None:
    adjacency = (draw(2, LENGTH, LENGTH, seed=1) > 0).double()
    op = operator(Swapped(functional.relu, normed=False), adjacency, draw(2, LENGTH, WIDTH))
    assert op.ports == (OTHER,) and op.reconstruction_error() <= LIMIT
