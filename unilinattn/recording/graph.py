"""`Recording`: the functions that a module calls on tensors which depend on its inputs, as a graph.

Nothing is computed beside the module's own values. What a function does to the tokens is read later, from its output
back, so that scores and gates, which are only frozen factors, cost no more than their values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unilinattn.call.functions import meaning_of
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.recording.complex_numbers import READING, Parts, complex_parts, is_complex, read_part
from unilinattn.rules.functions import (
    BLANK,
    COMPOSITE,
    CONSTANT,
    FACTORS,
    GATE,
    GATED_CONSTANT,
    HOMOGENEOUS,
    LIKE,
    LIMITS,
    NEW,
    PRODUCTS,
    SLOPES,
    WRITING,
    name_of,
    opened,
    rank_of_sum,
)
from unilinattn.rules.mixing_functions import MixingFunction
from unilinattn.rules.refusals import is_stopped_by_host

Kind = Literal["carried", "factor"]
"""Whether a tensor may be linear in the inputs, or depends on them in another way and is frozen."""

GRADIENTS = (torch.autograd.grad, Tensor.backward)
"""Functions that compute gradients."""

LEVELS = ("sigmoid", "hardsigmoid", "log_sigmoid", "logsigmoid")
"""Activations with f(0) != 0."""

GATED = 0.5
"""The rank of a product of a value and a gate: between a linear value and an activation."""

TERMS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda x, other: [(x, other)],
    "multiply": lambda x, other: [(x, other)],
    "addcmul": lambda x, first, other: [(x,), (first, other)],
    "lerp": lambda x, end, weight=None: [(x, weight), (end, weight)],
}
"""The factors of each term of a function's result."""


