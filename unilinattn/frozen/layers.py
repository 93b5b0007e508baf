"""A traced layer in a frozen run: its recorded output, whose derivative is its operator or its live flow."""

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unilinattn.call.axes import joined, joined_heads, token_axis
from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import mapped, unlisted
from unilinattn.errors import UncoveredError
from unilinattn.host.isolation import isolated
from unilinattn.host.module_calls import layer_input
from unilinattn.memory import return_free_pages
from unilinattn.mixers import CoreMixer, Reversed, Toeplitz
from unilinattn.operator.flow import Flow, evaluated_by
from unilinattn.operator.stages import WHOLE, Branch, Matrix, Mix, Scale, Stage, Unmapped, walk
from unilinattn.registry import UNREGISTERED, architecture_of
from unilinattn.rules.gamma import emphasised
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import OWN, others_returned, returns_maps


def require_transparent(layers: Sequence[Layer]) -> None:
    """Raise `UncoveredError` for opaque layers."""
    for layer in layers:
        if layer.opaque:
            raise UncoveredError(f"{layer.name} is opaque: no adapter knows it, so its part in the output is unknown.")


def without_operator(layers: Sequence[Layer]) -> frozenset[Layer]:
    """Return the layers that a run computes by the rules of functions, since later modules need more than their output.

    Their input has no matrix to their values, they keep values for such layers in a mapping, or they were recorded and
    return vectors in addition to their output, such as a class token beside the patches.
    """
    built = [layer for layer in layers if layer.prefix_error is None]
    stages = {layer: [stage for chain in layer.operator.chains.values() for stage in walk(chain)] for layer in built}
    without = [layer for layer in built if any(isinstance(stage, Unmapped) for stage in stages[layer])]
    shared = {id(x) for layer in without for x in layer.arguments.values() if isinstance(x, MutableMapping)}
    shares = (layer for layer in built if shared & {id(x) for x in layer.arguments.values()})
    more = (layer for number, layer in enumerate(built) if _returns_more(layer, built[number + 1 :]))
    return frozenset((*without, *shares, *more))


def _returns_more(layer: Layer, later: Sequence[Layer]) -> bool:
    """Tell whether a recorded layer returned more vectors than its output, as of a second stream, or feature maps.

    Or a vector of each sequence, such as its last state, or values of its heads, of the size of what a later layer
    reads.
    """
    if layer.architecture != UNREGISTERED:
        return False
    others = others_returned(layer)
    # Square tensors are weights of attention.
    if any(x.ndim == 3 and x.shape[1] != x.shape[2] for x in others) or returns_maps(layer):
        return True
    states = {(len(x), 1, x.shape[1]) for x in others if x.ndim == 2}
    heads = ((x, token_axis(x.shape, *layer.output.shape[:2])) for x in others)
    values = {tuple(joined_heads(x, axis).shape) for x, axis in heads if axis is not None}
    inputs = [each for reader in later if states or values for each in reader.operator.inputs.items()]
    # A state with as many keys as there are tokens is no argument.
    return any(tuple(x.shape) in states or (port != OWN and tuple(x.shape) in values) for port, x in inputs)


def shares_values(layer: Layer) -> bool:
    """Tell whether a layer's architecture shares values with later layers."""
    architecture = architecture_of(type(layer.module))
    return architecture is not None and architecture.shared_values is not None


def with_shared_values(layer: Layer, arguments: Mapping[str, Any], returned: Any) -> Any:
    """Return what a layer returned, with the values that its architecture shares with later layers in the graph."""
    architecture = architecture_of(type(layer.module))
    if architecture is None or architecture.shared_values is None:
        return returned
    values = architecture.shared_values(layer.module, arguments)
    return mapped(returned, lambda t: values if t.shape == values.shape and not t.requires_grad else t)


def frozen_output(layer: Layer, arguments: Mapping[str, Any]) -> Tensor:
    """Return the recorded output of a layer as the operator's image of the tensors that its ports read in this run.

    Raises `UncoveredError` if the tensor of a port is none of the arguments.
    """
    inputs = _port_values(layer, arguments)
    if not any(x.requires_grad for x in inputs.values()):
        # Of learned queries it is a constant, and functions multiply no tangent by carried values.
        return layer.as_returned(layer.output).to(next(iter(inputs.values())).dtype, copy=True)
    trigger = torch.zeros((), device="cpu")
    if any(map(_has_constants, inputs.values())) or layer.operator.bias.any():
        # `jvp` runs only if an input is dual. In a model without biases no tangent follows, which saves a third of the
        # run's products.
        trigger = forward_ad.make_dual(trigger, torch.zeros((), device="cpu"))
    dtype = next(iter(inputs.values())).dtype
    output: Tensor = _Operator.apply(layer, tuple(inputs), dtype, trigger, *inputs.values())
    return output


