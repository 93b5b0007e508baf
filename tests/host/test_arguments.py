"""The arguments of a module's call have the names and the order in which `inspect` binds them."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.models import Block, Model, added, ids
from unilinattn.errors import InputError
from unilinattn.host.inputs import bound_arguments


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return x


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Named(nn.Module):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x * scale


class Everything(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        return args[0]


class More(nn.Module):
    def forward(self, x: Tensor, *args: Tensor, **kwargs: Any) -> Tensor:
        return x


X, Y = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "names"),
    [
        (nn.Linear(1, 1), (X,), {}, ["input"]),
        (Optional(), (X,), {}, ["x"]),
        (Optional(), (X, Y), {}, ["x", "mask"]),
        (Optional(), (X,), {"scale": 2.0, "mask": Y}, ["x", "mask", "scale"]),
        (Optional(), (), {"mask": Y, "x": X}, ["x", "mask"]),
        (Two(), (X, Y), {}, ["x", "y"]),
        (Named(), (X,), {"scale": 1.0}, ["x", "scale"]),
        (Everything(), (X,), {}, ["0"]),
        (Everything(), (X, Y), {"z": Y}, ["0", "1", "z"]),
        (More(), (X,), {}, ["x"]),
        (More(), (X, Y), {"z": Y}, ["x", "0", "z"]),
    ],
)
def test_arguments_have_the_names_of_their_parameters(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> None:
    arguments = bound_arguments(module, args, kwargs)
    assert list(arguments) == names
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    values = [*bound.args, *bound.kwargs.values()]
    assert all(any(value is other for other in values) for value in arguments.values())


@pytest.mark.parametrize(("module", "name"), [(Two(), "y"), (Named(), "scale")])
def test_a_missing_argument_is_refused(module: nn.Module, name: str) -> None:
    with pytest.raises(TypeError, match=f"missing a required (keyword-only )?argument: '{name}'"):
        bound_arguments(module, (X,), {})


class TwoInputs(nn.Module):
    """Mixes the tokens of one input and adds those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixer = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, first: Tensor, second: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(first) * scale
        result: Tensor = self.mixer(x, x, x)[0] + self.embedding(second)
        return result


class PassingOn(TwoInputs):
    def forward(self, first: Tensor, second: Tensor, **others: Any) -> Tensor:  # type: ignore[override]
        return super().forward(first, second, **others)


@pytest.mark.parametrize("model", [TwoInputs, PassingOn])
def test_arguments_that_are_missing_are_named(model: type[nn.Module]) -> None:
    with pytest.raises(InputError, match=rf"{model.__name__}.forward needs 'second', and the inputs have first; give"):
        ula.trace(model().eval(), {"first": torch.tensor([[1, 2, 3]])}, progress=False)
    # A tensor is the first argument.
    with pytest.raises(InputError, match="needs 'second', and the inputs have first"):
        ula.trace(model().eval(), torch.tensor([[1, 2, 3]]), progress=False)


class Outside(nn.Module):
    """A wrapper that passes on all arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OnlyNamed(Outside):
    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


@pytest.mark.parametrize("wrap", [Outside, OnlyNamed, lambda model: Outside(Outside(model))])
@pytest.mark.parametrize("named", [False, True])
def test_a_wrapper_takes_the_inputs_of_the_model_inside(wrap: Any, named: bool) -> None:
    torch.manual_seed(0)
    model = Model(Block(added)).double()
    expected = ula.explain(model, ids(), method="logit", target=-1, progress=False).scores
    inputs = {"ids": ids()} if named else ids()
    assert torch.equal(ula.explain(wrap(model), inputs, method="logit", target=-1, progress=False).scores, expected)
