"""Laws of an operator and its host that run the host again."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.host.inputs import host_arguments
from unilinattn.kernels.precision import unrounded_products
from unilinattn.testing.checks import fresh, outputs, require, require_close
from unilinattn.testing.promote import promoted
from unilinattn.testing.rounding import rounding_limit, run_module, widened
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

PERTURBATION = 1e-4
"""Size of a change of one token, relative to the layer's input: too small to change which keys a host selects."""

MOVED = 1e-6
"""Smallest share of the output's change by which a position counts as moved."""


def own_output(model: nn.Module, exact: nn.Module, inputs: Any, run: Trace) -> str | None:
    """Check a traced run against the model's own output.

    Two calls are compared. With only the user's inputs, within a multiple of the call's rounding, measured against
    `exact`, the model promoted to float64: the model may use another attention function or a cache, and round in
    another order. With the trace's arguments, bit for bit: by the model's own attention function or by eager attention,
    which a trace runs where fused attention is no plain softmax. Outputs of padded tokens are excluded, because
    attention functions disagree on a token that attends to nothing.

    Returns the reason why the model cannot be called with only these inputs, or None. Some models build a cache of a
    wrong shape by default, and fail or return another shape; both calls are then without a cache.
    """
    arguments, failure = host_arguments(model, inputs), None
    direct = uncached = _returned(model, arguments, run.output)
    try:
        direct = _returned(model, inputs, run.output)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if [tensor.shape for tensor in direct] != [tensor.shape for tensor in uncached]:
        direct, failure = uncached, f"with a cache it returns {[tuple(tensor.shape) for tensor in direct]}"
    eager = copy.deepcopy(model)
    choose = getattr(eager, "set_attn_implementation", None)
    if choose is not None:
        choose("eager")
    traced, plain = outputs(run.output), [_returned(eager, _added_masks(arguments, model), run.output), uncached]
    with promoted():
        true = _returned(exact, widened(arguments), run.output)
    require("output", len(direct) == len(traced), "the model's own output has other parts than the traced one.")
    for got, expected, wide in zip(traced, direct, true, strict=True):
        what = "the traced model's output against its own output"
        got, expected, wide = (_real(tensor, run).reshape(1, -1) for tensor in (got, expected, wide))
        limit = rounding_limit(relative_error(expected, wide), expected.dtype)
        require_close("output", got, expected, limit, what)
    same = any(
        all(torch.equal(_real(got, run), _real(expected, run)) for got, expected in zip(traced, own, strict=True))
        for own in plain
    )
    require("output", same, "the traced model's output is not, bit for bit, its own output.")
    return failure


def mixing(layer: Layer, limit: float) -> None:
    """Check that T_ij is nonzero wherever token j of the host module's input changes output i != j.

    The module runs again, promoted to float64, with one token of its input changed. An adapter that carries a path
    without mixing (such as the gate's branch) and freezes the rest has an exact, linear operator with diagonal maps;
    only this law rejects it.
    """
    op, before = layer.operator, run_module(layer, exact=True)
    for port, x in op.inputs.items():
        size, others = x.square().mean().sqrt(), {name: torch.zeros_like(other) for name, other in op.inputs.items()}
        for token in sorted({0, x.shape[1] // 2, x.shape[1] - 1}):
            change = torch.zeros_like(x)
            change[:, token] = PERTURBATION * size * fresh(x[:, token], 33)
            moved = (run_module(layer, exact=True, add=change, to=x) - before).norm(dim=2)
            carried = op.apply({**others, port: change}, bias=False).norm(dim=2)
            moves = moved > MOVED * moved.norm(dim=1, keepdim=True)
            lost = moves & (carried <= limit * carried.norm(dim=1, keepdim=True))
            if x.shape[1] == lost.shape[1]:
                lost[:, token] = False
            where = lost.any(0).nonzero().flatten().tolist()
            message = f"token {token} at port {port!r} moves the host's outputs {where[:5]}, and T_ij is zero there."
            require("mixing", not where, message)


def bias_without_output(layer: Layer) -> None:
    """Check that the bias does not depend on the recorded output.

    The operator is built again from a record whose output differs by far less than adapters verify.
    """
    other = copy.copy(layer)
    vars(other).pop("operator", None)
    other.output = layer.output * (1 + 2.0**-45)
    with promoted():
        rebuilt = other.operator
    same = torch.equal(rebuilt.bias, layer.operator.bias)
    require("bias", same, "an operator built with another recorded output has another bias.")


def has_constants(layer: Layer) -> bool:
    """Tell whether a host module that reads one stream returns other numbers than zeros for vectors of zeros."""
    return len(layer.operator.inputs) == 1 and bool(run_module(layer, exact=True, add=-layer.input).count_nonzero())


def values_of_stages(layer: Layer, limit: float) -> None:
    """Check that the flow's value, from which a layer computes its reconstruction error, is that of its stages."""
    with promoted(), torch.no_grad():
        value = layer.flow(layer.input).value
    what = "the value of the adapter's flow against its stages on the same input"
    require_close("reconstruction", value, layer.operator.apply(layer.operator.inputs), limit, what)


def unpadded(layer: Layer, real: Bool[Tensor, "batch length"], singles: Sequence[Trace], k: int) -> None:
    """Check the padded operator of layer `k`, at its real tokens, against the operators of the single sequences."""
    limit = tolerance("padding", torch.float64)
    op = layer.operator
    ends = torch.stack([row.nonzero()[-1] for row in real])
    core, shares, bias = op.matrix("core", heads=None), op.contributions(ends).squeeze(1), op.bias
    for b, single in enumerate(singles):
        single_op, positions = single.layers[k].operator, real[b].nonzero().squeeze(1)
        size = single_op.output.flatten(1).norm(dim=1)
        for name, got, expected, scale in (
            ("core", core[b : b + 1, :, positions][..., positions], single_op.matrix("core", heads=None), None),
            ("contributions", shares[b : b + 1, positions], single_op.contributions(-1), None),
            ("bias", bias[b : b + 1, positions], single_op.bias, size),
        ):
            what = f"{name} of sequence {b} in the batch against it alone"
            require_close("padding", got, expected, limit, what, scale=scale)


def _added_masks(arguments: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the arguments with boolean attention masks as additive masks, the form of eager attention."""
    dtype = next(model.parameters()).dtype

    def added(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 4):
            return value
        return torch.zeros(value.shape, dtype=dtype, device=value.device).masked_fill(~value, torch.finfo(dtype).min)

    return {name: added(value) for name, value in arguments.items()}


def _real(tensor: Tensor, traced: Trace) -> Tensor:
    """Return a part of an output with zeros at padded tokens, if it has a token axis."""
    if traced.mask is None or tensor.shape[:2] != traced.mask.shape:
        return tensor
    return tensor * traced.mask.reshape(*tensor.shape[:2], *[1] * (tensor.ndim - 2))


@torch.no_grad()
def _returned(model: nn.Module, inputs: Any, like: Any) -> list[Tensor]:
    """Call a model as a trace does and return the parts of its output that `like` has, without states of a cache."""
    # Some hosts change their weights when they run, so a copy runs.
    host = copy.deepcopy(model)
    with unrounded_products():
        returned = host(**inputs) if isinstance(inputs, Mapping) else host(inputs)
    if isinstance(returned, Mapping) and isinstance(like, Mapping):
        returned = {name: returned.get(name) for name in like}
    return outputs(returned)
