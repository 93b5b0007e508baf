"""Checks that apply to every reference model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unilinattn.models.language_model import MixerForCausalLM
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


def check_no_token_sees_a_later_one(layer: nn.Module, d_model: int) -> None:
    u = torch.randn(1, 30, d_model, dtype=torch.float64)
    changed = u.clone()
    changed[:, 17:] += 10
    difference = (layer(u) - layer(changed)).abs()
    assert difference[:, :17].max() < 1e-10 * difference.max()
    assert (difference[:, 17:] > 1e-6).any(dim=-1).all()


def check_gradients_reach_every_parameter(layer: nn.Module, d_model: int) -> None:
    layer(torch.randn(2, 12, d_model)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def check_half_precision(layer: nn.Module, d_model: int) -> None:
    """The output of a bfloat16 layer is bfloat16 and close to that of the same weights in float64."""
    layer = layer.bfloat16()
    u = torch.randn(2, 20, d_model, dtype=torch.bfloat16)
    found = layer(u)
    assert found.dtype == torch.bfloat16
    assert relative_error(found.double(), layer.double()(u.double())) < 3e-2


def check_training_drops_the_loss(mixer: Callable[[], nn.Module], d_model: int) -> None:
    """Eighty steps teach a two-layer model to repeat the previous token, which requires memory."""
    torch.manual_seed(0)
    model = MixerForCausalLM(vocab_size=6, d_model=d_model, n_layers=2, mixer=mixer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        ids = torch.randint(6, (8, 2)).repeat(1, 6)
        loss = model(ids, labels=ids).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert losses[-1] < 0.5 * losses[0]


def check_state_dict_loads(layer: nn.Module, layout: dict[str, tuple[int, ...]]) -> None:
    """Random tensors of a published layout load strictly; other names or shapes do not."""
    published = {name: torch.randn(shape) for name, shape in layout.items()}
    layer.load_state_dict(published, strict=True)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == layout
