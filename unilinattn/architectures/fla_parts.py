"""What the layers of flash-linear-attention share: padding, projections, convolutions, rotations, functions, norms."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call
from unilinattn.errors import UncoveredError, nearest
from unilinattn.flow import Flow

Rows = Callable[[Tensor], Tensor]
"""Picks or repeats rows of a weight: channels of what it puts out."""

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: functional.elu(x) + 1,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "logsigmoid": functional.logsigmoid,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sqrelu": lambda x: functional.relu(x).square(),
    "swish": functional.silu,
}
"""The functions that the host's options name; its own are kernels that know no float64."""

_NAMES = {
    "FastGeLUFunction": "gelu",
    "ReLUFeatureMap": "relu",
    "SigmoidFunction": "sigmoid",
    "SquaredReLUFunction": "sqrelu",
    "SwishFeatureMap": "swish",
    "SwishFunction": "swish",
    "elu_p1": "elu",
}
"""What stands for these names in a module that is already built."""


def padding(call: Call) -> Float[Tensor, "batch length 1"] | None:
    """Return the attention mask as factors, one a token; None where the host got none."""
    call.refuse("past_key_values", "cu_seqlens")
    mask = call.arguments.get("attention_mask")
    return None if mask is None else call.weight(mask[:, -call.input.shape[1] :, None])


def unpadded(call: Call) -> Float[Tensor, "batch length 1"] | None:
    """Return factors that do what a host does that takes padding out, runs each sequence alone, and puts it back.

    Zeros before and after the layer are the same as long as a sequence's tokens stand side by side; raises
    `UncoveredError` where padding stands between them.
    """
    mask = padding(call)
    if mask is not None:
        starts = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
        if bool((starts > 1).any()):
            raise UncoveredError(
                f"{call.name}: the attention mask has padding between real tokens, which {type(call.module).__name__} "
                "takes out; pad on one side only."
            )
    return mask


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply by the factors of a mask, if there is one."""
    return x if mask is None else x * mask


def linear(call: Call, flow: Flow, name: str, *, rows: Rows | None = None) -> Flow:
    """Append the projection into queries ("q"), keys, values; `rows` picks or repeats output channels."""
    projection = getattr(call.host, f"{name}_proj")
    weight, bias = (_picked(call, tensor, rows) for tensor in (projection.weight, projection.bias))
    assert weight is not None
    return flow.matrix(weight, bias, role="input")


def convolved(call: Call, flow: Flow, name: str, *, rows: Rows | None = None) -> Flow:
    """Append the short convolution behind a projection, where the layer has one, and its activation."""
    if not call.host.use_short_conv:
        return flow
    convolution = getattr(call.host, f"{name}_conv1d")
    kernel, bias = (_picked(call, tensor, rows) for tensor in (convolution.weight, convolution.bias))
    assert kernel is not None
    flow.conv(kernel, bias)
    return flow if convolution.activation is None else flow.activation(convolution.activation)


def project(call: Call, flow: Flow, name: str, mask: Tensor | None = None, *, rows: Rows | None = None) -> Flow:
    """Append a projection with its convolution, from which padding comes out with the bias: masked again."""
    convolved(call, linear(call, flow, name, rows=rows), name, rows=rows)
    return flow.scale(mask if call.host.use_short_conv else None, role="input")


def shared(head: int, repeats: int) -> Rows:
    """Return what repeats each head of so many rows for the heads beside it that share it."""
    return lambda rows: rows.unflatten(0, (-1, head)).repeat_interleave(repeats, dim=0).flatten(0, 1)


def compute(call: Call, module: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a part of the host that is plain torch in the operator's dtype."""
    return torch.func.functional_call(module, {name: call.weight(p) for name, p in module.named_parameters()}, inputs)


def elementwise(call: Call, function: Any) -> Callable[[Tensor], Tensor]:
    """Return the host's function (a gate, a feature map), or the one of that name, in plain torch.

    Raises `UncoveredError` for an unknown one.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if name == "apply":
        # Of a kernel with a backward pass the host holds the bound method of an autograd function.
        name = function.__self__.__name__
    name = _NAMES.get(name, name)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if isinstance(function, nn.Module):
        return lambda x: compute(call, function, x)
    raise UncoveredError(f"{call.name}: the function {name!r} is not covered" + nearest(name, _FUNCTIONS))


def heads(x: Float[Tensor, "batch length channel"], size: int) -> Float[Tensor, "batch length head {size}"]:
    """Split channels into heads of a size."""
    return x.unflatten(-1, (-1, size))


def unit(x: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Divide by the length of each vector, as the host's kernels do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotated(
    call: Call, x: Float[Tensor, "batch length head state"], mask: Tensor | None
) -> Float[Tensor, "batch length head state"]:
    """Rotate queries or keys by their positions among the real tokens; the host's tables are made in float32."""
    rotary = call.host.rotary
    if rotary.interleaved or rotary.scale is not None or not rotary.pos_idx_in_fp32:
        raise UncoveredError(f"{call.name}: rotary embeddings of this kind (interleaved, XPos) are not covered.")
    real = x.new_ones(1, x.shape[1]) if mask is None else mask.squeeze(-1)
    position = (real.cumsum(1) - 1).clamp_min(0).float()
    even = torch.arange(0, rotary.dim, 2, device=x.device, dtype=torch.float32)
    angle = (position.unsqueeze(-1) * (1.0 / rotary.base ** (even / rotary.dim))).unsqueeze(2)
    cos, sin = (table.to(call.host.q_proj.weight.dtype).to(x.dtype) for table in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def head_norm(call: Call, flow: Flow, norm: Any, width: int | None = None) -> Flow:
    """Append the RMS norm over each head, of whose weights all heads have the same.

    `width`: channels of all heads, those that the output projection takes unless told.
    """
    count = (call.host.o_proj.weight.shape[1] if width is None else width) // norm.hidden_size
    weight = None if norm.weight is None else call.weight(norm.weight).repeat(count)
    return flow.rms_norm(weight, norm.eps, groups=count)


def gated_norm(call: Call, flow: Flow, norm: Any, gate: Tensor) -> Flow:
    """Append the RMS norm over each head, then the gate that the host runs in the same kernel."""
    return head_norm(call, flow, norm).gate(elementwise(call, norm.activation)(gate))


def output(call: Call, flow: Flow, mask: Tensor | None) -> Flow:
    """Append the output projection; padding that was taken out comes back as zeros."""
    projection = call.host.o_proj
    flow.matrix(call.weight(projection.weight), call.cast(projection.bias), role="output")
    return flow.scale(mask, role="output")


def _picked(call: Call, tensor: Tensor | None, rows: Rows | None) -> Tensor | None:
    return call.cast(tensor) if tensor is None or rows is None else rows(call.weight(tensor))
