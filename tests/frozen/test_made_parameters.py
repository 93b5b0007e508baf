"""Tensors that a host makes of its parameters are constants, even if torch would compute gradients for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Block, Model, added, ids


def transposed(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.T)


def leaf(weight: Tensor) -> Tensor:
    scale = torch.ones(WIDTH, dtype=weight.dtype, device=weight.device, requires_grad=True)
    return weight.T * scale


FORMS: dict[str, Callable[[Tensor], Tensor]] = {"a parameter": transposed, "a leaf": leaf}


class Normed(nn.Module):
    """A linear layer whose rows have a learned norm, as weights in DoRA have."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.size = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.weight)
        return functional.linear(x, weight * (self.size / torch.linalg.norm(weight, dim=1))[:, None]).relu()


def model(make: Callable[[Tensor], Tensor]) -> Model:
    torch.manual_seed(0)
    normed = Normed(make)

    def around(block: Block, x: Tensor) -> Tensor:
        x = added(block, x)
        return x + normed(x)

    host = Model(Block(around), Block(added))
    host.normed = normed
    return host.double().eval()


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_a_constant(form: str, method: str) -> None:
    plain = ula.explain(model(lambda weight: weight.T), ids(), method=method, target=-1, progress=False)
    result = ula.explain(model(FORMS[form]), ids(), method=method, target=-1, progress=False)
    assert torch.allclose(result.scores, plain.scores, rtol=1e-12)


@pytest.mark.long
def test_a_parameter_made_of_tokens_is_none() -> None:
    def around(block: Block, x: Tensor) -> Tensor:
        return added(block, x) + nn.Parameter(x)

    host = Model(Block(around), Block(added)).double().eval()
    with pytest.raises(ula.UnilinattnError):
        ula.explain(host, ids(), method="logit", target=-1, progress=False)
