"""Which of several operands that carry tokens is the value of a product; the others are its weights and gates."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unilinattn.call.functions import meaning_of
from unilinattn.recording.keys import Key, Keys
from unilinattn.recording.nodes import Node, Position
from unilinattn.rules.functions import GATE, MOVING, SAME, sums_channels
from unilinattn.rules.letters import Letters, equation_letters, matmul_letters
from unilinattn.rules.mixing_functions import MixingFunction

PRODUCTS = ("matmul", "rmatmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
"""Functions that sum the values of tokens, with weights that depend on tokens too."""

SUMMING = ("cumsum", "sum", "mean", "nansum")
"""Functions that sum along axes, such as that of tokens."""

SAMPLES = 4
"""Elements of an operand of which is asked from which tokens they come."""

ELEMENTS, TRIED = 3, 32
"""Pairs of elements of an operand that are compared along an axis, and elements of which some may be zero."""

Token = tuple[str, int, int]
"""The port, the sequence and the position of a token."""


@dataclass(frozen=True)
class Operand:
    """An operand that carries tokens.

    Attributes:
        rank: that of its `Node`.
        value: its value.
        summed: the axes over which the product sums.
        tokens: returns the tokens that an element, numbered in the flattened operand, comes from.
        key: the role that later functions tell (see `keys`), None for none.
        reads_pairs: whether it multiplies numbers of pairs of tokens, such as scores q k^T.
    """

    rank: int | float
    value: Tensor
    summed: tuple[int, ...]
    tokens: Callable[[int], frozenset[Token]]
    key: Key | None = None
    reads_pairs: bool = False

    @property
    def role(self) -> str:
        """That of the key, empty without one."""
        return "" if self.key is None else self.key.role

    @property
    def shape(self) -> torch.Size:
        """That of the value."""
        return self.value.shape

    @property
    def reach(self) -> int:
        """The largest number of tokens that one of some elements comes from."""
        count = self.shape.numel()
        numbers = torch.linspace(0, count - 1, min(count, TRIED), dtype=torch.float64, device="cpu").long()
        with torch._C.DisableTorchFunction():
            # A mask or an activation that is zero tells nothing.
            index = torch.unravel_index(numbers.to(self.value.device), self.shape)
            nonzero = numbers[(self.value[index] != 0).cpu()].tolist() or numbers.tolist()
        elements = {nonzero[number * (len(nonzero) - 1) // (SAMPLES - 1)] for number in range(SAMPLES)}
        return max(len(self.tokens(element)) for element in elements)

    @property
    def is_summed_over_tokens(self) -> bool:
        """Whether the product sums over tokens."""
        return self.has_tokens_along(self.summed)

    @property
    def is_key(self) -> bool:
        """Whether a later product sums over this operand's channels, as that of a query with a state does."""
        return self.key is not None and self.role == "key" and not self.has_tokens_along(self.key.axes)

    @property
    def is_matrix(self) -> bool:
        """Whether this operand has a number for each pair of two tokens, of which the other operand has the second.

        The channels of a state come from different numbers of its last tokens where the decays of some underflow.
        """
        return self.key is not None and self.role == "matrix" and self.has_tokens_along(self.key.axes, nested=False)

    def has_tokens_along(self, axes: tuple[int, ...], *, nested: bool = True) -> bool:
        """Tell whether some elements that differ in their place along some axes come from different tokens.

        An element that comes from none, as where a mask or an activation is zero, tells nothing. `nested`: whether one
        of two elements may come from all tokens of the other one.
        """
        if self.shape.numel() == 0 or all(self.shape[axis] == 1 for axis in axes):
            return False
        generator, told = torch.Generator().manual_seed(0), 0
        sizes = [(TRIED, TRIED if axis in axes else 1) for axis in range(len(self.shape))]
        drawn = [
            torch.randint(n, size, generator=generator, device="cpu").expand(TRIED, TRIED)
            for n, size in zip(self.shape, sizes, strict=True)
        ]
        with torch._C.DisableTorchFunction():
            nonzero = (self.value[tuple(index.to(self.value.device) for index in drawn)] != 0).cpu()
            strides = torch.empty(self.shape, device="meta").stride()
            numbers = sum(index * stride for index, stride in zip(drawn, strides, strict=True))
        for row in range(TRIED):
            elements = torch.as_tensor(numbers, device="cpu")[row][nonzero[row]].unique().tolist()
            tokens = [self.tokens(element) for element in elements[:: max(len(elements) - 1, 1)]]
            if len(tokens) == 2 and all(tokens):
                if tokens[0] != tokens[1] and (nested or not (tokens[0] <= tokens[1] or tokens[1] <= tokens[0])):
                    return True
                told += 1
            if told == ELEMENTS:
                break
        return False


