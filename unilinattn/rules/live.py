"""`Live`: run a host by its gradients, with the rules of AttnLRP in place of the derivatives that break relevance.

A tensor is carried if it requires a gradient; the model's parameters require none meanwhile. Everything that the tokens
decide is carried too: queries, keys, step sizes, decays, gates. The value times the gradient of a carried tensor is its
relevance.
- Of a product of two carried tensors each gets half; of values and the matrix that mixes them, the parts of a `Paths`.
- A function of one value such as SiLU has its frozen slope (f(p) - f(0)) / p, and so has a factor that is an
  activation of the value it multiplies, written out as in x sigmoid(x).
- An exponential or a softplus is such a function too, if its result is added to values.
- A norm's scale is a constant.
- All other functions, softmax and exponentials among them, have their derivative.

Source: Achtibat et al., "AttnLRP: attention-aware layer-wise relevance propagation for Transformers" (ICML 2024).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from unilinattn.call.functions import meaning_of
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.rules import functions as kinds
from unilinattn.rules.composed import Compositions, is_step
from unilinattn.rules.forms import FORMS, carried
from unilinattn.rules.functions import name_of, opened
from unilinattn.rules.live_functions import Derivative, Paths, differentiated
from unilinattn.rules.live_mixing import MIXING
from unilinattn.rules.mixing_functions import MixingFunction
from unilinattn.rules.refusals import is_stopped_by_host
from unilinattn.rules.slopes import DIFFERENCES

DECIDED = 3
"""The rank of a tensor that a softmax, an exponential or another function of `FACTORS` made."""

NORMS = kinds.SIZES | frozenset(["sqrt", "rsqrt", "var"])
"""Functions whose output scales a norm, if their argument is no decided tensor."""

ELEMENTWISE = (
    kinds.SLOPES
    | kinds.HOMOGENEOUS
    | kinds.ACTIVATING
    | kinds.SAME
    | frozenset(["view_as", "add", "sub", "subtract", "rsub", "mul", "multiply", "pow", "square", "neg", "negative"])
    | frozenset(["div", "divide", "true_divide", "rdiv", "reciprocal", "log"])
)
"""Functions whose output is a function of one value at each entry, if the other arguments are constants."""

_ADDING = kinds.CHOOSING | kinds.JOINING | frozenset(["add", "sub", "subtract", "rsub", "setitem"])
"""Functions that add their arguments to each other, or write them into one tensor."""

_OF_SUMS = (
    kinds.SAME | kinds.MOVING | frozenset(["mul", "multiply", "div", "divide", "true_divide", "masked_fill", "neg"])
)
"""Functions of a sum, and of constants, that are still sums of the same values."""

_OF_SCORES = frozenset(["softmax", "log_softmax", "exp", "logsumexp"])
"""Functions that make a matrix of scores."""

_ACTIVATIONS = kinds.SLOPES | kinds.HOMOGENEOUS

_SAVING = _ACTIVATIONS | kinds.FACTORS
"""Functions of one value whose derivative may need the argument or the result."""


class Live(TorchFunctionMode):
    """Applies the rules to every function of torch that a host calls on carried tensors.

    Args:
        where: returns the path and class of the module that is running, for errors.
        paths: the weights of the backward passes.
        mark: called with each function of constants, its arguments and its result; returns the result, or a tensor
            that is carried from here on.
    """

    def __init__(self, where: Callable[[], str], paths: Paths, mark: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._where, self._paths, self._mark = where, paths, mark
        self._ranks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._roots: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # The functions of `ACTIVATING` that made a decided tensor, or were added to a value.
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # Sums of decided functions of one value, and masks that a comparison made.
        self._sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.composed = Compositions()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the rule of a function."""
        if func.__name__ == "__get__" and not isinstance(attribute := func(*args), Tensor):
            return attribute
        kwargs = dict(kwargs or {})
        name, in_place = name_of(func, kwargs)
        if name == "requires_grad" and in_place:
            # A host that switches gradients on or off does not change which tensors are carried.
            return args[0]
        if is_stopped_by_host(name) and carried(args) and torch.is_grad_enabled():
            # Its values reach the output all the same.
            name, func, args, kwargs, in_place = "view_as", Tensor.view_as, (args[0], args[0].detach()), {}, False
        if (meaning := meaning_of(func)) is not None and carried((args, kwargs)):
            with self:
                if isinstance(meaning, MixingFunction):
                    return meaning.value(func, args, kwargs)
                return meaning(*args, **kwargs)
        if (call := opened(name, func, args, kwargs)) is not None:
            with self:
                return call()
        if name in kinds.LIKE:
            # Of the other arguments only the shape or the dtype matters.
            args, kwargs = (args[0], *mapped(args[1:], torch.detach)), mapped(kwargs, torch.detach)
        live = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if (name in kinds.COMPARING and live) or (name in kinds.SAME and args[0] in self._masks):
            self._masks[result := func(*args, **kwargs)] = True
            return result
        if not live or not torch.is_grad_enabled():
            return self._mark(func, args, func(*args, **kwargs))
        rank = self._rank_of(name, live, args, kwargs)
        rule = _RULES.get(name)
        if in_place and (rule is not None or name in _SAVING):
            function = getattr(torch.Tensor, name, None) or getattr(functional, name)
            # The graph may keep argument and result, and this or a later function writes over them.
            before = args[0].clone()
            self._ranks[before] = self.rank(args[0])
            computed = self._apply(name, function, (before, *args[1:]), kwargs)
            rank = self._ranks.get(computed, rank)
            result = args[0].copy_(computed)
            self._made[result] = self._made.get(computed, self._made.get(result, frozenset()))
        else:
            result = self._apply(name, func, args, kwargs)
            self.composed.follow(name, func, args, kwargs, result)
            if (
                name in ("add", "sub", "subtract", "rsub")
                and rank == DECIDED
                and self.composed.root(result) is not result
            ):
                self._sums[result] = True
        self._tell_activations(name, live, list(tensors(result)), rank)
        if in_place or name == "setitem":
            self._rewritten(name, args, kwargs, rank)
            return result
        for tensor in tensors(result):
            if tensor.requires_grad and tensor not in self._ranks:
                self._ranks[tensor] = rank
        if isinstance(result, Tensor) and name in ELEMENTWISE:
            self._follow(live, result)
        return result

    def _tell_activations(self, name: str, live: Sequence[Tensor], results: Sequence[Tensor], rank: int) -> None:
        """Tell functions of `ACTIVATING` whether they are activations, with a frozen slope.

        One is if its result is added to values, unless they are scores, of which a softmax makes a matrix.
        """
        # A set: a stream that is added to itself in every layer has each function once.
        made = {derivative for tensor in (*live, *results) for derivative in self._made.get(tensor, ())}
        if (name in _ADDING and rank < DECIDED) or name in _OF_SCORES:
            for derivative in made:
                derivative.is_slope = name in _ADDING
        if made and (rank == DECIDED or name in _ADDING or (name in _OF_SUMS and len(live) == 1)):
            for tensor in results:
                self._made[tensor] = made

    def _rewritten(self, name: str, args: Any, kwargs: Any, rank: int) -> None:
        """Note the rank of a tensor that was written into, and which value it is a function of."""
        written = args[0]
        if not written.requires_grad:
            return
        self._ranks[written] = rank
        roots = {id(self._root(tensor)) for tensor in tensors((args, kwargs)) if tensor.requires_grad}
        if name not in ELEMENTWISE or len(roots) > 1:
            # It is a new value; functions of the former one, which may have been the tensor itself, are none of it.
            self._roots[written] = written.detach()

    def rank(self, value: Any) -> int:
        """Return 0 for a value, 1 after an activation, 2 after one with f(0) != 0, and `DECIDED`."""
        return self._ranks.get(value, 0) if isinstance(value, Tensor) and value.requires_grad else 0

    def _rank_of(self, name: str, live: Sequence[Tensor], args: Any, kwargs: Any) -> int:
        """Return the rank of a function's result."""
        if name in kinds.FACTORS:
            return DECIDED
        ranks = [self.rank(tensor) for tensor in live]
        if any(x in self._masks and x.numel() == live[0].numel() for x in tensors((args, kwargs))):
            # A mask that a comparison of values made makes an activation of others.
            ranks = [max(rank, 1) for rank in ranks]
        if name in _ACTIVATIONS:
            is_limit = name in kinds.LIMITS and not is_step(name, args[1:], kwargs)
            rank = max(2 if name in DIFFERENCES else int(not is_limit), *ranks)
            return 2 if rank == 1 and self.composed.is_shifted(name, args, kwargs) else rank
        if name in ("add", "sub", "rsub") and len(ranks) == 1 and ranks[0] == 1:
            # An activation plus a constant, such as 1 + tanh, is one with f(0) != 0.
            return 2
        # What is added to a value, or written into one, is a value.
        values = [rank for rank in ranks if rank < DECIDED]
        if values and (name in kinds.PRODUCTS or name in kinds.AFFINE):
            # A linear map of activations is a value again, as in a frozen run.
            return 0
        return int(kinds.rank_of_sum(values)) if values else DECIDED

    def is_sum(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a sum of a number and decided functions of one value, such as 1 + exp(x)."""
        return tensor in self._sums and self.rank(self.composed.root(tensor)) < DECIDED

    def _follow(self, live: Sequence[Tensor], result: Tensor) -> None:
        """Note the value that a result is an elementwise function of."""
        roots = {id(root): root for root in map(self._root, live)}
        (root,) = roots.values() if len(roots) == 1 else (None,)
        if root is not None and root.shape == result.shape and root is not result:
            self._roots[result] = root

    def _root(self, tensor: Tensor) -> Tensor:
        return self._roots.get(tensor, tensor)

    def _apply(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _RULES:
            return _RULES[name](self, func, *args, **kwargs)
        if name in kinds.RECURRENT:
            raise UncoveredError(
                f"{self._where()} calls {name!r}, whose products the rules of relevance do not see: its state passes a "
                "nonlinearity at every step, in one kernel."
            )
        if name in FORMS:
            result, constant = FORMS[name](*args, **kwargs)
            return result if constant is None else result + constant
        if name in NORMS and all(self.rank(tensor) < DECIDED for tensor in tensors((args, kwargs))):
            return func(*mapped(args, torch.detach), **mapped(kwargs, torch.detach))
        if name in kinds.SLOPES and self.rank(args[0]) < DECIDED:
            return _slope(name, func, *args, **kwargs)
        if name in kinds.ACTIVATING and args and self.rank(args[0]) < DECIDED:
            derivative = Derivative()
            result = differentiated(derivative, name, func, *args, **kwargs)
            self._made[result] = {derivative}
            return result
        if name in ("log", "log1p") and args and self.rank(args[0]) == DECIDED:
            # A softplus, log(1 + exp(x)).
            return self._whole(Derivative(), name, func, args, kwargs)
        if name in kinds.PRODUCTS or name in kinds.AFFINE:
            return self.product(func, args, kwargs)
        return func(*args, **kwargs)

    def _whole(self, derivative: Derivative, name: str, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """Return a function of decided tensors, of one value f with a finite f(0) if they are such functions."""
        result = func(*args, **kwargs)
        self.composed.follow(name, func, args, kwargs, result)
        root, level = self.composed.root(result), self.composed.level(result)
        if level is None or not level.isfinite() or self.rank(root) == DECIDED:
            return result
        whole = differentiated(derivative, "", partial(self.composed.at, result), root)
        if derivative.is_slope:
            self._ranks[whole] = 2 if bool(level) else 1
        else:
            self._made[whole] = {derivative}
        return whole

    def weighted(self, tensor: Tensor, share: str, scale: float = 1.0) -> Tensor:
        """Return a tensor whose gradient has the weight of a share (see `Paths`)."""
        return self._paths.weighted(tensor, share, scale)

    def product(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a product that is linear in each operand, which share its relevance if they are carried.

        A sum of values by weights that a softmax or an exponential made, over tokens, is the product of a matrix.
        """
        operands = list({id(t): t for t in tensors((args, kwargs)) if t.requires_grad}.values())
        if len(operands) == 1:
            return func(*args, **kwargs)
        ranks = [self.rank(operand) for operand in operands]
        shares = self._shares(operands, ranks, sums=func is not torch.mul)
        weighted = {id(t): self.weighted(t, *share) for t, share in zip(operands, shares, strict=True)}
        args, kwargs = mapped((args, kwargs), lambda t: weighted.get(id(t), t))
        result = func(*args, **kwargs)
        # A product of a value with a factor is a value, and one of two decided tensors is decided.
        self._ranks[result] = min(min(ranks), 1) if min(ranks) < DECIDED else DECIDED
        return result

    def _shares(self, operands: list[Tensor], ranks: list[int], *, sums: bool) -> list[tuple[str, float]]:
        value, factor = ("values", "matrix") if sums and max(ranks) == DECIDED else ("value", "factor")
        sizes = [operand.numel() for operand in operands]
        if not sums and max(ranks) < DECIDED and len(set(sizes)) > 1:
            # A scale (batch, length, 1) of a stream (batch, length, channel) is a factor at any rank.
            ranks = [-size for size in sizes]
        if len(set(ranks)) == 1:
            return [("", 1 / len(operands))] * len(operands)
        return [(value if rank == min(ranks) else factor, 1.0) for rank in ranks]


def _slope(name: str, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a function of one value, whose derivative is its frozen slope."""
    return differentiated(Derivative(is_slope=True), name, func, x, *args, **kwargs)


def _mul(mode: Live, func: Any, x: Any, other: Any) -> Tensor:
    if carried(x) and carried(other):
        if x is other:
            return x.detach() * x
        if mode._root(x) is mode._root(other):
            # An activation that is written out, such as x sigmoid(x), has a frozen slope.
            frozen_first = mode.rank(x) > mode.rank(other)
            result = x.detach() * other if frozen_first else x * other.detach()
            # Such as x sigmoid(x), which is zero at zero.
            mode._ranks[result] = max(1, min(mode.rank(x), mode.rank(other)))
            return result
    return mode.product(torch.mul, (x, other), {})


def _div(mode: Live, func: Any, x: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is not None:
        return torch.div(*mapped((x, other), torch.detach), rounding_mode=rounding_mode)
    if carried(other) and mode.rank(x) != DECIDED:
        if carried(x) and mode._root(x) is mode._root(other) and x.shape == other.shape:
            # An activation that is written out, such as x / (1 + exp(-x)), has a frozen slope.
            result = x / other.detach()
            mode._ranks[result] = max(mode.rank(x), 1)
            return result
        if mode.is_sum(other):
            # A gate, 1 / (1 + exp(-x)).
            gate = _reciprocal(mode, torch.reciprocal, other)
            return _mul(mode, func, x, gate)
        # A norm divides by a size of the value; the divisor of a sum of weighted values belongs to the weights.
        if mode.rank(other) < DECIDED:
            other = other.detach()
        elif carried(x):
            other = mode.weighted(other, "matrix")
    elif carried(other) and mode.is_sum(other):
        return mode._whole(Derivative(is_slope=True), "div", torch.div, (x, other), {})
    return torch.div(x, other)


def _reciprocal(mode: Live, func: Any, x: Tensor) -> Tensor:
    if not mode.is_sum(x):
        return torch.reciprocal(x)
    return mode._whole(Derivative(is_slope=True), "reciprocal", torch.reciprocal, (x,), {})


def _rdiv(mode: Live, func: Any, x: Tensor, other: Any) -> Tensor:
    return _div(mode, func, other, x)


def _square(mode: Live, func: Any, x: Tensor) -> Tensor:
    return x.detach() * x


def _pow(mode: Live, func: Any, x: Any, exponent: Any) -> Tensor:
    if not carried(x) or isinstance(exponent, Tensor) or mode.rank(x) == DECIDED:
        return torch.pow(x, exponent)
    if exponent < 1:
        # The scale of a norm.
        return torch.pow(x.detach(), exponent)
    return x.detach().pow(exponent - 1) * x


def _addcmul(mode: Live, func: Any, x: Any, first: Any, other: Any, *, value: int | float = 1) -> Tensor:
    return torch.add(x, _mul(mode, func, first, other), alpha=value)


def _addcdiv(mode: Live, func: Any, x: Any, first: Any, other: Any, *, value: int | float = 1) -> Tensor:
    return torch.add(x, _div(mode, func, first, other), alpha=value)


def _lerp(mode: Live, func: Any, x: Any, end: Any, weight: Any) -> Tensor:
    return x + _mul(mode, func, end - x, weight)


def _glu(mode: Live, func: Any, x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    activated = _slope("sigmoid", torch.sigmoid, gate)
    mode._ranks[activated] = 2
    return mode.product(torch.mul, (value, activated), {})


_RULES: dict[str, Callable[..., Any]] = {
    "mul": _mul,
    "multiply": _mul,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "rdiv": _rdiv,
    "square": _square,
    "pow": _pow,
    "reciprocal": _reciprocal,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "glu": _glu,
    **MIXING,
}
