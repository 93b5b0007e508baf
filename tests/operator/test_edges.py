"""Edges of an operator: sum over (i, j) of T_ij x_j by linear passes, against the vectors T_ij x_j themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws.operators import LAYOUTS, operator
from tests.laws.structures import STRUCTURES, Draw, Structure
from unilinattn.errors import InputError, OptionError
from unilinattn.operator.edges import Edges, Groups, Listed, Outgoing, along, core_channels
from unilinattn.operator.operator import MixerOperator
from unilinattn.testing import relative_error, tolerance
from unilinattn.testing.checks import require_linear_memory, variant, without_matrices

BY_NAME = {structure.name: structure for structure in STRUCTURES}
DIAGONAL, DENSE = BY_NAME["diagonal decay, S6"], BY_NAME["dense"]
LIMIT = tolerance("law", torch.float64)
LENGTH = 9


def drawn(layout: str = "mamba", structure: Structure = DIAGONAL, length: int = LENGTH) -> MixerOperator:
    return operator(layout, structure, Draw(0, 2, length, torch.float64))


def by_definition(op: MixerOperator, pairs: Tensor) -> Tensor:
    """Pick the T_ij x_j of the pairs out of all of them, and add them up."""
    total = torch.zeros_like(op.output)
    for port in op.ports:
        vectors = op.contributions(range(op.output.shape[1]), port=port)
        for b, own in enumerate(pairs.expand(len(total), -1, -1)):
            for i, j in {tuple(pair) for pair in own.tolist()}:
                total[b, i] += vectors[b, i, j]
    return total


def passed(op: MixerOperator, edges: Edges, **selection: Any) -> Tensor:
    channels = core_channels(op, selection.get("heads"), selection.get("channels"))
    return along(op, edges.groups(op), op.inputs, channels)


def random_pairs(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Draw pairs whose query is not before their key."""
    drawn = torch.randint(LENGTH, (*shape, 2), generator=torch.Generator().manual_seed(seed))
    return drawn.sort(dim=-1, descending=True).values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [structure.name for structure in STRUCTURES])
