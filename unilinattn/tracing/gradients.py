"""The gradient of a logit of a host with respect to the outputs of its layers."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import UncoveredError
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import Logit
from unilinattn.host.recomputation import captures, recomputing
from unilinattn.host.recorder import GradientRecorder
from unilinattn.host.run import run
from unilinattn.host.substitution import through_operators
from unilinattn.host.wrappers import require_gradients
from unilinattn.tracing.explained import ExplainedLogit
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
