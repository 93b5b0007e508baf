"""Estimates of a method's memory before it runs; each method's file states its cost."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from unilinattn.operator.cost import left_multiply_elements, map_cut
from unilinattn.operator.selection import checked_heads
from unilinattn.options.bases import MapOptions
from unilinattn.scoring.maps import head_elements, map_bytes, map_shape, postprocess_bytes, postprocess_elements
from unilinattn.scoring.selection import mixing_operator
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace


def map_cost(layer: Layer, options: MapOptions, *, extra_elements: int = 0) -> int:
    """Return the bytes of `attention_blocks` with the same `extra_elements`."""
    scope = mixing_operator(layer).scoped_map(options.scope)
    return map_cut(scope, checked_heads(options.heads, scope.heads), extra_elements=extra_elements)[2]


def postprocess_cost(layer: Layer, options: MapOptions, *, computed: bool = False) -> int:
    """Return the bytes of `map_blocks`; `computed` says that the map exists already."""
    width, numbers = layer.output.element_size(), postprocess_elements(options.discard)
    if options.normalize == "min-max":
        whole = map_bytes(layer)
        return max((1 + numbers) * whole, whole + map_cost(layer, options, extra_elements=numbers))
    if computed:
        return postprocess_bytes(map_shape(layer), width, options.discard)
    return map_cost(layer, options, extra_elements=numbers)


def head_cost(layer: Layer, options: MapOptions) -> int:
    """Return the bytes of `map_blocks` with a weight of each head."""
    scope = mixing_operator(layer).scoped_map(options.scope)
    _, _, size = map_cut(scope, None, extra_elements=head_elements(layer, options))
    if options.normalize == "min-max":
        size += (1 + postprocess_elements(options.discard)) * map_bytes(layer)
    return size


def vecmat_cost(layer: Layer, options: MapOptions, *, computed: bool = False) -> int:
    """Return the bytes of `vecmat`: a linear-time pass, or blocks of the map, which may be `computed` already."""
    if options.is_linear and not computed:
        elements = left_multiply_elements(mixing_operator(layer).scoped_map(options.scope), 1)
        return elements * layer.output.element_size()
    if options.is_plain and not computed:
        return map_cost(layer, options)
    return postprocess_cost(layer, options, computed=computed)


def trace_bytes(trace: Trace) -> int:
    """Return the bytes of a trace and of its operators as far as they are built, without the model's parameters."""
    # Tensors that share memory, such as a stream that enters one block and leaves another, count once.
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(trace, set())}
    for weight in chain(trace.host.parameters(), trace.host.buffers()):
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of a trace: those of its attributes, of theirs, and so on, but not of the model."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in visited and not isinstance(value, nn.Module | type):
        visited.add(id(value))
        # Layers, operators, stages, mixers and deferred factors are objects of this package.
        is_record = type(value).__module__.startswith("unilinattn.") and hasattr(value, "__dict__")
        fields = vars(value) if is_record else value
        fields = fields.values() if isinstance(fields, Mapping) else fields
        for field in fields if isinstance(fields, Collection) and not isinstance(fields, str) else ():
            yield from _tensors(field, visited)
