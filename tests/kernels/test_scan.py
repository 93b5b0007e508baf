"""The scans against their definitions: the recurrence, and its unrolled map."""

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.scan import tiled
from unilinattn.kernels.scan.memories import Diagonal, Scalar
from unilinattn.kernels.scan.naive import decay_map, decay_scan
from unilinattn.kernels.scan.pairs import between
from unilinattn.kernels.scan.tiled import CHUNK, recur
from unilinattn.testing import relative_error, tolerance

LENGTHS = (1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2)


def factors(length: int, dtype: torch.dtype, groups: int = 2, heads: int = 4) -> dict[str, Tensor]:
    return {
        "query": torch.randn(2, length, groups, 3, dtype=dtype),
        "key": torch.randn(2, length, groups, 3, dtype=dtype),
        "log_decay": -torch.rand(2, length, heads, dtype=dtype),
        "value": torch.randn(2, length, heads, 5, dtype=dtype),
    }


def scalar_scan(query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor) -> Tensor:
    return tiled.scalar_scan(Scalar(query, key, log_decay, torch.ones_like(log_decay)), value)


def scalar_scan_adjoint(query: Tensor, key: Tensor, log_decay: Tensor, grad: Tensor) -> Tensor:
    return tiled.scalar_scan_adjoint(Scalar(query, key, log_decay, torch.ones_like(log_decay)), grad)


def by_definition(query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor) -> Tensor:
    each = log_decay.shape[2] // query.shape[2]
    query, key = (t.repeat_interleave(each, dim=2) for t in (query, key))
    return decay_scan(query, key, log_decay.unsqueeze(-1).expand_as(query), value)


def test_the_recurrence_is_the_map() -> None:
    query, key, value = (torch.randn(2, 7, 3, n, dtype=torch.float64) for n in (4, 4, 5))
    log_decay = -torch.rand(2, 7, 3, 4, dtype=torch.float64)
    mixed = torch.einsum("bhij,bjhp->bihp", decay_map(query, key, log_decay), value)
    assert relative_error(decay_scan(query, key, log_decay, value), mixed) < 1e-14


