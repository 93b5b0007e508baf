"""Parts of flash-linear-attention's layers: padding, projections, convolutions, rotations, activations and norms."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Call
from unilinattn.errors import UncoveredError, nearest
from unilinattn.operator.flow import Flow

Rows = Callable[[Tensor], Tensor]
"""A function that selects or repeats rows of a weight, that is, its output channels."""

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
"""Plain torch functions by the names of the host's options; the host's kernels have no float64."""

_NAMES = {
    "FastGeLUFunction": "gelu",
    "ReLUFeatureMap": "relu",
    "SigmoidFunction": "sigmoid",
    "SquaredReLUFunction": "sqrelu",
    "SwishFeatureMap": "swish",
    "SwishFunction": "swish",
    "elu_p1": "elu",
}
"""Option names by the names of the functions and classes that a built module holds for them."""


def padding(call: Call) -> Float[Tensor, "batch length 1"] | None:
    """Return the attention mask as one factor per token, or None if the call has no mask."""
    call.refuse("past_key_values", "cu_seqlens")
    mask = call.arguments.get("attention_mask")
    return None if mask is None else call.tensor(mask[:, -call.input.shape[1] :, None])


def unpadded(call: Call) -> Float[Tensor, "batch length 1"] | None:
    """Return the mask as factors for a host that removes padding, runs each sequence separately, and restores it.

    Multiplying by zeros before and after the layer is equivalent as long as a sequence's real tokens are contiguous.

    Raises `UncoveredError` if padding stands between real tokens.
    """
    mask = padding(call)
    if mask is not None:
        starts = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
        if bool((starts > 1).any()):
            raise UncoveredError(
                f"{call.name}: the attention mask has padding between real tokens, which {type(call.module).__name__} "
                "removes; pad on one side only."
            )
    return mask


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply `x` by the factors `mask`, if given."""
    return x if mask is None else x * mask


def linear(call: Call, flow: Flow, name: str, *, rows: Rows | None = None) -> Flow:
    """Append the projection `{name}_proj`, such as "q", "k" or "v"; `rows` selects or repeats output channels."""
    projection = getattr(call.host, f"{name}_proj")
    weight = call.stored(projection.weight)
    return flow.matrix(
        weight if rows is None else weight.then(rows), _picked(call, projection.bias, rows), role="input"
    )


def convolved(call: Call, flow: Flow, name: str, *, rows: Rows | None = None) -> Flow:
    """Append the short convolution `{name}_conv1d` and its activation, if the layer has short convolutions."""
    if not call.host.use_short_conv:
        return flow
    convolution = getattr(call.host, f"{name}_conv1d")
    kernel, bias = (_picked(call, tensor, rows) for tensor in (convolution.weight, convolution.bias))
    assert kernel is not None
    flow.conv(kernel, bias)
    return flow if convolution.activation is None else flow.activation(convolution.activation)


def project(call: Call, flow: Flow, name: str, mask: Tensor | None = None, *, rows: Rows | None = None) -> Flow:
    """Append a projection and its short convolution, whose bias makes padding nonzero, so `mask` applies after it."""
    convolved(call, linear(call, flow, name, rows=rows), name, rows=rows)
    return flow.scale(mask if call.host.use_short_conv else None, role="input")


def shared(head: int, repeats: int) -> Rows:
    """Return the function that repeats each head of `head` rows `repeats` times, for the heads that share it."""
    return lambda rows: rows.unflatten(0, (-1, head)).repeat_interleave(repeats, dim=0).flatten(0, 1)


def compute(call: Call, module: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a plain torch submodule of the host in the operator's dtype."""
    return torch.func.functional_call(module, {name: call.tensor(p) for name, p in module.named_parameters()}, inputs)


def elementwise(call: Call, function: Any) -> Callable[[Tensor], Tensor]:
    """Return an activation or feature map of the host, given by name or as a callable, in plain torch.

    Raises `UncoveredError` if it is unknown.
    """
    name = function_name(function)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if isinstance(function, nn.Module):
        return lambda x: compute(call, function, x)
    raise UncoveredError(f"{call.name}: the function {name!r} is not covered" + nearest(name, _FUNCTIONS))


def function_name(function: Any) -> str:
    """Return a function's name in the host's options, or else its own name."""
    # A live run wraps the host's functions.
    function = unwrap(function) if callable(function) else function
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if name == "apply":
        # A kernel with a backward pass is the bound `apply` of an autograd function.
        name = function.__self__.__name__
    return _NAMES.get(name, name)


def heads(x: Float[Tensor, "batch length channel"], size: int) -> Float[Tensor, "batch length head {size}"]:
    """Split channels into heads of `size` channels."""
    return x.unflatten(-1, (-1, size))


def unit(x: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Normalise each vector to L2 norm 1, with the epsilon of the host's kernels."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotated(
    call: Call, x: Float[Tensor, "batch length head state"], mask: Tensor | None
) -> Float[Tensor, "batch length head state"]:
    """Apply rotary embeddings at positions counted over real tokens; the tables are computed in float32, as the host's.

    Raises `UncoveredError` for interleaved or XPos embeddings.
    """
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
    """Append the RMS norm over each head, with one weight vector for all heads.

    `width`: channels of all heads; by default the input width of the output projection.
    """
    count = (call.host.o_proj.weight.shape[1] if width is None else width) // norm.hidden_size
    weight = None if norm.weight is None else call.tensor(norm.weight).repeat(count)
    return flow.rms_norm(weight, norm.eps, groups=count)


def gated_norm(call: Call, flow: Flow, norm: Any, gate: Tensor) -> Flow:
    """Append the RMS norm over each head, then the gate, which the host fuses into one kernel."""
    return head_norm(call, flow, norm).gate(elementwise(call, norm.activation)(gate))


def output(call: Call, flow: Flow, mask: Tensor | None) -> Flow:
    """Append the output projection; `mask` sets the outputs of padded tokens to zero."""
    projection = call.host.o_proj
    flow.matrix(*call.affine(projection), role="output")
    return flow.scale(mask, role="output")


def _picked(call: Call, tensor: Tensor | None, rows: Rows | None) -> Tensor | None:
    return call.tensor(tensor) if tensor is None or rows is None else rows(call.tensor(tensor))
