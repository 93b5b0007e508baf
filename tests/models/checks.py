"""Checks of reference models against their definitions and their published layouts."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from unilinattn.testing import relative_error


def pairs(parameter: Tensor) -> Tensor:
    """Complex numbers from real and imaginary parts on the last axis."""
    return torch.complex(parameter[..., 0].double(), parameter[..., 1].double())


def unroll(step: Tensor, drive: Tensor) -> Tensor:
    """x_t = step x_{t-1} + drive_t, token by token; time is axis 1 of the drive and of the result."""
    state = torch.zeros_like(drive[:, 0])
    states = []
    for token in drive.unbind(1):
        state = step * state + token
        states.append(state)
    return torch.stack(states, dim=1)


def of_one_stream(definition: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """A definition of a layer in which the input is both the deciding and the carried stream."""
    return lambda layer, x: definition(layer, x, x)


def check_perturbations(
    layer: nn.Module, definition: Callable[[nn.Module, Tensor], Tensor], x: Tensor, names: Iterable[str], least: float
) -> None:
    """Each of the named tensors, changed by one per cent, moves the output away from the definition."""
    truth = definition(layer, x)
    for name in names:
        tensor = layer.state_dict()[name]
        original = tensor.clone()
        tensor.mul_(1.01)
        assert relative_error(layer(x), truth) > least, name
        tensor.copy_(original)


def check_state_dict_loads(layer: nn.Module, layout: dict[str, tuple[int, ...]]) -> None:
    """Random tensors of a published layout load strictly; other names or shapes do not."""
    published = {name: torch.randn(shape) for name, shape in layout.items()}
    layer.load_state_dict(published, strict=True)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == layout
