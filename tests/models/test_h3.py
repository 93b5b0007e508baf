"""H3, single-head and multi-head: the recurrences of its paper, state dicts, and precision."""

import pytest
import torch

from tests.architectures import reference_recurrences
from tests.models import checks
from unilinattn.errors import OptionError
from unilinattn.models.h3 import H3
from unilinattn.testing import relative_error

recurrence = checks.of_one_stream(reference_recurrences.h3)


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
