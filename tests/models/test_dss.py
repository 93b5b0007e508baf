"""DSS: the recurrence of its paper, state dicts, and precision."""

import pytest
import torch

from tests.architectures import reference_recurrences
from tests.models import checks
from tests.models.checks import pairs
from unilinattn.errors import OptionError
from unilinattn.models.dss import DSS
from unilinattn.testing import relative_error

recurrence = checks.of_one_stream(reference_recurrences.dss)


@pytest.mark.parametrize("version", ["softmax", "exp"])
@pytest.mark.parametrize("length", [1, 2, 37, 100])
def test_the_layer_is_the_recurrence(version: str, length: int) -> None:
    layer = DSS(d_model=6, d_state=8, version=version).double()
    u = torch.randn(2, length, 6, dtype=torch.float64)
    assert relative_error(layer(u), recurrence(layer, u)) < 1e-10


def test_the_bound_on_reciprocals_has_a_small_effect() -> None:
    bounded, exact = DSS(6, 8).double(), DSS(6, 8, epsilon=0.0).double()
    exact.load_state_dict(bounded.state_dict())
    u = torch.randn(2, 37, 6, dtype=torch.float64)
    assert 1e-12 < relative_error(bounded(u), exact(u)) < 1e-3


def test_growing_poles_are_normalised_by_the_softmax() -> None:
    layer = DSS(d_model=5, d_state=6, epsilon=0.0).double()
    with torch.no_grad():
        layer.kernel.Lambda[::2, 0] = 3.0
    poles, dt = pairs(layer.kernel.Lambda), layer.kernel.log_dt.exp()
    step = torch.complex(dt[:, :1] * poles.real, dt[:, 1:] * poles.imag)
    length = 50
    exponent = step[..., None] * torch.arange(length)
    rows = exponent.exp() / exponent.exp().sum(-1, keepdim=True)
    expected = ((pairs(layer.kernel.W)[0] / poles)[..., None] * rows).sum(1).real
    torch.testing.assert_close(layer.kernel(length), expected, rtol=1e-9, atol=1e-11)
    assert layer.float().kernel(20_000).isfinite().all()


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = DSS(d_model=4, d_state=6, epsilon=0.0).double()
    x = torch.randn(2, 20, 4, dtype=torch.float64)
    checks.check_perturbations(layer, recurrence, x, ("kernel.Lambda", "kernel.log_dt", "kernel.W", "D"), 1e-6)


COMMON = {"D": (1, 6), "output_linear.weight": (6, 6), "output_linear.bias": (6, 1)}
KERNEL = {"kernel.log_dt": (6, 2), "kernel.W": (1, 6, 8, 2)}


def test_state_dicts_of_the_authors_layout_load() -> None:
    checks.check_state_dict_loads(DSS(6, 8), {**COMMON, **KERNEL, "kernel.Lambda": (8, 2)})
    exponential = {"kernel.Lambda_log_neg_re": (8,), "kernel.Lambda_im": (8,)}
    checks.check_state_dict_loads(DSS(6, 8, version="exp"), {**COMMON, **KERNEL, **exponential})


def test_the_initial_poles_are_those_of_hippos_skew_part() -> None:
    for version in ("softmax", "exp"):
        poles = DSS(4, 8, version=version).kernel.poles()
        torch.testing.assert_close(poles.real, torch.full((8,), -0.5))
        assert (poles.imag > 0).all()
        assert (poles.imag.diff() < 0).all()


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(OptionError, match="did you mean 'softmax'"):
        DSS(4, 8, version="soft-max")
