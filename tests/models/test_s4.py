"""S4D: the recurrence of its paper, state dicts, and its language model; `test_language_model` has padding."""

import copy
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from tests.architectures import recurrences
from tests.models import checks
from unilinattn.errors import OptionError
from unilinattn.models import S4D, S4DConfig, S4DForCausalLM
from unilinattn.testing import relative_error


def recurrence(layer: S4D, u: Tensor) -> Tensor:
    with torch.no_grad():
        return recurrences.s4d(copy.deepcopy(layer).double(), u.double(), u.double(), torch.ones(u.shape[:2]))


@pytest.mark.parametrize("length", [1, 2, 37, 130])
def test_the_layer_is_the_recurrence(length: int) -> None:
    layer = S4D(d_model=6, d_state=8).double()
    u = torch.randn(3, length, 6, dtype=torch.float64)
    assert relative_error(layer(u), recurrence(layer, u)) < 1e-12


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = S4D(d_model=6, d_state=8).double()
    x = torch.randn(2, 37, 6, dtype=torch.float64)
    checks.check_perturbations(layer, recurrence, x, ("kernel.A_imag", "kernel.log_dt", "D"), 1e-6)


def test_the_kernel_is_real_and_its_impulse_response() -> None:
    layer = S4D(d_model=4, d_state=6).double()
    kernel = layer.kernel(20)
    assert kernel.shape == (4, 20)
    assert kernel.dtype == torch.float64
    torch.testing.assert_close(layer.kernel(5), kernel[:, :5], rtol=1e-12, atol=1e-14)
    dt = layer.kernel.log_dt.exp()
    poles = torch.complex(-layer.kernel.log_A_real.exp(), layer.kernel.A_imag)
    c = torch.view_as_complex(layer.kernel.C)
    x = torch.expm1(dt[:, None] * poles) / poles
    for tap in kernel.unbind(1):
        torch.testing.assert_close(tap, 2 * (c * x).sum(-1).real, rtol=1e-12, atol=1e-13)
        x = x * torch.exp(dt[:, None] * poles)


def test_half_precision_computes_the_kernel_in_float32() -> None:
    layer = S4D(d_model=8).bfloat16()
    u = torch.randn(2, 20, 8, dtype=torch.bfloat16)
    assert layer.kernel(20).dtype == torch.float32
    assert layer(u).dtype == torch.bfloat16
    assert relative_error(layer(u).double(), recurrence(layer, u)) < 2e-2


def test_a_state_dict_of_the_authors_layout_loads() -> None:
    layout = {
        "D": (6,),
        "kernel.C": (6, 4, 2),
        "kernel.log_dt": (6,),
        "kernel.log_A_real": (6, 4),
        "kernel.A_imag": (6, 4),
        "output_linear.0.weight": (12, 6, 1),
        "output_linear.0.bias": (12,),
    }
    checks.check_state_dict_loads(S4D(d_model=6, d_state=8), layout)


def test_the_initialisation_is_s4d_lin() -> None:
    kernel = S4D(d_model=5, d_state=8, dt_min=0.01, dt_max=0.02).kernel
    assert torch.allclose(-kernel.log_A_real.exp(), torch.tensor(-0.5))
    assert torch.allclose(kernel.A_imag, torch.pi * torch.arange(4.0).expand(5, 4))
    assert kernel.log_dt.exp().min() >= 0.0099
    assert kernel.log_dt.exp().max() <= 0.0201


def test_the_head_can_be_tied() -> None:
    config = S4DConfig(vocab_size=11, d_model=8, n_layers=1)
    tied = S4DForCausalLM(S4DConfig(**{**asdict(config), "tie_word_embeddings": True}))
    assert tied.lm_head.weight is tied.embeddings.weight
    untied = S4DForCausalLM(config)
    assert untied.lm_head.weight is not untied.embeddings.weight


def test_a_configuration_is_restored_from_a_dict() -> None:
    config = S4DConfig(vocab_size=11, d_model=8, n_layers=2, d_state=4, dt_max=0.2)
    assert S4DConfig(**asdict(config)) == config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_state": 3}, "d_state is 3"),
        ({"d_state": 0}, "d_state is 0"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"dt_min": 1.0}, "dt_min is 1.0"),
    ],
)
def test_invalid_sizes_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        S4DConfig(**{"vocab_size": 11, "d_model": 8, "n_layers": 1, **wrong})
