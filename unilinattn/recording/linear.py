"""Rules of products and sums: over channels they are matrices, over tokens token mixers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import Matrix
from unilinattn.recording.compilation import Compilation, is_carried, rule
from unilinattn.recording.contraction import Product, contracted, joined
from unilinattn.recording.layout import Carried, added, with_last
from unilinattn.recording.nodes import Node
from unilinattn.recording.spectral import real_inverse
from unilinattn.recording.values import depends_on_mixed, is_weight, summed_axes, values
from unilinattn.rules.letters import equation_letters, matmul_letters

NEW = 100
"""The letter of an axis that a carried tensor lacks."""


@rule("linear")
def linear(run: Compilation, node: Node, x: Any, weight: Any, bias: Any = None) -> Carried:
    """Multiply the last axis by a weight."""
    axes = tuple(range(x.value.ndim))
    product = Product(axes, (NEW, axes[-1]), (*axes[:-1], NEW))
    carried = contracted(run.value(x), run.weight(weight), product, node.value.shape)
    if bias is None:
        return carried
    last = next(iter(carried.chains.values()))[-1] if len(carried.chains) == 1 else None
    whole = carried.layout.is_whole and carried.layout.has_all_channels and carried.shape[2] == len(run.number(bias))
    whole = whole and len(carried.chains) == 1
    if isinstance(last, Matrix) and last.bias is None and whole and not isinstance(bias, Node):
        return with_last(carried, Matrix(last.role, last.matrix, run.number(bias)))
    return run.shifted(carried, bias)


@rule("matmul", "mm", "bmm", "mv")
def matmul(run: Compilation, node: Node, x: Any, other: Any = None, **kwargs: Any) -> Carried:
    """Multiply a carried tensor by a frozen one."""
    other = next(iter(kwargs.values())) if other is None else other
    return _product(run, node, x, other, matmul_letters(run.number(x).ndim, run.number(other).ndim))


@rule("rmatmul")
def rmatmul(run: Compilation, node: Node, x: Any, other: Any) -> Carried:
    """Multiply a frozen tensor by a carried one."""
    return matmul(run, node, other, x)


@rule("einsum")
def einsum(run: Compilation, node: Node, equation: Any, *operands: Any) -> Carried:
    """Multiply and sum as an equation says."""
    terms = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else list(operands)
    if not isinstance(equation, str):
        raise UncoveredError("einsum without an equation")
    number = _value(run, node, "einsum", terms, (equation,))
    value, others = terms[number], [_weights(run, term) for n, term in enumerate(terms) if n != number]
    names, out = equation_letters(equation, [run.number(term).shape for term in terms])
    of_value, of_others = names[number], [x for n, x in enumerate(names) if n != number]
    weights, letters = joined(others, of_others, {*of_value, *out}, run.like)
    if set(of_value) == set(out):
        # Nothing is summed: the others are a factor.
        of_mixed = any(isinstance(term, Node) and depends_on_mixed(term, value) for term in others)
        weighs = all(is_weight(term, value) for term in others)
        order = sorted(range(len(letters)), key=lambda axis: out.index(letters[axis]))
        factor = weights.permute(order)[tuple(slice(None) if x in letters else None for x in out)]
        carried = run.value(value)
        carried = carried.moved(carried.index.permute([of_value.index(x) for x in out]))
        return run.scaled(carried, factor, "gate", of_value=of_mixed, weighs=weighs)
    return contracted(run.value(value), weights, Product(of_value, letters, out), node.value.shape)


@rule("addmm", "baddbmm")
def addmm(
    run: Compilation, node: Node, x: Any, one: Any, two: Any, *, beta: int | float = 1, alpha: float = 1
) -> Carried:
    """Add a product to a carried tensor or a constant."""
    if not is_carried(one) and not is_carried(two):
        return run.shifted(run.scaled(run.value(x), beta, "skip"), run.number(one) @ run.number(two) * alpha)
    carried = _product(run, node, one, two, matmul_letters(run.number(one).ndim, run.number(two).ndim))
    carried = carried if alpha == 1 else run.scaled(carried, float(alpha), "skip")
    if is_carried(x):
        term = run.value(x) if beta == 1 else run.scaled(run.value(x), float(beta), "skip")
        return added(carried, term.moved(term.index.expand(node.value.shape)))
    return run.shifted(carried, x if isinstance(x, Node) else x * beta)


@rule("sum", "mean")
def reduce(run: Compilation, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Carried:
    """Add or average along axes."""
    dim = options.get("axis", dim)
    count = x.value.ndim
    axes = [axis % count for axis in (range(count) if dim is None else (dim,) if isinstance(dim, int) else dim)]
    sizes = [x.value.shape[axis] for axis in axes]
    weights = run.like.new_ones(sizes)
    weights = weights / weights.numel() if node.name == "mean" else weights
    out = tuple(letter for letter in range(count) if letter not in axes)
    shape = torch.Size([x.value.shape[letter] for letter in out])
    carried = contracted(run.value(x), weights, Product(tuple(range(count)), tuple(axes), out), shape)
    return carried.moved(carried.index.reshape(node.value.shape))


@rule("cumsum")
def cumsum(run: Compilation, node: Node, x: Any, dim: int, **_: Any) -> Carried:
    """Multiply an axis by a triangle of ones."""
    size = x.value.shape[dim]
    return _along(run.value(x), dim % x.value.ndim, run.like.new_ones(size, size).tril(), node.value.shape)


@rule("interpolate", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
def resize(run: Compilation, node: Node, x: Any, *args: Any, **kwargs: Any) -> Carried:
    """Multiply each axis of an image by the matrix that a function of images applies to it."""
    size, carried = x.value.shape, run.value(x)
    for axis in range(2, x.value.ndim):
        # The unit vectors of an axis, and one entry of each other axis.
        length = size[axis]
        probe = run.like.new_zeros(length, 1, *size[2:])
        index: list[Any] = [torch.arange(length, device="cpu"), 0, *[slice(None)] * len(size[2:])]
        index[axis] = torch.arange(length, device="cpu")
        probe[tuple(index)] = 1
        result = node.func(probe, *args, **kwargs)
        matrix = result[(slice(None), 0, *(slice(None) if n == axis else 0 for n in range(2, result.ndim)))].mT
        shape = torch.Size((*carried.index.shape[:axis], len(matrix), *carried.index.shape[axis + 1 :]))
        carried = _along(carried, axis, matrix, shape)
    return carried


@rule("grid_sample")
def sample(run: Compilation, node: Node, x: Any, grid: Any, *args: Any, **kwargs: Any) -> Carried:
    """Average the values around each of the frozen places of an image."""
    carried, places = run.value(x), run.number(grid)
    space = x.value.shape[2:]
    units = torch.eye(space.numel(), dtype=places.dtype, device=places.device).reshape(1, -1, *space)
    weights = node.func(units.expand(len(places), *units.shape[1:]), places, *args, **kwargs).flatten(2)
    shape = torch.Size((*carried.index.shape[:2], weights.shape[2]))
    carried = contracted(
        carried.moved(carried.index.flatten(2)), weights.to(run.like), Product((0, 1, 2), (0, 2, 3), (0, 1, 3)), shape
    )
    return carried.moved(carried.index.unflatten(2, node.value.shape[2:]))


@rule("linalg_solve", "linalg_solve_triangular")
def solve(run: Compilation, node: Node, matrix: Any, x: Any, **options: Any) -> Carried:
    """Multiply by the inverse of a frozen matrix, as the delta rule's WY form does."""
    size, axes = run.number(matrix).shape[-1], run.number(x).ndim
    if not options.get("left", True) or axes != run.number(matrix).ndim:
        raise UncoveredError("the right-hand side of linear equations is no matrix of as many axes, at their right")
    inverse = node.func(run.number(matrix), torch.eye(size, dtype=run.like.dtype, device=run.like.device), **options)
    first, second, out = matmul_letters(axes, axes)
    return contracted(run.value(x), inverse, Product(second, first, out), node.value.shape)


