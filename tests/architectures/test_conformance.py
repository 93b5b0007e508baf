"""Every adapter on every configuration of its real hosts: the three-way oracle, and every law of the kit."""

from contextlib import nullcontext

import pytest
import torch

from tests.architectures.recurrences import RECURRENCES, frozen
from unilinattn import trace
from unilinattn.testing import HOSTS, Host, check_architecture, promoted, relative_error, tolerance
from unilinattn.testing.versions import sides

every_host = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
with_recurrence = pytest.mark.parametrize(
    "host", [host for host in HOSTS if host.architecture in RECURRENCES], ids=lambda host: host.name
)


@every_host
def test_every_law_holds(host: Host) -> None:
    model = host.model()
    modules = dict(model.double().named_modules())
    recurrence = None
    if host.architecture in RECURRENCES:
        recurrence = lambda layer, x: frozen(modules[layer.name], layer, x)  # noqa: E731  named for what it is
    verdict = check_architecture(host.model(), host.inputs(), recurrence=recurrence)
    assert len(verdict.layers) == host.layers
    assert {layer.architecture for layer in verdict.layers} == {host.architecture}
    assert verdict.masks == sides(host)
    for layer in verdict.layers:
        assert layer.errors["float32"] <= 1e-5
        assert layer.errors["float64"] <= 2e-6
        assert layer.errors["promoted"] <= 1e-10


@with_recurrence
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_recurrence_operator_and_host_agree(host: Host, side: str | None) -> None:
    model, ids = host.model().double(), host.inputs()
    inputs = {"input_ids": ids}
    if side is not None:
        mask = torch.ones_like(ids)
        pads = ids.shape[1] // 3
        mask[-1, slice(0, pads) if side == "left" else slice(ids.shape[1] - pads, None)] = 0
        inputs["attention_mask"] = mask
    modules = dict(model.named_modules())
    leaks = side is not None and not inputs["attention_mask"].all() and side not in sides(host, host.batch)
    with pytest.warns(UserWarning, match=f"{side} padding") if leaks else nullcontext(), promoted():
        layers = trace(model, inputs).layers
        for layer in layers:
            layer.operator  # noqa: B018  built while the host is promoted
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