class _Operator(torch.autograd.Function):
    """A traced layer: the recorded output, whose derivative is the operator."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, ports: Any, dtype: Any, trigger: Tensor, *inputs: Tensor) -> Tensor:
        ctx.layer, ctx.ports = layer, ports
        ctx.constants = [None if x.requires_grad else x.detach() for x in inputs]
        ctx.dtypes = [x.dtype for x in inputs]
        ctx.shapes = [x.shape for x in inputs]
        return layer.as_returned(layer.output).to(dtype, copy=True)

    @staticmethod
    @torch.no_grad()  # No gradient of a tangent is asked for, and its graph would hold every step of the operator.
    def jvp(ctx: Any, layer: Any, ports: Any, dtype: Any, trigger: Tensor, *tangents: Tensor | None) -> Tensor:
        _release(ctx.layer)
        op = ctx.layer.operator
        values = {}
        for port, tangent, constant in zip(ctx.ports, tangents, ctx.constants, strict=True):
            value = tangent if constant is None else constant
            like = op.inputs[port]
            values[port] = (
                torch.zeros_like(like) if value is None else ctx.layer.as_read(value.to(op.output.dtype), like.shape)
            )
        return ctx.layer.as_returned(op.apply(values).to(ctx.dtypes[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        _release(ctx.layer)
        op = ctx.layer.operator
        inputs = zip(ctx.ports, ctx.constants, ctx.dtypes, ctx.shapes, strict=True)
        grad = ctx.layer.output_as_read(grad.to(op.output.dtype))
        grads = (
            ctx.layer.in_shape(op.adjoint(grad, port=port).to(dtype), shape) if constant is None else None
            for port, constant, dtype, shape in inputs
        )
        return (None, None, None, None, *grads)


def _release(layer: Layer) -> None:
    """Return the pages of what earlier layers freed, if the input is long and operators are built one at a time."""
    if layer.prefix_error is not None:
        return_free_pages()


def _has_constants(x: Tensor) -> bool:
    """Tell whether a part of a tensor does not come from tokens."""
    return not x.requires_grad or forward_ad.unpack_dual(x).tangent is not None


def _port_values(layer: Layer, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a layer's ports read in this run, found by their values in the trace."""
    first = layer_input(arguments.values())
    if first is None:
        raise UncoveredError(f"{layer.name} was called without vectors of tokens in this run.")
    if tuple(layer.ports) == ("x",) and layer.prefix_error is not None:
        return {"x": first}
    if tuple(layer.ports) == ("x",):
        recorded = layer.input
        _require_recorded(layer, "its input", layer.as_read(first.detach().to(recorded), recorded.shape), recorded)
        return {"x": first}
    values, arguments = {}, unlisted(arguments)
    for port, recorded in layer.operator.inputs.items():
        matching = (
            name
            for name, value in unlisted(layer.arguments).items()
            if isinstance(value, Tensor)
            and value.numel() == recorded.numel()
            and (layer.axes.inputs == 1 or value.ndim == 4 or value.shape[-1] == recorded.shape[-1])
            and torch.equal(_as_port(layer, value.detach().to(recorded), recorded), recorded)
        )
        name = next(matching, None)
        if name is None or not isinstance(arguments.get(name), Tensor):
            raise UncoveredError(f"{layer.name}: the tensor of its port {port!r} is none of its arguments.")
        read = _as_port(layer, arguments[name], recorded)
        _require_recorded(layer, repr(name), read.detach().to(recorded), recorded)
        values[port] = arguments[name] if _is_in_order(layer, arguments[name], recorded) else read
    return values


def _as_port(layer: Layer, value: Tensor, recorded: Tensor) -> Tensor:
    """Return an argument as the vectors of tokens of a port.

    Several sequences, such as the tiles of an image, may be read as one.
    """
    is_in_order = _is_in_order(layer, value, recorded)
    return layer.as_read(value, recorded.shape) if is_in_order else joined(value, recorded.shape)


def _is_in_order(layer: Layer, value: Tensor, recorded: Tensor) -> bool:
    """Tell whether an argument has the axes of a layer's input: channels second, or tokens before sequences."""
    if value.ndim == 2:
        return False
    return layer.axes.inputs == 1 or (value.ndim == 3 and value.shape[:2] == recorded.shape[:2][::-1])


def _require_recorded(layer: Layer, name: str, value: Tensor, recorded: Tensor) -> None:
    """Raise `UncoveredError` for an argument that the run did not compute, such as one that an earlier layer returned.

    In the run a layer returns only its output, and the shared values of its architecture.
    """
    missing = float((value - recorded).norm())
    if not missing <= max(layer_tolerance(layer.precision), layer_tolerance(torch.float32)) * float(recorded.norm()):
        raise UncoveredError(
            f"{layer.name} reads {name}, whose value is not that of the trace: an earlier layer returned it in "
            "addition to its output, and the adapter of that layer does not compute it (`shared_values` of "
            "register_architecture), or the model draws random numbers."
        )


