"""The delta rule's WY form: values are multiplied by the inverse of a matrix of keys, or solve equations with it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_states import Model
from unilinattn.testing import relative_error

Solve = Callable[[Tensor, Tensor], Tensor]

FORMS: dict[str, Solve] = {
    "solve_triangular": lambda matrix, v: torch.linalg.solve_triangular(matrix, v, upper=False, unitriangular=True),
    "solve": torch.linalg.solve,
    "at the left": lambda matrix, v: torch.linalg.solve_triangular(matrix.mT, v.mT, upper=True, left=False).mT,
    "inv": lambda matrix, v: torch.linalg.inv(matrix) @ v,
    "inverse": lambda matrix, v: matrix.inverse() @ v,
    "the inverse by equations": lambda matrix, v: (
        torch.linalg.solve_triangular(matrix, torch.eye(matrix.shape[-1], dtype=v.dtype), upper=False) @ v
    ),
    "a series": lambda matrix, v: torch.linalg.matrix_exp(matrix.tril(-1)) @ v,
}


class Delta(nn.Module):
    """Writes v_i - (what earlier writes give for k_i), read by queries; perhaps a loop over tokens behind it."""

    def __init__(self, solve: Solve, *, loop: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.solve, self.loop = solve, loop
        self.matrix = nn.Parameter(torch.randn(6, 6) / 4)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        query, key = self.query(x), functional.normalize(self.key(x), dim=-1)
        if frozen:
            query, key = query.detach(), key.detach()
        eye = torch.eye(x.shape[1], dtype=x.dtype)
        written = self.solve((key @ key.mT).tril(-1) + eye, self.value(x))
        y = (query @ key.mT).tril() @ written
        if not self.loop:
            return y
        states = [torch.zeros_like(y[:, 0])]
        for t in range(y.shape[1]):
            states.append(states[-1] @ self.matrix + y[:, t])
        return torch.stack(states[1:], 1)


def ids(length: int) -> Tensor:
    return torch.randint(20, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [5, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
def test_values_have_shares_through_the_solution(form: str, length: int) -> None:
    model = Model(Delta(FORMS[form], loop=length > 5)).eval().double()
    trace = ula.trace(model, ids(length), progress=False)
    scores = ula.explain(trace, method="logit", target=-1, logit=3, progress=False).scores
    x = model.embedding(ids(length)).detach().requires_grad_()
    model.head(x + model.layer(x, frozen=True))[:, -1, 3].sum().backward()
    assert x.grad is not None
    assert relative_error(scores, (x * x.grad).sum(2)) < 1e-12
    if length == 5 and form != "at the left":
        assert trace.layers[0].operator.matrix().shape == (2, 5, 5)


def test_it_is_the_delta_rule_and_its_relevances_share_the_matrix() -> None:
    scores = []
    for form in ("solve_triangular", "inv"):
        trace = ula.trace(Model(Delta(FORMS[form])).eval().double(), ids(5), progress=False)
        (layer,) = trace.layers
        assert layer.operator.reconstruction_error() < 1e-12
        assert layer.operator.matrix().shape == (2, 5, 5)
        scores.append(ula.explain(trace, method="attn_lrp", target=-1, logit=3, progress=False))
    first, second = scores
    assert relative_error(first.extras["content"], second.extras["content"]) < 1e-12
