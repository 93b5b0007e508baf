"""The gradient of a logit of a host with respect to the outputs of its layers."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.errors import UncoveredError
from unilinattn.host.explained import ExplainedLogit
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import Logit, logits_wanted
from unilinattn.host.recomputation import captures, recomputing
from unilinattn.host.recorder import GradientRecorder
from unilinattn.host.run import run
from unilinattn.host.substitution import through_operators
from unilinattn.host.wrappers import require_gradients
from unilinattn.tracing.layer import Layer


def gradient_of(
    model: nn.Module,
    layers: Sequence[Layer],
    opaque: Collection[str],
    explained: ExplainedLogit,
    target: Any,
    logit: Logit,
) -> tuple[Tensor, ...]:
    """Return the gradient of a traced model's logit with respect to each layer's output (see `Trace.gradient`)."""
    require_gradients(model)
    recorder = GradientRecorder(model, opaque=opaque)
    # The logits of all tokens and their gradients may take more memory than all layers.
    arguments, positions = explained.arguments(model, None if callable(logit) else [target])

    def backward(output: Any) -> tuple[Tensor | None, ...]:
        scalar = explained.scalar(output, target, logit, positions).sum()
        if not scalar.requires_grad:
            raise UncoveredError("the explained number does not depend on the outputs of the model's layers.")
        return torch.autograd.grad(scalar, recorder.outputs, allow_unused=True)

    def both() -> Any:
        output = run(model, arguments, gradients=True, mixers=recomputing(model), observer=recorder.attached())
        # Outside of the isolated run, so that the segments of the backward pass use the operators too.
        with through_operators(model):
            return run(model, partial(backward, output), gradients=True, mixers=captures(model))

    grads = in_gradient_mode(True, both)
    # The graph refers to the recorder through its segments; the cycle would wait for the garbage collector.
    recorder.outputs.clear()
    return tuple(
        torch.zeros_like(layer.output) if grad is None else layer.output_as_read(grad.to(layer.output))
        for layer, grad in zip(layers, grads, strict=True)
    )


_latest: "WeakKeyDictionary[Any, dict[Hashable, tuple[Tensor, ...]]]" = WeakKeyDictionary()
"""The gradients of the latest scalar of traces inside of `one_gradient`."""


@contextmanager
def one_gradient(trace: Any) -> Iterator[None]:
    """Inside the context, methods that ask a trace for the gradient of one scalar in turn share its passes.

    The gradient of the latest scalar is kept until the context ends: as many numbers as the outputs of all layers. The
    weights are compared with those of the trace each time.
    """
    _latest[trace] = {}
    try:
        yield
    finally:
        del _latest[trace]


def shared_gradient(
    trace: Any, target: Any, logit: Logit, compute: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return `compute()`, or inside of `one_gradient` a copy of its result for the same logit just before."""
    latest = _latest.get(trace)
    if latest is None:
        return compute()
    scalar = trace.explained_logit.positions_of(target), tuple(logits_wanted(logit))
    if scalar not in latest:
        latest.clear()
        latest[scalar] = compute()
    return tuple(gradient.clone() for gradient in latest[scalar])