class Told:
    """Adds to the operands of products the roles that later functions tell.

    Args:
        keys: that of each, by the position of the product's call.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # Where numbers of pairs of tokens are computed, and how often the code came by.
        self._pairs: set[Position] = set()
        self._calls: Counter[Position] = Counter()

    def operands(self, terms: Mapping[int, Operand], position: Position) -> list[Operand]:
        """Return the operands of a product, by number, with their roles."""
        key, queries = self._keys.own.get(position), self._keys.queries.get(position, {})
        self._calls[position] += 1
        # A loop calls one product at each step, and to ask for tokens takes passes back through all earlier steps.
        if key is not None and position not in self._pairs and self._calls[position].bit_count() == 1:
            has_own = (n in terms and terms[n].has_tokens_along(axes) for n, axes in key.separate.items())
            if key.separate and all(has_own):
                self._pairs.add(position)
        operands: list[Operand] = []
        for number, operand in terms.items():
            summed = key.axes if key is not None and key.role == "summed" else operand.summed
            read = queries.get(number, set())
            role = key if key is not None and key.operand in (-1, number) else None
            operands.append(replace(operand, summed=summed, key=role, reads_pairs=not read.isdisjoint(self._pairs)))
        return operands


def values(operands: Sequence[Operand]) -> list[int]:
    """Return the numbers of the operands that may be the value of a product, in their order.

    Where the product sums over the tokens of some operands and not of others, such as a matrix with a row for each
    token, the former are mixed. One that is summed with the tokens of an outer product, as values are with scores q k^T
    that no softmax made factors, is the value. An activation with f(0) != 0, such as a sigmoid, is a gate, and a key is
    a weight. Of several that are mixed, as attention weights and values are, the least activated operand is the value.
    Elsewhere, as in the product of a gate with the output of a scan, it is the one that comes from most tokens, then
    the least activated one. Of a sum over channels, such as that of queries with a state, activations say nothing.
    """
    mixed = [n for n, operand in enumerate(operands) if operand.is_summed_over_tokens]
    if readers := [n for n in mixed if operands[n].reads_pairs]:
        return readers
    if len(operands) > 2:
        # Of q, k and v in one sum over the channels of q and k, the value has others, which are left.
        left = {n: len(operands[n].shape) - len(operands[n].summed) for n in mixed}
        mixed = [n for n in mixed if left[n] == max(left.values())]
    every = mixed or list(range(len(operands)))
    # A key that a query reads is told by more than its activation.
    numbers = [n for n in every if not (len(every) > 1 and operands[n].is_key)] or every
    numbers = [n for n in numbers if operands[n].rank < GATE] or numbers
    if len(numbers) > 1 and not mixed:
        reach = {n: operands[n].reach for n in numbers}
        numbers = [n for n in numbers if reach[n] == max(reach.values())]
        if any(operand.summed and operand.role != "summed" for operand in operands):
            # The state of the first token comes from as many as its query; a later step tells.
            return numbers
    rank = min(operands[n].rank for n in numbers)
    return [n for n in numbers if operands[n].rank == rank]


def factor_values(operands: Sequence[Operand]) -> list[int]:
    """Return the numbers of the values of an elementwise product of two operands; of two, each is the other's gate.

    An operand that is broadcast is a scale of the other one, unless this is a gate, such as the decays of several
    tokens, by which a parallel scan multiplies the state of one, a matrix of pairs of tokens, or a key that comes from
    no more tokens, such as dt B in (dt B) u. Of an outer product, in which both are broadcast, and of which no later
    product tells the key, the larger operand is the value, and of two of one size the last.
    """
    if readers := [n for n, operand in enumerate(operands) if operand.reads_pairs]:
        return readers[-1:]
    sizes = [operand.shape.numel() for operand in operands]
    outer = torch.broadcast_shapes(*(operand.shape for operand in operands)).numel() > max(sizes)
    if not outer and sizes[0] != sizes[1]:
        number = int(sizes[0] < sizes[1])
        larger, smaller = operands[number], operands[1 - number]
        is_gate = larger.rank >= GATE > smaller.rank
        is_value = smaller.rank >= GATE or not (larger.is_matrix or (larger.is_key and larger.reach <= smaller.reach))
        return [number if is_value and not is_gate else 1 - number]
    numbers = values(operands)
    return [max(numbers, key=lambda n: (sizes[n], n))] if outer else numbers


def depends_on_mixed(factor: Node, value: Node) -> bool:
    """Tell whether a factor may depend on a latest sum over tokens that a value comes from, other than by the value.

    True if this is unknown, as for a value that comes from an input by another way than such a sum.
    """
    behind, mixed, passed = [(value, False)], set[int](), {(id(value), False)}
    while behind:
        node, is_summed = behind.pop()
        if isinstance(meaning_of(node.func), MixingFunction) or (node.name in PRODUCTS and len(_read(node)) > 1):
            mixed.add(id(node))
            continue
        if node.name in SUMMING:
            # Of tokens or of channels: a sum of tokens may be in front of it.
            mixed.add(id(node))
            is_summed = True
        carried = [other for other in _read(node) if other.kind == "carried"]
        if not carried and not is_summed:
            return True
        new = [other for other in carried if (id(other), is_summed) not in passed]
        behind += [(other, is_summed) for other in new]
        passed.update((id(other), is_summed) for other in new)
    reached, visited = [factor], {id(factor)}
    while reached:
        reached = [other for each in reached for other in _read(each) if id(other) not in visited]
        visited.update(map(id, reached))
    return not mixed.isdisjoint(visited)


def is_weight(factor: Any, value: Node) -> bool:
    """Tell whether a factor is a constant, or computed from the tokens otherwise than as a norm of a value is.

    A norm, or an activation, reads the value's own numbers; a weight reads at most its projections.
    """
    sources = {id(value)}
    while (
        value.name in SAME | MOVING and len(read := _read(value)) == 1 and read[0].value.numel() == value.value.numel()
    ):
        (value,) = read
        sources.add(id(value))
    reached, visited = [factor] if isinstance(factor, Node) else [], set[int]()
    while reached:
        node = reached.pop()
        if id(node) in sources:
            return False
        if id(node) not in visited and not _projects(node):
            reached += _read(node)
        visited.add(id(node))
    return True


def _projects(node: Node) -> bool:
    """Whether a function multiplies a tensor by weights of the model."""
    return sums_channels(node.name, node.args, lambda x: isinstance(x, Node))


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
