"""Functions of one value that a host composes, such as 1 / (1 + exp(-x)), and masks of comparisons."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from unilinattn.call.nested import mapped, tensors
from unilinattn.rules import functions as kinds

BY_ELEMENT = (
    (kinds.SAME - {"dropout", "dropout1d", "dropout2d"})
    | kinds.LIMITS
    | kinds.SLOPES
    | kinds.HOMOGENEOUS
    | kinds.ACTIVATING
    | frozenset(["add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "rdiv"])
    | frozenset(["view_as", "neg", "negative", "pow", "rpow", "square", "sqrt", "rsqrt", "reciprocal", "log", "log2"])
)
"""Functions whose output is a function of one value at each entry, if the other arguments are numbers."""

LONGEST = 50
"""Number of functions of functions that are followed; a longer chain, such as that of a loop, is a new value."""

_Call = tuple[int, int, Tensor, list[tuple[Tensor, int]], Callable[..., Any], Any, Any]
"""The version of a result, how many functions lead to it, the root, the call's tensors and versions, the call."""


class Compositions:
    """The functions of one value that the tensors of a run are.

    With y = x / 6 + 1 / 2 and z = y.clamp(0, 1), z is a function of x. A tensor is followed while the other arguments
    are numbers: a bias with a number for each channel belongs to the linear map before the activation.

    Args:
        names: the functions that are followed.
    """

    def __init__(self, names: Collection[str] = BY_ELEMENT) -> None:
        self._names = names
        self._calls: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note the value that a function's result is a function of, if it is one at each entry."""
        if name not in self._names or not isinstance(result, Tensor):
            return
        read = args[:1] if name in kinds.LIKE else (args, kwargs)
        operands = [x for x in tensors(read) if x.numel() > 1 or x.requires_grad or self._call(x)]
        roots = {id(root): root for root in map(self.root, operands)}
        (root,) = roots.values() if len(roots) == 1 else (None,)
        is_new = all(x is not result for x in operands)
        if is_new and root is not None and root.requires_grad and root.shape == result.shape:
            versions = [(x, x._version) for x in operands]
            count = 1 + max(call[1] if (call := self._call(x)) else 0 for x in operands)
            if name == "view_as":
                # Of one shape it changes nothing, and a single point has another one.
                func, args = Tensor.clone, args[:1]
            if count <= LONGEST:
                self._calls[result] = result._version, count, root, versions, func, args, kwargs

    def _call(self, tensor: Tensor) -> _Call | None:
        call: _Call | None = self._calls.get(tensor)
        # What was written into is another value.
        return call if call is not None and call[0] == tensor._version else None

    def root(self, tensor: Tensor) -> Tensor:
        """Return the value that a tensor is a function of: itself, if it is no other one's."""
        call = self._call(tensor)
        return tensor if call is None else call[2]

    def at(self, tensor: Tensor, point: Tensor) -> Any:
        """Return the function that a tensor is, at another point; None if a tensor that it reads was written into."""
        values: dict[int, Any] = {id(self.root(tensor)): point}

        def value(x: Tensor) -> Any:
            if id(x) not in values and (call := self._call(x)) is not None:
                *_, versions, func, args, kwargs = call
                points: dict[int, Any] = {id(t): value(t) if t._version == version else None for t, version in versions}
                is_whole = all(p is not None for p in points.values())
                args, kwargs = mapped((args, kwargs), lambda t: points.get(id(t), t))
                values[id(x)] = func(*args, **kwargs) if is_whole else None
            return values.get(id(x))

        return value(tensor)

    def level(self, tensor: Tensor) -> Tensor | None:
        """Return f(0) of the function f that a tensor is, None for one that is no function of another one."""
        root = self.root(tensor)
        if root is tensor:
            return None
        level: Tensor | None = self.at(tensor, torch.zeros((), dtype=root.dtype, device=root.device))
        return level

    def is_shifted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call limits a value plus a number from above, with f(0) != 0, as hard sigmoids do."""
        is_limit = name in kinds.LIMITS or name == "relu6"
        if not is_limit or limits_of(name, args[1:], kwargs)[1] is None or (level := self.level(args[0])) is None:
            return False
        function = getattr(Tensor, name, None) or getattr(functional, name)
        return bool(function(level, *args[1:], **kwargs).any())


def limits_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the lower and the upper limit of a call of a function of `LIMITS`, or of relu6, behind its argument."""
    if name == "relu6":
        return 0, 6
    if name == "hardtanh":
        lower, upper = (*args, *(-1, 1)[len(args) :])[:2]
        return kwargs.get("min_val", lower), kwargs.get("max_val", upper)
    limits = dict(zip({"clamp_min": ["min"], "clamp_max": ["max"]}.get(name, ["min", "max"]), args, strict=False))
    return tuple({**limits, **kwargs}.get(side) for side in ("min", "max"))  # type: ignore[return-value]


def is_step(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call limits a value from 0 to an upper limit, as hard sigmoids do and limits of sizes do not."""
    if name not in kinds.LIMITS:
        return False
    lower, upper = limits_of(name, args, kwargs)
    return upper is not None and isinstance(lower, (int, float)) and lower == 0
