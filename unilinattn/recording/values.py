"""Which of several operands that carry tokens is the value of a product; the others are its weights and gates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unilinattn.call.functions import meaning_of
from unilinattn.recording.contraction import Letters, equation_letters, matmul_letters
from unilinattn.recording.nodes import Node
from unilinattn.rules.functions import GATE
from unilinattn.rules.mixing_functions import MixingFunction

PRODUCTS = ("matmul", "rmatmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
"""Functions that sum the values of tokens, with weights that depend on tokens too."""

SAMPLES = 4
"""Elements of an operand of which is asked from which tokens they come."""

Token = tuple[str, int, int]
"""The port, the sequence and the position of a token."""


@dataclass(frozen=True)
class Operand:
    """An operand that carries tokens.

    Attributes:
        rank: that of its `Node`.
        shape: its shape.
        summed: the axes over which the product sums.
        tokens: returns the tokens that an element, numbered in the flattened operand, comes from.
        read: of a key, the axes along which a later product sums, of a query, those along which this one does (see
            `keys`).
    """

    rank: int | float
    shape: torch.Size
    summed: tuple[int, ...]
    tokens: Callable[[int], frozenset[Token]]
    read: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """The largest number of tokens that one of some elements comes from."""
        elements = torch.linspace(0, self.shape.numel() - 1, SAMPLES, device="cpu").long().tolist()
        return max(len(self.tokens(element)) for element in elements)

    @property
    def is_summed_over_tokens(self) -> bool:
        """Whether the product sums over tokens."""
        return self._has_tokens_along(self.summed)

    @property
    def is_key(self) -> bool:
        """Whether a later product sums over this operand's channels, as that of a query with a state does."""
        return bool(self.read) and self.read != self.summed and not self._has_tokens_along(self.read)

    @property
    def is_query(self) -> bool:
        """Whether the product sums over this operand's channels and those of keys in a state."""
        return bool(self.read) and self.read == self.summed

    def _has_tokens_along(self, axes: tuple[int, ...]) -> bool:
        """Tell whether the last element comes from other tokens than the first one along some axes."""
        last = [size - 1 for size in self.shape]
        first = [0 if axis in axes else index for axis, index in enumerate(last)]
        return first != last and self.tokens(self._number(first)) != self.tokens(self._number(last))

    def _number(self, index: Sequence[int]) -> int:
        number = 0
        for size, entry in zip(self.shape, index, strict=True):
            number = number * size + entry
        return number


def values(operands: Sequence[Operand]) -> list[int]:
    """Return the numbers of the operands that may be the value of a product, in their order.

    Where the product sums over the tokens of some operands and not of others, such as a matrix with a row for each
    token, the former are mixed. An activation with f(0) != 0, such as a sigmoid, is a gate, and a key is a weight. Of
    several that are mixed, as attention weights and values are, the least activated operand is the value. Elsewhere,
    as in the product of a gate with the output of a scan, it is the one that comes from most tokens, then the least
    activated one. Of a sum over channels, such as that of queries with a state, activations say nothing, and a query is
    no value.
    """
    mixed = [n for n, operand in enumerate(operands) if operand.is_summed_over_tokens]
    every = mixed or list(range(len(operands)))
    numbers = [n for n in every if operands[n].rank < GATE] or every
    if len(numbers) > 1:
        numbers = [n for n in numbers if not operands[n].is_key] or numbers
    if len(numbers) > 1 and not mixed:
        reach = {n: operands[n].reach for n in numbers}
        numbers = [n for n in numbers if reach[n] == max(reach.values())]
        if any(operand.summed for operand in operands):
            # A state of one token comes from as many as its query.
            return [n for n in numbers if not operands[n].is_query] or numbers
    rank = min(operands[n].rank for n in numbers)
    return [n for n in numbers if operands[n].rank == rank]


def factor_values(operands: Sequence[Operand]) -> list[int]:
    """Return the numbers of the values of an elementwise product of two operands; of two, each is the other's gate.

    An operand that is broadcast is a scale of the other one, unless this is a gate, such as the decays of several
    tokens, by which a parallel scan multiplies the state of one. Of an outer product, whose operands both are, of which
    no later product tells the key, the larger operand is the value, and of two of one size the last.
    """
    sizes = [operand.shape.numel() for operand in operands]
    outer = torch.broadcast_shapes(*(operand.shape for operand in operands)).numel() > max(sizes)
    if not outer and sizes[0] != sizes[1]:
        larger = int(sizes[0] < sizes[1])
        return [1 - larger if operands[larger].rank >= GATE > operands[1 - larger].rank else larger]
    numbers = values(operands)
    return [max(numbers, key=lambda n: (sizes[n], n))] if outer else numbers


def depends_on_mixed(factor: Node, value: Node) -> bool:
    """Tell whether a factor may depend on a latest sum over tokens that a value comes from, other than by the value.

    True if this is unknown, as for a value that comes from an input by another way than such a sum.
    """
    behind, mixed, passed = [value], set[int](), {id(value)}
    while behind:
        node = behind.pop()
        if isinstance(meaning_of(node.func), MixingFunction) or (node.name in PRODUCTS and len(_read(node)) > 1):
            mixed.add(id(node))
            continue
        carried = [other for other in _read(node) if other.kind == "carried"]
        if not carried:
            return True
        behind += [other for other in carried if id(other) not in passed]
        passed.update(map(id, carried))
    reached, visited = [factor], {id(factor)}
    while reached:
        reached = [other for each in reached for other in _read(each) if id(other) not in visited]
        visited.update(map(id, reached))
    return not mixed.isdisjoint(visited)


def _read(node: Node) -> list[Node]:
    """Return the tensors that a call reads and that depend on the inputs."""
    return list(_nodes((node.args, node.kwargs)))


def _nodes(nested: Any) -> Iterator[Node]:
    if isinstance(nested, Node):
        yield nested
    elif isinstance(nested, (tuple, list, dict)):
        for item in nested.values() if isinstance(nested, dict) else nested:
            yield from _nodes(item)


def summed_axes(name: str, args: Sequence[Any], shapes: Sequence[torch.Size]) -> list[tuple[int, ...]]:
    """Return the axes of each operand over which `matmul` or `einsum` sums, none for other functions."""
    letters: list[Letters]
    if name == "einsum":
        letters, out = equation_letters(args[0], shapes)
    elif name in ("matmul", "rmatmul", "mm", "bmm", "mv"):
        first, second, out = matmul_letters(*(len(shape) for shape in shapes))
        letters = [first, second]
    else:
        return [() for _ in shapes]
    return [tuple(axis for axis, letter in enumerate(names) if letter not in out) for names in letters]
