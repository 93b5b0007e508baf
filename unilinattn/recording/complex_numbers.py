"""Complex tensors as pairs of real ones: each function of complex numbers as functions of real and imaginary parts.

Operators are real. A recorded module that turns its tokens into complex numbers and back, as diagonal state spaces do,
is the same linear map of pairs: z w = (re z re w - im z im w, re z im w + im z re w).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unilinattn.call.nested import mapped, tensors
from unilinattn.rules.functions import AFFINE, JOINING, LINEAR, PRODUCTS

Parts = tuple[Tensor, Tensor | None]
"""The real and the imaginary part of a tensor; None for an imaginary part that is zero."""

PartsOf = Callable[[Tensor], Parts | None]
"""Returns the parts of a complex tensor, None if they are unknown."""

ADDING = frozenset({"add", "sub", "subtract", "rsub", "where", "masked_fill"})
"""Functions whose numbers are added to complex ones, or take their place."""

CASTING = frozenset({"to", "type", "type_as", "cfloat", "cdouble"})
"""Casts, also of real numbers to complex ones."""

MAKING = frozenset({"view_as_complex", "complex", "cfloat", "cdouble"})
"""Functions that make complex numbers of real ones."""

ADJOINT = frozenset({"H", "mH", "adjoint"})
"""Transposes that conjugate."""

READING = frozenset({"real", "imag", "view_as_real"})
"""Functions that return real numbers of complex ones."""


class _Unknown(Exception):
    """A function has no form in parts, or those of an argument are unknown."""


def is_complex(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether a function reads complex numbers or makes some of real ones."""
    if name in MAKING:
        return True
    values = [*args, *kwargs.values()]
    dtypes = (value for value in values if isinstance(value, torch.dtype))
    numbers = any(isinstance(value, complex) for value in values)
    return numbers or any(dtype.is_complex for dtype in dtypes) or any(t.is_complex() for t in tensors(values))


def has_complex_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor is complex, without a call that a mode sees."""
    with torch._C.DisableTorchFunction():
        return tensor.is_complex()


def has_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor has real or complex numbers, none of which is an index, without a call that a mode sees."""
    with torch._C.DisableTorchFunction():
        return tensor.is_floating_point() or tensor.is_complex()


def read_part(name: str, parts: Parts) -> Tensor:
    """Return the value of a function of `READING`."""
    real, imaginary = parts
    if name == "real":
        return real
    imaginary = torch.zeros_like(real) if imaginary is None else imaginary
    return imaginary if name == "imag" else torch.stack((real, imaginary), -1)


