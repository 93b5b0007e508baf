"""Fixtures for the tests of kernels."""

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that entries that a kernel does not write are detected."""
    empty, like, of = torch.empty, torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: like(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: of(*a, **k).fill_(torch.nan))
