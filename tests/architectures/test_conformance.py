"""Every adapter on every configuration of its real hosts: recurrence, operator and host agree; every law holds."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import transformers

from tests import hosts
from tests.architectures import reference_recurrences as reference
from tests.architectures.padding import padded_inputs
from tests.architectures.recurrences import RECURRENCES, frozen
from tests.architectures.versions import LEFT_OUT, OLDEST
from tools.versions import sides
from unilinattn import trace
from unilinattn.testing import HOSTS, Host, check_architecture, promoted, relative_error, tolerance
from unilinattn.testing.hosts import delta, recurrent
from unilinattn.testing.hosts import reference as reference_hosts


def configurations(table: Sequence[Host]) -> Sequence[Host]:
    """Return all hosts; with the oldest transformers one for each model and mask, since only the models differ."""
    if transformers.__version__ != OLDEST:
        return table
    accepted = [host for host in reversed(table) if host.name not in LEFT_OUT[OLDEST]]
    return list({(hosts.model_of(host), host.masks): host for host in accepted}.values())


EVERY_HOST = [
    case
    for name, table in hosts.tables().items()
    for case in hosts.cases(configurations(table), hosts.STRUCTURES, f"{name}/", large=hosts.LARGE)
]
with_recurrence = hosts.every_host([host for host in HOSTS if host.architecture in RECURRENCES])


@pytest.mark.parametrize("host", EVERY_HOST)
def test_every_law_holds(host: Host) -> None:
    # The recurrences of hybrids with several kinds of layer are compared in the tests of their families.
    paper = frozen if host in HOSTS and host.architecture in RECURRENCES else None
    paper = reference.frozen if host in reference_hosts.HOSTS else paper
    modules = dict(host.model().double().named_modules()) if paper else {}
    recurrence = paper and (lambda layer, x: paper(modules[layer.name], layer, x))
    padding = pads(host)
    verdict = check_architecture(host.model(), host.inputs(), padding=padding, recurrence=recurrence)
    assert len(verdict.layers) == host.layers
    kinds = {layer.architecture for layer in verdict.layers}
    assert host.architecture in kinds
    # The tests of these two tables compare the order of layers with the configuration.
    if host not in (*delta.HOSTS, *recurrent.HOSTS):
        assert kinds <= {host.architecture, "attention"}
    assert verdict.masks == (sides(host) if padding else None)
    for layer in verdict.layers:
        assert layer.errors.keys() == {"float32", "float64", "promoted"}
        assert layer.errors["promoted"] <= 1e-10


def pads(host: Host) -> bool:
    """Whether padded batches are checked: only for hosts with a mask, and for short inputs of the delta rule."""
    if host in reference_hosts.HOSTS:
        return host.masks is not None
    return host not in delta.HOSTS or 1 < host.length < 20


@with_recurrence
@pytest.mark.parametrize("side", ["left", "right"])
def test_recurrence_operator_and_host_agree_on_a_padded_batch(host: Host, side: str) -> None:
    model, ids = host.model().double(), host.inputs()
    inputs = padded_inputs(ids, side)
    modules = dict(model.named_modules())
    leaks = not inputs["attention_mask"].all() and side not in sides(host, host.batch)
    with pytest.warns(UserWarning, match=f"{side} padding") if leaks else nullcontext(), promoted():
        layers = trace(model, inputs).layers
        for layer in layers:
            layer.operator  # noqa: B018  builds it while the host is promoted
    with torch.no_grad():
        for layer in layers:
            op = layer.operator
            real = torch.ones(ids.shape, dtype=torch.bool) if layer.mask is None else layer.mask
            host_output = layer.output * real[..., None]
            paper = frozen(modules[layer.name], layer, layer.input) * real[..., None]
            every = range(ids.shape[1])
            materialized = (op.contributions(every).sum(2) + op.bias) * real[..., None]
            assert relative_error(paper, host_output) <= tolerance("reconstruction", torch.float64)
            assert relative_error(materialized, host_output) <= tolerance("reconstruction", torch.float64)
            assert relative_error(materialized, paper) <= tolerance("law", torch.float64)
