"""The roles of a product's operands, which later functions tell: keys, queries, matrices of pairs of tokens.

Of v k^T and k v^T, the terms of states, the key is the operand along whose axis a later product sums, as a query does
with a state.
"""

import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.errors import UncoveredError
from unilinattn.recording.nodes import Node, Position, nodes_in
from unilinattn.rules.functions import HOMOGENEOUS, JOINING, MOVING, SAME, SLOPES
from unilinattn.rules.letters import Letters, equation_letters, matmul_letters

OUTER = ("mul", "multiply", "matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "addcmul", "einsum")
"""Functions that may be the outer product of two tensors."""

ELEMENTWISE = (
    SAME
    | SLOPES
    | HOMOGENEOUS
    | {
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "addcmul", "lerp"),
        *("where", "masked_fill", "neg", "negative", "cumsum", "addmm", "baddbmm", "tril", "triu", "pow", "square"),
    }
)
"""Functions whose result has the elements of an argument, changed, in the same places."""

SUMMING, SQUARES = ("sum", "mean"), ("pow", "square")
"""Functions that sum one tensor along axes, and those before the sum in a norm."""

TRIES = 3
"""Most outer products of one call in a loop of which is asked what reads them: the last state may have no reader."""


@dataclass(frozen=True)
class Key:
    """An operand of a product that later functions tell from the others.

    Attributes:
        operand: its number; -1 for all.
        axes: its axes along which a later product sums if it is a "key"; those that the other operand lacks, while a
            later sum is along common ones, if it is a "matrix"; those along which the product is summed later, of all
            operands, for "summed".
        role: one of these words.
        separate: of a key, the axes of each operand that the others lack, if the result has a number for each pair of
            their entries.
    """

    operand: int
    axes: tuple[int, ...]
    role: str
    separate: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """The operands of products that are told, by the position of the product's call.

    Attributes:
        own: a key, or an operand with another role.
        queries: the operands that sum along the axes of an earlier product's key, by number, with that product.
    """

    own: dict[Position, Key] = field(default_factory=dict)
    queries: dict[Position, dict[int, set[Position]]] = field(default_factory=dict)

    def tell(self, product: Position, key: Key, queries: "Queries") -> None:
        """Add what a later function tells, unless another one told otherwise."""
        if self.own.setdefault(product, key).operand == key.operand:
            for reader, query in queries:
                self.queries.setdefault(reader, {}).setdefault(query, set()).add(product)


Queries = tuple[tuple[Position, int], ...]
"""The operands that multiplied a result before it was summed: where, and their numbers."""


def called(forward: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return what a module's forward, without its hooks, returns; `position` counts calls from here on."""
    return forward(*positional, **named)


def position() -> Position:
    """Return which calls of a module's code are active: the code and the instruction of each."""
    calls: list[tuple[object, int]] = []
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != called.__name__ or frame.f_globals is not globals()):
        if frame.f_code.co_name == "__torch_function__":
            # The frames so far are those of the mode that handles the call.
            calls.clear()
        elif frame.f_globals is not vars(nn.modules.module):
            # Modules are called in another way where they have hooks.
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(calls)


def keys_of(output: Node) -> Keys:
    """Return the keys of the outer products that a recorded output depends on, and the queries of those that read them.

    They are found by the position of the products' calls.
    """
    users, products = _graph(output)
    keys, tries = Keys(), Counter[Position]()
    for node in products:
        separate = _separate(node)
        if separate is None or tries[node.position] == TRIES:
            continue
        tries[node.position] += 1
        wide = {number: each.axes for number, each in enumerate(separate) if each.axes}
        told: Iterator[tuple[Key, Queries]] = iter(())
        if len(wide) > 1:
            told = _told_keys(node, separate, wide, users)
        elif len(wide) == 1:
            told = _told_larger(node, next(iter(wide)), separate, users)
        elif all(isinstance(term, Node) and term.value.shape == node.value.shape for term in node.args[:2]):
            told = _told_summed(node, users)
        for key, queries in told:
            keys.tell(node.position, key, queries)
    return keys


def _told_keys(
    node: Node,
    separate: Sequence["_Separate"],
    wide: Mapping[int, tuple[int, ...]],
    users: Mapping[int, list[Node]],
) -> Iterator[tuple[Key, Queries]]:
    """Yield the key of an outer product, along whose axes a later function sums, and the queries."""
    numbers = list(wide)
    for index, queries in _readers(node, [separate[number].out for number in numbers], users):
        if queries:
            yield Key(numbers[index], wide[numbers[index]], "key", wide), queries


