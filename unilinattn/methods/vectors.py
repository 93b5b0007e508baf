"""T_i(x_j) of all pairs or of some rows, as the methods that reduce these vectors take them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from unilinattn.costs import rows_cost
from unilinattn.memory import allowed, rows_within
from unilinattn.methods.maps import added, map_shape
from unilinattn.methods.selection import only_port
from unilinattn.shares import TILE, Shares, Tile
from unilinattn.trace import Layer


def share_tiles(
    layers: Sequence[Layer], factors: Sequence[float], rows: Int[Tensor, "batch row"], activation: str
) -> Iterator[Tile]:
    """Yield T_i(x_j), each layer's times its factor, summed, of some rows and keys at a time.

    Tiles of all pairs where every layer has such a form and every row is asked for; else some rows at a time.
    Pairs that a causal layer leaves at zero may be missing.
    """
    ops = [only_port(layer) for layer in layers]
    tiled = rows.shape[1] == layers[0].output.shape[1] and activation == "exact"
    forms = [form for op in ops if tiled and (form := op.shares()) is not None]
    count = len(layers)
    if len(forms) == count:
        # A step of several layers holds the vectors of each, and all have to be cut alike.
        size = min(form.rows(_held_vectors(count), count) for form in forms)
        causal = all(form.causal for form in forms)
        streams = (form.times(factor).tiles(causal, rows=size) for form, factor in zip(forms, factors, strict=True))
        for together in zip(*streams, strict=True):
            yield together[0] if count == 1 else _sum(together[0], [tile.vectors() for tile in together])
        return
    keys, held = ops[0].inputs[ops[0].ports[0]].shape[1], _rows_size(layers)
    size = rows_within(lambda n: n * held, TILE, "vectors T_i(x_j)")
    for start in range(0, rows.shape[1], size):
        part = slice(start, min(start + size, rows.shape[1]))
        found = (op.contributions(rows[:, part], activation=activation) for op in ops)
        shares = [(v if f == 1 else f * v).permute(0, 3, 1, 2) for f, v in zip(factors, found, strict=True)]
        yield _sum(Tile(part, slice(0, keys), shares[0], None, rows[:, part]), shares)


def shares_cost(together: Sequence[Layer], rows: int, *, exact: bool) -> tuple[int, int]:
    """Return the bytes and operations of `share_tiles` for so many rows, the vectors of each row included."""
    ops, count = [only_port(layer) for layer in together], len(together)
    batch, queries, keys = map_shape(together[0])
    width, out = together[0].output.element_size(), together[0].output.shape[2]
    forms: list[Shares] = []
    if exact and rows == queries:
        # On shapes alone: nothing is allocated.
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            forms = [form for op in ops if (form := op.shares()) is not None]
    vectors = 4 * batch * max(rows, 1) * out
    if len(forms) == count:
        beside = _held_vectors(count)
        size = min(form.rows(beside, count, name=None) for form in forms)
        numbers = sum(form.numbers(min(size, queries), beside=beside) for form in forms) + vectors
        return width * numbers, sum(form.operations() for form in forms)
    # Rows of a per-channel chain, as many as fit; each weighs a vector of every key.
    each = _rows_size(together)
    size = min(rows, TILE)
    while size > 1 and size * each > allowed():
        size //= 2
    passes = [op.apply_cost() for op in ops]
    found = [rows_cost(op.chains[op.ports[0]], 0, op.width, size) for op in ops]
    taken = size * each // width + max(cost.numbers for cost in found)
    numbers = max(taken, *(cost.numbers for cost in passes)) + vectors
    inner = sum(op.width * (out + 8) for op in ops)
    return width * numbers, batch * rows * keys * inner + sum(cost.operations for cost in passes)


def _sum(tile: Tile, vectors: Sequence[Float[Tensor, "batch out row col"]]) -> Tile:
    return replace(tile, inner=added(vectors), weight=None, squared=None)


def _held_vectors(count: int) -> int:
    """Return how many tiles of vectors `share_tiles` holds for so many layers in one step."""
    return 0 if count == 1 else count + 3


def _rows_size(layers: Sequence[Layer]) -> int:
    """Return how many bytes `share_tiles` holds for each row where a layer has no form in tiles."""
    ops = [only_port(layer) for layer in layers]
    batch, keys, _ = ops[0].inputs[ops[0].ports[0]].shape
    return 5 * batch * keys * max(op.width for op in ops) * layers[0].output.element_size()
