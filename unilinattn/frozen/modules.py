"""Plain forms of modules in a frozen run, each compared with the module's own output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from unilinattn.call.exactness import tolerance
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import ExactnessError
from unilinattn.registry import PlainForm
from unilinattn.rules.forms import carried
from unilinattn.tracing.trust import precision_of


def plain_output(
    where: Callable[[], str], module: nn.Module, form: PlainForm, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's plain form if an argument is carried, and its own `forward` if all are constants.

    `where` returns the module's path and class. Raises `ExactnessError` if the form's result differs from the module's
    by more than the rounding of the dtype of both, at least float32, in which fused kernels compute.
    """
    if not carried((args, kwargs)):
        return forward(*args, **kwargs)
    result = form(module, *args, **kwargs)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = mapped((args, kwargs), _value)
        expected = [t for t in tensors(forward(*args, **kwargs)) if t.is_floating_point()]
        actual = [_value(t) for t in tensors(result) if t.is_floating_point()]
        shapes = [[tuple(t.shape) for t in values] for values in (expected, actual)]
        if shapes[0] != shapes[1]:
            raise ExactnessError(f"{where()}: its plain form returns shapes {shapes[1]}, and the module {shapes[0]}.")
        for host_output, plain in zip(expected, actual, strict=True):
            allowed = max(tolerance("stream", dtype) for dtype in (precision_of(module, host_output), torch.float32))
            error = float(
                (host_output.double() - plain.double()).norm() / host_output.double().norm().clamp_min(1e-300)
            )
            # Written so that a NaN is refused too.
            if not error <= allowed:
                raise ExactnessError(
                    f"{where()} differs from its plain form by {error:.1e} (relative; {allowed:.0e} is accepted), so "
                    "its part in the shares is unknown. Use the class's own forward."
                )
    return result


def _value(tensor: Tensor) -> Tensor:
    return forward_ad.unpack_dual(tensor).primal.detach() if tensor.is_floating_point() else tensor
