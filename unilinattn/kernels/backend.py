"""Choice of a kernel's implementation: Triton on CUDA devices, Numba for large work on a CPU, torch otherwise.

One of them can be forced.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from unilinattn.errors import OptionError, UnilinattnError, nearest

Backend = Literal["triton", "numba", "torch"]

VARIABLE = "UNILINATTN_KERNELS"
"""The environment variable that forces one implementation in a process: triton, numba or torch."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the Triton kernels, which compute in float32; float64 and complex tensors use torch."""

LEAST = {"contribution_norms": 1 << 22, "reduced_map": 1 << 18, "row_product": 1 << 18, "scan": 1 << 18}
"""Operations with an implementation in Numba, and the fewest elements for which it is chosen.

They are those of the vectors of a tile, or log-decays. Smaller work is fast in torch and not worth loading a compiler.
"""

_forced: ContextVar[Backend | None] = ContextVar("unilinattn.forced", default=None)


class BackendError(UnilinattnError, RuntimeError):
    """Raised if Triton or Numba kernels are forced where they cannot run."""


@contextmanager
def using(backend: Backend | None) -> Iterator[None]:
    """Force one implementation of every kernel inside a `with` block; None keeps the current choice.

    The block takes precedence over the environment variable.
    """
    token = _forced.set(_forced.get() if backend is None else _checked(backend, "using"))
    try:
        yield
    finally:
        _forced.reset(token)


def implementation(operation: str, like: Tensor, elements: int | None = None) -> ModuleType:
    """Return the module of an operation for tensors like `like`: its `triton`, its `numba` or its `tiled`.

    They define the same functions; an operation without a `numba` uses its `tiled`. `elements`: those of the work, as
    `LEAST` counts them; those of `like` by default.

    Raises `BackendError` if Triton or Numba is forced and cannot run.
    """
    form = "triton" if uses_triton(like) else "numba" if uses_numba(operation, like, elements) else "tiled"
    return importlib.import_module(f"unilinattn.kernels.{operation}.{form}")


def uses_triton(like: Tensor) -> bool:
    """Return whether tensors like `like` use Triton; warn once if the package is missing on a GPU."""
    forced = _chosen()
    if forced == "triton":
        _refuse_what_cannot_run(like)
    if forced is not None:
        return forced == "triton"
    if not like.is_cuda or like.dtype not in DTYPES or torch.version.cuda is None:
        return False
    if not _installed("triton"):
        _warn_once()
        return False
    return True


def uses_numba(operation: str, like: Tensor, elements: int | None = None) -> bool:
    """Return whether an operation on tensors like `like` uses Numba, for work of `elements` elements."""
    if operation not in LEAST:
        return False
    forced = _chosen()
    if forced == "numba":
        _refuse_what_cannot_be_compiled(like)
    if forced is not None:
        return forced == "numba"
    large = (like.numel() if elements is None else elements) >= LEAST[operation]
    return large and like.device.type == "cpu" and like.dtype == torch.float32 and _installed("numba")


def _chosen() -> Backend | None:
    forced = _forced.get()
    if forced is None and (named := os.environ.get(VARIABLE)):
        forced = _checked(named, f"the environment variable {VARIABLE}")
    return forced


def interpreted() -> bool:
    """Return whether Triton interprets its kernels on the CPU instead of compiling them for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _refuse_what_cannot_run(like: Tensor) -> None:
    if not _installed("triton"):
        raise BackendError(
            "the Triton kernels were forced, but the package triton is not installed. "
            "Install it (pip install 'unilinattn[gpu]') or take the torch form."
        )
    if not like.is_cuda and not interpreted():
        raise BackendError(
            f"the Triton kernels were forced for tensors on {like.device}; they run on CUDA devices. Move the tensors "
            "to one, take the torch form, or set TRITON_INTERPRET=1 before Triton is imported to interpret them."
        )
    if like.dtype not in DTYPES:
        accepted = ", ".join(str(dtype) for dtype in DTYPES)
        raise BackendError(
            f"the Triton kernels were forced for {like.dtype}; they take {accepted} and compute in float32. "
            "Take the torch form for other numbers."
        )


def _refuse_what_cannot_be_compiled(like: Tensor) -> None:
    if not _installed("numba"):
        raise BackendError(
            "the Numba kernels were forced, but the package numba is not installed. "
            "Install it (pip install 'unilinattn[cpu]') or take the torch form."
        )
    if like.device.type != "cpu" or like.dtype != torch.float32:
        raise BackendError(
            f"the Numba kernels were forced for {like.dtype} on {like.device}; they take torch.float32 on the CPU. "
            "Take the torch form for other tensors."
        )


def _checked(name: str, source: str) -> Backend:
    if name not in get_args(Backend):
        raise OptionError(f"{source} got {name!r}, which is no form of a kernel" + nearest(name, get_args(Backend)))
    return cast(Backend, name)


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _warn_once() -> None:
    warnings.warn(
        "the package triton is not installed: tensors on this GPU go through the slower torch form of every kernel. "
        f"Install it (pip install 'unilinattn[gpu]'), or set {VARIABLE}=torch to choose that form.",
        stacklevel=4,
    )
