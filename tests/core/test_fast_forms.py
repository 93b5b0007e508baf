"""Maps by products and vectors by tiles against the plain rows, on every host of the tables."""

from importlib import import_module

import pytest
import torch

from unilinattn.errors import UncoveredError
from unilinattn.memory import max_memory
from unilinattn.mixers import diagonal_decay
from unilinattn.operator import MixerOperator
from unilinattn.testing import Host, relative_error
from unilinattn.trace import trace

TABLES = ("hosts", "hosts_delta", "hosts_latent", "hosts_mamba", "hosts_recurrent", "hosts_reference")
HOSTS = [host for table in TABLES for host in import_module(f"unilinattn.testing.{table}").HOSTS]

CLOSE = 1e-11
"""In float64, against rows that are taken one by one."""


def check_maps(op: MixerOperator, scope: str) -> None:
    queries = op.output.shape[1]
    try:
        every = op.rows(range(queries), scope=scope, heads=None)
    except UncoveredError:
        return
    assert relative_error(op.matrix(scope), every.mean(1)) <= CLOSE
    with max_memory(1 << 23):
        parts = dict(enumerate(op.row_blocks(scope=scope)))
    for part, block in parts.values():
        assert relative_error(block, every.mean(1)[:, part]) <= CLOSE


def check_vectors(op: MixerOperator) -> None:
    form = op.shares()
    if form is None:
        return
    expected = op.contributions(range(op.output.shape[1]))
    for columns in (1, 4, 64):
        for causal in {False, form.causal}:
            got = torch.zeros_like(expected)
            total = torch.zeros_like(op.output)
            for tile in form.tiles(causal, columns):
                got[:, tile.rows, tile.cols] = tile.vectors().permute(0, 2, 3, 1)
                total[:, tile.rows] += tile.total()
            assert relative_error(got, expected) <= CLOSE
            assert relative_error(total, expected.sum(2)) <= CLOSE


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_fast_forms_are_the_plain_rows(host: Host) -> None:
    model, given = host.model(), host.inputs()
    if host.masks and "left" in host.masks and host.length > 3:
        mask = torch.ones_like(given)
        mask[-1, :3] = 0
        given = {"input_ids": given, "attention_mask": mask}
    for layer in trace(model, given, dtype=torch.float64).layers:
        if len(layer.operator.ports) == 1:
            for scope in ("core", "mixer", "unified"):
                check_maps(layer.operator, scope)
            check_vectors(layer.operator)


def test_squares_of_some_heads_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    host = next(host for host in HOSTS if host.name == "mamba")
    monkeypatch.setattr(diagonal_decay, "SQUARES", 5)
    for layer in trace(host.model(), host.inputs(), dtype=torch.float64).layers:
        assert layer.operator.num_heads() % 5
        check_vectors(layer.operator)
