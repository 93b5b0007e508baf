"""Maps by matrix products and vectors by tiles against single rows, on every architecture and a third of the hosts."""

import pytest
import torch
from torch import Tensor

from tests.hosts import every, every_host, named
from unilinattn.errors import UncoveredError
from unilinattn.kernels.contribution_norms import naive
from unilinattn.kernels.contribution_norms.naive import Order, Products
from unilinattn.kernels.weighted_map import tiled
from unilinattn.memory import max_memory
from unilinattn.mixers import DeltaRule, Dense
from unilinattn.operator import cost
from unilinattn.operator.cost import tile_rows
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.pairwise import PairwiseContributions
from unilinattn.operator.stages import Branch, Matrix, Mix, Scale
from unilinattn.scoring.vectors import contribution_tiles
from unilinattn.testing import Host, relative_error
from unilinattn.tracing.trace import trace

CLOSE = 1e-11
"""Tolerance in float64, against rows that are computed one by one."""


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
    form = op.pairwise()
    if form is None:
        return
    expected = op.contributions(range(op.output.shape[1]))
    for columns in (1, 4, 64):
        for causal in {False, form.causal}:
            actual = torch.zeros_like(expected)
            total = torch.zeros_like(op.output)
            for tile in form.tiles(causal, columns):
                actual[:, tile.rows, tile.cols] = tile.vectors().permute(0, 2, 3, 1)
                total[:, tile.rows] += tile.total()
            assert relative_error(actual, expected) <= CLOSE
            assert relative_error(total, expected.sum(2)) <= CLOSE
    check_norms(form.times(-1.5), -1.5 * expected, CLOSE)


def check_norms(form: PairwiseContributions, expected: Tensor, close: float) -> None:
    """Compare norms of narrow tiles with those of whole vectors, with a vector added to each diagonal entry."""
    extra = torch.randn_like(expected[:, :, 0])
    whole, y = expected.clone(), expected.sum(2) + extra
    whole.diagonal(dim1=1, dim2=2).add_(extra.transpose(1, 2))
    orders: list[tuple[Order, Tensor | None]] = [(2.0, None), (1.0, None), ("alti", y)]
    for order, reference in orders:
        actual = torch.zeros_like(expected[..., 0])
        for tile in form.tiles(form.causal, 4, rows=8):
            at = None if reference is None else reference[:, tile.rows]
            actual[:, tile.rows, tile.cols] = tile.norms(order, extra=extra[:, tile.rows], reference=at)
        each = whole.permute(0, 3, 1, 2)
        assert relative_error(actual, naive.norms(Products(each, None), order=order, reference=reference)) <= close


@every_host(every(), usual=("bert",), turn=0)
def test_fast_maps_and_vectors_equal_the_rows(host: Host) -> None:
    model, inputs = host.model(), host.inputs()
    if host.masks and "left" in host.masks and host.length > 3:
        mask = torch.ones_like(inputs)
        mask[-1, :3] = 0
        inputs = {"input_ids": inputs, "attention_mask": mask}
    for layer in trace(model, inputs, dtype=torch.float64).layers:
        if len(layer.operator.ports) == 1:
            for scope in ("core", "mixer", "unified"):
                check_maps(layer.operator, scope)
            check_vectors(layer.operator)


@pytest.mark.parametrize("name", ["gpt2", "gpt neox, parallel", "llama, grouped queries", "mamba2", "vit"])
def test_norms_in_float32_are_those_of_float64(name: str) -> None:
    # The l2 norms of softmax layers use Gram matrices in float32.
    host = named(name)
    for layer in trace(host.model(), host.inputs()).layers:
        op = layer.operator
        form = op.pairwise()
        assert form is not None
        check_norms(form.times(-1.5), -1.5 * op.contributions(range(op.output.shape[1])), 2e-6)


def test_norms_include_stages_after_the_projection() -> None:
    x = torch.randn(2, 9, 8)
    core, weight = Dense(torch.randn(2, 2, 9, 9).tril()), torch.randn(12, 8)
    chain = Mix("core", core), Matrix("output", weight), Scale("output", torch.randn(2, 9, 12))
    op = MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros(2, 9, 12))
    form = op.pairwise()
    assert form is not None
    check_norms(form, op.contributions(range(9)), 2e-6)


def test_a_causal_term_beside_one_that_is_not() -> None:
    x, weights = torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(2, 2, 2, 9, 9, dtype=torch.float64)
    both = Branch("core", tuple((Mix("core", Dense(each)),) for each in (weights[0].tril(), weights[1])))
    chain = both, Matrix("output", torch.randn(12, 8, dtype=torch.float64))
    op = MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros(2, 9, 12, dtype=torch.float64))
    form = op.pairwise()
    assert form is not None and len(form.terms) == 2 and not form.causal
    check_vectors(op)


@pytest.mark.long
@pytest.mark.parametrize("structure", ["dense", "delta rule"])
def test_tiles_of_heads_with_one_weight_span_chunks(structure: str) -> None:
    length, heads, state = 150, 2, 4
    x = torch.randn(1, length, 8, dtype=torch.float64)
    query, key = torch.randn(2, 1, length, heads, state, dtype=torch.float64) / 2
    strength = torch.rand(1, length, heads, dtype=torch.float64)
    weights = torch.rand(1, heads, length, length, dtype=torch.float64).tril()
    core = Dense(weights) if structure == "dense" else DeltaRule(query, key, strength)
    chain = Mix("core", core), Matrix("output", torch.randn(24, 8, dtype=torch.float64))
    op = MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros(1, length, 24, dtype=torch.float64))
    form = op.pairwise()
    assert form is not None
    assert form.folded is not None
    check_vectors(op)


def test_norms_of_two_layers_are_those_of_their_sum() -> None:
    host = named("gpt2")
    layers = trace(host.model(), host.inputs()).layers[:2]
    queries = layers[0].output.shape[1]
    rows = torch.arange(queries).expand(layers[0].output.shape[0], -1)
    first, second = (layer.operator.contributions(range(queries)) for layer in layers)
    every = 0.5 * first + 2 * second
    actual = torch.zeros_like(every[..., 0])
    for tile in contribution_tiles(layers, (0.5, 2.0), rows, "exact"):
        actual[:, tile.rows, tile.cols] = tile.norms(2.0)
    assert relative_error(actual, every.norm(dim=-1)) <= 2e-6


def test_squares_by_groups_of_heads_equal_those_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    host = named("mamba")
    monkeypatch.setattr(tiled, "HEADS", 5)
    for layer in trace(host.model(), host.inputs(), dtype=torch.float64).layers:
        assert layer.operator.num_heads() % 5
        check_vectors(layer.operator)


@pytest.mark.parametrize(("name", "on_a_gpu"), [("mamba", 256), ("gpt2", 512), ("qwen3 next", 64)])
def test_tiles_have_more_rows_on_a_gpu(name: str, on_a_gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = named(name)
    form = trace(host.model(), host.inputs()).layers[0].operator.pairwise()
    assert form is not None
    assert tile_rows(form) == (512 if name == "gpt2" else 64)
    monkeypatch.setitem(cost.TILE_ROWS, "cpu", 256)
    assert tile_rows(form) == on_a_gpu
