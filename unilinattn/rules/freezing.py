"""`Freezing`: run a host's token-wise code as a linear map of the tensors that it carries, with frozen factors.

A tensor is carried if it requires a gradient; the model's parameters require none meanwhile. Each function on carried
tensors follows a rule of this module, which detaches its frozen factor. A constant that is added to a carried tensor,
such as a bias, is a source: a dual tensor whose tangent is its value. Gradients then hold the part of a value that
comes from tokens, and tangents (`torch.autograd.forward_ad`) the part that comes from sources. A frozen factor depends
on the tokens, so it is no source: it may multiply a carried tensor. Where it is added, an activation such as softplus
has its slope, and adding another factor is an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.rules import functions as kinds
from unilinattn.rules.composed import BY_ELEMENT, Compositions, is_step
from unilinattn.rules.forms import FORMS, as_source, carried, halved, linear_in, without_gradients
from unilinattn.rules.freezing_functions import RULES
from unilinattn.rules.functions import Product, name_of, opened
from unilinattn.rules.letters import value_among, wide_letters
from unilinattn.rules.refusals import added_factor, is_stopped_by_host
from unilinattn.rules.slopes import frozen_slope

_RULES: dict[str, Callable[..., Any]] = dict(RULES)


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(names, method))
        return method

    return decorate


class Freezing(TorchFunctionMode):
    """Applies the rules to every function of torch that a host calls on carried tensors.

    Args:
        where: returns the path and class of the module that is running, for errors.
        mark: called with each function of constants, its arguments and its result; returns it, or a carried tensor.
        half: whether carried factors of different rank share their product's relevance; else the activated is frozen.

    Attributes:
        shared: functions with two carried factors of equal rank, each of which got half.
        last_sum: the latest sum of two carried tensors (batch, length, channel), None if there is none.
        memory: the numbers of the memory of the model's parameters (`forms.memory_of`), which the caller sets.
    """

    def __init__(
        self,
        where: Callable[[], str],
        mark: Callable[[Any, Any, Any], Any],
        *,
        half: bool = False,
        record: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._where, self._mark, self._half, self._record = where, mark, half, record
        self._ranks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._factors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._added: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._composed = Compositions()
        self.shared: set[str] = set()
        self.last_sum: Tensor | None = None
        self.memory: frozenset[int] = frozenset()
        self._stream: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the rule of a function; raise `UncoveredError` if it has none."""
        args, kwargs = without_gradients(args, kwargs or {}, self.memory)
        name, in_place = name_of(func, dict(kwargs))
        if name == "requires_grad" and in_place:
            # A host that switches gradients on or off does not change which tensors are carried.
            return args[0]
        if is_stopped_by_host(name) and carried(args) and torch.is_grad_enabled():
            # Its values reach the output all the same.
            name, func, args, kwargs, in_place = "view_as", Tensor.view_as, (args[0], args[0].detach()), {}, False
        read = args[:1] if name in kinds.LIKE else (args, kwargs)
        factors = [tensor for tensor in tensors(read) if tensor in self._factors]
        if name in kinds.SELECTING and isinstance(args[0], nn.Parameter):
            # Indices are frozen: what a router selects, such as the biases of an expert, is a constant.
            # The nearest entry of a codebook stands for a value.
            factors = [t for t in factors if t.is_floating_point() or self._factors[t] in kinds.NEAREST]
        origin = next((self._factors[tensor] for tensor in factors), None)
        if name in kinds.LEAVING and args[0].is_floating_point() and (origin or carried(args)):
            raise UncoveredError(
                f"{self._where()} computes outside of torch ({name!r}) on values that depend on the tokens, so their "
                "shares are unknown. Compute in torch."
            )
        if (call := opened(name, func, args, kwargs)) is not None:
            with self:
                return call()
        if name in kinds.LIKE:
            # Of the other arguments only the shape or the dtype matters.
            args, kwargs = (args[0], *mapped(args[1:], torch.detach)), mapped(kwargs, torch.detach)
        added: Callable[[Tensor], Tensor] | None = None
        if (carried(args) or carried(kwargs)) and not torch.is_grad_enabled() and not in_place and name != "setitem":
            result, origin = func(*mapped(args, torch.detach), **mapped(kwargs, torch.detach)), origin or name
        elif carried(args) or carried(kwargs):
            result, origin = self._carry(name, func, args, kwargs, in_place=in_place), origin or name
            if (is_activation := name in kinds.ACTIVATING | kinds.SIZES) or name in BY_ELEMENT:
                added = partial(self._activated if is_activation else self._of_added, name, func, args, kwargs)
        else:
            result = self._mark(func, args, func(*args, **kwargs))
            # A cast to the same dtype returns its argument.
            if not in_place and all(t is not result for t in factors) and any(t in self._added for t in factors):
                added = partial(self._of_added, name, func, args, kwargs)
        if origin is not None and not in_place:
            self._composed.follow(name, func, args, kwargs, result)
        if origin is not None and name not in kinds.NEW:
            origin = name if name in kinds.COMPARING else origin
            for tensor in tensors(args[:1] if name == "setitem" else result):
                if not tensor.requires_grad:
                    self._factors[tensor] = origin
                    if added is not None and isinstance(result, Tensor) and result.is_floating_point():
                        self._added[tensor] = added
        return result

    def _activated(self, name: str, func: Any, args: Any, kwargs: Any, factor: Tensor) -> Any:
        """Return a factor as an activation of carried values."""
        if name in kinds.SIZES:
            return self.ranked(func(*args, **kwargs), 1)
        return self._slope(name, func, *args, **kwargs)

    def _of_added(self, name: str, func: Any, args: Any, kwargs: Any, factor: Tensor) -> Any:
        """Return a function of factors or values as an activation of one value, or else of activations."""
        level = self._composed.level(factor)
        if level is not None and bool(level.isfinite().all()):
            return self._slope("", partial(self._composed.at, factor), self._composed.root(factor))
        args, kwargs = mapped((args, kwargs), lambda t: self._added[t](t) if t in self._added else t)
        return self._apply(name, func, args, dict(kwargs)) if carried((args, kwargs)) else factor

    def _carry(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool
    ) -> Any:
        if name == "setitem":
            return self._write(func, *args)
        if in_place:
            kwargs.pop("inplace", None)
            return self._in_place(name, *args, **kwargs)
        return self._apply(name, func, args, kwargs)

    def constant(self, value: Any, like: Tensor) -> Any:
        """Return a constant as a source."""
        return as_source(value, like, self._record)

    def source(self, value: Any, like: Tensor) -> Any:
        """Return a constant as a source, and a factor as an activation, or else with an error in its gradient."""
        if isinstance(value, Tensor) and value in self._added and carried(added := self._added[value](value)):
            return added
        source = self.constant(value, like)
        if isinstance(value, Tensor) and value.is_floating_point() and value in self._factors and value.any():
            return added_factor(source, like, self._where(), self._factors[value])
        return source

    def _apply(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rank = kinds.rank_of_sum(self.rank(tensor) for tensor in tensors((args, kwargs)) if tensor.requires_grad)
        if name in _RULES:
            return _RULES[name](self, *args, **kwargs)
        if name in FORMS:
            result, constant = FORMS[name](*args, **kwargs)
            return result if constant is None else result + self.constant(constant, result)
        if name in kinds.LINEAR:
            result = self.ranked(func(*args, **kwargs), rank)
            if name in kinds.CASTS and args and self.in_stream(args[0]):
                self.enter_stream(result)
            return result
        if name in kinds.CHOOSING or name in kinds.JOINING:
            like = next(tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad)
            args, kwargs = mapped((args, kwargs), lambda tensor: self.source(tensor, like))
            if name == "where":
                args = (args[0], *(self.source(value, like) for value in args[1:]))
                rank = self._masked(rank, args[0], like)
            return self.ranked(func(*args, **kwargs), rank)
        if name in kinds.HOMOGENEOUS:
            return self.ranked(func(*args, **kwargs), max(rank, 1))
        if name in kinds.SLOPES:
            return self._slope(name, func, *args, **kwargs)
        if name in kinds.FACTORS:
            return func(*mapped(args, torch.detach), **mapped(kwargs, torch.detach))
        if name in kinds.AFFINE:
            return self._affine(func, kinds.AFFINE[name], args, kwargs)
        if name in kinds.PRODUCTS:
            return self._bilinear(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if name not in kinds.CONSTANT and any(tensor.is_floating_point() for tensor in tensors(result)):
            raise self._unknown(name)
        return result

    def _unknown(self, name: str) -> UncoveredError:
        return UncoveredError(
            f"{self._where()} calls {name!r} on values that depend on the tokens, and the frozen run has no rule for "
            "this function, so their shares are unknown. Report the model's class."
        )

    def enter_stream(self, tensor: Tensor) -> None:
        """Mark a tensor as the residual stream; its sums with other tensors are marked too."""
        self._stream[tensor] = True

    def in_stream(self, tensor: Any) -> bool:
        """Tell whether a tensor is the residual stream, to which layers were only added."""
        return isinstance(tensor, Tensor) and tensor in self._stream

    def origin(self, tensor: Tensor) -> str | None:
        """Return the name of the function that made a frozen factor, None for other tensors."""
        return None if tensor.requires_grad else self._factors.get(tensor)

    def rank(self, tensor: Tensor) -> int | float:
        """Return 0 for a linear function of the tokens, 1 after an activation, `GATE` after one with f(0) != 0."""
        return self._ranks.get(tensor, 0) if tensor.requires_grad else 0

    def _masked(self, rank: int | float, mask: Any, x: Any) -> int | float:
        """Return the rank of values behind a mask: an activation, if a comparison of values tells it for each."""
        compares = isinstance(mask, Tensor) and self._factors.get(mask) in kinds.COMPARING
        return max(rank, 1) if compares and mask.numel() == x.numel() else rank

    def _gated(self, x: Tensor, factor: Any) -> int | float:
        """Return the rank of values times or over a frozen factor, which may make an activation of them."""
        rank = self._masked(self.rank(x), factor, x)
        if not isinstance(factor, Tensor) or factor.numel() != x.numel():
            return rank
        is_function = factor is not x and self._composed.root(factor) is self._composed.root(x)
        return max(rank, 1) if is_function or (rank < 1 and self.rank(factor) >= 1) else rank

    def ranked(self, result: Any, rank: int | float) -> Any:
        """Return a result whose tensors have a rank."""
        if rank:
            for tensor in tensors(result):
                self._ranks[tensor] = rank
        return result

    def _in_place(self, name: str, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if name in kinds.WRITING:
            written = next(iter((*args, *kwargs.values())), 0)
            value = written if isinstance(written, Tensor) else torch.full_like(target, written).detach()
            value = self.source(value, target)
        else:
            function = getattr(torch.Tensor, name, None) or getattr(functional, name, None)
            if function is None:
                # One that draws random numbers, such as normal_, has no other form.
                raise self._unknown(f"{name}_")
            # The derivative of some functions reads their argument, which is written over.
            entered = target.clone() if name in kinds.HOMOGENEOUS else target
            value = self._apply(name, function, (entered, *args), kwargs)
        rank, in_stream = self.rank(value), self.in_stream(value)
        for notes in (self._ranks, self._stream, self._factors, self._added):
            notes.pop(target, None)
        result = self.ranked(target.copy_(value), rank)
        if in_stream:
            self.enter_stream(result)
        return result

    def _write(self, func: Callable[..., Any], target: Tensor, index: Any, value: Any) -> None:
        if not target.requires_grad:
            target.copy_(self.source(target, target))  # The elements that are not written stay constants.
        rank = max(self.rank(target), self.rank(value) if isinstance(value, Tensor) else 0)
        rank = self._masked(rank, index, target)
        func(target, index, self.source(value, target))
        self._stream.pop(target, None)
        self.ranked(target, rank)

    @_rule("add")
    def add(self, x: Any, other: Any, *, alpha: int | float = 1) -> Tensor:
        """Return a sum, of which constants are sources."""
        if alpha == -1 and isinstance(other, Tensor) and self._factors.get(other) == kinds.NORMALISER:
            # log_softmax, which is a factor as a whole.
            return torch.sub(*mapped((x, other), torch.detach))
        like, both = x if carried(x) else other, carried(x) and carried(other)
        x, other = self.source(x, like), self.source(other, like)
        ranks = [self.rank(tensor) for tensor in (x, other) if carried(tensor)]
        rank = kinds.rank_of_sum(ranks)
        constant = other if like is x else x
        if rank >= 1 and not both and bool(constant.detach().any() if isinstance(constant, Tensor) else constant):
            # An activation plus a constant, such as 1 + tanh, is one with f(0) != 0.
            rank = kinds.GATE
        result = self.ranked(torch.add(x, other, alpha=alpha), rank)
        if both and x.shape == other.shape and x.ndim == 3:
            self.last_sum = result
        if self.in_stream(x) or (alpha == 1 and self.in_stream(other)):
            self.enter_stream(result)
        return result

    @_rule("sub", "subtract")
    def sub(self, x: Any, other: Any, *, alpha: int | float = 1) -> Tensor:
        """Return a difference, of which constants are sources."""
        return self.add(x, other, alpha=-alpha)

    @_rule("rsub")
    def _rsub(self, x: Any, other: Any, *, alpha: int | float = 1) -> Tensor:
        return self.add(other, x, alpha=-alpha)

    @_rule("mul", "multiply")
    def mul(self, x: Any, other: Any) -> Tensor:
        """Return a product, with a frozen factor or two halves."""
        return self._product("mul", torch.mul, x, other)

    @_rule("div", "divide", "true_divide")
    def div(self, x: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
        """Return a quotient with a frozen divisor."""
        if rounding_mode is not None:
            return torch.div(*mapped((x, other), torch.detach), rounding_mode=rounding_mode)
        # A quotient is not linear in its divisor, which normalises: a norm, or a sum of weights.
        rank = self._gated(x, other) if carried(x) else 0
        other = other.detach() if isinstance(other, Tensor) else other
        return self.ranked(x / other, rank)

    @_rule("rdiv")
    def _rdiv(self, x: Tensor, other: Any) -> Tensor:
        return self.div(other, x)

    @_rule("masked_fill")
    def masked_fill(self, x: Any, mask: Tensor, value: Any) -> Tensor:
        """Return values, or another one where a mask is True."""
        like = x if carried(x) else value
        return self.ranked(
            torch.where(mask, self.source(value, like), self.source(x, like)), self._masked(self.rank(like), mask, x)
        )

    @_rule("addmm", "baddbmm")
    def _addmm(self, x: Any, left: Tensor, other: Tensor, *, beta: int | float = 1, alpha: int | float = 1) -> Tensor:
        if alpha == beta == 1 and carried(left) and not carried((x, other)):
            return self._weighted(torch.matmul, left, other, self.source(x, left))
        product = self._bilinear("matmul", torch.matmul, (left, other), {}) if carried((left, other)) else left @ other
        return self.add(x * beta if beta != 1 else x, product, alpha=alpha)

    def _slope(self, name: str, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = mapped((args, kwargs), torch.detach)
        slope, level = frozen_slope(name, lambda point: func(point, *args, **kwargs), x.detach())
        through = linear_in(x, torch.mul, (x, slope), {})
        if bool((level == 0).all()):
            rank = max(name not in kinds.LIMITS or is_step(name, args, kwargs), self.rank(x))
            if rank == 1 and self._composed.is_shifted(name, (x, *args), kwargs):
                rank = kinds.GATE
            return self.ranked(through, rank)
        return self.ranked(through + self.constant(level, x), 2)

    def _affine(self, func: Callable[..., Tensor], position: int, args: Any, kwargs: Any) -> Tensor:
        product, x, weight, bias = kinds.affine_call(func, position, args, kwargs)
        # (channel,) for (batch, length, channel), and (channel, 1) for a convolution's (batch, channel, length).
        axes = 0 if func.__name__ == "linear" else x.ndim - (2 if x.ndim > 2 else 1)
        source = None if bias is None else self.source(bias, x).reshape(-1, *[1] * axes)
        return self._weighted(product, x, weight, source)

    def _weighted(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return products of values and weights, to which a bias is added."""
        z = self._bilinear("linear", product, (x, weight), {})
        return z if bias is None else z + bias

    def _bilinear(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a product that is linear in each operand: of two carried operands each gets half."""
        operands = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if len(operands) == 1:
            return linear_in(operands[0], func, args, kwargs)
        live = value_among([self.rank(x) for x in operands], wide_letters(func, args), half=self._half)
        if live is None:
            self.shared.add(name)
            return halved(operands, func, args, kwargs)
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor if tensor is operands[live] else tensor.detach())
        return linear_in(operands[live], func, args, kwargs)

    def _product(self, name: str, func: Callable[..., Tensor], x: Any, other: Any) -> Tensor:
        if not (carried(x) and carried(other)):
            live = x if carried(x) else other
            rank = self._gated(live, other if live is x else x)
            return self.ranked(linear_in(live, func, (x, other), {}), rank)
        if x is other:
            return self.ranked(x.detach() * x, self.rank(x))
        ranks = self.rank(x), self.rank(other)
        result_rank = max(ranks)
        if x.numel() != other.numel():
            # A scale (batch, length, 1) of a stream (batch, length, channel) is a factor at any rank.
            frozen_first = x.numel() < other.numel()
            # Nor is it an activation of each channel.
            result_rank = ranks[frozen_first]
        # By the half rule a gate with f(0) != 0, such as a sigmoid, is frozen too: at zero it still passes values on.
        elif ranks[0] != ranks[1] and (not self._half or result_rank == 2):
            frozen_first = ranks[0] > ranks[1]
        else:
            if ranks[0] == ranks[1]:
                self.shared.add(name)
            halves = func(x.detach(), other) / 2 + func(x, other.detach()) / 2
            return self.ranked(halves, result_rank)
        frozen = (x.detach(), other) if frozen_first else (x, other.detach())
        product = linear_in(other if frozen_first else x, func, frozen, {})
        # A product with a frozen factor, such as x sigmoid(x), is zero at zero again.
        return self.ranked(product, min(result_rank, 1))
