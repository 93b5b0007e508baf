"""Functions of torch by name, sorted by what they do to tensors that carry tokens."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor, Tensor], Tensor]
"""A function that is linear in each of two tensors."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LINEAR = _names("""
    view view_as reshape reshape_as transpose swapaxes swapdims permute movedim moveaxis T mT H mH t contiguous to type
    type_as float double half bfloat16 clone expand expand_as broadcast_to repeat tile unsqueeze squeeze flatten
    unflatten ravel flip fliplr flipud rot90 roll pixel_shuffle pixel_unshuffle channel_shuffle real imag getitem split
    split_with_sizes hsplit vsplit dsplit chunk unbind narrow select index_select gather take_along_dim
    tril triu diagonal repeat_interleave masked_select tensor_split sum mean cumsum neg negative positive dropout
    dropout1d dropout2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate unfold fold
    nan_to_num as_strided view_as_real view_as_complex
""")
"""Functions that are linear in their only carried argument: shapes, casts, selections, sums, inactive dropout."""

COMPOSITE = _names("multi_head_attention_forward cosine_similarity var_mean std_mean")
"""Functions of which the functions that they call are seen (see `opened`)."""

LIKE = _names("view_as reshape_as expand_as type_as to")
"""Functions that take only the shape or the dtype of their second argument."""

RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
"""Recurrences whose state passes a nonlinearity."""

SAME = _names("to type type_as float double half bfloat16 clone contiguous positive dropout dropout1d dropout2d")
"""Functions whose result has the elements of their first argument in the same places."""

MOVING = _names("""
    view view_as reshape reshape_as transpose swapaxes swapdims permute movedim moveaxis T mT H mH t expand expand_as
    broadcast_to repeat tile unsqueeze squeeze flatten unflatten ravel flip fliplr flipud rot90 roll pixel_shuffle
    pixel_unshuffle channel_shuffle getitem split split_with_sizes hsplit vsplit dsplit chunk unbind narrow select
    index_select gather take_along_dim diagonal repeat_interleave masked_select tensor_split unfold as_strided
""")
"""Functions that move or repeat the elements of their first argument."""

CASTS = _names("to type type_as float double half bfloat16 clone contiguous view reshape dropout")
"""Functions whose result is the residual stream if their argument is."""

CHOOSING = _names("max min amax amin maximum minimum where sort max_pool1d max_pool2d")
"""Functions that choose among their arguments, each of which is carried or a source."""

JOINING = _names(
    "cat concat concatenate stack hstack vstack complex index_add scatter_add index_copy index_put masked_scatter copy"
)
"""Functions that add, join or write their arguments, each of which is carried or a source."""

FACTORS = _names("""
    softmax log_softmax exp expm1 softplus log log1p log2 sqrt rsqrt var std var_mean std_mean norm vector_norm
    linalg_vector_norm linalg_norm logsumexp logaddexp logcumsumexp topk reciprocal prod cumprod rpow
    cross_entropy nll_loss mse_loss
    binary_cross_entropy_with_logits polar acos arccos cos cosh cdist pairwise_distance inverse linalg_inv linalg_pinv
    matrix_exp linalg_matrix_exp
""")
"""Functions whose outputs are frozen: factors of what follows, and losses, which no logit depends on."""

ACTIVATING = _names("exp expm1 softplus log1p")
"""Functions among `FACTORS` that are activations of one value where their output is added to values."""

SIZES = _names("std norm vector_norm linalg_vector_norm linalg_norm")
"""Functions among `FACTORS` with f(a x) = a f(x) for a > 0, whose derivative is the frozen slope of what is added."""

SELECTING = _names("getitem index_select")
"""Functions that select entries by indices, such as the biases of the experts that a router chose."""

COMPARING = _names("gt ge lt le greater greater_equal less less_equal")
"""Functions that make masks by comparing values."""

NEAREST = _names("argmin cdist pairwise_distance")
"""Functions that find the nearest entry of a codebook."""

NEW = _names("""
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty new_tensor
""")
"""Functions whose outputs take only the shape and dtype of their argument."""

BLANK = _names("empty empty_like new_empty empty_strided")
"""Functions that return memory with any numbers, which a host writes over."""

WRITING = _names("copy fill zero")
"""Functions that write a value, by default zero, into all of their first argument in place."""

CONSTANT = NEW | _names("detach data")
"""Functions whose outputs are constants for autograd too."""

LEAVING = _names("numpy array tolist")
"""Functions that return a tensor's values as objects that are not tensors."""

AFFINE = {"linear": 2} | {f"conv{kind}{axes}d": 2 for kind in ("", "_transpose") for axes in (1, 2, 3)}
"""Layers by name, with the position of their bias."""

PRODUCTS = _names("matmul rmatmul mm bmm mv einsum tensordot")
"""Products that sum over channels, tokens or heads."""

SOLVING = _names("linalg_solve linalg_solve_triangular")
"""Solutions of linear equations, linear in the right-hand side, which is their second argument."""

LIMITS = _names("clamp clamp_min clamp_max clip hardtanh")
"""Limits of a value, which are no activation: they keep its rank."""

