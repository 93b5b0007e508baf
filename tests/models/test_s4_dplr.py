"""S4: the recurrence of its paper, HiPPO initialisation, state dicts, and precision."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models import checks
from tests.models.checks import pairs
from unilinattn.errors import OptionError
from unilinattn.models.hippo import hippo_matrix
from unilinattn.models.s4_dplr import S4
from unilinattn.testing import relative_error


def both(half: Tensor) -> Tensor:
    return torch.cat([half, half.conj()], dim=-1)


def discrete(layer: S4, channel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dense Abar, Bbar and C of one channel, by the bilinear transform (Eq. 3)."""
    state = {name.removeprefix("layer.kernel."): tensor.double() for name, tensor in layer.state_dict().items()}
    system = channel % state["A_real"].shape[0]
    poles = both(torch.complex(-state["A_real"].exp(), -state["A_imag"])[system])
    p, b = both(pairs(state["P"])[0, system]), both(pairs(state["B"])[0, system])
    a = torch.diag(poles) - torch.outer(p, p.conj())
    dt = state["inv_dt"][channel].exp()
    identity = torch.eye(len(poles), dtype=a.dtype)
    backward = torch.linalg.inv(identity - dt / 2 * a)
    return backward @ (identity + dt / 2 * a), backward @ (dt * b), both(pairs(state["C"])[0, channel])


def recurrence(layer: S4, u: Tensor) -> Tensor:
    """The layer, token by token in float64: x_k = Abar x_{k-1} + Bbar u_k, y_k = C x_k + D u_k."""
    state = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    channels = []
    for channel in range(u.shape[-1]):
        a, b, c = discrete(layer, channel)
        x = torch.zeros(len(u), len(b), dtype=a.dtype)
        outputs = []
        for token in u.double()[..., channel].unbind(1):
            x = x @ a.T + token[:, None] * b
            outputs.append((x @ c).real + state["layer.D"][0, channel] * token)
        channels.append(torch.stack(outputs, dim=1))
    y = functional.gelu(torch.stack(channels, dim=-1))
    carry, gate = (y @ state["output_linear.0.weight"].T + state["output_linear.0.bias"]).chunk(2, dim=-1)
    return carry * gate.sigmoid()


@pytest.mark.parametrize("length", [1, 2, 3, 37, 130])
@pytest.mark.parametrize("n_ssm", [1, 2, 6])
def test_the_layer_is_the_recurrence(length: int, n_ssm: int) -> None:
    layer = S4(d_model=6, d_state=8, n_ssm=n_ssm).double()
    u = torch.randn(2, length, 6, dtype=torch.float64)
    assert relative_error(layer(u), recurrence(layer, u)) < 1e-11


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = S4(d_model=4, d_state=8).double()
    names = ("P", "A_imag", "A_real", "inv_dt", "B", "C")
    x = torch.randn(2, 37, 4, dtype=torch.float64)
    checks.check_perturbations(layer, recurrence, x, [f"layer.kernel.{name}" for name in names], 1e-6)


def test_the_initialisation_is_hippo_legs() -> None:
    layer = S4(d_model=3, d_state=16)
    a, _, _ = discrete(layer, 0)
    dt = layer.layer.kernel.inv_dt[0].double().exp()
    identity = torch.eye(16, dtype=torch.float64)
    backward = torch.linalg.inv(identity - dt / 2 * hippo_matrix(16))
    # HiPPO-LegS is triangular, so its diagonal gives the eigenvalues of both matrices; stored poles are float32.
    eigenvalues = torch.linalg.eigvals(a.to(torch.complex128))
    expected = torch.linalg.eigvals(backward @ (identity + dt / 2 * hippo_matrix(16)))
    for power in range(1, 5):
        torch.testing.assert_close((eigenvalues**power).sum(), (expected**power).sum(), rtol=1e-5, atol=1e-5)


def test_a_shorter_kernel_is_the_start_of_a_longer_one() -> None:
    kernel = S4(d_model=4, d_state=8).double().layer.kernel
    torch.testing.assert_close(kernel(9), kernel(40)[:, :9], rtol=1e-10, atol=1e-12)


LAYOUT = {
    "layer.D": (1, 6),
    "layer.kernel.C": (1, 6, 4, 2),
    "layer.kernel.inv_dt": (6, 1),
    "layer.kernel.B": (1, 2, 4, 2),
    "layer.kernel.P": (1, 2, 4, 2),
    "layer.kernel.A_real": (2, 4),
    "layer.kernel.A_imag": (2, 4),
    "layer.kernel.l_kernel": (),
    "output_linear.0.weight": (12, 6),
    "output_linear.0.bias": (12,),
}


def test_a_state_dict_of_the_authors_layout_loads() -> None:
    fresh = {name: torch.randn(shape) for name, shape in LAYOUT.items()} | {"layer.kernel.l_kernel": torch.tensor(0)}
    layer = S4(d_model=6, d_state=8, n_ssm=2)
    layer.load_state_dict(fresh, strict=True)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == LAYOUT
    assert torch.equal(layer.layer.kernel.C, fresh["layer.kernel.C"])


def test_outputs_tuned_to_a_length_are_reset() -> None:
    plain = S4(d_model=3, d_state=8, dt_min=0.05).double()
    tuned = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for channel in range(3):
        a, _, c = discrete(plain, channel)
        coefficients = c - c @ torch.linalg.matrix_power(a, 20)
        tuned["layer.kernel.C"][0, channel] = torch.view_as_real(coefficients[:4])
    tuned["layer.kernel.l_kernel"] = torch.tensor(20)
    loaded = S4(d_model=3, d_state=8).double()
    loaded.load_state_dict(tuned, strict=True)
    u = torch.randn(2, 30, 3, dtype=torch.float64)
    assert relative_error(loaded(u), plain(u)) < 1e-9
    assert loaded.state_dict()["layer.kernel.l_kernel"] == 0


@pytest.mark.parametrize(
    ("wrong", "message"), [({"d_state": 3}, "d_state is 3"), ({"d_state": 0}, "is 0"), ({"n_ssm": 4}, "n_ssm is 4")]
)
def test_invalid_sizes_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        S4(**{"d_model": 6, "d_state": 8, **wrong})