def _told_larger(
    node: Node, number: int, separate: Sequence["_Separate"], users: Mapping[int, list[Node]]
) -> Iterator[tuple[Key, Queries]]:
    """Yield the role of an operand whose axes the other one lacks, as `_told_keys`.

    It is a key if a query is summed with it along these axes, as the input matrix B of a state-space model is in (dt B)
    u, and a matrix if the sum is along common ones, as in sums over j of w_ij v_j by channel.
    """
    axes, out = separate[number].axes, separate[number].out
    common = [axis for axis in range(node.value.ndim) if axis not in out]
    # Scores of one query.
    is_row = node.name not in ("mul", "multiply", "addcmul") and _sums(node)
    for is_common, queries in _readers(node, [out, common], users):
        if is_common:
            yield Key(number, axes, "matrix"), ()
        elif queries:
            yield Key(number, axes, "key", {number: axes} if is_row else {}), queries


def _told_summed(node: Node, users: Mapping[int, list[Node]]) -> Iterator[tuple[Key, Queries]]:
    """Yield the axis along which a product by element is summed."""
    for axis, queries in _readers(node, [(axis,) for axis in range(node.value.ndim)], users):
        if not queries:
            yield Key(-1, (axis,), "summed"), ()


def _sums(node: Node) -> bool:
    """Tell whether a product sums over an axis."""
    _, letters, out = _terms(node) or ([], [], ())
    return any(x not in out for names in letters for x in names)


@dataclass(frozen=True)
class _Separate:
    """The axes of an operand of a product that the other operands lack.

    Attributes:
        axes: their numbers in the operand.
        out: their numbers in the result.
    """

    axes: tuple[int, ...]
    out: tuple[int, ...]


def _graph(output: Node) -> tuple[dict[int, list[Node]], list[Node]]:
    """Return the nodes that read each node, by its number, and the products of two carried tensors.

    Only nodes that the output depends on are among them.
    """
    users: dict[int, list[Node]] = defaultdict(list)
    products, waiting, visited = [], [output], {id(output)}
    while waiting:
        node = waiting.pop()
        if node.position:
            products.append(node)
        for read in nodes_in((node.args, node.kwargs)):
            users[id(read)].append(node)
            if id(read) not in visited:
                visited.add(id(read))
                waiting.append(read)
    return users, products


def _terms(node: Node) -> tuple[list[Any], list[Letters], Letters] | None:
    """Return the operands of a product of tensors, with a letter for each of their axes and of the result's."""
    terms = list(node.args)
    if node.name == "einsum" and isinstance(terms[0], str):
        terms = list(terms[1]) if isinstance(terms[1], (list, tuple)) else terms[1:]
    elif node.name in ("addmm", "baddbmm", "addcmul"):
        terms = terms[1:]
    elif node.name == "rmatmul":
        terms.reverse()
    if node.name not in OUTER or len(terms) < 2 or not all(isinstance(term, (Node, Tensor)) for term in terms):
        return None
    shapes = [(term.value if isinstance(term, Node) else term).shape for term in terms]
    if isinstance(node.args[0], str):
        with suppress(UncoveredError):
            return terms, *equation_letters(node.args[0], shapes)
        return None
    if node.name in ("mul", "multiply", "addcmul"):
        return terms, [tuple(range(-len(shape), 0)) for shape in shapes], tuple(range(-node.value.ndim, 0))
    first, second, out = matmul_letters(*map(len, shapes))
    return terms, [first, second], out


def _separate(node: Node) -> list[_Separate] | None:
    """Return the axes of each operand of a product that the others lack, None for a function that is no product."""
    product = _terms(node)
    if product is None:
        return None
    terms, letters, out = product
    shapes = [(term.value if isinstance(term, Node) else term).shape for term in terms]
    # An axis of size 1 is broadcast.
    wide = [{x for x, size in zip(*pair, strict=True) if size > 1} for pair in zip(letters, shapes, strict=True)]
    separate: list[_Separate] = []
    for number, names in enumerate(letters):
        others = set().union(*wide[:number], *wide[number + 1 :])
        axes = [axis for axis, x in enumerate(names) if x in out and x not in others and x in wide[number]]
        separate.append(_Separate(tuple(axes), tuple(out.index(names[axis]) for axis in axes)))
    return separate


