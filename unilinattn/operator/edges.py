"""Edges, pairs (query, key) of tokens: their share of a layer's output, sum over edges (i, j) of T_ij x_j."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import takewhile
from operator import index as as_int
from typing import Any, NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError
from unilinattn.kernels.precision import full_precision
from unilinattn.memory import parts, rows_within
from unilinattn.operator.cost import pass_elements
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.scopes import restricted, scoped
from unilinattn.operator.selection import checked_heads, chosen_heads
from unilinattn.operator.stages import Chain, Mix, run, walk

COLUMNS = 64
"""Largest number of groups of edges in one pass of an operator."""

Pairs = Iterable[tuple[SupportsIndex, SupportsIndex]] | Int[Tensor, "edge 2"] | Int[Tensor, "batch edge 2"]
"""Pairs (query, key), the same for all sequences or some for each; negative positions count from the end."""

Indices = SupportsIndex | slice | Sequence[SupportsIndex] | Tensor
"""One or several heads or channels: indices, a slice, or a boolean tensor."""

Selection = Indices | Callable[[MixerOperator], Indices]
"""Heads or channels of a core, or a function that selects those of each layer from its operator."""


class Groups(NamedTuple):
    """Edges as a sum of rectangles: all pairs of a query and a key of the same group."""

    queries: Bool[Tensor, "batch group query"]
    keys: Bool[Tensor, "batch group key"]


class Edges(ABC):
    """A set of edges, for operators of any shape."""

    @abstractmethod
    def groups(self, operator: MixerOperator) -> Groups:
        """Return the edges in groups that do not overlap; raise `InputError` for edges that the layer cannot have."""


@dataclass(frozen=True, eq=False)
class Outgoing(Edges):
    """All edges from one token of each sequence to the other tokens."""

    tokens: Int[Tensor, " batch"]

    def groups(self, operator: MixerOperator) -> Groups:
        """Return one group, of all queries but the token itself; the queries of another stream are all others."""
        _, queries, keys = _shape(operator)
        device = operator.output.device
        diagonal = torch.arange(keys, device=device) == self.tokens.to(device)[:, None]
        among = operator.ports[0] == "x" and queries == keys
        others = ~diagonal if among else diagonal.new_ones(len(diagonal), queries)
        return Groups(others[:, None], diagonal[:, None])


class Listed(Edges):
    """Edges given as pairs; a pair that is given twice counts once."""

    def __init__(self, pairs: Any) -> None:
        """Read `Pairs`; raise `InputError` unless they are pairs of integers."""
        self.pairs: Int[Tensor, "*batch edge 2"] = _integers(pairs)
        self._groups: dict[tuple[int, int, int], Groups] = {}

    def groups(self, operator: MixerOperator) -> Groups:
        """Return the edges grouped by key or by query, whichever gives fewer groups.

        Keys with the same queries are one group, and so are queries with the same keys.

        Raises `InputError` for a position outside the sequence, for pairs of another number of sequences, and for a key
        after its query in a causal layer.
        """
        shape = _shape(operator)
        pairs = self._positions(shape, operator.name)
        later = pairs[..., 1] > pairs[..., 0]
        if bool(later.any()) and is_causal(operator):
            query, key = pairs[later][0].tolist()
            raise InputError(
                f"edge ({query}, {key}): {operator.name} is causal, so nothing passes from token {key} to the earlier "
                f"token {query}. An edge is a pair (query, key); did you mean ({key}, {query})?"
            )
        if shape not in self._groups:
            # The layers of a model have one shape, or a few.
            self._groups[shape] = _grouped(pairs, shape)
        groups = self._groups[shape]
        return Groups(*(mask.to(operator.output.device).expand(shape[0], -1, -1) for mask in groups))

    def _positions(self, shape: tuple[int, int, int], name: str) -> Int[Tensor, "some edge 2"]:
        """Return the pairs counted from the first token, with an axis of sequences."""
        batch, *lengths = shape
        pairs = self.pairs if self.pairs.ndim == 3 else self.pairs[None]
        if self.pairs.ndim == 3 and len(pairs) != batch:
            raise InputError(f"edges are given for {len(pairs)} sequences, and {name} has {batch}; give some for each.")
        limit = torch.tensor(lengths, device="cpu")
        outside = ((pairs < -limit) | (pairs >= limit)).any(-1)
        if bool(outside.any()):
            edge = tuple(pairs[outside][0].tolist())
            raise InputError(
                f"edge {edge} is out of range: {name} has {lengths[0]} query and {lengths[1]} key positions; negative "
                "ones count from the end."
            )
        return pairs % limit


def is_causal(operator: MixerOperator) -> bool:
    """Whether no key of the operator reaches an earlier real query.

    Only dense maps with padding, whose rows at padding may weight later keys, are computed for this.
    """
    stages = (stage for chain in operator.chains.values() for stage in walk(chain))
    if all(stage.mixer.is_lower_triangular for stage in stages if isinstance(stage, Mix)):
        return True
    if operator.mask is None or len(operator.chains) > 1:
        return False
    for rows, block in operator.row_blocks(heads="abs-mean", extra_elements=2):
        later = block.triu(1 + rows.indices(operator.output.shape[1])[0])
        if bool(later[operator.mask[:, rows]].any()):
            return False
    return True


@full_precision()
def along(
    operator: MixerOperator,
    groups: Groups,
    inputs: Mapping[str, Float[Tensor, "batch key in"]],
    channels: Bool[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch query out"]:
    """Return sum over edges (i, j) of T_ij x_j, without biases, for the ports' inputs x.

    `channels` restricts the operator to some channels of its core (`core_channels`). One pass of the operator for each
    group, so the time is linear in length for edges of a few queries or of a few keys; no matrix is made.

    Raises `UncoveredError` for an operator that covers only its core, and `MemoryLimitError` if one pass does not fit.
    """
    total = torch.zeros_like(operator.output)
    for port, chain in operator.chains.items():
        x = inputs[port].to(total)
        stages = chain if channels is None else restricted(chain, channels.to(total))
        if stages is None:
            continue
        for span in _parts(operator, chain, x, groups.keys.shape[1]):
            keys, queries = (side[:, span].transpose(1, 2).unsqueeze(2) for side in (groups.keys, groups.queries))
            total += (_run_on_keys(stages, x, keys) * queries).sum(3)
    return total


def _run_on_keys(
    stages: Chain, x: Float[Tensor, "batch key in"], keys: Bool[Tensor, "batch key 1 group"]
) -> Float[Tensor, "batch query out group"]:
    """Apply the linear parts of stages to the tokens of each group, zeros in place of the others."""
    if keys.shape[3] > 1 or int(keys.sum(1).max()) > 1:
        return run(stages, x.unsqueeze(3) * keys, bias=False)
    # Before the first one that mixes tokens, stages have zeros for all tokens but one.
    before = list(takewhile(lambda stage: not any(inner.mixes for inner in walk([stage])), stages))
    index = keys[..., 0, 0].int().argmax(1, keepdim=True)
    token = x.gather(1, index[..., None].expand(-1, -1, x.shape[2])) * keys.any(1)
    token = run([stage.at(index) for stage in before], token, bias=False)
    values = token.new_zeros(token.shape[0], x.shape[1], token.shape[2])
    values.scatter_(1, index[..., None].expand_as(token), token)
    return run(stages[len(before) :], values, bias=False).unsqueeze(3)


def core_channels(operator: MixerOperator, heads: Any, channels: Any) -> Bool[Tensor, " channel"] | None:
    """Return which channels of the operator's core two selections (`Selection` or None) select, None for all.

    `heads` are heads of the scope `core`, each a block of consecutive channels; `channels` are single channels.

    Raises `OptionError` for both at once and for indices that the core does not have, and `UncoveredError` for a core
    that mixes channels.
    """
    if heads is None and channels is None:
        return None
    if heads is not None and channels is not None:
        raise OptionError("heads and channels both restrict the cut; give one of them.")
    core = operator.scoped_map("core")
    total = scoped(operator.chains[operator.ports[0]], "core", operator.inputs[operator.ports[0]].shape[2])[1]
    what, wanted, count = ("heads", heads, core.heads) if channels is None else ("channels", channels, total)
    if callable(wanted):
        wanted = wanted(operator)
    selected = torch.zeros(count, total // count, dtype=torch.bool, device=operator.output.device)
    selected[_indices(what, wanted, count, operator.name)] = True
    return selected.flatten()


def _indices(what: str, wanted: Any, count: int, name: str) -> list[int]:
    if isinstance(wanted, Tensor) and wanted.dtype == torch.bool and wanted.shape == (count,):
        wanted = wanted.nonzero().flatten()
    try:
        checked = checked_heads(wanted, count)
    except OptionError:
        checked = "none"
    if checked is None or isinstance(checked, str):
        raise OptionError(
            f"{what}={wanted!r}: the core of {name} has {what} 0 to {count - 1}; give an index, a list or slice of "
            "them, a boolean tensor with an entry for each, or a function from an operator to one of these."
        )
    return chosen_heads(checked, count)


def _parts(operator: MixerOperator, chain: Any, x: Tensor, count: int) -> Iterator[slice]:
    """Yield slices of the groups, each as large as `max_memory` allows."""

    def size(columns: int) -> int:
        return pass_elements(chain, x.shape[0] * x.shape[1], x.shape[2], columns) * x.element_size()

    step = rows_within(size, COLUMNS, f"a pass of {operator.name} for cut edges") if count else 1
    return parts(count, step)


def _shape(operator: MixerOperator) -> tuple[int, int, int]:
    """Return (batch, query, key); raise `InputError` if the ports have different numbers of keys."""
    lengths = {port: x.shape[1] for port, x in operator.inputs.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{operator.name} reads tensors of different lengths, {lengths}: no edge names a key of all.")
    return operator.output.shape[0], operator.output.shape[1], next(iter(lengths.values()))


def _integers(pairs: Any) -> Int[Tensor, "*batch edge 2"]:
    if isinstance(pairs, Tensor):
        table = pairs.detach().cpu()
        integer = not (table.is_floating_point() or table.is_complex() or table.dtype == torch.bool)
        if integer and table.ndim in (2, 3) and table.shape[-1] == 2:
            return table.long()
        description = f"{pairs.dtype} of shape {tuple(pairs.shape)}"
    else:
        try:
            rows = [tuple(pair) for pair in pairs]
            if not all(len(row) == 2 and not any(isinstance(position, bool) for position in row) for row in rows):
                raise TypeError
            return torch.tensor([as_int(position) for position in chained(*rows)], dtype=torch.long, device="cpu").view(
                -1, 2
            )
        except TypeError:
            description = repr(pairs)[:80]
    raise InputError(
        f"edges are {description}; give pairs (query, key) of integers, such as [(9, 4), (-1, 4)], or an integer "
        "tensor of shape (edge, 2), or (batch, edge, 2) for edges of each sequence."
    )


def _grouped(pairs: Int[Tensor, "some edge 2"], shape: tuple[int, int, int]) -> Groups:
    """Return all sequences' edges in groups, some of them empty where sequences have fewer."""
    rectangles = [_rectangles(edges) for edges in pairs]
    count = max(map(len, rectangles), default=0)
    queries, keys = (torch.zeros(len(pairs), count, length, dtype=torch.bool, device="cpu") for length in shape[1:])
    for b, sets in enumerate(rectangles):
        for group, (rows, columns) in enumerate(sets):
            queries[b, group, rows], keys[b, group, columns] = True, True
    return Groups(queries, keys)


def _rectangles(pairs: Int[Tensor, "edge 2"]) -> list[tuple[Tensor, Tensor]]:
    """Return one sequence's edges as pairs of sets (queries, keys), as few as one side gives."""
    by_query = _alike(pairs)
    by_key = [(queries, keys) for keys, queries in _alike(pairs.flip(1))]
    return min(by_query, by_key, key=len)


def _alike(pairs: Int[Tensor, "edge 2"]) -> list[tuple[Tensor, Tensor]]:
    """Return the sets of first positions that have the same set of second positions, with that set."""
    pairs = torch.unique(pairs, dim=0)
    first, counts = torch.unique_consecutive(pairs[:, 0], return_counts=True)
    sets: dict[bytes, tuple[list[int], Tensor]] = {}
    for position, others in zip(first.tolist(), pairs[:, 1].split(counts.tolist()), strict=True):
        sets.setdefault(others.numpy().tobytes(), ([], others))[0].append(position)
    return [(torch.tensor(ones, device="cpu"), others) for ones, others in sets.values()]
