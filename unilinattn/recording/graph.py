"""`Recording`: the functions that a module calls on tensors which depend on its inputs, as a graph.

Nothing is computed beside the module's own values. What a function does to the tokens is read later, from its output
back, so that scores and gates, which are only frozen factors, cost no more than their values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unilinattn.call.axes import joined_heads
from unilinattn.call.functions import meaning_of
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.recording.complex_numbers import READING, Parts, complex_parts, is_complex, read_part
from unilinattn.recording.keys import OUTER, position
from unilinattn.recording.nodes import MASK, Kind, Node, is_zero, kind_of, nodes_in, rank_of
from unilinattn.recording.views import Views, constants_in, elements_of, same_elements, slice_of, with_copy
from unilinattn.rules.functions import (
    BLANK,
    CONSTANT,
    FACTORS,
    LIKE,
    NEW,
    SOLVING,
    WRITING,
    name_of,
    opened,
)
from unilinattn.rules.mixing_functions import MixingFunction
from unilinattn.rules.refusals import is_stopped_by_host

_OUT_OF_PLACE = (
    "it writes in place into memory that another tensor reads, through `.data`, `.detach()` or another view; "
    "write it out of place, such as h = h * a instead of h.data.mul_(a)"
)
"""Why a write in place has no stages."""

GRADIENTS = (torch.autograd.grad, Tensor.backward)
"""Functions that compute gradients."""


class Recording(TorchFunctionMode):
    """Records every function whose arguments depend on the inputs.

    Args:
        module: the module that runs; its parameters and buffers are constants.
        inputs: the tensors that carry tokens, by port.
        heads: the axis of tokens of those with heads (see `token_axis`), by port.
        factors: further tensors that may depend on tokens, such as masks: they may multiply, and adding them to a
            carried tensor is an error.
        masks: further tensors that depend on no token, such as padding masks: they may multiply and be added.

    Attributes:
        differentiates: whether the module computed gradients, whose functions are not recorded.
    """

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, Tensor], heads: Mapping[str, int], factors: Any, masks: Any = ()
    ) -> None:
        super().__init__()
        self.differentiates = False
        self._nodes: dict[int, Node] = {}
        # Of complex tensors that depend on the inputs; each is kept, so that its number names no other one.
        self._parts: dict[int, tuple[Tensor, Parts]] = {}
        # A tensor that neither the module has nor a function made comes from elsewhere, perhaps from tokens.
        self._constants: dict[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self._views = Views()
        # The nodes with a constant among their arguments, by its number.
        self._users: dict[int, list[Node]] = {}
        for tensor in self._constants.values():
            self._views.enter(tensor)
        for tensor in tensors(factors):
            self._enter(Node("argument", None, (), {}, tensor, "factor"))
        for tensor in tensors(masks):
            self._enter(Node(MASK, None, (), {}, tensor, "factor"))
        for port, tensor in inputs.items():
            axis = heads.get(port)
            vectors = tensor if axis is None else joined_heads(tensor, axis)
            node = Node("input", None, (), {}, vectors, "carried", port=port)
            self._enter(node)
            if axis is not None:
                by_token = _moved(torch.reshape, node, tensor.transpose(1, axis).shape)
                self._enter(Node("transpose", torch.transpose, (by_token, 1, axis), {}, tensor, "carried"))

    def node(self, value: Any) -> Node | None:
        """Return the node of a tensor, None for a constant."""
        if not isinstance(value, Tensor):
            return None
        if self._views.is_stale(value):
            self._read_again(value)
        return self._nodes.get(id(value))

    def _enter(self, node: Node) -> None:
        if not (node.value.is_floating_point() or node.value.is_complex()):
            # A comparison or an index is a step of the inputs.
            node.kind = "factor"
        self._nodes[id(node.value)] = node
        self._views.enter(node.value)
        for constant in constants_in((node.args, node.kwargs)):
            self._users.setdefault(id(constant), []).append(node)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record it if an argument depends on the inputs."""
        kwargs = dict(kwargs or {})
        self.differentiates |= func in GRADIENTS
        name, in_place = name_of(func, dict(kwargs))
        meaning = meaning_of(func)
        if meaning is not None and not isinstance(meaning, MixingFunction):
            with self:
                return meaning(*args, **kwargs)
        if (call := opened(name, func, args, kwargs)) is not None:
            with self:
                return call()
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
        if func is Tensor.__setitem__ and self._is_in_place(args):
            return func(*args, **kwargs)
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
        base = None
        if before is not None:
            base, (named, resolved) = self._copied(before, (named, resolved))
        if meaning is not None:
            return self._mixed(func, meaning, args, kwargs, (named, resolved))
        # Of some arguments only the shape matters.
        nodes = [] if name in NEW else list(nodes_in((named, resolved)))
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
            if before is not None:
                self._write_into(base, before, name)
            return result
        is_factor = name in FACTORS | CONSTANT or (name in SOLVING and kind_of(list(nodes_in(named[1:2]))) == "factor")
        kind: Kind = "factor" if is_factor else kind_of(nodes)
        resolved.pop("inplace", None)
        rank = rank_of(name, nodes, named)
        target = before if before is not None else result
        if parts is not None:
            pairs = [parts] if isinstance(target, Tensor) else parts
            self._parts |= {id(t): (t, pair) for t, pair in zip(tensors(target), pairs, strict=True)}
        if isinstance(target, Tensor):
            is_bilinear = name in OUTER and sum(node.kind == "carried" for node in nodes) > 1
            at = position() if is_bilinear else ()
            self._enter(Node(name, plain, named, resolved, target, kind, rank, position=at))
            if before is not None:
                self._write_into(base, before, name)
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
        node = self.node(tensor)
        return tensor if node is None else node

    def _keep(self, result: Any) -> None:
        for tensor in tensors(result):
            self._constants[id(tensor)] = tensor
            self._views.enter(tensor)

    def _is_in_place(self, args: Any) -> bool:
        """Tell whether a view is assigned to its own place, the second half of `x[:, t] += y`."""
        target, place, value = args
        keys = place if isinstance(place, tuple) else (place,)
        if any(not isinstance(key, (int, slice)) and key is not Ellipsis for key in keys):
            return False
        with torch._C.DisableTorchFunction():
            return isinstance(value, Tensor) and same_elements(target[place], value)

    def _copied(self, target: Tensor, arguments: Any) -> tuple[tuple[Tensor, Any] | None, Any]:
        """Copy the values in the memory of a tensor that is written over, which earlier functions read.

        Returns the base of this memory and its node or its value, None if it is the tensor, and the arguments. A base
        whose detached view is written has neither, since autograd does not see the write.
        """
        base = self._base(target) if len(self._views.sharing(target)) > 1 else target
        # The base may have been added.
        sharing = self._views.sharing(target)
        origin = self._nodes.get(id(target))
        is_detached = base is not target and origin is not None and origin.name in CONSTANT
        value: Any = None if base is None else self._nodes.get(id(base))
        for tensor in sharing:
            node = self._nodes.get(id(tensor))
            if node is not None:
                if node.value is tensor:
                    node.value = tensor.clone()
                continue
            users = self._users.pop(id(tensor), [])
            if not users and tensor is not target and tensor is not base:
                continue
            copy = tensor.clone()
            value = copy if tensor is base else value
            arguments = with_copy(arguments, tensor, copy)
            for user in users:
                user.args, user.kwargs = with_copy((user.args, user.kwargs), tensor, copy)
                self._users.setdefault(id(copy), []).append(user)
        return None if base is None or base is target else (base, None if is_detached else value), arguments

    def _base(self, target: Tensor) -> Tensor | None:
        """Return the base of a memory; a tensor that has other strides, as a copy may, is recorded in their order."""
        base = self._views.base(target)
        if base is not None or (dense := self._views.dense(target)) is None:
            return base
        tensor, order = dense
        node, base = self.node(tensor), tensor.permute(order)
        if node is None:
            self._keep(base)
        else:
            self._enter(Node("permute", torch.permute, (node, order), {}, base, node.kind, node.rank))
        return base

    def _write_into(self, base: tuple[Tensor, Any] | None, target: Tensor, name: str) -> None:
        """Record the base of a memory after a write into a view of it."""
        self._views.write(target)
        if base is None:
            return
        tensor, old = base
        value = self._nodes.get(id(target), target.clone())
        nodes = list(nodes_in((old, value)))
        if not nodes:
            return
        kind, rank = kind_of(nodes), rank_of("setitem", nodes, (old, value))
        if old is not None and (part := slice_of(target, tensor)) is not None:
            value = _moved(torch.permute, value, part.order)
            value = _moved(torch.reshape, value, part.read(tensor).shape)
            old = _moved(torch.reshape, old, part.shape)
            split = tensor if part.shape == tensor.shape else tensor.reshape(part.shape).clone()
            node = Node("setitem", Tensor.__setitem__, (old, part.key, value), {}, split, kind, rank)
            self._enter(node)
            if split is not tensor:
                self._enter(Node("reshape", torch.reshape, (node, tensor.shape), {}, tensor, kind, node.rank))
        else:
            self._enter(Node(f"{name}_", None, (), {}, tensor, kind, rank, refusal=_OUT_OF_PLACE))

    def _select(self, node: Node, elements: Tensor, tensor: Tensor) -> None:
        """Record a tensor as elements of another one by their numbers."""
        flat = Node("reshape", torch.reshape, (node, (-1,)), {}, node.value.reshape(-1), node.kind, node.rank)
        self._enter(Node("getitem", Tensor.__getitem__, (flat, elements), {}, tensor, node.kind, node.rank))

    def _read_again(self, tensor: Tensor) -> None:
        """Record a tensor into whose memory another one has written, as a part of the base of the memory."""
        base = self._views.base(tensor)
        node = None if base is None else self._nodes.get(id(base))
        if node is not None:
            self._select(node, elements_of(tensor), tensor)
            return
        others = [self._nodes[id(other)] for other in self._views.sharing(tensor) if id(other) in self._nodes]
        if base is None and others:
            self._enter(Node("a write in place", None, (), {}, tensor, kind_of(others), refusal=_OUT_OF_PLACE))
            return
        self._nodes.pop(id(tensor), None)
        self._keep(tensor)


def _moved(func: Any, value: Any, argument: Sequence[int]) -> Any:
    """Return a value, or its node, with its axes in another order or with another shape, the argument of `func`."""
    if not isinstance(value, Node):
        return func(value, argument)
    moved = func(value.value, argument)
    if same_elements(moved, value.value):
        return value
    return Node(func.__name__, func, (value, argument), {}, moved, value.kind, value.rank)
