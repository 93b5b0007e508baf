"""Results of the linear layers and attentions of a run, which later uses of the same inputs need not compute."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.overrides import handle_torch_function, has_torch_function

from unilinattn.call.exactness import layer_tolerance
from unilinattn.host.forwards import Forward
from unilinattn.host.observer import Inputs
from unilinattn.memory import allowed

_records: ContextVar[bool] = ContextVar("unilinattn.records", default=False)


@contextmanager
def recorded_products() -> Iterator[None]:
    """Record the products of the runs that are traced in this context."""
    token = _records.set(True)
    try:
        yield
    finally:
        _records.reset(token)


class _Product(NamedTuple):
    """The result of a linear layer with its version, and the projection of each input vector on one direction."""

    result: Tensor
    version: int
    projection: Tensor


class Products:
    """Results of linear layers by module, in order of the calls, each for one use.

    They are kept up to `max_memory`. A result is used if its input is the recorded one up to rounding, as its
    projection on a random direction tells for each token.
    """

    def __init__(self) -> None:
        """Prepare for a run."""
        self._by_module: dict[nn.Module, deque[_Product]] = {}
        self._left = allowed()

    @classmethod
    def of_run(cls) -> "Products | None":
        """Return the products of a run that begins, None outside `recorded_products`."""
        return cls() if _records.get() else None

    def record(self, module: nn.Module, inputs: Inputs, result: Any) -> None:
        """Record the result of a call, if the module is a plain linear layer under no hooks but the recorder's."""
        x = inputs[0][0] if len(inputs[0]) == 1 and not inputs[1] else None
        if not (isinstance(x, Tensor) and isinstance(result, Tensor) and _is_plain(module)):
            return
        size = result.numel() * result.element_size()
        # An inference tensor has no version, and a host may write into any result.
        if size > self._left or result.is_inference() or not x.dtype == result.dtype == module.weight.dtype:
            return
        self._left -= size
        product = _Product(result.detach(), result._version, _projected(x))
        self._by_module.setdefault(module, deque()).append(product)

    def forward_of(self, module: Any, host: Forward) -> Forward | None:
        """Return a forward of a linear layer that takes its results from here, None for a module without any.

        Of inputs that need no gradient, `host` computes the results: they may be the vectors of the tokens.
        """
        if module not in self._by_module:
            return None

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """Compute what `torch.nn.functional.linear` does; modes see it by the same name."""
            if has_torch_function((x, weight)):
                seen: Tensor = handle_torch_function(linear, (x, weight), x, weight, bias)
                return seen
            # A tangent is mapped without gradients, and is no input of the traced run.
            result = self._taken(module, x) if x.requires_grad and torch.is_grad_enabled() else None
            if result is None:
                return functional.linear(x, weight, bias)
            if bias is None and module.bias is not None:
                # A mode adds the bias, which is a source, by itself.
                result = result - module.bias.detach()
            product: Tensor = _Recorded.apply(x, weight, result)
            return product

        def forward(input: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
                is_carried = input.requires_grad
            return linear(input, weight, module.bias) if is_carried else host(input)

        return forward

    def _taken(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the next result of a module and release it; None if it is that of another input."""
        if not self._by_module[module]:
            return None
        result, version, projection = self._by_module[module].popleft()
        if result.shape[:-1] != x.shape[:-1] or result.dtype != x.dtype or result._version != version:
            return None
        x = x.detach()
        missed = (_projected(x) - projection).abs()
        # Written so that a NaN is refused too.
        is_same = missed <= layer_tolerance(x.dtype) * torch.linalg.vector_norm(x, dim=-1)
        return result if bool(is_same.all()) else None


class _Recorded(torch.autograd.Function):
    """A recorded product with the weight of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, result: Tensor) -> Tensor:
        ctx.weight = weight.detach()
        # A path without relevance has no gradient, and needs no product.
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else grad @ ctx.weight, None, None


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a module computes a linear layer of torch or transformers, without hooks but the recorder's."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    has_hooks = len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1 or hooks._global_forward_hooks
    has_hooks = has_hooks or hooks._global_forward_pre_hooks
    return type(module) in (nn.Linear, conv1d) and not has_hooks and "forward" not in vars(module)


def _projected(x: Float[Tensor, "*axes channel"]) -> Float[Tensor, "*axes"]:
    return x @ _direction(x.shape[-1], x.dtype, x.device)


@lru_cache(maxsize=64)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " channel"]:
    with torch.inference_mode(False):
        return torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
