"""Fixtures for the tests of kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    """Make tensors on a GPU, where Triton compiles its kernels; without one on the CPU, where it interprets them."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        # The mode lists the functions that it redirects at its first call, before others are put in their place.
        torch.empty(0)
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that entries that a kernel does not write are detected."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
            return tensor

        return made

    for target, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(target, name, filled(getattr(target, name)))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives a kernel block sizes, in place of those that are timed on a GPU."""
    # Imported late, because a thorough run checks modules of the package that are imported after its configuration.
    from unilinattn.kernels.backend import interpreted

    def pin(kernel: Any, **sizes: int) -> None:
        if interpreted():
            for name, size in sizes.items():
                monkeypatch.setitem(kernel.config, name, size)
        else:
            first = kernel.configs[0]
            config = type(first)({**first.kwargs, **sizes}, num_warps=first.num_warps, num_stages=first.num_stages)
            monkeypatch.setattr(kernel, "configs", [config])

    return pin
