"""Packed scores: a decoder from the format's definition, rounding, causality and pooling."""

import base64
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from unilinattn.viz import packing
from unilinattn.viz.packing import Packed, any_in_blocks, causal, pack, pooled, pooling


def decoded(packed: Packed, shapes: list[tuple[int, int]], triangular: list[bool]) -> list[np.ndarray]:
    """Cell by cell: a high and a low byte are one number of half precision."""
    planes = zlib.decompress(base64.b64decode(packed.text))
    assert len(planes) == 2 * packed.count
    numbers = iter(struct.unpack(">e", bytes((planes[at], planes[packed.count + at])))[0] for at in range(packed.count))
    maps = []
    for (rows, columns), lower, scale in zip(shapes, triangular, packed.scales, strict=True):
        values = np.zeros((rows, columns))
        for row in range(rows):
            for column in range(row + 1 if lower else columns):
                values[row, column] = next(numbers) * scale
        maps.append(values)
    assert next(numbers, None) is None
    return maps


@given(arrays(np.float64, (3, 4), elements=st.floats(-1e20, 1e20)))
def test_scores_return_to_half_precision_of_the_largest(values: np.ndarray) -> None:
    (read,) = decoded(pack([values]), [(3, 4)], [False])
    scale = np.abs(values).max() or 1.0
    np.testing.assert_allclose(read, values, rtol=2.0**-11, atol=scale * 2.0**-25)


def test_maps_follow_each_other_and_causal_ones_have_no_later_keys() -> None:
    rng = np.random.default_rng(0)
    lower, full, row = np.tril(rng.normal(size=(5, 5))), rng.normal(size=(2, 3)), rng.normal(size=(1, 7))
    packed = pack([lower, full, row])
    assert packed.count == 15 + 6 + 7
    for read, values in zip(
        decoded(packed, [(5, 5), (2, 3), (1, 7)], [True, False, False]), (lower, full, row), strict=True
    ):
        np.testing.assert_allclose(read, values, rtol=2.0**-11)


def test_nan_infinity_and_zero() -> None:
    (read,) = decoded(pack([np.array([[np.nan, np.inf, -np.inf], [0.0, -2.0, 1.0]])]), [(2, 3)], [False])
    np.testing.assert_array_equal(read, [[np.nan, np.inf, -np.inf], [0.0, -2.0, 1.0]])
    packed = pack([np.zeros((2, 3)), np.full((1, 2), np.nan)])
    np.testing.assert_array_equal(decoded(packed, [(2, 3), (1, 2)], [False, False])[0], np.zeros((2, 3)))
    assert math.isnan(decoded(packed, [(2, 3), (1, 2)], [False, False])[1][0, 0])


def test_many_scores_have_a_shorter_mantissa(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shape = (200, 199)
    values = np.exp(3 * rng.normal(size=shape)) * rng.choice([-1, 1], shape)
    chosen = []
    for limit in np.linspace(2.0, 0.6, 57) * values.size:
        monkeypatch.setattr(packing, "MOST_BYTES", limit)
        packed = pack([values])
        if packed.mantissa in chosen:
            continue
        chosen.append(packed.mantissa)
        # The tables of the deflated stream are not estimated.
        assert len(base64.b64decode(packed.text)) <= 1.02 * limit
        assert packed.error == 2.0 ** -(packed.mantissa + 1)
        (read,) = decoded(packed, [shape], [False])
        error = np.abs(read / values - 1)[np.abs(values) > 1e-4 * np.abs(values).max()].max()
        # Half precision rounds first, then the mantissa is shortened.
        assert packed.error / 2 < error <= packed.error + (2.0**-11 if packed.mantissa < 10 else 0)
    assert chosen == list(packing.MANTISSAS)


def test_causality_is_read_from_the_scores() -> None:
    lower = np.tril(np.ones((4, 4)))
    assert causal(lower)
    later = lower.copy()
    later[0, 3] = 1e-3
    assert not causal(later)
    # Rounding of an operator computed by FFT, and keys without a score.
    later[0, 3], later[1, 2] = 1e-8, np.nan
    assert causal(later)
    assert not causal(np.ones((3, 4))) and not causal(np.ones((1, 1))) and not causal(np.ones((3, 3)))


def test_pooling_keeps_the_largest_score_of_each_block_and_its_sign() -> None:
    values = np.zeros((7, 7))
    values[0, 1], values[1, 0], values[6, 6], values[2, 5] = 1.0, -3.0, 2.0, np.nan
    expected = np.zeros((4, 4))
    expected[0, 0], expected[3, 3] = -3.0, 2.0
    np.testing.assert_array_equal(pooled(values, 2), expected)
    assert np.isnan(pooled(np.full((4, 4), np.nan), 2)).all()
    np.testing.assert_array_equal(any_in_blocks(values == -3, 2), expected == -3)


def test_maps_are_pooled_only_if_they_do_not_fit() -> None:
    assert pooling([(256, 256)] * 24) == pooling([(1024, 1024)] * 4) == 1
    assert pooling([(1024, 1024)] * 24) == 3
    # A map that is not square has all its cells.
    assert pooling([(1024, 1023)] * 4) == 2
