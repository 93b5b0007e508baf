"""Softmax attention by blocks of queries, against its definition in float64."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from unilinattn.errors import FactorError
from unilinattn.mixers import Softmax, softmax
from unilinattn.testing import relative_error, tolerance
from unilinattn.testing.peak import peak_of

BATCH, HEADS, GROUPS, QUERIES, STATE, CHANNELS = 2, 6, 3, 37, 5, 4
SCALE = 0.7
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks, the last one smaller."""
    monkeypatch.setattr(softmax, "BLOCK", {"cpu": 1})
    monkeypatch.setattr(softmax, "FEWEST", 8)
    yield


def padded() -> Tensor:
    """A causal mask of pairs in which the first sequence has padding on the left, whose queries have no key."""
    mask = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril().repeat(BATCH, 1, 1, 1)
    mask[0, :, :, :9] = False
    return mask


def windows() -> Tensor:
    """A mask of windows of another width in each head, for all sequences."""
    tokens = torch.arange(QUERIES)
    width = torch.arange(1, HEADS + 1)[:, None, None]
    return ((tokens[:, None] - tokens).abs() <= width)[None]


LOWEST = torch.finfo(torch.float32).min
BIAS = torch.linspace(-2, 2, HEADS * QUERIES**2, dtype=torch.float64).sin().view(1, HEADS, QUERIES, QUERIES)
CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"causal": True},
    "padding": {"mask": padded()},
    "windows": {"mask": windows()},
    "keys of all queries": {"mask": (torch.arange(QUERIES) % 5 > 0).expand(BATCH, 1, 1, -1)},
    "biases of all queries": {"bias": BIAS[:, :, :1]},
    "the mask decides": {"mask": torch.ones(1, 1, QUERIES, QUERIES, dtype=torch.bool), "causal": True},
    "position bias": {"bias": BIAS, "causal": True},
    "position bias and mask": {"bias": BIAS, "mask": padded()},
    "mask that is added": {"bias": torch.zeros(padded().shape).masked_fill(~padded(), LOWEST)},
    "causal mask that is added": {"bias": torch.full((1, 1, QUERIES, QUERIES), LOWEST).triu(1)},
    "soft cap": {"cap": 0.5, "causal": True},
}


def drawn(name: str, dtype: torch.dtype, keys: int = QUERIES) -> tuple[Softmax, Tensor]:
    """Return a mixer and its matrix by the definition, in float64."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, QUERIES, STATE, generator=generator, dtype=torch.float64).to(dtype)
    key = torch.randn(BATCH, GROUPS, keys, STATE, generator=generator, dtype=torch.float64).to(dtype)
    case = CASES[name]
    scores = SCALE * query.double() @ key.double().repeat_interleave(HEADS // GROUPS, 1).mT
    if cap := case.get("cap"):
        scores = cap * (scores / cap).tanh()
    scores = scores + case.get("bias", torch.zeros(())).double()
    allowed = case.get("mask", torch.ones(QUERIES, keys, dtype=torch.bool))
    allowed = allowed.tril() if case.get("causal") and "mask" not in case else allowed
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * allowed
    expected = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    case = {**case, "bias": case["bias"].to(dtype)} if "bias" in case else case
    return Softmax(query, key, scale=SCALE, **case), expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_operation_is_that_of_the_matrix(name: str, dtype: torch.dtype) -> None:
    mixer, expected = drawn(name, dtype)
    limit = tolerance("law", dtype)
    value, grad = torch.randn(2, BATCH, QUERIES, HEADS, CHANNELS, dtype=dtype).unbind(0)
    assert relative_error(mixer.apply(value), torch.einsum("bhij,bjhp->bihp", expected, value.double())) < limit
    assert relative_error(mixer.adjoint(grad), torch.einsum("bhij,bihp->bjhp", expected, grad.double())) < limit
    index = torch.tensor([[36, 0, 20], [36, 11, 7]])
    rows = expected.gather(2, index[:, None, :, None].expand(-1, HEADS, -1, QUERIES))
    assert relative_error(mixer.rows(index), rows) < limit
    assert mixer.is_lower_triangular == (not bool(expected.triu(1).any()))
    assert relative_error(mixer.diagonal(), expected.diagonal(dim1=2, dim2=3)) < limit
    assert relative_error(mixer.mean_map(), expected.mean(1)) < limit
    assert relative_error(mixer.materialize(), expected) < limit
    for rows, cols, heads in [
        (slice(3, 30), slice(5, 33), slice(None)),
        (slice(2, 36, 5), slice(0, 20, 3), slice(1, 5)),
        (slice(30, 31), slice(36, 37), slice(0, 6, 2)),
        (slice(4, 4), slice(0, 3), slice(5, 6)),
    ]:
        tile = mixer.tile(rows, cols, heads)
        assert tile.shape == expected[:, heads, rows, cols].shape
        assert float((tile - expected[:, heads, rows, cols]).abs().max() if tile.numel() else 0) < limit
    blocks = [block(slice(0, QUERIES)) for _, block in mixer.blocks(11)]
    assert relative_error(torch.cat(blocks, 2), expected) < limit


def test_queries_of_one_stream_attend_to_keys_of_another() -> None:
    mixer, expected = drawn("all keys", torch.float64, keys=11)
    value = torch.randn(BATCH, 11, HEADS, CHANNELS, dtype=torch.float64)
    assert mixer.shape == (BATCH, HEADS, QUERIES, 11)
    assert relative_error(mixer.apply(value), torch.einsum("bhij,bjhp->bihp", expected, value)) < 1e-13


def test_a_causal_mask_leaves_out_the_keys_of_later_blocks() -> None:
    causal = [8, 16, 24, 32, 37]
    reaches = {"causal": causal, "padding": causal, "causal mask that is added": causal, "all keys": [37] * 5}
    # A query without any key whose biases are all large attends to all.
    for name, reached in {**reaches, "mask that is added": [37, 37, 24, 32, 37]}.items():
        assert [block.keys for block in drawn(name, torch.float64)[0]._weights()] == reached


def test_values_with_a_gradient_are_differentiated() -> None:
    mixer, expected = drawn("causal", torch.float64)
    value = torch.randn(BATCH, QUERIES, HEADS, CHANNELS, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(value)
    (actual,) = torch.autograd.grad(mixer.apply(value), value, grad)
    assert relative_error(actual, torch.einsum("bhij,bihp->bjhp", expected, grad)) < 1e-13


def test_a_copy_has_queries_and_keys_of_its_own() -> None:
    mixer, expected = drawn("padding", torch.float64)
    copied = copy.deepcopy(mixer)
    mixer._query.zero_()
    value = torch.randn(BATCH, QUERIES, HEADS, CHANNELS, dtype=torch.float64)
    assert relative_error(copied.apply(value), torch.einsum("bhij,bjhp->bihp", expected, value)) < 1e-13


def test_no_operation_holds_the_matrix() -> None:
    query, key = torch.randn(1, 4, 512, 8), torch.randn(1, 2, 512, 8)
    mixer, value = Softmax(query, key, scale=SCALE, causal=True), torch.randn(1, 512, 4, 8)
    matrix = 4 * 512 * 512 * value.element_size()
    assert peak_of(lambda: mixer.apply(value)).peak < matrix / 8
    assert peak_of(lambda: mixer.adjoint(value)).peak < matrix / 8


def test_factors_with_nan_are_refused() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(FactorError, match="key"):
        Softmax(query, query.log(), scale=1.0)
