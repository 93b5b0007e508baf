"""Every adapter on every configuration of its real hosts: recurrence, operator and host agree; every law holds."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import Tensor

from tests import hosts
from tests.architectures import delta_recurrences, recurrences, recurrent_steps, reference_recurrences
from tests.architectures.versions import LEFT_OUT, OLDEST
from tools.coverage_runs import models
from tools.versions import sides
from unilinattn import trace
from unilinattn.testing import HOSTS, Host, check_architecture, promoted, relative_error, tolerance
from unilinattn.testing.hosts import delta, mamba, recurrent, reference
from unilinattn.tracing.layer import Layer


def configurations(table: Sequence[Host]) -> Sequence[Host]:
    """Return all hosts; with the oldest transformers one for each model and mask, since only the models differ."""
    if transformers.__version__ != OLDEST:
        return table
    accepted = [host for host in table if host.name not in LEFT_OUT[OLDEST]]
    every = dict.fromkeys(host.masks for host in accepted)
    return [one for masks in every for one in models([host for host in accepted if host.masks == masks])]


EVERY_HOST = [
    case
    for name, table in hosts.tables().items()
    for case in hosts.cases(configurations(table), hosts.STRUCTURES, f"{name}/", large=hosts.LARGE)
]
MASKED = {
    **dict.fromkeys(recurrences.RECURRENCES, recurrences.frozen),
    **dict.fromkeys(recurrent_steps.STEPS, recurrent_steps.frozen),
    **dict.fromkeys(delta_recurrences.ARCHITECTURES, delta_recurrences.frozen),
}
PAPERS = {**MASKED, **dict.fromkeys(reference_recurrences.RECURRENCES, reference_recurrences.frozen)}
"""The recurrence of each adapter by its paper; those of `MASKED` take padding."""

WITH_MASKS = [
    case
    for table in (HOSTS, mamba.HOSTS, delta.HOSTS, recurrent.HOSTS)
    for case in hosts.cases([host for host in configurations(table) if host.architecture in MASKED], ("glm 5 next",))
]


@pytest.mark.parametrize("host", EVERY_HOST)
def test_every_law_holds(host: Host) -> None:
    modules = dict(host.model().double().named_modules()) if host.architecture in PAPERS else {}

    def recurrence(layer: Layer, x: Tensor) -> Tensor:
        # The attention of a hybrid has no recurrence.
        paper = PAPERS.get(layer.architecture)
        return layer.operator.apply(x) if paper is None else paper(modules[layer.name], layer, x)

    padding = pads(host)
    verdict = check_architecture(
        host.model(), host.inputs(), padding=padding, recurrence=recurrence if modules else None
    )
    assert len(verdict.layers) == host.layers
    kinds = [layer.architecture for layer in verdict.layers]
    types = getattr(host.build().config, "layer_types", None) if host in (*delta.HOSTS, *recurrent.HOSTS) else None
    if types is not None:
        softmax = [kind.endswith("attention") and kind != "linear_attention" for kind in types]
        assert [kind != host.architecture for kind in kinds] == softmax
    elif host.architecture == "rwkv4":
        assert kinds == ["rwkv4", "rwkv4_channel"] * (host.layers // 2)
    else:
        assert host.architecture in kinds and {*kinds} <= {host.architecture, "attention"}
    assert verdict.masks == (sides(host) if padding else None)
    for layer in verdict.layers:
        assert layer.errors.keys() == {"float32", "float64", "promoted"}
        assert layer.errors["promoted"] <= 1e-10


def pads(host: Host) -> bool:
    """Whether padded batches are checked: only for hosts with a mask, and for short inputs of the delta rule."""
    if host in reference.HOSTS:
        return host.masks is not None
    return host not in delta.HOSTS or 1 < host.length < 20


@pytest.mark.parametrize("host", WITH_MASKS)
def test_recurrence_operator_and_host_agree_on_a_padded_batch(host: Host) -> None:
    model, ids = host.model().double(), host.inputs()
    mask, third = torch.ones_like(ids), ids.shape[1] // 3
    mask[-1, :third] = 0
    if host.batch > 1:
        mask[0, ids.shape[1] - third :] = 0
    modules = dict(model.named_modules())
    leaks = third > 0 and "left" not in (sides(host, host.batch) or ())
    with pytest.warns(UserWarning, match="left padding") if leaks else nullcontext(), promoted():
        traced = trace(model, {"input_ids": ids, "attention_mask": mask})
        layers = [layer for layer in traced.layers if layer.architecture in MASKED]
        for layer in layers:
            layer.operator  # noqa: B018  builds it while the host is promoted
    assert layers
    law = tolerance("law", torch.float64)
    for layer in layers:
        op, real, paper = layer.operator, mask[..., None], MASKED[layer.architecture]
        output, fresh = layer.output * real, torch.randn_like(layer.input)
        expected, moved = (paper(modules[layer.name], layer, x) * real for x in (layer.input, fresh))
        materialized = (op.contributions(range(ids.shape[1])).sum(2) + op.bias) * real
        assert output.any()
        assert relative_error(expected, output) <= tolerance("reconstruction", torch.float64)
        assert relative_error(materialized, output) <= tolerance("reconstruction", torch.float64)
        assert relative_error(materialized, expected) <= law
        assert relative_error(op.apply(fresh) * real, moved) <= law
