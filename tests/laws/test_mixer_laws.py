"""Every law of core mixers, over structures, dtypes, ragged lengths and extreme factors."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.laws.structures import EXTREMES, STRUCTURES, Draw, Structure
from unilinattn.call.exactness import relative_error
from unilinattn.testing import (
    batch_is_a_loop,
    check_mixer,
    gradients_are_finite,
    mixer_passes,
    require_linear_memory,
    tolerance,
)

LENGTHS = (1, 3, 63, 64, 65, 130)
DTYPES = (torch.float32, torch.float64)

structures = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)


@structures
@pytest.mark.parametrize("length", LENGTHS)
@settings(max_examples=3)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    extreme=st.sampled_from(EXTREMES),
)
def test_every_law_holds(
    structure: Structure, length: int, seed: int, batch: int, dtype: torch.dtype, extreme: str
) -> None:
    draw = Draw(seed, batch, length, dtype, extreme)
    mixer = structure.mixer(draw)
    if length == 1:
        # One token leaves one sum over states; where its terms cancel, the rounding of the factors decides.
        narrow, wide = (
            structure.mixer(Draw(seed, batch, length, width, extreme)).materialize()
            for width in (torch.float32, torch.float64)
        )
        assume(relative_error(narrow.double(), wide) < tolerance("law", torch.float32) / 10)
    check_mixer(mixer)
    batch_is_a_loop(mixer, structure.singles(Draw(seed, batch, length, dtype, extreme)), tolerance("law", dtype))


@structures
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("length", [1, 67])
def test_gradients_are_finite(structure: Structure, extreme: str, length: int) -> None:
    draw = Draw(0, 2, length, torch.float32, extreme)
    gradients_are_finite(structure.bind(draw), structure.factors(draw))


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s.linear], ids=lambda s: s.name)
def test_passes_allocate_linearly(structure: Structure) -> None:
    require_linear_memory(lambda length: mixer_passes(structure.mixer(Draw(0, 1, length, torch.float32))), 256)
