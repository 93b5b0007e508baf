"""Dense, Toeplitz, scalar and diagonal decay against their definitions, in value and gradient; their errors."""

import pytest
import torch
from torch import Tensor

from tests.laws.structures import STRUCTURES, Draw, Structure
from tests.mixers.laws import check_reductions
from unilinattn.errors import FactorError
from unilinattn.kernels.scan.naive import decay_map
from unilinattn.mixers import Dense, DiagonalDecay, ScalarDecay, Toeplitz
from unilinattn.testing import relative_error, tolerance


def alpha(structure: Structure, length: int, factors: dict[str, Tensor]) -> Tensor:
    """Fill every head's matrix from the formula of the structure, in float64."""
    factors = {name: factor.double() if factor.is_floating_point() else factor for name, factor in factors.items()}
    if structure.build is Dense:
        return factors["weights"]
    if structure.build is Toeplitz:
        kernel = factors["kernel"]
        rows = [
            [kernel[:, i - j] if 0 <= i - j < kernel.shape[1] else 0 * kernel[:, 0] for j in range(length)]
            for i in range(length)
        ]
        return torch.stack([torch.stack(row, -1) for row in rows], -2)[None]
    query, key, log_decay = factors["query"], factors["key"], factors["log_decay"]
    if structure.build is ScalarDecay:
        log_decay = log_decay.unsqueeze(-1)
    if "rate" in factors:
        log_decay = log_decay * factors["rate"]
    if "reset" in factors:
        # A decay of exactly zero, which resets the state.
        log_decay = log_decay.masked_fill(factors["reset"][..., None, None], -torch.inf)
    heads = log_decay.shape[2]
    query, key = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (query, key))
    if "key_scale" in factors:
        key = key * factors["key_scale"].unsqueeze(-1)
    return decay_map(query, key, log_decay.expand_as(query))


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 9, 66])
def test_a_mixer_is_its_definition(structure: Structure, dtype: torch.dtype, length: int) -> None:
    draw = Draw(3, 2, length, dtype)
    factors = structure.factors(draw)
    mixer = structure.bind(draw)(**factors)
    expected = alpha(structure, length, factors).expand(mixer.shape)
    assert relative_error(mixer.materialize(), expected) < tolerance("law", dtype)
    value = torch.randn(2, length, mixer.heads, 3, dtype=dtype)
    mixed = torch.einsum("bhij,bjhp->bihp", expected, value.double())
    assert relative_error(mixer.apply(value), mixed) < tolerance("law", dtype)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("length", [1, 9, 66, 130])
def test_blocks_and_reductions_are_the_matrix(structure: Structure, length: int, channels: int) -> None:
    draw = Draw(6, 2, length, torch.float64)
    check_reductions(structure.bind(draw)(**structure.factors(draw)), channels)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
@pytest.mark.parametrize("operation", ["apply", "adjoint", "materialize", "rows", "diagonal"])
def test_gradients_are_those_of_the_definition(structure: Structure, operation: str) -> None:
    draw = Draw(4, 2, 9, torch.float64)
    factors = structure.factors(draw)
    leaves = {name: factor.requires_grad_() for name, factor in factors.items() if factor.is_floating_point()}
    mixer = structure.bind(draw)(**factors)
    whole = alpha(structure, 9, factors).expand(mixer.shape)
    inputs, index = torch.randn(2, 9, mixer.heads, 3, dtype=torch.float64), torch.tensor([[0, 4], [8, 2]])
    actual = {
        "apply": lambda: mixer.apply(inputs),
        "adjoint": lambda: mixer.adjoint(inputs),
        "materialize": lambda: mixer.materialize(),
        "rows": lambda: mixer.rows(index),
        "diagonal": lambda: mixer.diagonal(),
    }[operation]()
    expected = {
        "apply": lambda: torch.einsum("bhij,bjhp->bihp", whole, inputs),
        "adjoint": lambda: torch.einsum("bhij,bihp->bjhp", whole, inputs),
        "materialize": lambda: whole,
        "rows": lambda: whole.gather(2, index[:, None, :, None].expand(-1, mixer.heads, -1, 9)),
        "diagonal": lambda: whole.diagonal(dim1=-2, dim2=-1),
    }[operation]()
    weights = torch.randn_like(expected)
    for name, leaf in leaves.items():
        # Unused factors, such as a decay on the diagonal, have no gradient in either.
        flows = [
            torch.autograd.grad((y * weights).sum(), leaf, allow_unused=True, retain_graph=True)[0]
            for y in (actual, expected)
        ]
        ours, theirs = (torch.zeros_like(leaf) if flow is None else flow for flow in flows)
        assert relative_error(ours, theirs) < 1e-11, name


def test_a_kernel_longer_than_the_sequence_is_cut() -> None:
    mixer = Toeplitz(torch.arange(1.0, 9.0)[None], batch=1, length=3)
    assert mixer.materialize()[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [3, 2, 1]]


def test_dense_weights_may_be_rectangular() -> None:
    weights = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    value = torch.randn(2, 5, 3, 2, dtype=torch.float64)
    assert Dense(weights).shape == (2, 3, 4, 5)
    assert relative_error(Dense(weights).apply(value), torch.einsum("bhij,bjhp->bihp", weights, value)) < 1e-14


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
def test_a_factor_that_is_not_finite_is_refused(structure: Structure, number: float) -> None:
    draw = Draw(5, 2, 6, torch.float32)
    for name in structure.factors(draw):
        factors = structure.factors(draw)
        if not factors[name].is_floating_point():
            continue
        factors[name].view(-1)[1] = number
        with pytest.raises(FactorError, match=f"factor '{name}' .* holds 1 NaN or infinite number"):
            structure.bind(draw)(**factors)


def test_the_properties_of_each_structure() -> None:
    properties = {
        cls: (cls.structure, cls.causal, cls.data_controlled) for cls in (Dense, DiagonalDecay, ScalarDecay, Toeplitz)
    }
    assert properties == {
        Dense: ("dense", False, True),
        DiagonalDecay: ("diagonal decay", True, True),
        ScalarDecay: ("scalar decay", True, True),
        Toeplitz: ("Toeplitz", True, False),
    }


def test_a_weight_one_key_ahead_is_not_lower_triangular() -> None:
    ahead = torch.eye(3)[None, None].clone()
    ahead[..., 0, 1] = 1
    assert Dense(ahead.mT).is_lower_triangular
    assert not Dense(ahead).is_lower_triangular
