"""Mean maps that are written at once, and blocks of convolutions, against loops over the entries."""

import pytest
import torch

from unilinattn.mixers import CoreMixer, Dense, DiagonalDecay, ScalarDecay, Toeplitz

LENGTH, HEADS, BATCH = 9, 3, 2


def toeplitz(taps: int) -> Toeplitz:
    return Toeplitz(torch.randn(HEADS, taps, dtype=torch.float64), batch=BATCH, length=LENGTH)


def entry(mixer: CoreMixer, b: int, h: int, i: int, j: int) -> float:
    if isinstance(mixer, Dense):
        return float(mixer.weights[b, h, i, j])
    assert isinstance(mixer, Toeplitz)
    return float(mixer.taps[h, i - j]) if 0 <= i - j < mixer.taps.shape[1] else 0.0


def looped(mixer: CoreMixer) -> torch.Tensor:
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    flat = [
        entry(mixer, b, h, i, j)
        for b in range(BATCH)
        for h in range(HEADS)
        for i in range(LENGTH)
        for j in range(LENGTH)
    ]
    return torch.tensor(flat, dtype=torch.float64).view(shape)


MIXERS = {
    **{f"toeplitz {taps}": lambda taps=taps: toeplitz(taps) for taps in (1, 4, LENGTH, LENGTH + 3)},
    "dense": lambda: Dense(torch.rand(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64).tril()),
}


@pytest.mark.parametrize("name", MIXERS)
def test_the_mean_map_is_the_mean_over_heads_in_new_memory(name: str) -> None:
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    expected = looped(mixer)
    found = mixer.mean_map()
    assert found is not None
    torch.testing.assert_close(found, expected.mean(1), atol=1e-14, rtol=0)
    # The sequences of a batch share no memory with each other nor with the factors.
    found[0].fill_(7.0)
    torch.testing.assert_close(found[1], expected[1].mean(0), atol=1e-14, rtol=0)
    torch.testing.assert_close(mixer.materialize(), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("length", [1, LENGTH, 70])
def test_the_mean_map_of_scalar_decays_is_that_of_its_matrix(length: int) -> None:
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, 2, 4, dtype=torch.float64) for _ in range(2))
    decay, scale = (torch.rand(BATCH, length, 6, dtype=torch.float64) for _ in range(2))
    mixer = ScalarDecay(query, key, -decay, key_scale=scale)
    mean = mixer.mean_map()
    assert mean is not None
    torch.testing.assert_close(mean, mixer.materialize().mean(1), atol=1e-13, rtol=0)


def test_a_mixer_that_needs_blocks_has_no_mean_map() -> None:
    factors = [torch.randn(1, LENGTH, HEADS, 4) for _ in range(2)]
    assert DiagonalDecay(*factors, -torch.rand(1, LENGTH, HEADS, 4)).mean_map() is None


@pytest.mark.parametrize("taps", [1, 4, LENGTH, LENGTH + 3])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7), slice(8, 9), slice(1, 8, 3), slice(5, 5)])
@pytest.mark.parametrize("cols", [slice(None), slice(0, 3), slice(4, 9), slice(0, 9, 2), slice(0, 0)])
def test_blocks_of_a_convolution_are_those_of_its_matrix(taps: int, rows: slice, cols: slice) -> None:
    mixer = toeplitz(taps)
    torch.testing.assert_close(mixer.tile(rows, cols, slice(1, 3)), looped(mixer)[:, 1:3, rows, cols], atol=0, rtol=0)
