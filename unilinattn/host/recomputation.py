"""Gradients segment by segment: only the inputs of a model's blocks are kept, and the blocks are computed again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from unilinattn.call import CACHES
from unilinattn.call.nested import mapped
from unilinattn.call.parameters import constant_parameters
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.module_calls import layer_input
from unilinattn.host.recorder import captured
from unilinattn.host.substitution import functional, through_operators
from unilinattn.memory import return_free_pages

BLOCK = "transformers.modeling_layers.GradientCheckpointingLayer"
"""The base class of blocks that transformers declares fit for recomputation."""


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep only the inputs of segments while a model runs with gradients; its mixers run through their operators.

    A segment is a block that its package declares fit for recomputation, or a registered mixer outside of such a block,
    unless it is called with a cache. The backward pass computes the segments again, one after the other; it must run
    inside `through_operators` and `captures`.
    """
    entered: list[nn.Module] = []

    def segmented(path: str, module: nn.Module, host: Forward) -> Forward | None:
        if functional(module) is None and not is_block(module):
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            if entered or any(kwargs.get(cache) is not None for cache in CACHES):
                return host(*args, **kwargs)
            entered.append(module)
            try:
                run = _Segment(module, host, args, kwargs)
                return checkpoint(run, use_reentrant=False, preserve_rng_state=False)
            finally:
                entered.pop()

        return forward

    with constant_parameters(model), through_operators(model), replaced_forwards(model, segmented):
        yield


@contextmanager
def captures(model: nn.Module) -> Iterator[None]:
    """Enter every architecture's `capture`, as in the forward pass, and discard its records."""
    with constant_parameters(model), captured(model):
        yield


def is_block(module: nn.Module) -> bool:
    """Tell whether a module's package declares it fit for recomputation in the backward pass."""
    return any(f"{ancestor.__module__}.{ancestor.__qualname__}" == BLOCK for ancestor in type(module).__mro__)


class _Segment:
    """One call of a module: first on its arguments, then on copies that nothing writes into."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._forward, self._call, self._begun = forward, (args, kwargs), False
        # A host may run on temporary parameters, such as rescaled copies.
        self._parameters = [(inner, dict(inner._parameters)) for inner in module.modules()]
        # torch exits the active modes before it runs a backward pass.
        self._modes = _get_current_function_mode_stack()
        # The backward pass of a GPU runs in another thread, without the context variables of the segment's run.
        self._context = copy_context()

    def __call__(self) -> Any:
        return_free_pages()
        return self._context.copy().run(self._again) if self._begun else self._run()

    def _again(self) -> Any:
        with ExitStack() as stack:
            entered = _get_current_function_mode_stack()
            for mode in self._modes:
                if not any(mode is other for other in entered):
                    stack.enter_context(mode)
            for inner, parameters in self._parameters:
                stack.callback(inner._parameters.update, dict(inner._parameters))
                inner._parameters.update(parameters)
            return self._run()

    def _run(self) -> Any:
        args, kwargs = self._call
        stream = layer_input((*args, *kwargs.values()))
        if not self._begun:
            # The parameters require no gradient, so the first segment's input has to.
            live = None if stream is None or stream.requires_grad else stream.detach().requires_grad_().clone()
            if live is not None:
                # The containers stay those of the host: a layer may write keys and values for later ones into them.
                args = tuple(live if value is stream else value for value in args)
                kwargs = {name: live if value is stream else value for name, value in kwargs.items()}
            # A host may write into the tensors that it passes on.
            self._call, self._begun = mapped((args, kwargs), _copied), True
        return self._forward(*args, **kwargs)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that requires a gradient, with its strides, by which functions save other tensors."""
    if not tensor.requires_grad:
        return tensor
    # A clone of a slice would be contiguous; axes along which a tensor is expanded are expanded again.
    values = tensor.detach()[tuple(slice(None if step else 1) for step in tensor.stride())]
    copy = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device).copy_(values)
    return copy.expand(tensor.shape).requires_grad_()
