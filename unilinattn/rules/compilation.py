"""Compile a recorded module: from the functions that it called to the chain of stages from its inputs to its output."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale, Stage, walk
from unilinattn.rules.contraction import Product, contracted, from_equation, matmul_letters, with_channels
from unilinattn.rules.functions import HOMOGENEOUS, LINEAR, PRODUCTS, SLOPES
from unilinattn.rules.layout import Carried, added, whole
from unilinattn.rules.recording import Node
from unilinattn.rules.simplification import simplified
from unilinattn.rules.slopes import frozen_slope

Rule = Callable[..., Carried]

_RULES: dict[str, Rule] = {}

TAPS = 128
"""Largest number of taps of a convolution that is written as a sum of shifted copies."""

RECURRENT = frozenset(
    ["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"]
)
"""Recurrences whose state passes a nonlinearity."""

CASTS = frozenset(
    [
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "clone",
        "contiguous",
        "dropout",
        "dropout1d",
        "dropout2d",
        "positive",
    ]
)
"""Functions whose result has the elements of their first argument in the same places."""

SUMS = frozenset(("sum", "mean", "cumsum"))


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def decorate(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return decorate


class Compilation:
    """The stages of the tensors of one recorded run.

    Args:
        like: a tensor of the operator's dtype and device.
        transposed: whether inputs are (token, batch, channel).
    """

    def __init__(self, like: Tensor, *, transposed: bool) -> None:
        self._like, self._transposed = like.new_empty(0), transposed
        self._values: dict[int, Carried] = {}

    def value(self, node: Any) -> Carried:
        """Return the stages of a carried tensor; raise `UncoveredError` with the reason if it has none."""
        if not isinstance(node, Node):
            raise UncoveredError("a constant is used as a value of the tokens")
        if node.kind != "carried":
            raise UncoveredError(f"the output of {node.name!r} depends on the tokens and is added to their values")
        if id(node) not in self._values:
            self._values[id(node)] = self._compiled(node)
        return self._values[id(node)]

    def _compiled(self, node: Node) -> Carried:
        if node.name == "input":
            return self._input(node)
        if node.name in _RULES:
            rule = _RULES[node.name]
        elif node.name in HOMOGENEOUS | SLOPES:
            rule = _slope
        elif node.name in LINEAR:
            rule = _moved
        elif node.name in PRODUCTS:
            rule = _product
        elif node.name in RECURRENT:
            raise UncoveredError(
                "its state passes a nonlinearity at every step, so it is no linear map of its tokens: no operator exists"
            )
        else:
            raise UncoveredError(f"{node.name!r} is applied to values that depend on the tokens, and has no rule")
        return rule(self, node, *node.args, **node.kwargs)

    def _input(self, node: Node) -> Carried:
        x = node.value
        # The tokens of an input with more axes are numbered by its middle axes.
        if self._transposed:
            shape = x.shape[1], x.shape[0], x.shape[2]
            return Carried({node.port: ()}, shape, whole(shape, x).transpose(0, 1), self._like)
        shape = (1, *x.shape) if x.ndim == 2 else (x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
        return Carried({node.port: ()}, shape, whole(shape, x).view(x.shape), self._like)

    def number(self, value: Any) -> Any:
        """Return the value of a node, a copy of a constant tensor, or another value unchanged."""
        if isinstance(value, Node):
            return value.value.detach()
        # Later changes of the model's weights do not reach the operator.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def scaled(self, carried: Carried, factor: Any, role: str) -> Carried:
        """Multiply a carried tensor by a frozen factor that is broadcast to its shape."""
        factor = torch.as_tensor(self.number(factor), dtype=self._like.dtype, device=self._like.device)
        if factor.ndim > carried.index.ndim:
            carried = carried.moved(carried.index.expand(torch.broadcast_shapes(factor.shape, carried.index.shape)))
        carried = carried.moved(carried.index.expand(torch.broadcast_shapes(factor.shape, carried.index.shape)))
        if not carried.layout.is_whole:
            carried = carried.arranged()
        return carried.same_elements(Scale(role, carried.layout.factor(factor)))

    def shifted(self, carried: Carried, bias: Any) -> Carried:
        """Add a constant that is broadcast to the tensor's shape."""
        if isinstance(bias, Node):
            raise UncoveredError(f"the output of {bias.name!r} depends on the tokens and is added to their values")
        bias = torch.as_tensor(bias, dtype=self._like.dtype, device=self._like.device).detach()
        carried = carried.moved(carried.index.expand(torch.broadcast_shapes(bias.shape, carried.index.shape)))
        if not bool(bias.any()):
            return carried
        if not carried.layout.is_whole:
            carried = carried.arranged()
        bias = carried.layout.factor(bias)
        bias = bias.repeat_interleave(carried.shape[2] // bias.shape[2], 2)
        same = torch.equal(bias, bias[:1, :1].expand_as(bias))
        ones = self._like.new_ones(1, 1, 1)
        return carried.same_elements(Scale("skip", ones, bias[0, 0].clone() if same else bias))


def chains_of(node: Node, like: Tensor, *, transposed: bool = False) -> Mapping[str, Chain]:
    """Return the stages from each input port to a module's output, (batch, token, channel).

    Raises `UncoveredError` with the reason if the output is not a sum of chains of stages.
    """
    carried = Compilation(like, transposed=transposed).value(node)
    carried = _output(carried.moved(carried.index.reshape(node.value.shape)))
    mixes = [stage for chain in carried.chains.values() for stage in walk(chain) if stage.mixes]
    core = any(stage.role == "core" and not isinstance(getattr(stage, "mixer", None), Gather) for stage in mixes)
    chains = {port: simplified(chain) for port, chain in carried.chains.items()}
    return {port: _with_roles(chain, core)[0] for port, chain in chains.items()}


def _output(carried: Carried) -> Carried:
    """Return the value of a module's output, whose last axis has the channels."""
    rows = frozenset(range(carried.index.ndim - 1))
    carried = carried.arranged(rows)
    if carried.index.shape[-1] != carried.shape[2]:
        raise UncoveredError("the last axis of its output is no axis of channels")
    return carried


def _with_roles(chain: Chain, core: bool, *, behind: bool = False) -> tuple[Chain, bool]:
    """Return stages whose matrices after the core have the role "output"; without a core, convolutions are one."""
    from dataclasses import replace

    stages: list[Stage] = []
    for stage in chain:
        if isinstance(stage, Branch):
            pairs = [_with_roles(inner, core, behind=behind) for inner in stage.chains]
            stages.append(replace(stage, chains=tuple(inner for inner, _ in pairs)))
            behind = behind or any(passed for _, passed in pairs)
        elif isinstance(stage, Mix):
            role = "core" if not core else stage.role
            stages.append(replace(stage, role=role))
            behind = behind or role == "core"
        elif isinstance(stage, Matrix) and behind:
            stages.append(replace(stage, role="output"))
        else:
            stages.append(stage)
    return tuple(stages), behind


def _slope(at: Compilation, node: Node, x: Node, *args: Any, **kwargs: Any) -> Carried:
    """Multiply by the frozen slope of an activation, and add f(0)."""
    args = tuple(at.number(value) for value in args)
    kwargs = {name: at.number(value) for name, value in kwargs.items()}
    func = node.func
    point = x.value.detach()
    slope, level = frozen_slope(node.name, lambda p: func(p, *args, **kwargs), point)
    carried = at.scaled(at.value(x), slope, "act")
    return at.shifted(carried, level) if bool(level != 0) else carried


def _moved(at: Compilation, node: Node, x: Any, *args: Any, **kwargs: Any) -> Carried:
    """Apply a function that moves elements to the index."""
    carried = at.value(x)
    if node.name in CASTS:
        return carried
    args = tuple(at.number(value) for value in args)
    kwargs = {name: at.number(value) for name, value in kwargs.items()}
    if node.name in ("tril", "triu"):
        ones = torch.ones_like(x.value)
        return at.scaled(carried, node.func(ones, *args, **kwargs), "gate")
    if (
        node.func is functional.unfold
        or node.name in ("real", "imag", "interpolate", "fold", "nan_to_num")
        or (node.name.startswith("adaptive"))
    ):
        raise UncoveredError(f"{node.name!r} is applied to values that depend on the tokens, and has no rule")
    if node.name == "as_strided" and not x.value.is_contiguous():
        raise UncoveredError("a window of values that depend on the tokens is read in an unknown order of memory")
    if node.name in ("view", "view_as", "reshape_as"):
        # The index may lie in memory in another order than the tensor.
        return carried.moved(carried.index.reshape(node.value.shape))
    index = node.func(carried.index, *args, **kwargs)
    return carried.moved(index if node.item is None else index[node.item])


@_rule("real")
def _real(at: Compilation, node: Node, x: Any) -> Carried:
    """Return the real part of a Fourier transform: cosines and sines are matrices."""
    return _spectrum(at, x)[0]


def _spectrum(at: Compilation, node: Any) -> tuple[Carried, Carried | None]:
    """Return the real and the imaginary part of a Fourier transform of carried values."""
    if not node.name.startswith(("fft_fft", "fft")):
        carried = at.value(node)
        return carried, None
    x, *args = node.args
    if node.kwargs.get("s") or node.kwargs.get("n"):
        raise UncoveredError("a Fourier transform of another length")
    dims = node.kwargs.get("dim", node.kwargs.get("dims", args[1] if len(args) > 1 else None))
    count = x.value.ndim
    if dims is None:
        dims = {"fft": (-1,), "fft2": (-2, -1)}.get(node.name.removeprefix("fft_"), tuple(range(count)))
    real, imaginary = _spectrum(at, x)
    for dim in (dims,) if isinstance(dims, int) else dims:
        size, axis = x.value.shape[dim], dim % count
        angle = 2 * torch.pi * torch.outer(torch.arange(size), torch.arange(size)).remainder(size).double() / size
        scale = size**-0.5 if node.kwargs.get("norm") == "ortho" else 1.0
        cosine, sine = (scale * wave(angle).to(at._like) for wave in (torch.cos, torch.sin))
        letters = tuple(range(count))
        product = Product(letters, (100, axis), tuple(100 if letter == axis else letter for letter in letters))

        def by(carried: Carried, matrix: Tensor) -> Carried:
            return contracted(carried, matrix, product, x.value.shape, "input")  # noqa: B023

        if imaginary is None:
            real, imaginary = by(real, cosine), by(real, -sine)
        else:
            real, imaginary = (
                added(by(real, cosine), by(imaginary, sine)),
                added(by(imaginary, cosine), by(real, -sine)),
            )
    return real, imaginary


@_rule("neg", "negative")
def _neg(at: Compilation, node: Node, x: Node) -> Carried:
    return at.scaled(at.value(x), -1.0, "skip")


@_rule("add", "sub", "subtract", "rsub")
def _add(at: Compilation, node: Node, x: Any, other: Any, *, alpha: float = 1) -> Carried:
    first, second = 1.0, float(alpha)
    if node.name in ("sub", "subtract"):
        second = -second
    elif node.name == "rsub":
        first, second = -1.0, 1.0 * alpha
    terms = [(value, sign) for value, sign in ((x, first), (other, second))]
    shape = node.value.shape
    carried: list[Carried] = []
    constants: list[Any] = []
    for value, sign in terms:
        if isinstance(value, Node) and value.kind == "carried":
            term = at.value(value)
            term = term if sign == 1 else at.scaled(term, sign, "skip")
            carried.append(term.moved(term.index.expand(shape)))
        elif isinstance(value, Node):
            at.shifted(carried[0] if carried else None, value)  # type: ignore[arg-type]  # raises the reason
        else:
            constants.append(value * sign)
    total = carried[0] if len(carried) == 1 else added(*carried)
    for constant in constants:
        total = at.shifted(total, constant)
    return total


@_rule("mul", "multiply")
def _mul(at: Compilation, node: Node, x: Any, other: Any) -> Carried:
    live = [value for value in (x, other) if isinstance(value, Node) and value.kind == "carried"]
    if len(live) == 1:
        return at.scaled(at.value(live[0]), other if live[0] is x else x, "gate")
    if x is other:
        return at.scaled(at.value(x), x, "gate")
    if x.value.numel() != other.value.numel():
        frozen = x if x.value.numel() < other.value.numel() else other
    elif x.rank != other.rank:
        frozen = x if x.rank > other.rank else other
    else:
        halves = (
            at.scaled(at.value(x), other.value.detach() / 2, "gate"),
            at.scaled(at.value(other), x.value / 2, "gate"),
        )
        return added(*halves)
    return at.scaled(at.value(other if frozen is x else x), frozen, "gate")


@_rule("div", "divide", "true_divide")
def _div(at: Compilation, node: Node, x: Any, other: Any, **options: Any) -> Carried:
    if options.get("rounding_mode") is not None:
        raise UncoveredError("a rounded quotient of values that depend on the tokens")
    return at.scaled(at.value(x), 1 / torch.as_tensor(at.number(other), dtype=at._like.dtype), "gate")


@_rule("masked_fill")
def _masked_fill(at: Compilation, node: Node, x: Any, mask: Any, value: Any) -> Carried:
    mask = at.number(mask)
    carried = at.scaled(at.value(x), ~mask, "gate")
    value = at.number(value)
    if bool(torch.as_tensor(value != 0).any()) and bool(mask.any()):
        raise UncoveredError("masked values of the tokens are filled with a number")
    return carried


@_rule("where")
def _where(at: Compilation, node: Node, mask: Any, x: Any, other: Any) -> Carried:
    mask = at.number(mask)
    terms = [(value, keep) for value, keep in ((x, mask), (other, ~mask))]
    live = [(v, k) for v, k in terms if isinstance(v, Node) and v.kind == "carried"]
    for value, keep in terms:
        if not (isinstance(value, Node) and value.kind == "carried"):
            number = torch.as_tensor(at.number(value))
            if bool(number.any()) and bool((keep & (number != 0)).any()):
                raise UncoveredError("values of the tokens are replaced by numbers")
    scaled = [at.scaled(at.value(v), k, "gate") for v, k in live]
    scaled = [s.moved(s.index.expand(node.value.shape)) for s in scaled]
    return scaled[0] if len(scaled) == 1 else added(*scaled)


@_rule("linear")
def _linear(at: Compilation, node: Node, x: Any, weight: Any, bias: Any = None) -> Carried:
    axes = tuple(range(x.value.ndim))
    product = Product(axes, (100, axes[-1]), (*axes[:-1], 100))
    carried = contracted(at.value(x), at.number(weight), product, node.value.shape, "input")
    if bias is None:
        return carried
    if not isinstance(bias, Node) and carried.layout.has_all_channels and carried.shape[2] == len(bias):
        # The bias of the matrix itself.
        from dataclasses import replace

        first = next(iter(carried.chains))
        chains = dict(carried.chains)
        last = chains[first][-1]
        if isinstance(last, (Matrix, Mix)) and last.bias is None and carried.layout.is_whole:
            chains[first] = (*chains[first][:-1], replace(last, bias=at.number(bias)))
            return replace(carried, chains=chains)
    return at.shifted(carried, bias)


def _product(at: Compilation, node: Node, *operands: Any, **kwargs: Any) -> Carried:
    """Multiply a carried tensor by a frozen one."""
    if node.name == "einsum":
        equation, *terms = operands
        if len(terms) == 1 and isinstance(terms[0], (tuple, list)):
            terms = list(terms[0])
        if not isinstance(equation, str):
            raise UncoveredError("einsum without an equation")
        shapes = [at.number(term).shape for term in terms]
        first, second, out = from_equation(equation, shapes)
    elif node.name in ("matmul", "mm", "bmm", "mv"):
        terms = list(operands) or [kwargs["input"], kwargs.get("other", kwargs.get("mat2"))]
        terms += [kwargs[name] for name in ("other", "mat2") if len(terms) == 1 and name in kwargs]
        first, second, out = matmul_letters(at.number(terms[0]).ndim, at.number(terms[1]).ndim)
    elif node.name == "rmatmul":
        terms = [operands[1], operands[0]]
        first, second, out = matmul_letters(at.number(terms[0]).ndim, at.number(terms[1]).ndim)
    else:
        raise UncoveredError(f"{node.name!r} is applied to values that depend on the tokens, and has no rule")
    live = [value for value in terms if isinstance(value, Node) and value.kind == "carried"]
    # Of two carried operands the left one holds the weights, unless the right one is the activated one.
    chosen = terms[1] if len(live) == 2 and terms[0].rank >= terms[1].rank else live[0]
    if chosen is terms[0]:
        product, weights = Product(first, second, out), terms[1]
    else:
        product, weights = Product(second, first, out), terms[0]
    weights = at.number(weights).to(at._like.dtype) if not at.number(weights).is_complex() else at.number(weights)
    return contracted(at.value(chosen), weights, product, node.value.shape, "input")


@_rule("addmm", "baddbmm")
def _addmm(at: Compilation, node: Node, x: Any, one: Any, other: Any, *, beta: float = 1, alpha: float = 1) -> Carried:
    first, second, out = matmul_letters(at.number(one).ndim, at.number(other).ndim)
    if isinstance(one, Node) and one.kind == "carried":
        product, weights, chosen = Product(first, second, out), other, one
    else:
        product, weights, chosen = Product(second, first, out), one, other
    carried = contracted(at.value(chosen), at.number(weights) * alpha, product, node.value.shape, "input")
    if isinstance(x, Node) and x.kind == "carried":
        return added(carried, at.scaled(at.value(x), beta, "skip"))
    return at.shifted(carried, x if isinstance(x, Node) else x * beta)


@_rule("sum", "mean")
def _sum(at: Compilation, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Carried:
    dim = options.get("axis", dim)
    axes = range(x.value.ndim) if dim is None else ((dim,) if isinstance(dim, int) else tuple(dim))
    axes = [axis % x.value.ndim for axis in axes]
    letters = tuple(range(x.value.ndim))
    out = tuple(letter for letter in letters if letter not in axes)
    count = 1
    for axis in axes:
        count *= x.value.shape[axis]
    weights = at._like.new_full([x.value.shape[axis] for axis in axes], 1 / count if node.name == "mean" else 1.0)
    shape = torch.Size([x.value.shape[letter] for letter in out])
    carried = contracted(at.value(x), weights, Product(letters, tuple(axes), out), shape, "input")
    return carried.moved(carried.index.reshape(node.value.shape))


@_rule("cumsum")
def _cumsum(at: Compilation, node: Node, x: Any, dim: int, **_: Any) -> Carried:
    axis, size = dim % x.value.ndim, x.value.shape[dim]
    letters = tuple(range(x.value.ndim))
    out = tuple(100 if letter == axis else letter for letter in letters)
    weights = at._like.new_ones(size, size).tril()
    return contracted(at.value(x), weights, Product(letters, (100, axis), out), node.value.shape, "input")


@_rule("scaled_dot_product_attention")
def _attention(
    at: Compilation,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Carried:
    """Average the values with the frozen weights of fused attention."""
    query, key, mask = at.number(query), at.number(key), at.number(attn_mask)
    carried = at.value(value)
    if enable_gqa:
        repeats = query.shape[-3] // value.value.shape[-3]
        carried = carried.moved(carried.index.repeat_interleave(repeats, -3))
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # A query without any key reads nothing, as in torch's fused attention.
    weights = (
        scores.softmax(-1).nan_to_num(nan=0.0) if mask is not None and mask.dtype == torch.bool else scores.softmax(-1)
    )
    first, second, out = matmul_letters(weights.ndim, carried.index.ndim)
    return contracted(carried, weights, Product(second, first, out), node.value.shape, "input")


@_rule("layer_norm")
def _layer_norm(
    at: Compilation,
    node: Node,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Carried:
    """Centre live, divide by the frozen deviation."""
    return _normed(at, x, len(normalized_shape), weight, bias, eps, centred=True)


@_rule("rms_norm")
def _rms_norm(
    at: Compilation, node: Node, x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Carried:
    """Divide by the frozen root mean square."""
    eps = torch.finfo(x.value.dtype).eps if eps is None else eps
    return _normed(at, x, len(normalized_shape), weight, None, eps, centred=False)


def _normed(at: Compilation, x: Any, axes: int, weight: Any, bias: Any, eps: float, *, centred: bool) -> Carried:
    carried, point = at.value(x), x.value.detach()
    for axis in range(carried.index.ndim - axes, carried.index.ndim):
        if len({is_row for size, is_row in carried.layout.split[axis] if size > 1}) == 2:
            carried = with_channels(carried, axis, at._like)
    dims = tuple(range(-axes, 0))
    if centred:
        split = carried.layout.split[-axes:]
        if any(is_row and size > 1 for sizes in split for size, is_row in sizes):
            raise UncoveredError("a norm over tokens")
        if not carried.layout.is_whole:
            carried = carried.arranged()
        size = point.shape[-axes:].numel()
        width = carried.shape[2]
        channels = carried.layout.channels
        if not torch.equal(channels, torch.arange(width, device=channels.device)):
            carried = carried.arranged()
        carried = carried.same_elements(Center("norm", width // size))
        point = point - point.mean(dims, keepdim=True)
    elif any(is_row and size > 1 for sizes in carried.layout.split[-axes:] for size, is_row in sizes):
        raise UncoveredError("a norm over tokens")
    scale = torch.rsqrt(point.pow(2).mean(dims, keepdim=True) + eps)
    carried = at.scaled(carried, scale, "norm")
    if weight is not None:
        carried = at.scaled(carried, weight, "norm")
    return carried if bias is None else at.shifted(carried, bias)


@_rule("batch_norm")
def _batch_norm(
    at: Compilation,
    node: Node,
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Carried:
    """Apply the running mean and variance, which are constants."""
    if training or running_mean is None or running_var is None:
        raise UncoveredError("a batch norm normalises over the batch; call model.eval() before tracing")
    shape = (-1, *[1] * (x.value.ndim - 2))
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    offset = -running_mean * scale + (0 if bias is None else bias)
    return at.shifted(at.scaled(at.value(x), scale.reshape(shape), "norm"), offset.reshape(shape))


@_rule("normalize")
def _normalize(
    at: Compilation, node: Node, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any
) -> Carried:
    """Divide by the frozen norm."""
    return at.scaled(at.value(x), 1 / x.value.detach().norm(p, dim, keepdim=True).clamp_min(eps), "norm")


@_rule("glu")
def _glu(at: Compilation, node: Node, x: Any, dim: int = -1) -> Carried:
    """Multiply one half by the frozen gate of the other."""
    carried = at.value(x)
    gate = torch.sigmoid(x.value.detach().chunk(2, dim)[1])
    return at.scaled(carried.moved(carried.index.chunk(2, dim)[0]), gate, "gate")


@_rule("pad")
def _pad(at: Compilation, node: Node, x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Carried:
    """Add zeros along tokens or channels."""
    if mode != "constant" or (value not in (None, 0, 0.0)):
        raise UncoveredError("values of the tokens are padded by other numbers than zeros")
    carried = at.value(x)
    for number in range(len(pad) // 2):
        axis = carried.index.ndim - 1 - number
        before, after = pad[2 * number], pad[2 * number + 1]
        if before or after:
            carried = _padded(carried, axis, before, after)
    return carried


def _padded(carried: Carried, axis: int, before: int, after: int) -> Carried:
    size = carried.index.shape[axis]
    if before < 0 or after < 0:
        start, stop = max(0, -before), size - max(0, -after)
        carried = carried.moved(carried.index.narrow(axis, start, stop - start))
        size, before, after = stop - start, max(before, 0), max(after, 0)
    index = functional.pad(torch.arange(size), (before, after), value=-1).to(carried.index.device)
    return along(carried, axis, index)


def along(carried: Carried, axis: int, index: Tensor) -> Carried:
    """Read the entries `index` along an axis, zeros where it is -1."""
    if not bool((index < 0).any()):
        return carried.moved(carried.index.index_select(axis, index))
    split = carried.layout.split[axis]
    carried = carried.arranged()
    filled = carried.index.index_select(axis, index.clamp_min(0))
    shape = [1] * filled.ndim
    shape[axis] = -1
    real = (index >= 0).view(shape)
    (batch, length, width) = carried.shape
    if len(split) != 1:
        raise UncoveredError("an axis of tokens and channels is padded")
    is_row = split[0][1] or (carried.index.shape[axis] == 1 and axis == 1 and carried.index.ndim == 3)
    if is_row:
        layout = carried.moved(filled).layout
        tokens = layout.tokens
        rows = real.expand(filled.shape).reshape(layout.sizes)
        rows = rows.permute(
            *[k for k, row in enumerate(layout.is_row) if row], *[k for k, row in enumerate(layout.is_row) if not row]
        ).reshape(layout.rows.numel(), -1)[:, 0]
        tokens = tokens.masked_fill(~rows[layout._order].view(batch, -1), -1)
        role = "conv" if tokens.shape[1] == length else "core"
        value = carried.then(Mix(role, Gather(tokens, length, like=carried.like)), tokens=tokens.shape[1])
        if not layout.has_all_channels:
            value = value.select(layout.channels)
        return value.moved(layout.own_index)
    layout = carried.moved(filled).layout
    channels = layout.channels
    keep = real.expand(filled.shape).reshape(layout.sizes)
    keep = keep.permute(
        *[k for k, row in enumerate(layout.is_row) if row], *[k for k, row in enumerate(layout.is_row) if not row]
    ).reshape(layout.rows.numel(), -1)[0]
    ones = carried.like.new_zeros(len(channels), width)
    ones[torch.arange(len(channels), device=ones.device), channels] = keep.to(ones)
    return carried.then(Matrix("input", ones), channels=len(channels)).moved(layout.own_index)


@_rule("cat", "concat", "concatenate")
def _cat(at: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    """Add the terms, each padded by zeros where the others are."""
    dim %= node.value.ndim
    terms, start, total = [], 0, node.value.shape[dim]
    for tensor in tensors:
        size = at.number(tensor).shape[dim]
        if isinstance(tensor, Node) and tensor.kind == "carried":
            terms.append((at.value(tensor), start, total - start - size))
        elif isinstance(tensor, Node) or bool(tensor.any()):
            raise UncoveredError("values of the tokens are joined with other numbers")
        start += size
    shared = terms[0][0]
    if len(terms) == len(tensors) and all(term.chains is shared.chains for term, _, _ in terms):
        return shared.moved(torch.cat([term.index for term, _, _ in terms], dim))
    sum_: Carried | None = None
    for term, before, after in terms:
        padded = _padded(term, dim, before, after)
        sum_ = padded if sum_ is None else added(sum_, padded)
    assert sum_ is not None
    return sum_


@_rule("stack")
def _stack(at: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    terms = [at.value(tensor) for tensor in tensors]
    if all(term.chains is terms[0].chains for term in terms):
        return terms[0].moved(torch.stack([term.index for term in terms], dim))
    dim %= node.value.ndim
    sum_: Carried | None = None
    for number, term in enumerate(terms):
        padded = _padded(term.moved(term.index.unsqueeze(dim)), dim, number, len(terms) - number - 1)
        sum_ = padded if sum_ is None else added(sum_, padded)
    assert sum_ is not None
    return sum_


@_rule("conv1d", "conv2d")
def _conv(
    at: Compilation,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Carried:
    """Sum over the taps: the tokens at each tap's distance, times its matrix."""
    weight = at.number(weight)
    out, _, *kernel = weight.shape
    grouped = weight.unflatten(0, (groups, -1))

    def tap(moved: Carried, places: tuple[int, ...]) -> Carried:
        matrix = grouped[(..., *places)]
        if matrix.shape[1:] == (1, 1):
            return at.scaled(moved, matrix.reshape(-1, *[1] * len(kernel)), "conv")
        # (batch, group, channel, *tokens) by (group, out, channel).
        space = tuple(range(10, 10 + len(kernel)))
        product = Product((0, 1, 2, *space), (1, 3, 2), (0, 1, 3, *space))
        shape = torch.Size((len(x.value), groups, matrix.shape[1], *node.value.shape[2:]))
        by_group = moved.moved(moved.index.unflatten(1, (groups, -1)))
        result = contracted(by_group, matrix, product, shape, "input")
        return result.moved(result.index.flatten(1, 2))

    total = _over_taps(at.value(x), kernel, (stride, padding, dilation), node.value.shape[2:], tap)
    if bias is None:
        return total
    return at.shifted(total, bias if isinstance(bias, Node) else bias.reshape(-1, *[1] * len(kernel)))


@_rule("avg_pool1d", "avg_pool2d")
def _avg_pool(
    at: Compilation,
    node: Node,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Carried:
    """Average the tokens of each window."""
    space = node.value.ndim - (x.value.ndim - (2 if node.name == "avg_pool2d" else 1))
    kernel = [kernel_size] * space if isinstance(kernel_size, int) else list(kernel_size)
    stride = kernel_size if stride is None or stride == () else stride
    if ceil_mode:
        raise UncoveredError("a pooling window that reaches over the end")
    total = _over_taps(at.value(x), kernel, (stride, padding, 1), node.value.shape[-space:], lambda moved, _: moved)
    # The pool of ones counts the tokens of each window.
    ones = torch.ones_like(x.value)
    counts = node.func(
        ones,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        *(() if divisor_override is None else (divisor_override,)),
    )
    divided = functional.avg_pool2d if space == 2 else functional.avg_pool1d
    reach = (
        divided(ones, kernel_size, stride, padding, ceil_mode, True)
        if space == 1
        else divided(ones, kernel_size, stride, padding, ceil_mode, True, 1)
    )
    size = reach if space == 2 else reach * kernel[0]
    return at.scaled(total, counts / size.clamp_min(1), "conv")


def _over_taps(
    carried: Carried,
    kernel: Sequence[int],
    options: tuple[Any, Any, Any],
    out: Sequence[int],
    tap: Callable[[Carried, tuple[int, ...]], Carried],
) -> Carried:
    """Sum a function of the moved tokens over the places of a window; `options` are its stride, padding and dilation."""
    count = len(kernel)
    stride, dilation = (
        [v] * count if isinstance(v, int) else list(v) * (count if len(v) == 1 else 1) for v in options[::2]
    )
    padding = options[1]
    if isinstance(padding, str):
        reach = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        before = [r // 2 for r in reach]
    else:
        before = [padding] * count if isinstance(padding, int) else list(padding) * (count if len(padding) == 1 else 1)
    places = list(product_of(*(range(size) for size in kernel)))
    if len(places) > TAPS:
        raise UncoveredError(f"a convolution of {len(places)} taps over values that depend on the tokens")
    total: Carried | None = None
    for place in places:
        moved = carried
        for axis in range(count):
            size = carried.index.shape[axis - count]
            index = torch.arange(out[axis]) * stride[axis] + place[axis] * dilation[axis] - before[axis]
            index = index.masked_fill((index < 0) | (index >= size), -1).to(carried.index.device)
            moved = along(moved, moved.index.ndim + axis - count, index)
        term = tap(moved, place)
        total = term if total is None else added(total, term)
    assert total is not None
    return total