SLOPES = LIMITS | _names("""
    silu gelu tanh sigmoid erf elu celu selu mish softsign hardswish hardsigmoid relu6 sin log_sigmoid logsigmoid
    tanhshrink softshrink hardshrink threshold _threshold sign floor ceil round trunc
""")
"""Functions f of one value, frozen as x (f(p) - f(0)) / p + f(0)."""

HOMOGENEOUS = _names("relu abs leaky_relu rrelu prelu")
"""Activations with f(x) = f'(x) x, whose derivative is the frozen slope."""

GATE, GATED_CONSTANT, GATED_FACTOR = 2, 3, 4
"""Ranks of an activation with f(0) != 0, such as a sigmoid, and of its product with constant channels, or with an
argument of the module, such as a state.
"""

NORMALISER = "logsumexp"
"""The function whose output, subtracted from its argument, gives its log_softmax."""


def name_of(func: Any, kwargs: dict[str, Any]) -> tuple[str, bool]:
    """Return a function's name without underscores, and whether it writes into its first argument."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        return func.__self__.__name__, False
    if name.startswith("__"):
        name = name.strip("_")
        in_place = name in ("iadd", "isub", "imul", "idiv", "itruediv")
        return (name[1:] if in_place else name), in_place
    in_place = name.endswith("_") or kwargs.pop("inplace", False)
    return name.rstrip("_"), in_place


def rank_of_sum(ranks: Iterable[int | float]) -> int | float:
    """Return the rank of a sum, or of joined tensors: a gate tells nothing of the values that it is added to."""
    ranks = list(ranks)
    return max((rank for rank in ranks if rank < GATE), default=min(ranks, default=0))


def sums_channels(name: str, args: tuple[Any, ...], is_carried: Callable[[Any], bool]) -> bool:
    """Tell whether a product of a carried tensor with constants sums its last axis, that of channels, and no other."""
    if name == "einsum":
        inputs, _, output = str(args[0]).replace(" ", "").partition("->")
        terms = [term for term, x in zip(inputs.split(","), args[1:], strict=False) if is_carried(x)]
        return len(terms) == 1 and set(terms[0]) - set(output) == set(terms[0][-1:])
    if name in ("matmul", "mm", "bmm"):
        return is_carried(args[0])
    if name in AFFINE:
        # A convolution of one token each.
        weight = args[1] if len(args) > 1 else None
        return name == "linear" or (isinstance(weight, Tensor) and weight.shape[2:].numel() == 1)
    return name == "addmm" and is_carried(args[1])


def opened(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return a call as one of the functions that it consists of, None for other functions.

    These are composite functions of torch, which do not hand their calls to a mode, and `clamp(x, min=0)` and
    `maximum(x, zeros)`, which are `relu`. `name` is the function's (see `name_of`).
    """
    if name in COMPOSITE:
        if name in _MOMENTS:
            return partial(_moments, _MOMENTS[name], *args, **kwargs)
        function = cosine_similarity if name == "cosine_similarity" else _opened(func)
        return partial(function, *args, **kwargs)
    x = _rectified(name, args, kwargs)
    return None if x is None else partial(functional.relu, x, inplace=func.__name__.endswith("_"))


def _opened(func: Any) -> Any:
    functions = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, functions, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_MOMENTS = {"var_mean": torch.var, "std_mean": torch.std}


def _moments(
    spread: Callable[..., Tensor],
    input: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a variance or a deviation, and the mean, which is linear."""
    # var_mean(x, False) has no axes.
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    correction = int(unbiased) if correction is None else correction
    return spread(input, dim, correction=correction, keepdim=keepdim), torch.mean(input, dim, keepdim=keepdim)


def _rectified(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor of which a call returns the positive part, None for another call."""
    if name in ("maximum", "max") and len(args) == 2 and isinstance(args[1], Tensor) and not kwargs:
        for value, zero in (args, args[::-1]):
            is_one_shape = torch.broadcast_shapes(value.shape, zero.shape) == value.shape
            if is_one_shape and zero.dtype == value.dtype and not zero.requires_grad and not bool(zero.any()):
                return value
    if name in ("clamp", "clip", "clamp_min") and args and args[0].is_floating_point():
        limits = {**dict(zip(("min", "max"), args[1:], strict=False)), **kwargs}
        if isinstance(limits.get("min"), (int, float)) and limits["min"] == 0 and limits.get("max") is None:
            return args[0]
    return None


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the inner products of vectors that are divided by their norms, as `torch.cosine_similarity` does."""
    first, second = (functional.normalize(x, dim=dim, eps=eps) for x in (x1, x2))
    return (first * second).sum(dim)


def affine_call(
    func: Callable[..., Tensor], position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Product, Tensor, Tensor, Tensor | None]:
    """Return the product, the values, the weights and the bias of a call of a function of `AFFINE`."""
    named = dict(kwargs)
    bias = named.pop("bias", None) if len(args) <= position else args[position]
    args = args if len(args) <= position else (*args[:position], None, *args[position + 1 :])
    x, weight, *others = (*args, *(named.pop(name) for name in ("input", "weight") if name in named))
    return lambda values, weights: func(values, weights, *others, **named), x, weight, bias
