"""Probe the affine maps from an attention's input to its values and from its result to its output."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.linear_maps import Affine, linear_map, linear_maps
from unilinattn.call import Call, Captured, package_version
from unilinattn.call.attention_interface import Attended, cast, interface
from unilinattn.call.copies import without_hooks
from unilinattn.call.exactness import layer_tolerance, relative_error, tolerance
from unilinattn.call.stored import Stored, matrix_of
from unilinattn.errors import UncoveredError
from unilinattn.operator.flow import Flow


def probe(call: Call, seen: Captured, source: Tensor) -> tuple[Affine, Affine]:
    """Return the affine maps to the values and from the attention's result to the output: ((W_v, b_v), (W_o, b_o)).

    Raises `UncoveredError` if no argument of the module is `source`, the input of the values.
    """
    argument = next((name for name, value in seen.arguments.items() if _is_source(value, source, call)), None)
    if argument is None:
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}): no argument of its attention module is the input that its "
            "values come from; register an adapter for this class."
        )
    value, output = linear_maps(call, seen, argument)
    if value is None or output is None:
        computed = images(call, seen, source, argument)
        value, output = value or computed[0], output or computed[1]
    return value, output


def images(call: Call, seen: Captured, source: Tensor, name: str) -> tuple[Affine, Affine]:
    """Compute both maps column by column, as images of basis vectors.

    A copy of the module runs on basis vectors as tokens, in batches of the observed call's shape (its masks and
    position embeddings have that shape), while its attention function returns basis vectors as the result. `name`:
    the argument that is `source`, the input of the values.
    """
    record: Attended = seen.record
    module = without_hooks(seen.module).to(source.dtype)
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
    with torch.no_grad(), interface(module, handle):
        for start in range(calls):
            rows = _rows(basis, start * tokens, tokens).view(batch, -1, width)
            outputs.append(_run(module, call, seen, **{name: rows}))
    return _affine(torch.cat(values), width), _affine(torch.cat(outputs), inner)


def gated_output(call: Call, seen: Captured) -> tuple[Tensor, Affine] | None:
    """Return an output gate (batch, query, inner), a factor on the attention's result, and the map after it.

    A copy of the module runs twice on the captured arguments, while the attention function returns zeros, then ones.
    The first submodule whose input differs between the runs is the projection, and its second input is the gate.
    Basis vectors in place of that input give the affine map to the output. Returns None if no submodule's input
    differs, or if it is not the result times a factor. A linear layer whose product is the module's output is that map.
    """
    record: Attended = seen.record
    module = without_hooks(seen.module).to(call.input.dtype)
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
        whole = _run(module, call, seen)
        for hook in hooks:
            hook.remove()
        pairs = zip(silent, received, strict=True)
        first = next(((leaf, x, y) for (leaf, x), (_, y) in pairs if not torch.equal(x, y)), None)
        if first is None or bool(first[1].any()) or first[2].numel() != batch * queries * inner:
            return None
        projection, _, gate = first
        gate_of_result = gate.reshape(batch, queries, inner)
        original = dict(zip(module.modules(), seen.module.modules(), strict=True))[projection]
        last = linear_map(call, original)
        if last is not None and last[0].shape == (whole.shape[-1], inner):
            product = functional.linear(gate_of_result, matrix_of(last[0]), last[1]).flatten(0, 1)
            if relative_error(product[None], whole[None]) <= layer_tolerance(call.input.dtype):
                return gate_of_result, last
        basis, outputs = _basis(inner, call.input), []
        for start in range(0, inner + 1, batch * queries):
            rows = _rows(basis, start, batch * queries).view_as(gate)
            hook = projection.register_forward_pre_hook(lambda _, args, rows=rows: (rows, *args[1:]))
            outputs.append(_run(module, call, seen))
            hook.remove()
    return gate_of_result, _affine(torch.cat(outputs), inner)


def with_values(flow: Flow, call: Call, seen: Captured, value: Affine, repeats: int) -> Flow:
    """Return a flow with the map to the values, each value head repeated for its query heads.

    If it misses the captured values, the map is not affine: the flow ends with an unmapped stage that gives the reason.
    """
    weight, bias = value
    head_dim = seen.record.value.shape[-1]

    def repeated(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)

    if repeats > 1:
        weight = weight.then(repeated) if isinstance(weight, Stored) else repeated(weight)
        bias = None if bias is None else repeated(bias)
    mapped = flow.copy().matrix(weight, bias, role="input")
    missed = values_missed(mapped.value.unflatten(2, (-1, repeats, head_dim))[:, :, :, 0].flatten(2), call, seen)
    if missed > tolerance("attention", seen.record.value.dtype):
        reason = _not_affine(
            call, "from its input to its values", missed, "a norm on the values, or values kept in a latent"
        )
        return flow.unmapped("input", reason, weight.shape[0])
    return mapped


def values_missed(values: Tensor, call: Call, seen: Captured) -> float:
    """Return the relative error of values (batch, key, head * channel) against those of the captured call."""
    return relative_error(values, call.tensor(seen.record.value).transpose(1, 2).flatten(2))


def with_output(flow: Flow, call: Call, seen: Captured, mixed: Tensor | None, output: Affine) -> Flow:
    """Return a flow with the map from the attention's result to the output: a matrix, or a gate and a matrix.

    `mixed`: the result, weights times values, (batch, query, head * channel); None if it is the flow's value. If
    neither gives the observed output of the queries that have keys, the flow ends with an unmapped stage that gives the
    reason.
    """
    mapped = flow.copy().matrix(*output, role="output")
    if call.output is None:
        return mapped
    limit, expected = tolerance("attention", seen.record.value.dtype), call.output
    rows = seen.record.has_keys.unsqueeze(-1).to(expected)

    def missed_by(flow: Flow, mixed: Tensor | None, output: Affine) -> float:
        if mixed is None:
            return relative_error(flow.value.detach() * rows, expected * rows)
        with torch.no_grad():
            product = functional.linear(mixed, matrix_of(output[0]), output[1])
        return relative_error(product * rows, expected * rows)

    if (missed := missed_by(mapped, mixed, output)) <= limit:
        return mapped
    if (gated := gated_output(call, seen)) is not None:
        gate, output = gated
        mapped = flow.copy().scale(gate, role="gate").matrix(*output, role="output")
        if (missed := missed_by(mapped, None if mixed is None else mixed * gate, output)) <= limit:
            return mapped
    reason = _not_affine(call, "from its attention's result to its output", missed, "a norm on the result")
    return flow.unmapped("output", reason, expected.shape[-1])


def _run(module: nn.Module, call: Call, seen: Captured, **instead: Tensor) -> Tensor:
    """Run a copy of an observed module with its captured arguments, those in `instead` replaced.

    Returns the output (batch * query, channel).
    """
    arguments = {name: cast(call, value) for name, value in seen.arguments.items() if not name.isdigit()}
    result = module(**{**arguments, **instead})
    return (result[0] if isinstance(result, tuple) else result).flatten(0, 1)


def _not_affine(call: Call, where: str, missed: float, example: str) -> str:
    host = f"{type(call.module).__name__} of {package_version(call.module)}"
    return (
        f"{call.name} ({host}): the map {where} is not one matrix and one bias (missed by {missed:.1e} on the observed "
        f"input; perhaps {example}). Use scope='core', 'mixer' or 'unified', or register an adapter for this class."
    )


def _is_source(value: Any, source: Tensor, call: Call) -> bool:
    if not isinstance(value, Tensor) or value.ndim != source.ndim or value.numel() != source.numel():
        return False
    return torch.equal(call.tensor(value).reshape(source.shape), source.detach())


def _basis(width: int, like: Tensor) -> Tensor:
    """Return the zero vector and the unit vectors, whose images are a bias and the columns of a matrix."""
    return torch.cat([like.new_zeros(1, width), torch.eye(width, dtype=like.dtype, device=like.device)])


def _rows(rows: Tensor, start: int, count: int) -> Tensor:
    """Return `count` rows from `start` on, padded with zero rows."""
    chunk = rows[start : start + count]
    return functional.pad(chunk, (0, 0, 0, count - chunk.shape[0]))


def _affine(images: Tensor, width: int) -> Affine:
    bias = images[0]
    return (images[1 : width + 1] - bias).T, bias if bool(bias.any()) else None