def live_output(
    layer: Layer, arguments: Mapping[str, Any], gamma: float, *, edges: bool
) -> tuple[Tensor, list[GradientEdge]]:
    """Return the recorded output of a layer with the derivative of its live flow, and the edges after its cores.

    Runs inside `Freezing(half=True)`, which multiplies by the gates: a value and its gate each get half of the
    relevance of their product, unless the gate is an activation with f(0) != 0, such as a sigmoid. All other factors
    are constants: the matrices of token mixers, the slopes of activations and the scales of norms. Gates that an
    adapter reads from a capture of the host's run are constants too, and so are those of a recorded module that is one
    stage or has a function without a rule. A layer that reads several tensors is its frozen operator, without edges
    after its cores, and so is one without gates unless `edges` asks for these: both are one function. Matrices and
    short convolutions follow the gamma rule (see `rules.gamma`); 0 is none.
    """
    with torch._C.DisableTorchFunction():
        values = _port_values(layer, arguments)
        ((port, x), *others) = values.items()
        is_frozen = not gamma and not edges and not _has_gates(layer)
        if others or not x.requires_grad or is_frozen:
            return frozen_output(layer, arguments), []
    with evaluated_by(partial(_evaluate, gamma=gamma)):
        shape = layer.input.shape if port == "x" else layer.operator.inputs[port].shape
        flow = _flow(layer, port, layer.as_read(x.to(layer.input.dtype), shape))
        computed, mixed = flow.value, [get_gradient_edge(value()) for value in flow.mixed]
    with torch._C.DisableTorchFunction():
        # The value is the recorded one, so that later factors are those of the trace.
        rounding = (layer.output - computed).detach()
        return layer.as_returned(computed + rounding).to(x.dtype), mixed


def _has_gates(layer: Layer) -> bool:
    """Tell whether a layer's operator has gates; one that is built in pieces may have some."""
    if layer.prefix_error is not None:
        return True
    return any(stage.role == "gate" for chain in layer.operator.chains.values() for stage in walk(chain))


def _flow(layer: Layer, port: str, x: Tensor) -> Flow:
    """Return the flow that the adapter builds on `x`, or the frozen stages if it needs a capture of the host's run."""
    if not layer.needs_capture and port == "x":
        return layer.flow_in_run(x)
    stages = layer.operator.chains[port]
    roles = {stage.role for stage in walk(stages)}
    if layer.is_recorded and port == "x" and "gate" in roles and WHOLE not in roles:
        # The module runs by its own forward, which this layer replaces in the run.
        with suppress(UncoveredError):
            return isolated(layer.module, lambda: layer.flow_in_run(x))
    flow = Flow(x)
    for stage in stages:
        flow.stage(stage)
    return flow


def _evaluate(stages: Sequence[Stage], x: Tensor, *, gamma: float) -> Tensor:
    """Apply stages to a carried tensor; of the scales only gates are carried too."""
    for stage in stages:
        if isinstance(stage, Branch):
            x = torch.stack([_evaluate(chain, x, gamma=gamma) for chain in stage.chains]).sum(0)
        elif isinstance(stage, Scale):
            x = (stage if stage.role == "gate" else replace(stage, factor=stage.scale.detach())).apply(x)
        else:
            x = _linear(stage, x, gamma)
    return x


def _linear(stage: Stage, x: Tensor, gamma: float) -> Tensor:
    """Apply a stage that is no gate, by the gamma rule if it has weights."""
    z = _affine(stage, x)
    if not gamma or not x.requires_grad:
        return z
    with torch._C.DisableTorchFunction():
        raised, lowered = _clamped(stage, min=0), _clamped(stage.unbiased(), max=0)
        if raised is None or lowered is None:
            return z
        positive = _affine(raised, x.clamp(min=0)) + _affine(lowered, x.clamp(max=0))
        return emphasised(z, positive, gamma)


def _clamped(stage: Stage, **limit: int) -> Stage | None:
    """Return a matrix or a short convolution with clamped weights and bias, None for another stage."""
    if isinstance(stage, Matrix) and not stage.is_complex:
        return replace(stage, matrix=stage.weight.clamp(**limit), bias=_clamped_bias(stage.bias, **limit))
    if isinstance(stage, Mix) and stage.role == "conv":
        mixer = _clamped_taps(stage.mixer, **limit)
        return None if mixer is None else replace(stage, mixer=mixer, bias=_clamped_bias(stage.bias, **limit))
    return None


def _clamped_bias(bias: Tensor | None, **limit: int) -> Tensor | None:
    return None if bias is None else bias.clamp(**limit)


def _clamped_taps(mixer: CoreMixer, **limit: int) -> CoreMixer | None:
    if isinstance(mixer, Reversed):
        inner = _clamped_taps(mixer.mixer, **limit)
        return None if inner is None else Reversed(inner)
    if not isinstance(mixer, Toeplitz) or mixer.taps.is_complex():
        return None
    batch, _, length, _ = mixer.shape
    return Toeplitz(mixer.taps.clamp(**limit), batch=batch, length=length)


def _affine(stage: Stage, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        if not x.requires_grad:
            return stage.apply(x)
        # `jvp` runs only if an input is dual.
        trigger = forward_ad.make_dual(torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))
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