def _readers(
    product: Node, groups: Sequence[Sequence[int]], users: Mapping[int, list[Node]]
) -> Iterator[tuple[int, Queries]]:
    """Yield the number of the group of a product's axes along which a later function sums, and the queries.

    These are the operands that this function, or earlier ones, multiply the result by. Elements of the result are
    followed through later functions by their indices along the axes of each group; a norm's mean, or its sum of
    squares, reads nothing.
    """
    start: Queries = ()
    waiting = deque([(product, [_indices(product.value, axes) for axes in groups], start)])
    visited = {id(product)}
    while waiting:
        node, marks, queries = waiting.popleft()
        for user in users[id(node)]:
            axes, query = _summed_axes(user, node)
            varies = [any(_varies(mark, axis) for axis in axes) for mark in marks]
            every: Queries = queries if query is None else (*queries, (user.position, query))
            if sum(varies) == 1 and not (user.name in SUMMING and (user.name == "mean" or node.name in SQUARES)):
                yield varies.index(True), every
            followed = [] if any(varies) or id(user) in visited else [_followed(user, node, mark) for mark in marks]
            visited.add(id(user))
            marked = [mark for mark in followed if mark is not None]
            if len(marked) == len(marks):
                waiting.append((user, marked, every))


def _indices(tensor: Tensor, axes: Sequence[int]) -> UInt8[Tensor, "*axes"]:
    """Return the index of each element of a tensor along some axes, as one number modulo a prime.

    Neighbours differ, in an eighth of the memory of their numbers: scores of attention are outer products too.
    """
    shape = [size if axis in axes else 1 for axis, size in enumerate(tensor.shape)]
    numbers = torch.arange(math.prod(shape), device=tensor.device) % 251
    return numbers.to(torch.uint8).view(shape).expand(tensor.shape)


def _varies(mark: UInt8[Tensor, "*axes"], axis: int) -> bool:
    """Tell whether marks change along an axis."""
    size = mark.shape[axis]
    return mark.stride(axis) != 0 and bool((mark.narrow(axis, 1, size - 1) != mark.narrow(axis, 0, size - 1)).any())


def _summed_axes(user: Node, node: Node) -> tuple[tuple[int, ...], int | None]:
    """Return the axes of a tensor along which a function sums it, or its product with another one from tokens.

    The second item is the number of this other operand.
    """
    if user.name in SUMMING:
        dim = user.kwargs.get("dim", user.kwargs.get("axis", user.args[1] if len(user.args) > 1 else None))
        count = node.value.ndim
        dims = range(count) if dim is None else (dim,) if isinstance(dim, int) else dim
        return tuple(axis % count for axis in dims), None
    product = _terms(user)
    if product is None or not all(isinstance(term, Node) for term in product[0]):
        return (), None
    terms, letters, out = product
    number = next((n for n, term in enumerate(terms) if term is node), None)
    if number is None or len(terms) != 2 or terms[0] is terms[1] or not user.position:
        return (), None
    return tuple(axis for axis, x in enumerate(letters[number]) if x not in out), 1 - number


def _followed(user: Node, node: Node, mark: UInt8[Tensor, "*node"]) -> UInt8[Tensor, "*user"] | None:
    """Return the marks of a tensor's elements in the result of a function, None for one that moves them unknown."""
    terms, letters, out = _terms(user) or ([], [], ())
    names = next((names for term, names in zip(terms, letters, strict=True) if term is node), None)
    if names is not None:
        if not set(names) <= set(out):
            return None
        # An axis of one element may be broadcast.
        axes = [names.index(x) if x in names else None for x in out]
        shape = [1 if axis is None else mark.shape[axis] for axis in axes]
        ordered = mark.permute([axis for axis in axes if axis is not None])
        return ordered.reshape(shape).expand(user.value.shape)
    is_convolved = (
        user.name.startswith(("conv", "avg_pool")) and user.args[0] is node and user.value.shape == node.value.shape
    )
    if user.name in ELEMENTWISE or is_convolved:
        with suppress(RuntimeError):
            return mark.expand(user.value.shape)
        return None
    if user.name not in MOVING | JOINING | {"setitem"}:
        return None

    def marked(value: Any) -> Any:
        if value is node:
            return mark
        value = value.value if isinstance(value, Node) else value
        is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        return torch.zeros_like(value, dtype=mark.dtype) if is_number else value

    # A function may take no numbers.
    with suppress(Exception):
        arguments, named = _mapped((user.args, user.kwargs), marked)
        if user.name == "setitem":
            target = arguments[0].clone()
            target[arguments[1]] = arguments[2]
            return target
        result = user.func(*arguments, **named)
        return result if user.item is None else list(tensors(result))[user.item]
    return None


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the entries of nested arguments, nodes among them."""
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(entry, change) for entry in value)
    if isinstance(value, dict):
        return {name: _mapped(entry, change) for name, entry in value.items()}
    return change(value)
