"""`discard`, `normalize` and `heads` of a map against loops over rows and keys; `vecmat` against the map."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.methods.hosts import CASES, close, real_map, references, traced
from unilinattn.options import Raw, Rollout
from unilinattn.scoring.maps import Weight, attention_map, attention_rows, map_blocks, postprocess, vecmat

BATCH, ROWS, KEYS = 2, 5, 7


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(BATCH, ROWS, KEYS, dtype=torch.float64)


@pytest.fixture
def real() -> Tensor:
    keys = torch.ones(BATCH, KEYS, dtype=torch.bool)
    keys[1, :3] = False
    rows = torch.ones(BATCH, ROWS, dtype=torch.bool)
    rows[1, 0] = False
    return rows[:, :, None] & keys[:, None, :]


@pytest.fixture
def diagonal() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])


def dropped_by_loop(row: Tensor, keys: list[int], diagonal: int, fraction: float) -> Tensor:
    remaining = row.clone()
    candidates = sorted((float(row[k]), k) for k in keys if k != diagonal)
    for _, k in candidates[: math.floor(fraction * len(keys))]:
        remaining[k] = 0
    return remaining


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.99])
def test_discard_drops_the_lowest_scores_except_the_diagonal(scores, real, diagonal, fraction) -> None:
    actual = postprocess(scores, real, diagonal, discard=fraction, normalize="none")
    for b in range(BATCH):
        for i in range(ROWS):
            keys = real[b, i].nonzero().flatten().tolist()
            masked = scores[b, i] * real[b, i]
            expected = dropped_by_loop(masked, keys, int(diagonal[b, i]), fraction)
            assert torch.equal(actual[b, i], expected)
            if int(diagonal[b, i]) in keys:
                assert actual[b, i, diagonal[b, i]] == scores[b, i, diagonal[b, i]]


@pytest.mark.parametrize(
    ("fraction", "keys", "count"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.29, 101, 29), (0.7, 10, 7), (0.5, 5, 2), (0.99, 10, 9)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_number_of_discarded_keys_is_the_exact_floor(
    fraction: float, keys: int, count: int, dtype: torch.dtype
) -> None:
    # 0.29 * 100 is 28.999999999999996.
    ascending = torch.arange(1, keys + 1, dtype=dtype).reshape(1, 1, -1)
    real, diagonal = torch.ones(1, 1, keys, dtype=torch.bool), torch.tensor([[keys - 1]])
    actual = postprocess(ascending, real, diagonal, discard=fraction, normalize="none")
    assert (actual == 0).flatten().nonzero().flatten().tolist() == list(range(count))


def test_discard_is_a_fraction_of_the_real_keys_of_each_sequence(real, diagonal) -> None:
    ascending = torch.arange(1.0, KEYS + 1, dtype=torch.float64).expand(BATCH, ROWS, KEYS)
    actual = postprocess(ascending, real, diagonal, discard=0.5, normalize="none")
    # Half of seven real keys in the first sequence, half of four in the second: three and two are discarded.
    assert (actual[0, 4] == 0).nonzero().flatten().tolist() == [0, 1, 2]
    assert (actual[1, 4] == 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_rows_are_divided_by_the_sum_of_absolute_values(scores, real, diagonal) -> None:
    actual = postprocess(scores, real, diagonal, discard=0.0, normalize="rows")
    for b in range(BATCH):
        for i in range(ROWS):
            row = scores[b, i] * real[b, i]
            total = sum(abs(float(value)) for value in row)
            assert torch.allclose(actual[b, i], row / total if total else row, rtol=1e-12)
    assert torch.allclose(actual[0].abs().sum(-1), torch.ones(ROWS, dtype=torch.float64))


def test_a_row_of_zeros_stays_zero(real, diagonal) -> None:
    for normalize in ("rows", "min-max"):
        actual = postprocess(torch.zeros(BATCH, ROWS, KEYS), real, diagonal, discard=0.0, normalize=normalize)
        assert torch.equal(actual, torch.zeros(BATCH, ROWS, KEYS))


def test_min_max_rescales_each_sequence_to_the_unit_interval(scores, real, diagonal) -> None:
    actual = postprocess(scores, real, diagonal, discard=0.0, normalize="min-max")
    for b in range(BATCH):
        size = scores[b].abs()
        low, high = size[real[b]].min(), size[real[b]].max()
        expected = torch.where(real[b], (size - low) / (high - low), 0)
        assert torch.allclose(actual[b], expected, rtol=1e-12)
        assert actual[b][real[b]].min() == 0
        assert actual[b].max() == 1


def test_padding_scores_zero_for_any_values(scores, real, diagonal) -> None:
    noisy = torch.where(real, scores, 1e6)
    for normalize in ("none", "rows", "min-max"):
        actual = postprocess(noisy, real, diagonal, discard=0.4, normalize=normalize)
        assert torch.equal(actual, postprocess(scores, real, diagonal, discard=0.4, normalize=normalize))
        assert (actual[~real] == 0).all()


@pytest.mark.parametrize("heads", ["mean", "max", "min", "abs-mean", "product", 1, [0, 2]])
def test_heads_are_reduced_by_the_option(heads) -> None:
    layer, reference = traced("mamba2").layers[0], references("mamba2")[0]
    rows = torch.arange(reference.alpha.shape[-1]).expand(reference.alpha.shape[0], -1)
    expected = {
        "mean": reference.alpha.mean(1),
        "max": reference.alpha.max(1).values,
        "min": reference.alpha.min(1).values,
        "abs-mean": reference.alpha.abs().mean(1),
        "product": reference.alpha.prod(1),
        "1": reference.alpha[:, 1],
        "[0, 2]": (reference.alpha[:, 0] + reference.alpha[:, 2]) / 2,
    }[str(heads)]
    assert close(attention_rows(layer, Raw(heads=heads), rows), expected)
    assert close(attention_map(layer, Raw(heads=heads)), expected)


@pytest.mark.parametrize("scope", ["core", "mixer", "unified"])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_vecmat_is_the_row_times_the_map(name, padding, scope) -> None:
    trace = traced(name, padding)
    layer = trace.layers[1]
    row = torch.randn(layer.output.shape[:2], dtype=torch.float64)
    target = torch.zeros(row.shape[0], 1, dtype=torch.long)
    options = Rollout(scope=scope)
    expected = row[:, None] @ (layer.operator.matrix(scope) * real_map(padding))
    assert close(vecmat(row[:, None], trace, layer, options, target=target), expected)
    signed = torch.randn_like(row)
    for sign, axis in product(("keep", "clamp", "abs"), ("row", "key")):
        options, weight = Rollout(scope=scope, sign=sign), Weight(signed, axis)
        weighed = row[:, None] @ torch.cat([b for _, b in map_blocks(trace, layer, options, weight=weight)], 1)
        assert close(vecmat(row[:, None], trace, layer, options, target=target, weight=weight), weighed)
        factor = signed[:, :, None] if axis == "row" else signed[:, None]
        function = {"keep": lambda a: a, "clamp": torch.relu, "abs": torch.abs}[sign]
        assert close(weighed, row[:, None] @ (function(factor * layer.operator.matrix(scope)) * real_map(padding)))
