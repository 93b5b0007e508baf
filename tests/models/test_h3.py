"""H3, single-head and multi-head: the recurrences of its paper, state dicts, and precision."""

import pytest
import torch
from torch import Tensor

from tests.models import checks
from tests.models.checks import pairs
from unilinattn.errors import OptionError
from unilinattn.models.h3 import H3
from unilinattn.testing import relative_error


def recurrence(layer: H3, x: Tensor) -> Tensor:
    """Algorithm 1, token by token in float64, with the states of the shift and of the diagonal model."""
    state = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    q, k, v = (x.double() @ state[f"{name}_proj.weight"].T + state[f"{name}_proj.bias"] for name in ("q", "k", "v"))
    shift_b, shift_c = state["ssm_k_kernel.kernel.B"], state["ssm_k_kernel.kernel.C"][0]
    a = torch.complex(-state["kernel.kernel.inv_A_real"].exp(), state["kernel.kernel.A_imag"])
    b, c = pairs(state["kernel.kernel.B"]), pairs(state["kernel.kernel.C"])[0]
    dt = state["kernel.kernel.log_dt"].exp()[:, None]
    decay = (1 + dt / 2 * a) / (1 - dt / 2 * a)
    gain = dt * b / (1 - dt / 2 * a)
    heads, width = layer.num_heads, layer.head_dim
    past = torch.zeros(*x[:, 0].shape, shift_b.shape[-1], dtype=torch.float64)
    memory = torch.zeros(len(x), heads, width, width, a.shape[-1], dtype=torch.complex128)
    outputs = []
    for query, key, value in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        past = torch.cat([torch.zeros_like(past[..., :1]), past[..., :-1]], dim=-1) + shift_b * key[..., None]
        shifted = (shift_c * past).sum(-1) + state["ssm_k_D"] * key
        q_h, k_h, v_h = (token.view(-1, heads, width) for token in (query, shifted, value))
        product = torch.einsum("bhi,bhj->bhij", k_h, v_h)
        memory = decay[:, None, None] * memory + gain[:, None, None] * product[..., None]
        content = 2 * (c[:, None, None] * memory).sum(-1).real + state["D"][:, None, None] * product
        read = torch.einsum("bhi,bhij->bjh", q_h, content)
        outputs.append(read.flatten(1))
    return torch.stack(outputs, dim=1) @ state["output_linear.weight"].T + state["output_linear.bias"]


def scrambled(layer: H3) -> H3:
    """The layer with random parameters instead of special initial values (B = e_1 and ones)."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("length", [1, 2, 5, 37])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 6])
def test_the_layer_is_the_recurrence(length: int, head_dim: int) -> None:
    layer = scrambled(H3(d_model=6, d_state=8, head_dim=head_dim).double())
    x = torch.randn(2, length, 6, dtype=torch.float64)
    assert relative_error(layer(x), recurrence(layer, x)) < 1e-11


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = scrambled(H3(d_model=4, d_state=6, head_dim=2).double())
    x = torch.randn(2, 20, 4, dtype=torch.float64)
    # The bilinear step is hardly moved by a pole's real part.
    checks.check_perturbations(layer, recurrence, x, dict(layer.named_parameters()), 1e-7)


def test_the_shift_starts_with_c_as_its_taps() -> None:
    layer = H3(d_model=4, d_state=6).double()
    taps = layer.key_kernel(9)
    torch.testing.assert_close(taps[:, :6], layer.ssm_k_kernel["kernel"].C[0])
    assert taps[:, 6:].abs().max() == 0


def test_a_state_dict_of_the_published_layout_loads() -> None:
    layout = {
        **{f"{name}_proj.{kind}": shape for name in "qkv" for kind, shape in (("weight", (8, 8)), ("bias", (8,)))},
        "ssm_k_kernel.kernel.B": (8, 6),
        "ssm_k_kernel.kernel.C": (1, 8, 6),
        "ssm_k_D": (8,),
        "kernel.kernel.C": (1, 4, 3, 2),
        "kernel.kernel.log_dt": (4,),
        "kernel.kernel.B": (4, 3, 2),
        "kernel.kernel.inv_A_real": (4, 3),
        "kernel.kernel.A_imag": (4, 3),
        "D": (4,),
        "output_linear.weight": (8, 8),
        "output_linear.bias": (8,),
    }
    checks.check_state_dict_loads(H3(8, 6, head_dim=2), layout)


@pytest.mark.parametrize(("wrong", "message"), [({"head_dim": 4}, "head_dim is 4"), ({"d_state": 5}, "d_state is 5")])
def test_invalid_sizes_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        H3(**{"d_model": 6, "d_state": 8, **wrong})
