"""Find the linear layers that compute an attention's values and output, in a run of its module without numbers."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call import Call, Captured
from unilinattn.call.attention_interface import Attended, interface
from unilinattn.call.copies import EMPTY, empty, without_numbers
from unilinattn.call.stored import Stored

Affine = tuple[Tensor | Stored, Tensor | None]
"""A weight (out, in) and a bias (out), None without one."""

Located = tuple[tuple[str, Tensor | slice] | None, str | None]
"""The path of the layer to the values with the rows of its weight for them, and the path of the layer to the output."""

_located: "WeakKeyDictionary[nn.Module, dict[object, Located]]" = WeakKeyDictionary()
"""The layers of each module, by the shapes of its call: its run without numbers takes as long as some with them."""


def linear_maps(call: Call, seen: Captured, source: str) -> tuple[Affine | None, Affine | None]:
    """Return the affine maps to the values and from the attention's result to the output: ((W_v, b_v), (W_o, b_o)).

    They are weights of linear layers if the values are a view of the output of one whose input is the argument
    `source`, and the module's output is that of one whose input is the attention's result. A copy of the module without
    numbers shows this. None stands for a map that is not, and for both in a module whose run needs numbers.
    """
    record: Attended = seen.record
    modules = tuple((id(inner), type(inner), inner.training) for inner in seen.module.modules())
    shapes = tuple(_shapes(x) for x in (seen.arguments, record.query, record.value))
    located, key = _located.setdefault(seen.module, {}), (modules, shapes, source)
    if key not in located:
        located[key] = _locate(seen, source)
    to_values, to_output = located[key]
    named = seen.module.get_submodule
    return (
        None if to_values is None else _rows(call, named(to_values[0]), to_values[1]),
        None if to_output is None else linear_map(call, named(to_output)),
    )


def _locate(seen: Captured, source: str) -> Located:
    """Find the layers in a run of a copy of the module without numbers."""
    record: Attended = seen.record
    batch, heads, queries = record.query.shape[:3]
    module = without_numbers(seen.module)
    paths = {layer: path for path, layer in module.named_modules()}
    inputs = {name: empty(value) for name, value in seen.arguments.items() if not name.isdigit()}
    result = record.value.new_empty(batch, queries, heads, record.value.shape[-1], device=EMPTY)
    values: list[Tensor] = []
    ran: list[tuple[str, Tensor, Tensor]] = []

    def handle(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        values.append(value)
        return result, None

    def note(layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        ran.append((paths[layer], arguments[0], output))

    for layer in module.modules():
        if _is_linear(layer):
            layer.register_forward_hook(note)
    try:
        with torch.no_grad(), EMPTY, interface(module, handle):
            output = module(**inputs)
    except (RuntimeError, TypeError, ValueError):
        # The module reads a number, or mixes its tensors with those of another device.
        return None, None
    output = output[0] if isinstance(output, tuple) else output
    to_values = ((path, _channels(values[-1], out)) for path, x, out in ran if _is_whole(x, inputs[source]))
    first = next(((path, rows) for path, rows in to_values if rows is not None), None)
    last = next((path for path, x, out in ran if _is_whole(x, result) and _is_whole(out, output)), None)
    return first, last


def linear_map(call: Call, layer: nn.Module) -> Affine | None:
    """Return the map of a linear layer, None for a layer of another class."""
    return _rows(call, layer, slice(None)) if _is_linear(layer) else None


def _shapes(value: Any) -> object:
    """Return the nested shapes, dtypes and plain values of an argument; the number of sequences does not matter."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype
    if type(value) in (tuple, list):
        return tuple(map(_shapes, value))
    if type(value) is dict:
        return tuple((name, _shapes(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a module is a linear layer of torch or transformers; a subclass may compute something else."""
    from transformers.pytorch_utils import Conv1D

    return type(layer) in (nn.Linear, Conv1D)


def _rows(call: Call, layer: Any, rows: Any) -> Affine:
    """Return rows of the weight and of the bias of a linear layer."""
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    matrix, bias = call.stored(weight.detach())[rows], layer.bias
    if bias is None:
        return matrix, None
    return matrix, call.tensor(bias.detach()[rows.to(bias.device) if isinstance(rows, Tensor) else rows])


def _channels(value: Tensor, output: Tensor) -> Tensor | slice | None:
    """Return the channels of `output` (batch, token, channel) that `value` (batch, head, token, channel) is a view of.

    In the order (head, channel); None if it is no view of them.
    """
    if not _share_memory(value, output) or output.ndim != 3:
        return None
    batch, heads, tokens, channels = value.shape
    steps = value.stride()
    if (batch, tokens) != output.shape[:2] or (steps[0], steps[2], 1) != output.stride():
        return None
    first = int(value.storage_offset()) - int(output.storage_offset())
    index = (
        first + torch.arange(heads, device="cpu")[:, None] * steps[1] + torch.arange(channels, device="cpu") * steps[3]
    ).flatten()
    if not bool(((index >= 0) & (index < output.shape[2])).all()):
        return None
    is_run = torch.equal(index, first + torch.arange(len(index), device="cpu"))
    return slice(first, first + len(index)) if is_run else index


def _is_whole(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both tensors are the same memory, in the same order."""
    same = _share_memory(tensor, other) and tensor.numel() == other.numel()
    return same and all(x.is_contiguous() and x.storage_offset() == other.storage_offset() for x in (tensor, other))


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    # Tensors without numbers have no addresses.
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
