"""How a map is treated: every rule against a loop over rows and keys, and the linear-time row against the map."""

import math

import pytest
import torch
from torch import Tensor

from tests.methods.hosts import CASES, close, real_map, references, traced
from unilinattn.methods.maps import attention_map, attention_rows, map_blocks, postprocess, vecmat
from unilinattn.methods.options import RawOptions, RolloutOptions

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
def own() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])


def dropped_by_loop(row: Tensor, keys: list[int], own: int, fraction: float) -> Tensor:
    kept = row.clone()
    candidates = sorted((float(row[k]), k) for k in keys if k != own)
    for _, k in candidates[: math.floor(fraction * len(keys))]:
        kept[k] = 0
    return kept


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.99])
def test_discarding_drops_the_lowest_of_each_row_but_its_own_token(scores, real, own, fraction) -> None:
    got = postprocess(scores, real, own, discard=fraction, normalize="none")
    for b in range(BATCH):
        for i in range(ROWS):
            keys = real[b, i].nonzero().flatten().tolist()
            masked = scores[b, i] * real[b, i]
            expected = dropped_by_loop(masked, keys, int(own[b, i]), fraction)
            assert torch.equal(got[b, i], expected)
            if int(own[b, i]) in keys:
                assert got[b, i, own[b, i]] == scores[b, i, own[b, i]]


@pytest.mark.parametrize(
    ("fraction", "keys", "count"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.29, 101, 29), (0.7, 10, 7), (0.5, 5, 2), (0.99, 10, 9)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_fraction_of_the_keys_is_rounded_down_and_never_loses_one_to_rounding(
    fraction: float, keys: int, count: int, dtype: torch.dtype
) -> None:
    # 0.29 * 100 is 28.999999999999996.
    ascending = torch.arange(1, keys + 1, dtype=dtype).reshape(1, 1, -1)
    real, own = torch.ones(1, 1, keys, dtype=torch.bool), torch.tensor([[keys - 1]])
    got = postprocess(ascending, real, own, discard=fraction, normalize="none")
    assert (got == 0).flatten().nonzero().flatten().tolist() == list(range(count))


def test_discarding_counts_the_real_keys_of_each_sequence_alone(real, own) -> None:
    ascending = torch.arange(1.0, KEYS + 1, dtype=torch.float64).expand(BATCH, ROWS, KEYS)
    got = postprocess(ascending, real, own, discard=0.5, normalize="none")
    # Seven real keys in the first sequence, four in the second: three and two of them go.
    assert (got[0, 4] == 0).nonzero().flatten().tolist() == [0, 1, 2]
    assert (got[1, 4] == 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_rows_are_divided_by_the_sum_of_absolute_values(scores, real, own) -> None:
    got = postprocess(scores, real, own, discard=0.0, normalize="rows")
    for b in range(BATCH):
        for i in range(ROWS):
            row = scores[b, i] * real[b, i]
            total = sum(abs(float(value)) for value in row)
            assert torch.allclose(got[b, i], row / total if total else row, rtol=1e-12)
    assert torch.allclose(got[0].abs().sum(-1), torch.ones(ROWS, dtype=torch.float64))


def test_a_row_of_zeros_stays_so(real, own) -> None:
    for normalize in ("rows", "min-max"):
        got = postprocess(torch.zeros(BATCH, ROWS, KEYS), real, own, discard=0.0, normalize=normalize)
        assert torch.equal(got, torch.zeros(BATCH, ROWS, KEYS))


def test_min_max_brings_each_sequence_to_the_unit_interval(scores, real, own) -> None:
    got = postprocess(scores, real, own, discard=0.0, normalize="min-max")
    for b in range(BATCH):
        size = scores[b].abs()
        low, high = size[real[b]].min(), size[real[b]].max()
        expected = torch.where(real[b], (size - low) / (high - low), 0)
        assert torch.allclose(got[b], expected, rtol=1e-12)
        assert got[b][real[b]].min() == 0
        assert got[b].max() == 1


def test_padding_is_zero_whatever_stands_there(scores, real, own) -> None:
    noisy = torch.where(real, scores, 1e6)
    for normalize in ("none", "rows", "min-max"):
        got = postprocess(noisy, real, own, discard=0.4, normalize=normalize)
        assert torch.equal(got, postprocess(scores, real, own, discard=0.4, normalize=normalize))
        assert (got[~real] == 0).all()


@pytest.mark.parametrize("heads", ["mean", "max", "min", "abs-mean", "product", 1, [0, 2]])
def test_heads_are_reduced_as_the_option_says(heads) -> None:
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
    assert close(attention_rows(layer, RawOptions(heads=heads), rows), expected)
    assert close(attention_map(layer, RawOptions(heads=heads)), expected)


@pytest.mark.parametrize("scope", ["core", "mixer", "unified"])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_a_row_carried_in_linear_time_is_the_row_times_the_map(name, padding, scope) -> None:
    trace = traced(name, padding)
    layer = trace.layers[1]
    row = torch.randn(layer.output.shape[:2], dtype=torch.float64)
    target = torch.zeros(row.shape[0], 1, dtype=torch.long)
    options = RolloutOptions(scope=scope)
    expected = row[:, None] @ (layer.operator.matrix(scope) * real_map(padding))
    assert close(vecmat(row[:, None], trace, layer, options, target=target), expected)
    weight = torch.randn_like(row)
    weighed = row[:, None] @ torch.cat([b for _, b in map_blocks(trace, layer, options, weight=weight)], 1)
    assert close(vecmat(row[:, None], trace, layer, options, target=target, weight=weight), weighed)
