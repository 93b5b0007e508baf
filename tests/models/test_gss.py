"""GSS: the recurrence of its paper, state dicts, and precision."""

import pytest
import torch

from tests.architectures import reference_recurrences
from tests.models import checks
from unilinattn.models.gss import GSS
from unilinattn.testing import relative_error

recurrence = checks.of_one_stream(reference_recurrences.gss)


@pytest.mark.parametrize("length", [1, 2, 37, 130])
def test_the_layer_is_the_recurrence(length: int) -> None:
    layer = GSS(d_model=8, d_state=6, d_ssm=5).double()
    x = torch.randn(3, length, 8, dtype=torch.float64)
    assert relative_error(layer(x), recurrence(layer, x)) < 1e-11


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = GSS(d_model=8, d_state=6, d_ssm=5).double()
    names = ("Lambda_real", "Lambda_imag", "C_real", "C_imag", "param_D", "norm.weight")
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    checks.check_perturbations(layer, recurrence, x, [f"dss.{name}" for name in names], 1e-6)


def test_the_papers_widths_are_the_default() -> None:
    layer = GSS(d_model=16, d_state=4)
    assert layer.to_u[0].out_features == 64
    assert layer.to_v[0].out_features == 4


def test_a_state_dict_of_the_public_layout_loads() -> None:
    layout = {
        "to_u.0.weight": (32, 8),
        "to_v.0.weight": (5, 8),
        "dss.norm.weight": (5,),
        "dss.norm.bias": (5,),
        "dss.Lambda_real": (6,),
        "dss.Lambda_imag": (6,),
        "dss.C_real": (5, 6),
        "dss.C_imag": (5, 6),
        "dss.param_D": (5,),
        "to_gate.weight": (32, 5),
        "to_out.weight": (8, 32),
        "to_out.bias": (8,),
    }
    checks.check_state_dict_loads(GSS(8, 6, d_ssm=5), layout)
