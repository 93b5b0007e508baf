"""The chunked forms of the training, against the recurrences and the hosts that they stand in for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from evidence.text_scans import CHUNK, fast_scans, gated_delta_rule, mamba2_scan, short_convolution
from evidence.texts import MODELS, build
from unilinattn.testing import relative_error, tolerance

LENGTH = 3 * CHUNK
EXACT = 1e-10


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("strength", [0.01, 30.0])
def test_the_scan_of_mamba2_is_its_recurrence(strength: float) -> None:
    x, dt, keys, queries = random(2, LENGTH, 3, 4), random(2, LENGTH, 3), random(2, LENGTH, 5), random(2, LENGTH, 5)
    decay, skip, bias = -strength * torch.rand(3, dtype=torch.float64), random(3), random(3)
    computed = mamba2_scan(x, dt, decay, keys[:, :, None], queries[:, :, None], 64, skip, bias)
    step = functional.softplus(dt + bias)
    state = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for token in range(LENGTH):
        written = (x * step[..., None])[:, token, :, :, None] * keys[:, token, None, None]
        state = state * (step[:, token] * decay).exp()[..., None, None] + written
        expected = (state * queries[:, token, None, None]).sum(-1) + x[:, token] * skip[:, None]
        torch.testing.assert_close(computed[:, token], expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("strength", [0.01, 30.0])
def test_the_gated_delta_rule_is_its_recurrence(strength: float) -> None:
    query, key, value = random(2, LENGTH, 3, 4), random(2, LENGTH, 3, 4), random(2, LENGTH, 3, 5)
    beta, decay = random(2, LENGTH, 3).sigmoid(), -strength * torch.rand(2, LENGTH, 3, dtype=torch.float64)
    computed = gated_delta_rule(query, key, value, g=decay, beta=beta)[0]
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for token in range(LENGTH):
        state = state * decay[:, token, :, None, None].exp()
        predicted = (state * key[:, token, ..., None]).sum(-2)
        new = (value[:, token] - predicted) * beta[:, token, :, None]
        state = state + key[:, token, ..., None] * new[:, :, None]
        expected = (state * query[:, token, ..., None]).sum(-2) / 2
        torch.testing.assert_close(computed[:, token], expected, rtol=EXACT, atol=EXACT)


def test_the_convolution_is_causal_and_that_of_torch() -> None:
    x, weight, bias = random(2, 6, 20), random(6, 4), random(6)
    expected = functional.silu(functional.conv1d(functional.pad(x, (3, 0)), weight[:, None], bias, groups=6))
    torch.testing.assert_close(short_convolution(x, weight, bias), expected, rtol=EXACT, atol=EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_with_either_form(name: str) -> None:
    host = build(name).eval()
    ids = torch.randint(3072, (2, LENGTH))
    expected = host(ids).logits
    with fast_scans():
        replaced = host(ids).logits
    assert relative_error(replaced, expected) < tolerance("reconstruction", torch.float32)
    assert not torch.equal(replaced, expected), "the forms of the training did not run"
    assert torch.equal(host(ids).logits, expected)
