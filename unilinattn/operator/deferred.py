"""Tensors that are computed when they are first needed, and a context that computes only their shapes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_shapes_only: ContextVar[bool] = ContextVar("unilinattn.shapes_only", default=False)


class Deferred:
    """A lazily computed, cached tensor; the function that computes it is released afterwards."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._value: Tensor | None = None
        self._check: Callable[[Tensor], None] | None = None

    def __call__(self) -> Tensor:
        """Return the tensor; inside `shapes_only` a fake one, which is neither checked nor cached."""
        if self._value is not None:
            return self._value
        assert self._compute is not None
        value = self._compute()
        if not _shapes_only.get():
            if self._check is not None:
                self._check(value)
            self._value, self._compute = value, None
        return value

    def check(self, check: Callable[[Tensor], None]) -> None:
        """Call `check` with the tensor: now if it is computed, else before it is cached."""
        if self._value is not None:
            check(self._value)
        self._check = check


@contextmanager
def shapes_only() -> Iterator[None]:
    """Compute shapes without allocation: tensors created in this context are fake."""
    token = _shapes_only.set(True)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _shapes_only.reset(token)
