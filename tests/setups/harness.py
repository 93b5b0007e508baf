"""Set-ups of users: each must work or be refused.

A set-up is a function that uses real hosts like a user. It returns the worst reconstruction error from `works`, which
compares the trace with a direct call of the model, or raises an error of the library.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn import explain, trace
from unilinattn.errors import ModelStateError, UncoveredError, UnilinattnError
from unilinattn.testing import left_as_found, relative_error
from unilinattn.testing.hosts import Host
from unilinattn.testing.hosts import host as plain_host
from unilinattn.testing.hosts.mamba import HOSTS as MAMBA_HOSTS

HOSTS: Mapping[str, Host] = {
    "Mamba": plain_host("mamba"),
    "Mamba-2": plain_host("mamba2"),
    "Llama": plain_host("llama, grouped queries"),
    "Jamba": next(entry for entry in MAMBA_HOSTS if entry.name == "jamba"),
}
EVERY = tuple(HOSTS)

SAME = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest relative difference of two outputs or maps whose sums have different orders."""


@dataclass(frozen=True)
class SetUp:
    """One row: name, procedure, required packages, and the expected error (None: it must work)."""

    name: str
    group: str
    done: str
    needs: tuple[str, ...]
    refused: type[UnilinattnError] | None
    run: Callable[[], float]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a set-up: "works", "refused", "not run" or "broken", with the error or a message."""

    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


SETUPS: list[SetUp] = []

REFUSALS: list[str] = []
"""The refusals of the default method in the running set-up."""


def setup(
    name: str, done: str, *, needs: tuple[str, ...] = (), refused: type[UnilinattnError] | None = None
) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Add a function to the table; its module is its group."""

    def add(run: Callable[[], float]) -> Callable[[], float]:
        SETUPS.append(SetUp(name, run.__module__.rpartition(".")[2], done, needs, refused, run))
        return run

    return add


def outcome(entry: SetUp) -> Outcome:
    """Seed the random state, run a set-up and return its outcome."""
    missing = [package for package in entry.needs if find_spec(package) is None]
    if missing:
        return Outcome("not run", f"{', '.join(missing)} is not installed")
    torch.manual_seed(0)
    REFUSALS.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome("works", f"error {entry.run():.0e}" + "".join(REFUSALS[:1]))
    except UnilinattnError as error:
        return Outcome("refused", f"`{type(error).__name__}`: {first_sentence(str(error))}")
    except Exception as error:
        return Outcome("broken", f"{type(error).__name__}: {error}")


def first_sentence(text: str) -> str:
    """Return the first sentence of a message, on one line."""
    return re.split(r"(?<=[.?]) (?=[A-Z])", " ".join(text.split()))[0].rstrip(".")


def each(run: Callable[[Host], float], names: tuple[str, ...] = EVERY) -> float:
    """Return the worst error over hosts."""
    return max(run(HOSTS[name]) for name in names)


def works(
    model: nn.Module,
    inputs: Any,
    call: Callable[[], Any],
    *,
    like: tuple[nn.Module, Any] | None = None,
    real: Tensor | None = None,
) -> float:
    """Trace and explain a model; return the worst reconstruction error.

    The output of the trace must equal that of `call`, a direct call of the model, at real tokens; the maps and the
    scores of the default method must equal those of `like`, another model with its inputs. The default method may be
    refused where the layers work, which is added to `REFUSALS`.

    Raises:
        AssertionError: if they differ, or if the trace changed the model.
    """
    with torch.no_grad():
        expected = outputs(call())
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in model.parameters())
    # Packed formats of other packages cannot be compared bit by bit.
    with left_as_found(model) if plain else nullcontext():
        host_trace = trace(model, inputs)
    require_same("output", at(outputs(host_trace.output), real), at(expected, real))
    with torch.no_grad():
        require_same("output after the trace", at(outputs(call()), real), at(expected, real))
    if like is not None:
        reference = trace(*like)
        assert len(host_trace.layers) == len(reference.layers), "layers differ from those of the plain model"
        for layer, other in zip(host_trace.layers, reference.layers, strict=True):
            require_same(f"map of {layer.name}", layer.operator.matrix(), other.operator.matrix())
    for stream in host_trace.streams:
        explain(host_trace, method="raw", layers=list(stream.layers))
    try:
        result = explain(host_trace, target=-1)
    except (ModelStateError, UncoveredError) as error:
        REFUSALS.append(f"; `explain` without a method is refused: {first_sentence(str(error))}")
    else:
        if like is not None:
            require_same(f"scores of {result.method}", result.scores, explain(reference, target=-1).scores)
    return max(layer.operator.reconstruction_error() for layer in host_trace.layers)


def outputs(output: Any) -> Tensor:
    """Return the logits of a model's output, or the output if it is a tensor."""
    if isinstance(output, tuple):
        return output[0]
    return output if isinstance(output, Tensor) else output.logits


def at(values: Tensor, real: Tensor | None) -> Tensor:
    return values if real is None else values[real]


def require_same(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raise `AssertionError` unless two tensors agree up to rounding."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    coarse = min((actual.dtype, expected.dtype), key=lambda dtype: dtype.itemsize)
    error = relative_error(actual.double().reshape(1, -1), expected.double().reshape(1, -1))
    assert error <= SAME[coarse], f"{what} differs by {error:.1e} (relative)"