@rule("scaled_dot_product_attention")
def attention(
    run: Compilation,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: int | float = 0.0,
    is_causal: bool = False,
    scale: int | float | None = None,
    enable_gqa: bool = False,
) -> Carried:
    """Average the values with the weights of torch's fused attention, which are computed here."""
    q, k, mask, carried = run.number(query), run.number(key), run.number(attn_mask), run.value(value)
    if enable_gqa:
        carried = carried.moved(carried.index.repeat_interleave(q.shape[-3] // carried.index.shape[-3], -3))
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    # The scores are as large as the map: they are written over.
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        # A query without any key reads nothing.
        weights = torch.where(mask, scores, -torch.inf).softmax(-1).nan_to_num_(nan=0.0)
    else:
        weights = (scores if mask is None else scores + mask).softmax(-1)
    first, second, out = matmul_letters(weights.ndim, carried.index.ndim)
    return contracted(carried, weights, Product(second, first, out), node.value.shape)


@rule("real")
def real(run: Compilation, node: Node, x: Any) -> Carried:
    """Return the real part of a Fourier transform, whose cosines and sines are matrices."""
    if x.name == "fft_ifft":
        return real_inverse(run, x)
    if x.value.is_complex() and not x.name.startswith("fft"):
        return without_parts(run, node, x)
    return _spectrum(run, x)[0]


@rule("imag", "view_as_real")
def without_parts(run: Compilation, node: Node, x: Any) -> Carried:
    """Raise `UncoveredError`: the parts of other complex numbers were recorded (see `complex_numbers`)."""
    raise UncoveredError(f"{x.name!r} is applied to complex numbers that depend on the tokens, and has no rule")


def _spectrum(run: Compilation, node: Any) -> tuple[Carried, Carried | None]:
    """Return the real part of a tensor, and the imaginary part of one that is a Fourier transform."""
    if not (isinstance(node, Node) and node.name in ("fft_fft", "fft_fft2", "fft_fftn")):
        return run.value(node), None
    x, *args = node.args
    if node.kwargs.get("s") or node.kwargs.get("n") or (args and args[0] is not None):
        raise UncoveredError("a Fourier transform of another length")
    count, scale = x.value.ndim, node.kwargs.get("norm", args[2] if len(args) > 2 else None)
    every = {"fft_fft": (-1,), "fft_fft2": (-2, -1), "fft_fftn": tuple(range(count))}[node.name]
    dims = node.kwargs.get("dim", args[1] if len(args) > 1 else every)
    real, imaginary = _spectrum(run, x)
    for dim in (dims,) if isinstance(dims, int) else dims:
        size, axis = x.value.shape[dim], dim % count
        steps = torch.arange(size, device=run.like.device)
        angle = torch.outer(steps, steps).remainder(size).double() * (2 * torch.pi / size)
        factor = {None: 1.0, "backward": 1.0, "ortho": size**-0.5, "forward": 1 / size}[scale]
        # exp(-i angle) (a + i b) = (cos a + sin b) + i (cos b - sin a)
        cosine, sine = ((wave(angle) * factor).to(run.like) for wave in (torch.cos, torch.sin))
        a, b = real, imaginary
        real, imaginary = (_along(a, axis, matrix, x.value.shape) for matrix in (cosine, -sine))
        if b is not None:
            real = added(real, _along(b, axis, sine, x.value.shape))
            imaginary = added(imaginary, _along(b, axis, cosine, x.value.shape))
    return real, imaginary


def _along(carried: Carried, axis: int, matrix: Tensor, result: torch.Size) -> Carried:
    """Multiply one axis by a matrix (out, in)."""
    letters = tuple(range(carried.index.ndim))
    out = tuple(NEW if letter == axis else letter for letter in letters)
    return contracted(carried, matrix, Product(letters, (NEW, axis), out), result)


def _product(run: Compilation, node: Node, x: Any, other: Any, letters: Any) -> Carried:
    """Multiply and sum two operands with the letters of both and of the result."""
    first, second, out = letters
    if _value(run, node, "matmul", (x, other)):
        return contracted(run.value(other), _weights(run, x), Product(second, first, out), node.value.shape)
    return contracted(run.value(x), _weights(run, other), Product(first, second, out), node.value.shape)


def _value(run: Compilation, node: Node, name: str, terms: Sequence[Any], args: Sequence[Any] = ()) -> int:
    """Return the number of the operand that is the value: of several that may be, the last one, as in q @ (k @ v)."""
    numbers = [n for n, term in enumerate(terms) if is_carried(term)]
    if len(numbers) > 1:
        axes = summed_axes(name, args, [run.number(term).shape for term in terms])
        return run.values(node, {n: terms[n] for n in numbers}, axes, values)[0][-1]
    return numbers[0]


def _weights(run: Compilation, value: Any) -> Tensor:
    weights: Tensor = run.weight(value)
    if weights.is_complex():
        raise UncoveredError("a product with complex numbers")
    return weights.to(run.like.dtype)
