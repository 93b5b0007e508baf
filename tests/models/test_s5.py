"""S5: the recurrence of its paper, HiPPO initialisation, state dicts, and precision."""

import pytest
import torch

from tests.architectures import reference_recurrences
from tests.models import checks
from unilinattn.errors import OptionError
from unilinattn.models.hippo import hippo_matrix
from unilinattn.models.s5 import S5
from unilinattn.testing import relative_error

recurrence = checks.of_one_stream(reference_recurrences.s5)


@pytest.mark.parametrize("length", [1, 2, 37, 130])
@pytest.mark.parametrize("conj_sym", [True, False])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_the_layer_is_the_recurrence(length: int, conj_sym: bool, discretization: str) -> None:
    layer = S5(6, 8, blocks=2, conj_sym=conj_sym, discretization=discretization).double()
    u = torch.randn(3, length, 6, dtype=torch.float64)
    assert relative_error(layer(u), recurrence(layer, u)) < 1e-11


def test_poles_are_clipped_only_by_option() -> None:
    u = torch.randn(1, 20, 4, dtype=torch.float64)
    for clip in (True, False):
        layer = S5(4, 4, clip_eigs=clip).double()
        with torch.no_grad():
            layer.seq.Lambda_re.fill_(0.2)
        assert relative_error(layer(u), recurrence(layer, u)) < 1e-11
        assert (layer.seq.modes().decay.abs() < 1).all() == clip


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = S5(4, 8).double()
    names = ("Lambda_re", "Lambda_im", "B", "C", "D", "log_step")
    x = torch.randn(2, 20, 4, dtype=torch.float64)
    checks.check_perturbations(layer, recurrence, x, [f"seq.{name}" for name in names], 1e-6)


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_initialisation_is_blocks_of_hippos_normal_part(blocks: int) -> None:
    layer = S5(d_model=3, d_state=16, blocks=blocks, conj_sym=False)
    size = 16 // blocks
    root = torch.sqrt(torch.arange(size, dtype=torch.float64) + 0.5)
    normal = hippo_matrix(size) + torch.outer(root, root)
    expected = torch.linalg.eigvals(normal).imag.sort().values
    actual = layer.seq.Lambda_im.detach().double().unflatten(0, (blocks, size))
    torch.testing.assert_close(actual, expected.expand(blocks, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.seq.Lambda_re.detach(), torch.full((16,), -0.5))


def test_half_of_each_conjugate_pair_is_equivalent_to_all_modes() -> None:
    half, full = S5(5, 8).double(), S5(5, 8, conj_sym=False).double()
    state = half.state_dict()
    mirrored = dict(state)
    for name, axis in (("Lambda_re", 0), ("Lambda_im", 0), ("log_step", 0), ("B", 0), ("C", 1)):
        first_half = state[f"seq.{name}"]
        other = first_half.clone()
        if name in ("B", "C"):
            other[..., 1] *= -1
        if name == "Lambda_im":
            other *= -1
        mirrored[f"seq.{name}"] = torch.cat([first_half, other], dim=axis)
    full.load_state_dict(mirrored)
    u = torch.randn(2, 15, 5, dtype=torch.float64)
    assert relative_error(full(u), half(u)) < 1e-12


def test_a_state_dict_of_the_authors_layout_loads() -> None:
    layout = {
        "seq.Lambda_re": (4,),
        "seq.Lambda_im": (4,),
        "seq.B": (4, 6, 2),
        "seq.C": (6, 4, 2),
        "seq.D": (6,),
        "seq.log_step": (4, 1),
        "out2.weight": (6, 6),
        "out2.bias": (6,),
    }
    checks.check_state_dict_loads(S5(6, 8), layout)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"d_state": 6, "blocks": 2}, "d_state is 6"), ({"blocks": 0}, "blocks is 0"), ({"discretization": "zho"}, "zoh")],
)
def test_invalid_options_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        S5(**{"d_model": 6, "d_state": 8, **wrong})
