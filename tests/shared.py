"""Traces that several tests share: made once in a process, and only read."""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import ParamSpec

import pytest
from torch import Tensor

from unilinattn.call.nested import tensors
from unilinattn.testing import Host, promoted
from unilinattn.tracing.trace import Trace, trace

P = ParamSpec("P")

_in_use: dict[int, tuple[str, list[tuple[Tensor, int]]]] = {}
"""The shared traces of the present test: their names and tensors, with the number of earlier writes into each."""


def shared(make: Callable[P, Trace]) -> Callable[P, Trace]:
    """Return a function that makes each trace once; a test that writes into one fails (see `require_unwritten`)."""
    made = cache(make)

    @wraps(make)
    def once(*arguments: P.args, **options: P.kwargs) -> Trace:
        result = made(*arguments, **options)
        versions = [(tensor, tensor._version) for tensor in _tensors(result) if not tensor.is_inference()]
        _in_use.setdefault(id(result), (f"{make.__module__}.{make.__name__}{arguments}", versions))
        return result

    return once


def require_unwritten() -> None:
    """Fail if the present test wrote into a shared trace; the next test begins without any."""
    written = [name for name, versions in _in_use.values() if any(t._version != version for t, version in versions)]
    _in_use.clear()
    if written:
        pytest.fail(f"this test wrote into {written}, which other tests read; make a trace in the test instead")


@shared
def exact_trace(host: Host) -> Trace:
    """Trace a host in float64 on its inputs."""
    # Inside of `promoted` the weights would be drawn in float64, which are others.
    model, inputs = host.model().double(), host.inputs()
    with promoted():
        return trace(model, inputs.double() if inputs.is_floating_point() else inputs, progress=False)


def _tensors(made: Trace) -> Iterator[Tensor]:
    yield from tensors(made.output)
    for layer in made.layers:
        yield from (part for part in (layer.input, layer.output, layer.mask) if part is not None)
        yield from layer.module.parameters()
