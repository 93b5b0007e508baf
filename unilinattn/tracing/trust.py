"""Trust: the check of a layer's operator against the host's output before a method uses the layer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import ExactnessError, OptionError, UncoveredError, nearest
from unilinattn.kernels.precision import AUTOCAST

Trust = Literal["require", "warn"]
"""Raise an error for a layer whose operator misses the host's output, or warn and keep the warning in the result."""

_trust: ContextVar[Trust] = ContextVar("unilinattn.trust", default="require")


@runtime_checkable
class Checked(Protocol):
    """The attributes of a layer that its check needs."""

    name: str
    precision: torch.dtype
    module: nn.Module

    def reconstruction_error(self) -> float:
        """Return the relative error of the operator against the host's output."""
        ...


@contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """Apply a level of trust to every layer that is checked inside.

    Raises:
        OptionError: for another level.
    """
    if trust not in get_args(Trust):
        raise OptionError(f"unknown trust {trust!r}" + nearest(trust, get_args(Trust)))
    token = _trust.set(trust)
    try:
        yield
    finally:
        _trust.reset(token)


def require_exact(layers: Iterable[Checked]) -> tuple[str, ...]:
    """Compare each layer's operator with the host's output, once a layer: one forward pass of the operator.

    Returns a sentence for each layer above the tolerance; only `trusting("warn")` gets that far. A layer whose adapter
    covers only its core has no error to compare; the adapter compared that core with the result of the host's
    attention when it built the operator.

    Raises:
        ExactnessError: for an error above the tolerance of the layer's dtype.
    """
    doubts = tuple(doubt for layer in layers if (doubt := doubt_of(layer)) is not None)
    if doubts:
        require_trust(f"{doubts[0]} No scores are computed from such an operator: remove the cause")
    return doubts


def require_trust(doubt: str) -> None:
    """Raise `ExactnessError` with a doubt about scores and the option that returns them, unless `trusting("warn")`."""
    if _trust.get() == "require":
        raise ExactnessError(f"{doubt}, or pass trust='warn' to get them with this warning.")


def doubt_of(layer: Checked) -> str | None:
    """Return a sentence with layer, error, tolerance and likely causes, None for an error within the tolerance."""
    try:
        error = layer.reconstruction_error()
    except UncoveredError:
        return None
    allowed = layer_tolerance(layer.precision)
    if error <= allowed:
        return None
    causes = likely_causes(layer.module)
    reason = "; ".join(causes) if causes else "the adapter does not cover what this module computes"
    return (
        f"the operator of {layer.name} misses the host's output by {error:.1e} (relative; {allowed:.0e} is accepted in "
        f"{str(layer.precision).removeprefix('torch.')}). Likely cause: {reason}."
    )


def precision_of(module: nn.Module, output: Tensor) -> torch.dtype:
    """Return the coarsest dtype among a module's parameters, its output, and the autocast that it runs under.

    On a GPU that may round float32 products to TensorFloat-32 this is float16, which has as many digits.
    """
    dtypes = [output.dtype, *(p.dtype for p in module.parameters() if p.is_floating_point())]
    device = output.device.type
    if device in AUTOCAST and torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        dtypes.append(torch.float16)
    return max(dict.fromkeys(dtypes), key=lambda dtype: torch.finfo(dtype).eps)


def likely_causes(module: nn.Module) -> list[str]:
    """Return the parts of a mixer that may change its output: hooks, parametrizations, replaced and quantised parts."""
    causes, package = [], type(module).__module__.split(".")[0]
    for path, inner in module.named_modules():
        if inner._forward_hooks or inner._forward_pre_hooks:
            causes.append(f"a forward hook on {path or 'the module itself'}")
        home = type(inner).__module__.split(".")[0]
        if parametrize.is_parametrized(inner):
            causes.append(f"a parametrization of {path}")
        elif home not in ("torch", package) or type(inner).__module__.startswith("torch.ao."):
            causes.append(f"{path} is a {type(inner).__module__}.{type(inner).__qualname__}")
        elif path and "forward" in vars(inner):
            causes.append(f"the forward method of {path} was replaced")
    return causes
