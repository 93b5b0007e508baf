"""Mean maps that are written at once, and blocks of convolutions, against the matrix."""

import pytest
import torch

from unilinattn.mixers import Dense, DiagonalDecay, ScalarDecay, Toeplitz

LENGTH, HEADS, BATCH = 9, 3, 2


def toeplitz(taps: int) -> Toeplitz:
    return Toeplitz(torch.randn(HEADS, taps, dtype=torch.float64), batch=BATCH, length=LENGTH)


def scalar_decay(length: int) -> ScalarDecay:
    query, key = torch.randn(2, BATCH, length, 2, 4, dtype=torch.float64)
    decay, scale = torch.rand(2, BATCH, length, 6, dtype=torch.float64)
    return ScalarDecay(query, key, -decay, key_scale=scale)


MIXERS = {
    **{f"toeplitz {taps}": lambda taps=taps: toeplitz(taps) for taps in (1, 4, LENGTH, LENGTH + 3)},
    "dense": lambda: Dense(torch.rand(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64).tril()),
    **{f"scalar decay {length}": lambda length=length: scalar_decay(length) for length in (1, LENGTH, 70)},
}


@pytest.mark.parametrize("name", MIXERS)
def test_the_mean_map_is_the_mean_over_heads_in_new_memory(name: str) -> None:
    mixer = MIXERS[name]()
    expected, mean = mixer.materialize().clone(), mixer.mean_map()
    assert mean is not None
    torch.testing.assert_close(mean, expected.mean(1), atol=1e-13, rtol=0)
    # The sequences of a batch share no memory with each other nor with the factors.
    mean[0].fill_(7.0)
    torch.testing.assert_close(mean[1], expected[1].mean(0), atol=1e-13, rtol=0)
    torch.testing.assert_close(mixer.materialize(), expected, atol=1e-13, rtol=0)


def test_a_mixer_that_needs_blocks_has_no_mean_map() -> None:
    factors = [torch.randn(1, LENGTH, HEADS, 4) for _ in range(2)]
    assert DiagonalDecay(*factors, -torch.rand(1, LENGTH, HEADS, 4)).mean_map() is None


@pytest.mark.parametrize("taps", [1, 4, LENGTH, LENGTH + 3])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7), slice(8, 9), slice(1, 8, 3), slice(5, 5)])
@pytest.mark.parametrize("cols", [slice(None), slice(0, 3), slice(4, 9), slice(0, 9, 2), slice(0, 0)])
def test_blocks_of_a_convolution_are_those_of_its_matrix(taps: int, rows: slice, cols: slice) -> None:
    mixer = toeplitz(taps)
    assert torch.equal(mixer.tile(rows, cols, slice(1, 3)), mixer.materialize()[:, 1:3, rows, cols])