@dataclass(eq=False)
class Node:
    """A tensor that depends on a module's inputs: the function that made it, and its arguments.

    Attributes:
        name: the function's name; "input" for an input of the module.
        func: the function, without its in-place form.
        args, kwargs: its arguments, with nodes in place of the tensors that have one.
        value: the tensor.
        kind: "factor" if the function's result is frozen.
        rank: 0 for a tensor that is linear in the inputs, `GATED` for a gated one, 1 after an activation, `GATE` after
            one with f(0) != 0, `GATED_CONSTANT` for a constant times such a gate.
        item: the number of the tensor in the function's result, None if it is the result.
        port: name of the input.
        refusal: the reason for which a call of a mixing function has no stages, None if it has.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    kind: Kind
    rank: int | float = 0
    item: int | None = None
    port: str = ""
    refusal: str | None = None

    def __repr__(self) -> str:
        """Show the function and the shape."""
        return f"{self.name}{tuple(self.value.shape)}"


class Recording(TorchFunctionMode):
    """Records every function whose arguments depend on the inputs.

    Args:
        module: the module that runs; its parameters and buffers are constants.
        inputs: the tensors that carry tokens, by port.
        factors: further tensors that may depend on tokens, such as masks: they may multiply, and adding them to a
            carried tensor is an error.

    Attributes:
        differentiates: whether the module computed gradients, whose functions are not recorded.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor], factors: Any) -> None:
        super().__init__()
        self.differentiates = False
        self._nodes: dict[int, Node] = {}
        # Of complex tensors that depend on the inputs; each is kept, so that its number names no other one.
        self._parts: dict[int, tuple[Tensor, Parts]] = {}
        # A tensor that neither the module has nor a function made comes from elsewhere, perhaps from tokens.
        self._constants: dict[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        for tensor in tensors(factors):
            self._enter(Node("argument", None, (), {}, tensor, "factor"))
        for port, tensor in inputs.items():
            self._enter(Node("input", None, (), {}, tensor, "carried", port=port))

    def node(self, value: Any) -> Node | None:
        """Return the node of a tensor, None for a constant."""
        return self._nodes.get(id(value)) if isinstance(value, Tensor) else None

    def _enter(self, node: Node) -> None:
        if not (node.value.is_floating_point() or node.value.is_complex()):
            # A comparison or an index is a step of the inputs.
            node.kind = "factor"
        self._nodes[id(node.value)] = node

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record it if an argument depends on the inputs."""
        kwargs = dict(kwargs or {})
        self.differentiates |= func in GRADIENTS
        name, in_place = name_of(func, dict(kwargs))
        meaning = meaning_of(func)
        if meaning is not None and not isinstance(meaning, MixingFunction):
            with self:
                return meaning(*args, **kwargs)
        if name in COMPOSITE:
            with self:
                return opened(func)(*args, **kwargs)
        if is_stopped_by_host(name) and self.node(args[0]) is not None:
            self._same(args[0], result := func(*args, **kwargs))
            return result
        for tensor in tensors((args, kwargs)):
            # A function among the arguments may contain modules, whose parameters are constants too.
            is_constant = id(tensor) in self._constants or isinstance(tensor, nn.Parameter)
            if id(tensor) in self._nodes or is_constant:
                continue
            if is_zero(tensor):
                # A first state, for instance, holds no tokens.
                self._keep(tensor)
            else:
                self._enter(Node("attribute", None, (), {}, tensor, "factor"))
        named, resolved = mapped((args, kwargs), self._resolve)
        if name in LIKE:
            # Of the other arguments only the shape or the dtype matters.
            named, resolved = (named[0], *args[1:]), kwargs
        called = args, kwargs
        if in_place and name in WRITING:
            # Nothing is left of the target: the value is written into all of it.
            value, written = (next(iter((*a[1:], *k.values())), 0) for a, k in ((named, resolved), called))
            called = (args[0], ..., written), {}
            name, in_place, named, resolved = "setitem", False, (torch.zeros_like(args[0]), ..., value), {}
        before = args[0] if (in_place or name == "setitem") and isinstance(args[0], Tensor) else None
        if before is not None and (node := self.node(before)) is not None:
            # Earlier functions read the value that is written over here.
            node.value = before.clone()
        if meaning is not None:
            return self._mixed(func, meaning, args, kwargs, (named, resolved))
        # Of some arguments only the shape matters.
        nodes = [] if name in NEW else list(_nodes_in((named, resolved)))
        plain = (getattr(Tensor, name, None) or getattr(functional, name, func)) if in_place else func
        parts = self._complex(name, plain, *called) if nodes else None
        result = func(*args, **kwargs)
        if isinstance(parts, Tensor):
            # The value is the host's, so that an error in the parts would be seen in the module's output.
            self._same(parts, result)
            return result
        if before is not None:
            self._parts.pop(id(before), None)
        if not nodes:
            if name in BLANK:
                # Numbers that happen to be in memory may be NaN, which no later write removes from a sum.
                result.zero_()
            if before is not None:
                self._nodes.pop(id(before), None)
            self._keep(result if before is None else before)
            return result
        kind: Kind = "factor" if name in FACTORS | CONSTANT else _kind(nodes)
        resolved.pop("inplace", None)
        rank = _rank(name, nodes, named)
        target = before if before is not None else result
        if parts is not None:
            pairs = [parts] if isinstance(target, Tensor) else parts
            self._parts |= {id(t): (t, pair) for t, pair in zip(tensors(target), pairs, strict=True)}
        if isinstance(target, Tensor):
            self._enter(Node(name, plain, named, resolved, target, kind, rank))
        else:
            for item, tensor in enumerate(tensors(target)):
                self._enter(Node(name, plain, named, resolved, tensor, kind, rank, item))
        return result

    def _complex(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a function of complex numbers by its real and imaginary parts.

        Returns the parts of its result, a real tensor for a part that is read, and None for other functions and where
        parts are unknown.
        """
        if not is_complex(name, args, kwargs):
            return None
        with self:
            if name not in READING:
                return complex_parts(name, func, args, kwargs, self._parts_of)
            pair = self._parts_of(args[0])
            return None if pair is None else read_part(name, pair)

    def _same(self, tensor: Tensor, result: Tensor) -> None:
        """Record a result as the same values as another tensor's."""
        node = self.node(tensor)
        if node is None:
            self._keep(result)
        else:
            self._enter(Node("clone", torch.clone, (node,), {}, result, node.kind, node.rank))

    def _parts_of(self, tensor: Tensor) -> Parts | None:
        if id(tensor) in self._parts:
            return self._parts[id(tensor)][1]
        node = self.node(tensor)
        if node is None:
            return tensor.real, tensor.imag
        if node.kind == "carried":
            return None
        with torch._C.DisableTorchFunction():
            parts = tensor.real.clone(), tensor.imag.clone()
        for name, part in zip(("real", "imag"), parts, strict=True):
            self._enter(Node(name, None, (node,), {}, part, "factor"))
        self._parts[id(tensor)] = tensor, parts
        return parts

    def _mixed(self, func: Any, function: MixingFunction, args: Any, kwargs: Any, nodes: Any) -> Any:
        """Record a call of a mixing function, whose values are those of its stages; without stages it runs itself."""
        refusal = None
        try:
            result = function.value(func, args, kwargs)
        except UncoveredError as error:
            result, refusal = func(*args, **kwargs), str(error)
        named, resolved = nodes
        carried = function.arguments(func, named, resolved).get(function.carried)
        kind: Kind = carried.kind if isinstance(carried, Node) else "factor"
        for item, tensor in enumerate(tensors(result)):
            # Other results, such as states, are not linear in the carried argument.
            item_kind: Kind = kind if item == 0 else "factor"
            self._enter(Node(func.__name__, func, named, resolved, tensor, item_kind, 0, item, refusal=refusal))
        return result

    def _resolve(self, tensor: Tensor) -> Any:
        return self._nodes.get(id(tensor), tensor)

    def _keep(self, result: Any) -> None:
        for tensor in tensors(result):
            self._constants[id(tensor)] = tensor


def is_zero(tensor: Tensor) -> bool:
    """Tell whether all numbers are zero; those that are unknown, inside of `vmap` or without data, may be others."""
    is_unknown = tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_unknown and not bool(tensor.any())


def _nodes_in(value: Any) -> Iterator[Node]:
    return (entry for entry in _entries(value) if isinstance(entry, Node))


def _entries(value: Any) -> Iterator[Any]:
    """Yield the objects in nested tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from _entries(entry)
    elif isinstance(value, Mapping):
        yield from _entries(list(value.values()))
    else:
        yield value


def _kind(nodes: list[Node]) -> Kind:
    return "carried" if any(node.kind == "carried" for node in nodes) else "factor"


def _adds_zero(args: tuple[Any, ...]) -> bool:
    """Tell whether the constants among the arguments are zero, such as a first state."""
    return all(isinstance(x, Node) or (isinstance(x, Tensor) and is_zero(x)) for x in args)


def _rank(name: str, nodes: list[Node], args: tuple[Any, ...]) -> int | float:
    """Return the rank of a function's result (see `Node.rank`)."""
    ranks = [node.rank for node in nodes if node.kind == "carried"]
    rank = rank_of_sum(ranks)
    if name in HOMOGENEOUS:
        return max(rank, 1)
    if name in SLOPES:
        return GATE if name in LEVELS else max(rank, int(name not in LIMITS))
    if name in ("add", "sub", "rsub") and len(nodes) == 1 and _is_activation(nodes[0]) and not _adds_zero(args):
        # An activation plus a constant, such as 1 + tanh, is one with f(0) != 0.
        return GATE
    if name in TERMS:
        terms = [[x for x in factors if x is not None] for factors in TERMS[name](*args)]
        return rank_of_sum(map(rank_of_product, filter(_carries, terms)))
    if name not in PRODUCTS:
        return rank
    if name == "scaled_dot_product_attention" or len(ranks) < len(nodes):
        # A sum over tokens with weights that depend on them activates none of its values.
        return 0
    if len(nodes) == 1:
        # A first state of zeros stays zero.
        return 0 if any(isinstance(x, Tensor) and is_zero(x) for x in _entries(args)) else rank
    return min(rank, GATED)


def _carries(factors: list[Any]) -> bool:
    return any(isinstance(x, Node) and x.kind == "carried" for x in factors)


def rank_of_product(factors: list[Any]) -> int | float:
    """Return the rank of a product of one or two factors, 0 if none is carried."""
    carried = [x for x in factors if isinstance(x, Node) and x.kind == "carried"]
    ranks = [node.rank for node in carried]
    if not carried:
        return 0
    if len(carried) == 1:
        constants = [x for x in factors if isinstance(x, Tensor)]
        if any(map(is_zero, constants)):
            # A first state of zeros stays zero.
            return 0
        return GATED_CONSTANT if ranks[0] >= GATE and any(x.ndim for x in constants) else ranks[0]
    sizes = [node.value.numel() for node in carried]
    if sizes[0] != sizes[1]:
        # A factor for many channels, such as a rate of writing, is no activation of each.
        return ranks[sizes[0] < sizes[1]]
    # A product with a gate, such as x sigmoid(x), is zero at zero again.
    return GATE if min(ranks) >= GATE else min(max(ranks), GATED)


def _is_activation(node: Node) -> bool:
    """Tell whether a tensor is an activation of one value, perhaps times a constant, and no product of values."""
    while node.name not in SLOPES | HOMOGENEOUS:
        nodes = list(_nodes_in((node.args, node.kwargs)))
        if len(nodes) != 1 or node.kind != "carried":
            return False
        (node,) = nodes
    return node.name not in LIMITS
