"""The library on a GPU: the laws of every adapter there, and every method against the same model on the CPU.

`python -m pytest -m "" tests/kernels tests/test_gpu.py` runs the compiled Triton kernels.
"""

import warnings
from functools import cache

import pytest
import torch

import unilinattn as ula
from tests import hosts
from tests.methods.refused import HOSTS
from unilinattn.call.nested import mapped
from unilinattn.errors import UnilinattnError
from unilinattn.examples import TASKS, load, names
from unilinattn.registry import list_methods
from unilinattn.testing import Host, check_architecture, relative_error

GPU = "cuda"
METHODS = sorted(list_methods().keys() - {"smoothgrad"})
"""All but the method whose noise is drawn on the device."""

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)


@hosts.every_host(hosts.every(), large=hosts.LARGE)
def test_every_law_holds(host: Host) -> None:
    verdict = check_architecture(host.model().to(GPU), host.inputs().to(GPU), padding=False)
    assert len(verdict.layers) == host.layers


@cache
def example(task: str, kind: str, device: str) -> ula.Trace:
    ids = TASKS[task].sample(2, 0).input_ids
    return ula.trace(load(task, kind).to(device), ids.to(device))


@pytest.mark.parametrize(("task", "kind"), names())
@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_that_on_the_cpu(method: str, task: str, kind: str) -> None:
    expected, actual = (ula.explain(example(task, kind, device), method=method, target=-1) for device in ("cpu", GPU))
    assert actual.scores.device.type == GPU
    assert relative_error(actual.scores.cpu(), expected.scores) < 1e-3


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("method", METHODS)
def test_recorded_layers_and_streams(name: str, method: str) -> None:
    expected, actual = (outcome(name, method, device) for device in ("cpu", GPU))
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), actual
        assert relative_error(actual, expected) < 1e-3
    else:
        assert actual == expected


def outcome(name: str, method: str, device: str) -> torch.Tensor | type:
    """Return scores, or the class of the refusal."""
    torch.manual_seed(0)
    model, inputs = HOSTS[name]()
    inputs = mapped(inputs, lambda x: x.to(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ula.explain(model.eval().to(device), inputs, method=method, target=-1).scores.cpu()
        except UnilinattnError as refusal:
            return type(refusal)
