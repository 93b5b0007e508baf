"""HiPPO-LegS and its decomposition."""

import pytest
import torch

from unilinattn.models.hippo import hippo_legs, hippo_matrix


def test_the_matrix_of_three_states() -> None:
    expected = -torch.tensor([[1, 0, 0], [3**0.5, 2, 0], [5**0.5, 15**0.5, 3]], dtype=torch.float64)
    torch.testing.assert_close(hippo_matrix(3), expected)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_decomposition_reproduces_the_matrix(size: int) -> None:
    poles, low_rank, inputs, vectors = hippo_legs(size)
    rebuilt = vectors @ (torch.diag(poles) - low_rank[:, None] * low_rank.conj()) @ vectors.mH
    torch.testing.assert_close(rebuilt.real, hippo_matrix(size), rtol=1e-10, atol=1e-10)
    assert rebuilt.imag.abs().max() < 1e-10
    torch.testing.assert_close((vectors @ inputs).real, torch.sqrt(2 * torch.arange(size).double() + 1))
    assert (poles[: size // 2].imag < 0).all()
    torch.testing.assert_close(poles.flip(0), poles.conj().resolve_conj())