def complex_parts(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts_of: PartsOf) -> Any:
    """Return the parts of a function's complex result, a list of them for several; None if they are unknown.

    `name` is that of `name_of`, `func` writes into none of its arguments, and `parts_of` returns the parts of a complex
    one.
    """

    def parts(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return (value.real, value.imag) if isinstance(value, complex) else (value, None)
        if not has_complex_numbers(value):
            return value, None
        if (pair := parts_of(value)) is None:
            raise _Unknown
        return pair

    try:
        return _parts(name, func, args, dict(kwargs), parts)
    except _Unknown:
        return None


def _parts(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Callable[[Any], Any]) -> Any:
    if name == "setitem":
        target, place, value = args
        return _written(target, place, value, parts)
    if name == "view_as_complex":
        return args[0][..., 0], args[0][..., 1]
    if name == "complex":
        names = ("real", "imag")
        return tuple(args[number] if number < len(args) else kwargs[part] for number, part in enumerate(names))
    if name in CASTING:
        return parts(args[0])
    if name in ("conj", "conj_physical", "resolve_conj", "neg", "negative"):
        real, imaginary = parts(args[0])
        sign = 1 if name == "resolve_conj" else -1
        real = -real if name.startswith("neg") else real
        return real, None if imaginary is None else sign * imaginary
    if name in ("mul", "multiply"):
        return _product(torch.mul, parts(args[0]), parts(args[1]))
    if name in ("div", "divide", "true_divide"):
        return _product(torch.mul, parts(args[0]), _reciprocal(*parts(args[1])))
    if name in PRODUCTS:
        return _bilinear(func, args, kwargs, parts)
    if name in AFFINE:
        position = AFFINE[name]
        bias = args[position] if len(args) > position else kwargs.pop("bias", None)
        without = (*args[:position], None, *args[position + 1 :]) if len(args) > position else args
        product = _bilinear(func, without, kwargs, parts)
        return product if bias is None else _sum(product, _beside_window(parts(bias), args[0].ndim, name))
    pads_zeros = name == "pad" and not (args[3] if len(args) > 3 else kwargs.get("value"))
    if name not in LINEAR | JOINING | ADDING and not pads_zeros:
        raise _Unknown
    result = _linear(name, func, args, kwargs, parts)
    return (result[0], -result[1]) if name in ADJOINT else result


def _linear(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Callable[[Any], Any]) -> Any:
    """Apply a function that is linear in all of its tensors of numbers to each part."""

    def of(part: int) -> Any:
        def select(value: Any) -> Any:
            if isinstance(value, Tensor) and not has_numbers(value):
                return value
            real, imaginary = parts(value)
            if part == 0:
                return real
            return torch.zeros_like(real) if imaginary is None else imaginary

        if name not in ADDING:
            return func(*mapped(args, select), **mapped(kwargs, select))
        # The imaginary part of a number is zero.
        values = [value if isinstance(value, Tensor) else parts(value)[part] or 0 for value in args]
        return func(*mapped(values, select), **kwargs)

    real, imaginary = of(0), of(1)
    if isinstance(real, Tensor):
        return real, imaginary
    return list(zip(real, imaginary, strict=True))


def _written(target: Tensor, place: Any, value: Any, parts: Callable[[Any], Any]) -> Parts:
    """Write the parts of a value into copies of those of a target."""
    copies: list[Tensor] = []
    for before, after in zip(parts(target), parts(value), strict=True):
        copy = torch.zeros_like(parts(target)[0]) if before is None else before.clone()
        copy[place] = 0.0 if after is None else after
        copies.append(copy)
    return copies[0], copies[1]


def _bilinear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Callable[[Any], Any]) -> Parts:
    operands = [value for value in args if isinstance(value, Tensor)]
    if len(operands) != 2 or list(tensors(kwargs)):
        raise _Unknown
    numbers = [number for number, value in enumerate(args) if isinstance(value, Tensor)]

    def product(first: Tensor, second: Tensor) -> Tensor:
        values = list(args)
        values[numbers[0]], values[numbers[1]] = first, second
        return func(*values, **kwargs)

    return _product(product, *(parts(value) for value in operands))


def _product(product: Callable[[Any, Any], Tensor], first: Any, second: Any) -> Parts:
    (a, b), (c, d) = first, second
    if b is None or d is None:
        imaginary = None if b is None and d is None else product(a, d) if b is None else product(b, c)
        return product(a, c), imaginary
    return product(a, c) - product(b, d), product(a, d) + product(b, c)


def _reciprocal(real: Any, imaginary: Any) -> Any:
    if imaginary is None:
        return 1 / real, None
    size = real * real + imaginary * imaginary
    return real / size, -imaginary / size


def _beside_window(bias: Any, axes: int, name: str) -> Any:
    """Return the parts of a bias in the shape of a result: convolutions have the axes of their window behind it."""
    shape = (-1,) if name == "linear" else (-1, *[1] * (axes - 2))
    return tuple(None if part is None else part.reshape(shape) for part in bias)


def _sum(first: Parts, second: Parts) -> Parts:
    real, imaginary = (a if b is None else b if a is None else a + b for a, b in zip(first, second, strict=True))
    assert real is not None
    return real, imaginary