def test_the_sum_over_edges_is_the_sum_of_their_vectors(layout: str, name: str) -> None:
    op = drawn(layout, BY_NAME[name])
    for pairs in (random_pairs((14,)), random_pairs((2, 14))):
        expected = by_definition(op, pairs)
        assert relative_error(passed(op, Listed(pairs)), expected) <= LIMIT
        # Transposed pairs are other edges.
        if op.output.shape[1] == LENGTH and bool((pairs[..., 0] != pairs[..., 1]).any()):
            wrong = by_definition(op, pairs.flip(-1))
            assert relative_error(wrong, expected) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_and_channels_add_up_to_the_edge(layout: str) -> None:
    op = drawn(layout, DENSE)
    edges = Listed(random_pairs((8,)) if layout != "post-norm" else [(5, 2), (8, 0), (3, 1)])
    whole = passed(op, edges)
    heads = op.num_heads("core")
    each = [passed(op, edges, heads=head) for head in range(heads)]
    assert relative_error(torch.stack(each).sum(0), whole) <= LIMIT
    assert min(float(part.norm()) for part in each) > 0
    width = len(core_channels(op, None, slice(None)) if heads else ())
    halves = [passed(op, edges, channels=part) for part in (range(0, width // 2), range(width // 2, width))]
    assert relative_error(halves[0] + halves[1], whole) <= LIMIT
    assert relative_error(passed(op, edges, heads=list(range(heads))), whole) <= LIMIT


def test_a_head_is_a_block_of_channels() -> None:
    op, edges = drawn("attention", DENSE), Listed([(5, 2), (8, 0)])
    width = len(core_channels(op, None, slice(None))) // op.num_heads("core")  # type: ignore[arg-type]  # not None
    assert width > 1
    block = torch.zeros(width * op.num_heads("core"), dtype=torch.bool)
    block[width : 2 * width] = True
    for same in (block, range(width, 2 * width), slice(width, 2 * width), lambda op: np.arange(width, 2 * width)):
        assert torch.equal(passed(op, edges, channels=same), passed(op, edges, heads=1))
    assert torch.equal(passed(op, edges, heads=-1), passed(op, edges, heads=op.num_heads("core") - 1))


def test_all_edges_from_a_token_to_others_are_one_group() -> None:
    op = drawn()
    tokens = torch.tensor([3, 5])
    pairs = torch.stack([torch.tensor([[i, t] for i in range(LENGTH) if i > t][:3]) for t in (3, 5)])
    assert Outgoing(tokens).groups(op).keys.shape[1] == 1
    every = [[(i, t) for i in range(LENGTH) if i != t] for t in (3, 5)]
    expected = by_definition(op, torch.tensor(every))
    assert relative_error(passed(op, Outgoing(tokens)), expected) <= LIMIT
    assert relative_error(passed(op, Listed(pairs)), by_definition(op, pairs)) <= LIMIT


def test_the_rest_is_independent_of_a_token_whose_edges_are_removed() -> None:
    op, changed = drawn(), dict(drawn().inputs)
    changed["x"] = changed["x"].clone()
    changed["x"][:, 4] += torch.randn_like(changed["x"][:, 4])
    groups = Outgoing(torch.tensor([4, 4])).groups(op)
    rest = [op.apply(x) - along(op, groups, x) for x in (op.inputs, changed)]
    others = torch.arange(LENGTH) != 4
    assert relative_error(rest[0][:, others], rest[1][:, others]) <= LIMIT
    assert relative_error(op.apply(op.inputs)[:, others], op.apply(changed)[:, others]) > 1e-3


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ([(8, j) for j in range(8)], 1),
        ([(i, 2) for i in range(3, 9)], 1),
        ([(8, j) for j in range(4)] + [(7, j) for j in range(4)], 1),
        ([(8, j) for j in range(4)] + [(7, j) for j in range(3)], 2),
        ([(8, 0), (5, 1), (3, 2), (3, 2), (-1, 0)], 3),
        ([(i, j) for i in range(9) for j in range(i)], 8),
        ([], 0),
    ],
)
def test_edges_take_as_few_passes_as_one_side_needs(pairs: list[tuple[int, int]], groups: int) -> None:
    op = drawn()
    found = Listed(pairs).groups(op)
    assert found.keys.shape[1] == groups
    covered = torch.einsum("bgi,bgj->bij", found.queries.int(), found.keys.int())
    expected = torch.zeros(LENGTH, LENGTH, dtype=torch.int)
    for i, j in pairs:
        expected[i, j] = 1
    assert torch.equal(covered, expected.expand(2, -1, -1))


def test_edges_of_few_keys_take_linear_memory_and_no_matrix() -> None:
    def passes(length: int) -> dict[str, Any]:
        op = without_matrices(drawn(length=length), "linear")
        edges = Listed([(i, j) for j in (1, 4) for i in range(j + 1, length)])
        groups = edges.groups(op)
        assert groups.keys.shape[1] == 2
        return {"along": lambda: along(op, groups, op.inputs)}

    require_linear_memory(passes, 256)


def test_many_groups_run_in_parts_that_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    op, edges = drawn(), Listed(random_pairs((30,)))
    whole = passed(op, edges)
    calls: list[Groups] = []
    monkeypatch.setattr("unilinattn.operator.edges.COLUMNS", 2)
    monkeypatch.setattr("unilinattn.operator.edges.run", _counting(calls))
    assert relative_error(passed(op, edges), whole) <= LIMIT
    assert len(calls) == -(-edges.groups(op).keys.shape[1] // 2)


def _counting(calls: list[Any]) -> Any:
    from unilinattn.operator.stages import run

    def counted(chain: Any, x: Tensor, **options: Any) -> Tensor:
        calls.append(x)
        return run(chain, x, **options)

    return counted


BAD_PAIRS: list[tuple[Any, str]] = [
    ([(9, 0)], r"edge \(9, 0\) is out of range: layer has 9 query and 9 key positions"),
    ([(0, -10)], r"edge \(0, -10\) is out of range"),
    ([(2, 5)], r"edge \(2, 5\): layer is causal, .* from token 5 to the earlier token 2.*did you mean \(5, 2\)"),
    ([(2, -1)], r"edge \(2, 8\): layer is causal"),
    (torch.zeros(3, 1, 2, dtype=torch.long), r"given for 3 sequences, and layer has 2"),
    ([(1.0, 0)], r"edges are \[\(1.0, 0\)\]; give pairs \(query, key\) of integers"),
    ([(True, 0)], r"edges are \[\(True, 0\)\]"),
    ([1, 2], r"edges are \[1, 2\]"),
    ((1, 2), r"edges are \(1, 2\)"),
    ([(1, 2, 3)], r"edges are \[\(1, 2, 3\)\]"),
    (7, r"edges are 7"),
    (torch.zeros(4, 2), r"edges are torch.float32 of shape \(4, 2\)"),
    (torch.zeros(4, 3, dtype=torch.long), r"edges are torch.int64 of shape \(4, 3\)"),
]


@pytest.mark.parametrize(("pairs", "message"), BAD_PAIRS)
def test_bad_pairs_say_what_is_accepted(pairs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Listed(pairs).groups(drawn())


def test_keys_after_queries_are_edges_of_a_layer_that_is_not_causal() -> None:
    op, pairs = drawn("two directions", DENSE), torch.tensor([(2, 5), (0, 8)])
    assert relative_error(passed(op, Listed(pairs)), by_definition(op, pairs)) <= LIMIT


def test_ports_of_different_lengths_have_no_common_key() -> None:
    op = drawn()
    two = variant(
        op, chains={**op.chains, "other": op.chains["x"]}, inputs={**op.inputs, "other": op.inputs["x"][:, 1:]}
    )
    with pytest.raises(InputError, match=r"reads tensors of different lengths, \{'x': 9, 'other': 8\}"):
        Listed([(2, 1)]).groups(two)


BAD_SELECTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(heads=9), r"heads=9: the core of layer has heads 0 to \d; give an index, a list or slice"),
    (dict(heads="mean"), r"heads='mean': the core"),
    (dict(heads=[]), r"heads=\[\]: the core"),
    (dict(channels=[0, 99]), r"channels=\[0, 99\]: the core of layer has channels 0 to \d+; give"),
    (dict(channels=torch.ones(3, dtype=torch.bool)), r"channels=tensor"),
    (dict(channels=lambda op: 1.5), r"channels=1.5"),
    (dict(heads=0, channels=0), r"heads and channels both restrict the cut; give one of them"),
]


@pytest.mark.parametrize(("selection", "message"), BAD_SELECTIONS)
def test_bad_heads_and_channels_say_what_is_accepted(selection: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        passed(drawn("attention", DENSE), Listed([(2, 1)]), **selection)


def test_edges_of_several_keys_in_one_group_are_all_cut() -> None:
    op = drawn()
    pairs = [(5, 2), (5, 3)]
    assert Listed(pairs).groups(op).keys.sum(2).tolist() == [[2], [2]]
    assert relative_error(passed(op, Listed(pairs)), by_definition(op, torch.tensor(pairs))) <= LIMIT
