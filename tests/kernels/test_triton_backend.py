"""The choice between the torch and Triton implementation of a kernel, and its errors."""

import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unilinattn.errors import OptionError
from unilinattn.kernels import backend
from unilinattn.kernels.backend import VARIABLE, BackendError, implementation, uses_triton, using

on_cpu = torch.zeros(1)


def on_gpu(dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda:0")


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def chosen(like: object) -> bool:
    # The undecorated function, because the type check would refuse the stand-in for a GPU tensor.
    return inspect.unwrap(uses_triton)(like)


def test_cpu_tensors_use_torch() -> None:
    assert implementation("reduced_map", on_cpu).__name__.endswith(".tiled")


def test_gpu_tensors_use_triton_up_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert chosen(on_gpu())
    assert chosen(on_gpu(torch.bfloat16))
    assert not chosen(on_gpu(torch.float64))
    assert not chosen(on_gpu(torch.complex64))


def test_a_context_and_the_environment_select_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with using("triton"):
        assert implementation("reduced_map", on_cpu).__name__.endswith(".triton")
        with using("torch"):
            assert not uses_triton(on_cpu)
        with using(None):
            assert uses_triton(on_cpu)
    assert not uses_triton(on_cpu)
    monkeypatch.setenv(VARIABLE, "triton")
    assert uses_triton(on_cpu)
    with using("torch"):
        assert not uses_triton(on_cpu)


def test_an_unknown_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tritn")
    with pytest.raises(OptionError, match=rf"{VARIABLE} got 'tritn'.*did you mean 'triton'"):
        uses_triton(on_cpu)


@pytest.mark.parametrize("value", ["0", None])
def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with using("triton"), pytest.raises(BackendError, match=r"tensors on cpu.*TRITON_INTERPRET=1"):
        uses_triton(on_cpu)


def test_selected_triton_refuses_unsupported_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with using("triton"), pytest.raises(BackendError, match="float64"):
        uses_triton(on_cpu.double())


def test_a_missing_triton_warns_once_on_a_gpu_and_is_refused_if_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend, "_installed", lambda package: False)
    backend._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"triton is not installed.*unilinattn\[gpu\]"):
        assert not chosen(on_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chosen(on_gpu())
    with using("triton"), pytest.raises(BackendError, match="not installed"):
        uses_triton(on_cpu)
    backend._warn_once.cache_clear()


@pytest.mark.slow
def test_the_choice_of_torch_imports_no_triton() -> None:
    code = """
import sys, torch
from unilinattn.kernels.backend import implementation
import unilinattn.mixers
implementation("reduced_map", torch.zeros(1))
print("triton" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
