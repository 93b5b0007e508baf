"""Factors that a module adds to its values are activations, and what frozen indices select is a constant."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.frozen.gates import sloped
from tests.frozen.test_rules import LOGIT, by_hand, check, with_mixer
from tests.tracing.models import WIDTH, TokenWise
from unilinattn.errors import UncoveredError
from unilinattn.frozen.run import frozen

Function = Callable[[Tensor], Tensor]

MATRIX = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).sin().unflatten(0, (WIDTH, WIDTH))
LOG_2 = float(torch.tensor(2, dtype=torch.float64).log())


def masked(x: Tensor) -> Tensor:
    with torch.no_grad():
        highest, _ = x.max(-1, keepdim=True)
        mask = (highest - x) / x.abs().clamp(min=highest) > 0.3
    return x + x * mask


def without_largest(x: Tensor) -> Tensor:
    _, index = x.topk(2, dim=-1)
    weights = x.scatter(-1, index, float("-inf")).softmax(-1)
    return x * weights + x.scatter(-1, index, 0.5 * x[..., :2])


def without_largest_by_hand(x: Tensor) -> Tensor:
    index = x.topk(2, dim=-1).indices
    mask = torch.zeros_like(x, dtype=torch.bool).scatter(-1, index, True)
    values = torch.zeros_like(x).scatter(-1, index, 0.5 * x[..., :2])
    return x * x.masked_fill(mask, float("-inf")).softmax(-1).detach() + torch.where(mask, values, x)


def by_experts(x: Tensor, *, frozen: bool = False) -> Tensor:
    weights, index = x.softmax(-1).topk(2, dim=-1)
    out = torch.zeros_like(x)
    for expert in range(WIDTH):
        rows = torch.where(index == expert)
        out[rows[:-1]] += (expert + 1) * x[rows[:-1]] * (weights.detach() if frozen else weights)[rows][..., None]
    return out


CASES: dict[str, tuple[Function, Function]] = {
    "expm1": (lambda x: x + 2 * torch.expm1(x), lambda x: x + 2 * sloped(torch.expm1, x)),
    "exp": (lambda x: x - x.exp(), lambda x: x - sloped(torch.exp, x, 1.0)),
    "softplus": (lambda x: x - functional.softplus(x), lambda x: x - sloped(functional.softplus, x, LOG_2)),
    "softplus in the dtype that it has": (
        lambda x: x - functional.softplus(x).to(x.dtype),
        lambda x: x - sloped(functional.softplus, x, LOG_2),
    ),
    "function of a factor": (
        lambda x: x + torch.tanh(3 * x.clamp(-0.5, 0.5).expm1()),
        lambda x: x + sloped(torch.tanh, 3 * sloped(torch.expm1, sloped(lambda y: y.clamp(-0.5, 0.5), x))),
    ),
    "sigmoid as a quotient": (
        lambda x: x + 1 / (1 + torch.exp(-x)),
        lambda x: x + sloped(torch.sigmoid, x, 0.5),
    ),
    "sigmoid as a reciprocal, by a matrix": (
        lambda x: (1 + torch.exp(-x)).reciprocal() @ MATRIX + x,
        lambda x: sloped(torch.sigmoid, x, 0.5) @ MATRIX + x,
    ),
    "sigmoid of exponentials": (
        lambda x: x + torch.exp(x) / (1 + torch.exp(x)),
        lambda x: x + sloped(torch.sigmoid, x, 0.5),
    ),
    "tanh of exponentials": (
        lambda x: x + (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
        lambda x: x + sloped(torch.tanh, x),
    ),
    "softplus as a logarithm": (
        lambda x: x - torch.log(1 + x.exp()),
        lambda x: x - sloped(functional.softplus, x, LOG_2),
    ),
    "softplus without overflow": (
        lambda x: x - (torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)),
        lambda x: x - sloped(functional.softplus, x, LOG_2),
    ),
    "function of values": (
        lambda x: x + 1 / (1 + x.square()),
        lambda x: x + sloped(lambda y: 1 / (1 + y.square()), x, 1.0),
    ),
    "deviation": (
        lambda x: functional.relu(x - 0.5 * x.std(-1, keepdim=True)),
        lambda x: functional.relu(x - 0.5 * x.std(-1, keepdim=True)),
    ),
    "joined deviation": (
        lambda x: torch.cat([x[..., 1:], x.norm(dim=-1, keepdim=True)], -1),
        lambda x: torch.cat([x[..., 1:], x.norm(dim=-1, keepdim=True)], -1),
    ),
    "factor that multiplies too": (
        lambda x: x * (scale := x.std(-1, keepdim=True)) + scale,
        lambda x: x * x.std(-1, keepdim=True).detach() + x.std(-1, keepdim=True),
    ),
    "constants without gradients": (masked, lambda x: x + x * ((masked(x) - x) / x).detach()),
    "added at indices": (lambda x: x + by_experts(x), lambda x: x + by_experts(x, frozen=True)),
    "written at indices": (without_largest, without_largest_by_hand),
}


@pytest.mark.parametrize("name", CASES)
def test_a_factor_that_is_added_is_an_activation(name: str) -> None:
    live, form = CASES[name]
    model, traced = with_mixer(TokenWise(live))
    check(frozen(traced).shares(-1, LOGIT), by_hand(model, traced, form))


@pytest.mark.parametrize(
    "live",
    [
        lambda x: x + torch.log(x.exp() - 1).nan_to_num(),
        lambda x: x + torch.log(1 + x.softmax(-1)),
    ],
    ids=["infinite at zero", "function of a softmax"],
)
def test_other_factors_that_are_added_are_refused(live: Function) -> None:
    _, traced = with_mixer(TokenWise(live))
    with pytest.raises(UncoveredError, match="adds the output of"):
        frozen(traced).shares(-1, LOGIT)


class Routed(nn.Module):
    """Adds the bias of the expert with the largest score, a parameter or, in a codebook, a buffer."""

    def __init__(self, *, codebook: bool) -> None:
        super().__init__()
        rows = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        self.rows: Tensor
        self.register_buffer("rows", rows) if codebook else self.register_parameter("rows", nn.Parameter(rows))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows[x.argmax(-1)]


def test_the_bias_of_a_selected_expert_is_a_bias_and_an_entry_of_a_codebook_is_refused() -> None:
    model, traced = with_mixer(Routed(codebook=False))
    rows = model.blocks[0].rows
    check(frozen(traced).shares(-1, LOGIT), by_hand(model, traced, lambda x: x + rows[x.argmax(-1)].detach()))
    with pytest.raises(UncoveredError, match="adds the output of 'argmax'"):
        frozen(with_mixer(Routed(codebook=True))[1]).shares(-1, LOGIT)
