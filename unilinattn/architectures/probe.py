"""Find the ways into an attention's values and out of its result by running a copy of the host's module."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, Seen, package_version
from unilinattn.architectures.interface import Attended, cast, interface, mixed_values, relative_error, tolerance
from unilinattn.flow import Flow

Affine = tuple[Tensor, Tensor]
"""A weight (out, in) and a bias (out)."""


def probe(call: Call, seen: Seen, source: Tensor) -> tuple[Affine, Affine]:
    """Read off the affine maps into the values and out of the attention's result: ((W_v, b_v), (W_o, b_o)).

    Basis vectors go through a copy of the module as tokens, as many at once as the observed call had (its masks and
    position embeddings have that shape); the attention function hands basis vectors back as its result.
    """
    record: Attended = seen.record
    module = _copy(seen.module, source.dtype)
    batch, heads, queries = record.query.shape[:3]
    width, inner = source.shape[-1], heads * record.value.shape[-1]
    tokens = batch * source.shape[1]
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    basis = _basis(width, source)
    results = _basis(inner, source)

    def handle(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        values.append(value.transpose(1, 2).flatten(2).flatten(0, 1))
        rows = _rows(results, len(outputs) * batch * queries, batch * queries)
        return rows.view(batch, queries, heads, -1), None

    calls = max(-(-(width + 1) // tokens), -(-(inner + 1) // (batch * queries)))
    place = next(name for name, value in seen.arguments.items() if _is_source(value, source, call))
    with torch.no_grad(), interface(module, handle):
        for start in range(calls):
            rows = _rows(basis, start * tokens, tokens).view(batch, -1, width)
            outputs.append(_run(module, call, seen, **{place: rows}))
    return _affine(torch.cat(values), width), _affine(torch.cat(outputs), inner)


def gated_output(call: Call, seen: Seen) -> tuple[Tensor, Affine] | None:
    """Find an output gate (batch, query, inner): what multiplies the attention's result on its way to a projection.

    A copy of the module runs on what the module was given, while the attention function returns zeros, then ones.
    The first inner module to receive something else the second time is the projection, and what it receives is the
    gate; basis vectors in its place give the map from there on. None where no module tells the runs apart, or where
    one receives more than the result times a factor.
    """
    record: Attended = seen.record
    module = _copy(seen.module, call.input.dtype)
    batch, heads, queries = record.query.shape[:3]
    inner = heads * record.value.shape[-1]
    result = call.input.new_zeros(batch, queries, heads, inner // heads)
    received: list[tuple[nn.Module, Tensor]] = []

    def note(leaf: nn.Module, args: tuple[Any, ...]) -> None:
        received.extend((leaf, x.clone()) for x in args[:1] if isinstance(x, Tensor))

    with torch.no_grad(), interface(module, lambda *_, **options: (result.clone(), None)):
        hooks = [m.register_forward_pre_hook(note) for m in module.modules() if not list(m.children())]
        _run(module, call, seen)
        silent = received.copy()
        received.clear()
        result.fill_(1)
        _run(module, call, seen)
        for hook in hooks:
            hook.remove()
        pairs = zip(silent, received, strict=True)
        met = next(((leaf, x, y) for (leaf, x), (_, y) in pairs if not torch.equal(x, y)), None)
        if met is None or bool(met[1].any()) or met[2].numel() != batch * queries * inner:
            return None
        projection, _, gate = met
        basis, outputs = _basis(inner, call.input), []
        for start in range(0, inner + 1, batch * queries):
            rows = _rows(basis, start, batch * queries).view_as(gate)
            hook = projection.register_forward_pre_hook(lambda _, args, rows=rows: (rows, *args[1:]))
            outputs.append(_run(module, call, seen))
            hook.remove()
    return gate.reshape(batch, queries, inner), _affine(torch.cat(outputs), inner)


def add_values(flow: Flow, call: Call, seen: Seen, value: Affine, repeats: int) -> None:
    """Append the way into the values, each value head repeated for its queries, if it is affine as observed."""
    weight, bias = value
    missed = values_missed(functional.linear(flow.value.detach(), weight, bias), call, seen)
    head_dim = seen.record.value.shape[-1]
    weight = weight.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    bias = bias.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    if missed > tolerance(seen.record.value.dtype):
        reason = _not_affine(
            call, "from its input to its values", missed, "a norm on the values, or values kept in a latent"
        )
        flow.unmapped("input", reason, weight.shape[0])
    else:
        flow.matrix(weight, bias, role="input")


def values_missed(found: Tensor, call: Call, seen: Seen) -> float:
    """Return how far values (batch, key, head * channel) are from those that the attention function was given."""
    return relative_error(found, call.weight(seen.record.value).transpose(1, 2).flatten(2))


def add_output(flow: Flow, call: Call, seen: Seen, weights: Tensor, repeats: int, output: Affine) -> Flow:
    """Append the way out of the attention's result: a matrix, or a gate and a matrix, if that is what was observed."""
    if call.output is None:
        return flow.matrix(*output, role="output")
    limit, gate = tolerance(seen.record.value.dtype), None
    with torch.no_grad():
        context = mixed_values(weights, call.weight(seen.record.value), repeats)
        missed = relative_error(functional.linear(context, *output), call.output)
        gated = gated_output(call, seen) if missed > limit else None
        if gated is not None:
            gate, output = gated
            missed = relative_error(functional.linear(context * gate, *output), call.output)
    if missed > limit:
        reason = _not_affine(call, "from its attention's result to its output", missed, "a norm on the result")
        return flow.unmapped("output", reason, call.output.shape[-1])
    return flow.scale(gate, role="gate").matrix(*output, role="output")


def _run(module: nn.Module, call: Call, seen: Seen, **instead: Tensor) -> Tensor:
    """Run a copy of an observed module as it was called but for some arguments; return its output token by token."""
    given = {name: cast(call, value) for name, value in seen.arguments.items() if not name.isdigit()}
    result = module(**{**given, **instead})
    return (result[0] if isinstance(result, tuple) else result).flatten(0, 1)


def _not_affine(call: Call, where: str, missed: float, example: str) -> str:
    host = f"{type(call.module).__name__} of {package_version(call.module)}"
    return (
        f"{call.name} ({host}): the way {where} is not one matrix and one bias (missed by {missed:.1e} on the observed "
        f"input; perhaps {example}). Use scope='core', 'mixer' or 'unified', or register an adapter for this class."
    )


def _copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    copied = copy.deepcopy(module).to(dtype)
    for inner in copied.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            hooks.clear()
        inner.__dict__.pop("forward", None)
    return copied


def _is_source(value: Any, source: Tensor, call: Call) -> bool:
    return (
        isinstance(value, Tensor) and value.shape == source.shape and torch.equal(call.weight(value), source.detach())
    )


def _basis(width: int, like: Tensor) -> Tensor:
    """Return a zero vector and the unit vectors: what reads off a bias and the columns of a matrix."""
    return torch.cat([like.new_zeros(1, width), torch.eye(width, dtype=like.dtype, device=like.device)])


def _rows(rows: Tensor, start: int, count: int) -> Tensor:
    """Return `count` rows from `start` on, zeros where there are no more."""
    picked = rows[start : start + count]
    return functional.pad(picked, (0, 0, 0, count - picked.shape[0]))


def _affine(images: Tensor, width: int) -> Affine:
    bias = images[0]
    return (images[1 : width + 1] - bias).T, bias
