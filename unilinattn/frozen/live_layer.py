"""A traced layer in a run with the half rule: its flow on the run's own input, with gates that carry relevance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unilinattn.frozen.layers import frozen_output
from unilinattn.host.module_calls import first_tensor
from unilinattn.operator.flow import Flow, evaluated_by
from unilinattn.operator.stages import Branch, Scale, Stage
from unilinattn.tracing.layer import Layer


def live_output(layer: Layer, arguments: Mapping[str, Any]) -> tuple[Tensor, list[GradientEdge]]:
    """Return the recorded output of a layer with the derivative of its live flow, and the edges after its cores.

    Runs inside `Freezing(half=True)`, which multiplies by the gates: a value and its gate each get half of the
    relevance of their product, unless the gate is an activation with f(0) != 0, such as a sigmoid. All other factors
    are constants: the matrices of token mixers, the slopes of activations and the scales of norms. Gates that an
    adapter reads from a capture of the host's run are constants too, and a layer that reads several tensors is its
    frozen operator, without edges after its cores.
    """
    x = first_tensor(arguments.values())
    assert x is not None
    if not x.requires_grad or tuple(layer.ports) != ("x",):
        with torch._C.DisableTorchFunction():
            return frozen_output(layer, arguments), []
    with evaluated_by(_evaluate):
        flow = _flow(layer, x.to(layer.input.dtype))
        computed, mixed = flow.value, [get_gradient_edge(value()) for value in flow.mixed]
    with torch._C.DisableTorchFunction():
        # The value is the recorded one, so that later factors are those of the trace.
        rounding = (layer.output - computed).detach()
        return (computed + rounding).to(x.dtype), mixed


def _flow(layer: Layer, x: Tensor) -> Flow:
    """Return the flow that the adapter builds on `x`, or the frozen stages if it needs a capture of the host's run."""
    if not layer.needs_capture:
        return layer.flow_in_run(x)
    flow = Flow(x)
    for stage in layer.operator.chains["x"]:
        flow.stage(stage)
    return flow


def _evaluate(stages: Sequence[Stage], x: Tensor) -> Tensor:
    """Apply stages to a carried tensor; of the scales only gates are carried too."""
    for stage in stages:
        if isinstance(stage, Branch):
            x = torch.stack([_evaluate(chain, x) for chain in stage.chains]).sum(0)
        elif isinstance(stage, Scale):
            x = (stage if stage.role == "gate" else replace(stage, factor=stage.scale.detach())).apply(x)
        else:
            x = _affine(stage, x)
    return x


def _affine(stage: Stage, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        if not x.requires_grad:
            return stage.apply(x)
        # `jvp` runs only if an input is dual.
        trigger = forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
        output: Tensor = _Affine.apply(stage, trigger, x)
        return output


class _Affine(torch.autograd.Function):
    """A frozen stage, whose bias is a source."""

    @staticmethod
    def forward(ctx: Any, stage: Stage, trigger: Tensor, x: Tensor) -> Tensor:
        ctx.stage, ctx.shape, ctx.like = stage, x.shape, x.new_empty(0)
        return stage.apply(x.detach())

    @staticmethod
    @torch.no_grad()  # No gradient of a tangent is asked for.
    def jvp(ctx: Any, stage: Any, trigger: Tensor, tangent: Tensor | None) -> Tensor:
        return ctx.stage.apply(ctx.like.new_zeros(ctx.shape) if tangent is None else tangent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, ctx.stage.adjoint(grad)
