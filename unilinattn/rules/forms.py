"""Frozen forms of norms and attention for `rules.freezing`; their signatures are those of torch's functions."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import ModelStateError

Parts = tuple[Tensor, Tensor | None]
"""The part of a function's result that is linear in its carried argument, and the constant that is added to it."""


def carried(value: Any) -> bool:
    """Tell whether a tensor requires a gradient, or one of a nested value."""
    return any(tensor.requires_grad for tensor in tensors(value))


def without_gradients(args: Any, kwargs: dict[str, Any], memory: Collection[int]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call of a host in which no constant requires a gradient, as carried tensors do.

    A host may make leaves, and parameters such as a transposed one. Of the latter, those in the `memory` of the model's
    parameters are constants; others may have the values of tokens.
    """
    if kwargs.get("requires_grad") is True:
        kwargs = {**kwargs, "requires_grad": False}
    made = [t for t in tensors((args, kwargs)) if isinstance(t, nn.Parameter) and t.requires_grad]
    constants = {id(t): nn.Parameter(t.detach(), requires_grad=False) for t in made if _storage(t) in memory}
    if not constants:
        return args, kwargs
    values, named = mapped((args, kwargs), lambda tensor: constants.get(id(tensor), tensor))
    return values, named


def memory_of(module: nn.Module) -> frozenset[int]:
    """Return numbers that tell the memory of a module's parameters, without those that have none, as packed ones."""
    return frozenset(filter(None, map(_storage, module.parameters())))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def as_source(value: Any, like: Tensor, record: Callable[[Tensor], None] | None = None) -> Any:
    """Return a constant as a dual tensor whose tangent is its value; carried tensors and indices are unchanged.

    `record` is called with the constant, which is then a leaf of the graph.
    """
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        value = torch.as_tensor(value, dtype=torch.result_type(like, value), device=like.device)
    if not isinstance(value, Tensor) or value.requires_grad or not (value.is_floating_point() or value.is_complex()):
        return value
    value = value.detach().clone(memory_format=torch.contiguous_format)
    tangent = value.clone()
    if record is not None:
        record(value.requires_grad_())
    return forward_ad.make_dual(value, tangent)


def linear_in(live: Tensor, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Apply a function that is linear in `live`, its only carried argument, to the value and to the tangent of `live`.

    torch's forward mode would also multiply the value by the tangent of each constant factor, which is zero.
    """
    value, tangent = forward_ad.unpack_dual(live)

    def applied(component: Tensor) -> Tensor:
        values, named = mapped((args, kwargs), lambda tensor: component if tensor is live else tensor)
        return func(*values, **named)

    result = applied(value)
    if tangent is None:
        return result
    with torch.no_grad():
        moved = applied(tangent)
    return forward_ad.make_dual(result, moved)


def halved(operands: Sequence[Tensor], func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Return a product that is linear in each of several carried operands, which share it equally.

    The derivatives y and x of x y sum to twice the product, so each operand gets half of it.
    """
    products = []
    for operand in operands:

        def only(tensor: Tensor, live: Tensor = operand) -> Tensor:
            return tensor if tensor is live else tensor.detach()

        products.append(linear_in(operand, func, mapped(args, only), mapped(kwargs, only)) / len(operands))
    return torch.stack(products).sum(0)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Parts:
    """Centre live, divide by the frozen deviation."""
    axes = tuple(range(-len(normalized_shape), 0))
    return _normed(x, axes, weight, eps), bias


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Parts:
    """Divide by the frozen root mean square."""
    axes, wide = tuple(range(-len(normalized_shape), 0)), _widened(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.detach().pow(2).mean(axes, keepdim=True) + eps)
    return (wide * (scale if weight is None else scale * weight)).to(x.dtype), None


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Parts:
    """Centre each group of channels live, divide by its frozen deviation."""
    # With 3 groups (batch, 6, length) becomes (batch, 3, 2, length), whose axes 2 and 3 are normed.
    grouped = _normed(x.unflatten(1, (num_groups, -1)), tuple(range(2, x.ndim + 1)), None, eps)
    shape = (-1, *[1] * (x.ndim - 2))
    normed = grouped.flatten(1, 2)
    normed = normed if weight is None else normed * weight.reshape(shape)
    return normed, None if bias is None else bias.reshape(shape)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Parts:
    """Apply the running mean and variance, which are constants."""
    if training or running_mean is None or running_var is None:
        raise ModelStateError("a batch norm normalises over the batch; call model.eval() before tracing.")
    shape = (-1, *[1] * (x.ndim - 2))
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    offset = -running_mean * scale + (0 if bias is None else bias)
    return x * scale.reshape(shape), offset.reshape(shape)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Parts:
    """Norm each channel of a sequence as one group, or by the running mean and variance."""
    if use_input_stats:
        return group_norm(x, x.shape[1], weight, bias, eps)
    return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)


def normalize(x: Tensor, p: int | float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Parts:
    """Divide by the frozen norm."""
    return x / x.detach().norm(p, dim, keepdim=True).clamp_min(eps), None


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Parts:
    """Average the values with frozen weights."""
    # The math backend is the one that has a forward-mode derivative.
    with sdpa_kernel(SDPBackend.MATH):
        attend = functional.scaled_dot_product_attention
        return attend(query.detach(), key.detach(), value, *args, **kw), None


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Parts:
    """Multiply each group of rows by its own matrix; torch has no forward-mode derivative for its kernel."""
    # With offs = (3, 5), rows 0 to 2 are multiplied by weight[0], rows 3 and 4 by weight[1], and later rows are zero.
    ends = [0, *offs.tolist()]
    products = [x[start:end] @ w for start, end, w in zip(ends, ends[1:], weight, strict=False)]
    return torch.cat([*products, x.new_zeros(len(x) - ends[-1], weight.shape[-1])]), None


def solve(matrix: Tensor, x: Tensor, **options: Any) -> Parts:
    """Solve linear equations with a frozen matrix."""
    return torch.linalg.solve(matrix.detach(), x, **options), None


def solve_triangular(matrix: Tensor, x: Tensor, **options: Any) -> Parts:
    """Solve linear equations with a frozen triangular matrix."""
    return torch.linalg.solve_triangular(matrix.detach(), x, **options), None


def grid_sample(x: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Parts:
    """Read values at frozen places between those of an image."""
    places = grid.detach()
    sampled: Tensor = _LinearMap.apply(x, lambda image: functional.grid_sample(image, places, *args, **kwargs))
    return sampled, None


class _LinearMap(torch.autograd.Function):
    """A linear function of a tensor, also where torch has no forward-mode derivative of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function, ctx.like = function, x.detach()
        return function(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, function: Any) -> Tensor:
        result: Tensor = ctx.function(tangent)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = torch.zeros_like(ctx.like, requires_grad=True)
            return torch.autograd.grad(ctx.function(x), x, grad)[0], None


def _normed(x: Tensor, axes: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """Centre a tensor and divide it by its frozen deviation."""
    wide = _widened(x)
    centred = wide - wide.mean(axes, keepdim=True)
    scale = torch.rsqrt(centred.detach().pow(2).mean(axes, keepdim=True) + eps)
    return (centred * (scale if weight is None else scale * weight)).to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype in which torch computes its norms: squares of float16 overflow above 255."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


FORMS: dict[str, Callable[..., Parts]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "normalize": normalize,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "linalg_solve": solve,
    "linalg_solve_triangular": solve_triangular,
    "grid_sample": grid_sample,
    "_grouped_mm": grouped_mm,
    "grouped_mm": grouped_mm,
}
"""Frozen forms by the name of torch's function; the sums of their parts have rank 0 (see `Freezing.rank`)."""
