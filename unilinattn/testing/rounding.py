"""`host_rounding`: the rounding error of a host's layers, measured by running them again."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import UncoveredError
from unilinattn.testing.checks import outputs, real_tokens
from unilinattn.testing.promote import promoted
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import trace

MULTIPLE = 8.0
"""Largest distance of an operator from its host, in multiples of the host's measured rounding.

Operator and host compute one function with sums in two orders and one dtype, so they differ by a few roundings; an
operator that computes another function differs by many thousands.
"""

_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


class _Reordered(TorchFunctionMode):
    """Runs every matrix product with its sums in reverse order."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        if func is nn.functional.linear:
            args = (args[0].flip(-1), args[1].flip(-1), *args[2:])
        elif func in _PRODUCTS and len(args) == 2 and all(factor.ndim > 1 for factor in args):
            args = (args[0].flip(-1), args[1].flip(-2))
        return func(*args, **(kwargs or {}))


def host_rounding(model: nn.Module, inputs: Any) -> tuple[float, ...]:
    """Return the rounding error of every layer of a host in the model's dtype, in order of execution.

    See `layer_rounding`. The model is not changed. Raises the errors of `trace`.
    """
    return tuple(layer_rounding(layer) for layer in trace(model, inputs).layers)


@torch.no_grad()
def layer_rounding(layer: Layer) -> float:
    """Return the relative rounding error of a host's layer on the arguments of the traced call.

    It is the larger of two relative errors over real tokens, for the worst sequence: of the recorded output against
    the module promoted to float64, and of the module with reversed sums in every matrix product against the unchanged
    module. It does not depend on the operator.
    """
    exact = run_module(layer, exact=True)
    with _Reordered():
        reordered = run_module(layer)
    pairs = ((layer.output, exact), (reordered, run_module(layer)))
    return max(relative_error(real_tokens(layer.mask, first), real_tokens(layer.mask, other)) for first, other in pairs)


def rounding_limit(rounding: float, dtype: torch.dtype) -> float:
    """Return the largest reconstruction error that passes for a host with the measured `rounding` in `dtype`.

    It is `MULTIPLE` times the rounding plus the limit of a promoted host. A rounding below one unit of the dtype counts
    as one unit, the cost of rounding a layer's input once. The limit never exceeds half the digits of the dtype, or of
    float32: a host that loses more computes another function.
    """
    unit, coarsest = torch.finfo(dtype).eps, max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return min(tolerance("reconstruction", torch.float64) + MULTIPLE * max(rounding, unit), coarsest**0.5)


def run_module(layer: Layer, *, exact: bool = False, add: Tensor | None = None, to: Tensor | None = None) -> Tensor:
    """Run a copy of a layer's host module on the arguments of its call, promoted to float64 if `exact`.

    `add` is added to every argument that equals `to` (batch, key, channel), by default the layer's input.

    Raises `UncoveredError` if no argument equals it, or if the module returns no tensor of the output's shape.
    """
    # The host may write into its arguments and its state, so copies are used.
    module, arguments = copy.deepcopy((layer.module, layer.arguments))
    if exact:
        module, arguments = module.double(), widened(arguments)
    if add is not None:
        to = layer.input if to is None else to
        names = [name for name, value in arguments.items() if _equal(value, to, layer)]
        if not names:
            raise UncoveredError(f"{layer.name}: no argument of its module is the tensor that is to be changed.")
        arguments |= {name: arguments[name] + layer.in_shape(add, arguments[name].shape) for name in names}
    with torch.no_grad(), promoted() if exact else nullcontext():
        returned = outputs(module(**arguments))
    return _like(returned, layer)


def widened(inputs: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return inputs, possibly nested, with every floating-point tensor in float64 or another dtype."""

    def wide(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(wide, inputs)


def _like(returned: Sequence[Tensor], layer: Layer) -> Tensor:
    fitting = next((tensor for tensor in returned if tensor.shape == layer.output_shape), None)
    if fitting is None:
        shapes = [tuple(tensor.shape) for tensor in returned]
        raise UncoveredError(f"{layer.name}: run again it returns {shapes}, not {tuple(layer.output_shape)}.")
    return layer.output_as_read(fitting)


def _equal(value: Any, tensor: Tensor, layer: Layer) -> bool:
    """Tell whether an argument has the vectors of a tensor (batch, token, channel), in the host's layout."""
    if not isinstance(value, Tensor) or value.numel() != tensor.numel() or value.ndim < 2:
        return False
    return torch.equal(layer.as_read(value, tensor.shape).to(tensor), tensor)