def test_the_map_is_inclusive() -> None:
    # y_2 reads the write of token 1 after one decay, and the write of token 2 undecayed (HMA ACL Eq. 11).
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    log_decay = torch.tensor([-5.0, -1.0, -2.0], dtype=torch.float64).view(1, 3, 1, 1)
    between = torch.tensor([[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [-3.0, -2.0, 0.0]], dtype=torch.float64)
    assert relative_error(decay_map(one, one, log_decay)[0, 0], between.exp().tril()) < 1e-15


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_chunked_scan_is_the_recurrence(length: int, dtype: torch.dtype) -> None:
    inputs = factors(length, dtype)
    assert relative_error(scalar_scan(**inputs), by_definition(**inputs)) < tolerance("law", dtype)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_chunked_scan_has_the_gradients_of_the_recurrence(length: int) -> None:
    inputs = {name: t.requires_grad_() for name, t in factors(length, torch.float64).items()}
    weights = torch.randn(2, length, 4, 5, dtype=torch.float64)
    chunked = torch.autograd.grad((scalar_scan(**inputs) * weights).sum(), list(inputs.values()), allow_unused=True)
    defined = torch.autograd.grad((by_definition(**inputs) * weights).sum(), list(inputs.values()), allow_unused=True)
    for name, actual, expected in zip(inputs, chunked, defined, strict=True):
        nothing = torch.zeros_like(inputs[name])
        error = relative_error(nothing if actual is None else actual, nothing if expected is None else expected)
        assert error < 1e-12, name


@pytest.mark.parametrize("length", LENGTHS)
def test_the_adjoint_scan_is_the_transposed_map(length: int) -> None:
    query, key, log_decay, grad = factors(length, torch.float64, groups=4).values()
    alpha = decay_map(query, key, log_decay.unsqueeze(-1).expand_as(query))
    expected = torch.einsum("bhij,bihp->bjhp", alpha, grad)
    assert relative_error(scalar_scan_adjoint(query, key, log_decay, grad), expected) < 1e-12


@pytest.mark.parametrize("strong", [-20.0, -100.0, -1e3, -1e4])
@pytest.mark.parametrize("scan", [scalar_scan, scalar_scan_adjoint])
def test_tokens_after_a_strong_decay_are_accurate(scan, strong: float) -> None:
    inputs = factors(130, torch.float32)
    weak = 0.05 * inputs["log_decay"]
    inputs["log_decay"] = torch.where(torch.rand(weak.shape) < 0.15, torch.tensor(strong), weak)
    wide = scan(*(t.double() for t in inputs.values()))
    assert relative_error(scan(*inputs.values()), wide) < 2e-6


def test_groups_serve_consecutive_heads() -> None:
    assert repeat_groups(torch.tensor([[1.0, 2.0]]), 4, 1).tolist() == [[1, 1, 2, 2]]


def test_the_scan_continues_from_an_initial_state() -> None:
    state, decay = torch.randn(2, 3, 4, 5), torch.rand(2, 6, 3, 4, 1)
    increment = torch.randn(2, 6, 3, 4, 5)
    expected, current = [], state
    for t in range(6):
        current = decay[:, t] * current + increment[:, t]
        expected.append(current)
    assert relative_error(recur(state, decay, increment), torch.stack(expected, 1)) < 1e-6


def test_decays_within_a_chunk_mask_before_the_exponential() -> None:
    log_decay = torch.full((1, 5, 1), -200.0, requires_grad=True)
    decays = between(log_decay.unsqueeze(-1)).exp().squeeze(-1).permute(0, 3, 1, 2)
    assert torch.equal(decays.detach()[0, 0], torch.eye(5))
    (grad,) = torch.autograd.grad(decays.sum(), log_decay)
    assert torch.isfinite(grad).all()


def diagonal(length: int, channels: int) -> list[Tensor]:
    """Query, key, log-decay, scale, rate and value in float64."""
    query, key = torch.randn(2, 2, length, 1, 3)
    decay, scale, rate = torch.rand(2, length, 4, 1), torch.rand(2, length, 4), -torch.rand(4, 3)
    return [t.double() for t in (query, key, decay, scale, rate, torch.randn(2, length, 4, channels))]


@pytest.mark.parametrize("length", [17, 70])
@pytest.mark.parametrize("passed", ["diagonal_scan", "diagonal_scan_adjoint"])
def test_recomputed_states_give_the_same_gradients(length: int, passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [t.requires_grad_() for t in diagonal(length, 2)]
    weights = torch.randn(2, length, 4, 2, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        *factors, vectors = inputs
        total = (getattr(tiled, passed)(Diagonal(*factors), vectors) * weights).sum()
        return list(torch.autograd.grad(total, inputs))

    saved = gradients()
    monkeypatch.setattr(tiled, "KEPT", 8)
    monkeypatch.setattr(tiled, "GROUP", 20)
    for once, again in zip(saved, gradients(), strict=True):
        assert relative_error(again, once) < 1e-13


def token_by_token(query, key, decay, scale, rate, value, back: bool) -> Tensor:
    read, write = (key * scale.unsqueeze(-1), query) if back else (query, key * scale.unsqueeze(-1))
    steps = (decay * rate).exp()
    state, outputs = torch.zeros(value.shape[0], 4, 3, value.shape[3], dtype=torch.float64), {}
    length = value.shape[1]
    for t in range(length - 1, -1, -1) if back else range(length):
        crossed = t + 1 if back else t
        state = state * (steps[:, crossed, ..., None] if crossed < length else 1)
        state = state + write[:, t].expand(-1, 4, -1).unsqueeze(-1) * value[:, t].unsqueeze(-2)
        outputs[t] = (read[:, t].expand(-1, 4, -1).unsqueeze(-1) * state).sum(-2)
    return torch.stack([outputs[t] for t in range(length)], dim=1)


@pytest.mark.parametrize("alone", [None, 0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("back", [False, True])
def test_the_diagonal_scan_is_the_recurrence_for_any_differentiated_factor(
    back: bool, channels: int, alone: int | None
) -> None:
    # In-place writes must not overwrite tensors that the gradient of any factor needs.
    length = 35
    inputs = diagonal(length, channels)
    if alone is not None:
        inputs[alone].requires_grad_()
    expected = token_by_token(*inputs, back)
    actual = (tiled.diagonal_scan_adjoint if back else tiled.diagonal_scan)(Diagonal(*inputs[:5]), inputs[5])
    assert relative_error(actual.detach(), expected.detach()) < 1e-13
    if alone is not None:
        weights = torch.randn_like(expected)
        one, other = (torch.autograd.grad((t * weights).sum(), inputs[alone])[0] for t in (actual, expected))
        assert relative_error(one, other) < 1e-12


def test_a_long_pass_saves_vectors_but_not_all_states_for_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "KEPT", 8)
    monkeypatch.setattr(tiled, "GROUP", 32)
    sizes = []
    for length in (128, 256):
        numbers: list[int] = []
        value = torch.randn(1, length, 4, 1, requires_grad=True)
        factors = torch.randn(1, length, 1, 16), torch.randn(1, length, 1, 16), -torch.rand(1, length, 4, 16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: n.append(t.numel()) or t, lambda t: t):
            tiled.diagonal_scan(Diagonal(*factors), value)
        sizes.append(sum(numbers))
    # Its inputs and one state per group; saving all states would take twice as much in addition.
    assert sizes[1] <= 1.1 * sum(t.numel() for t in (value, *factors))
    assert sizes[1] <= 2.2 * sizes[0]
