"""Estimates of a method's memory and operations before it runs; each method's file states its cost."""

from collections.abc import Callable, Sequence
from math import prod

import torch

from unilinattn.memory import allowed, without
from unilinattn.methods.heads import HeadAxis
from unilinattn.methods.maps import head_elements, map_bytes, map_shape, postprocess_bytes, postprocess_elements
from unilinattn.methods.results import result_shape
from unilinattn.methods.selection import only_port
from unilinattn.operator.cost import apply_cost, left_multiply_cost, map_cut, map_operations
from unilinattn.options.base import Options
from unilinattn.options.bases import MapOptions
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target


def estimated(
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    options: Options | None,
    cost: Callable[[Layer], tuple[int, int]],
    *,
    heads: HeadAxis | None = None,
    held: int = 0,
    extras: int = 0,
    before: Sequence[LayerCost] = (),
) -> Estimate:
    """Return the estimate of a method, given the cost of each layer and the memory shared by all layers.

    Args:
        method: name of the method.
        layers: the layers of the method.
        target: the method's target.
        options: options of a layer-wise method, None for a method without a layer axis.
        cost: returns (bytes, operations) of a layer.
        heads: the head axis of the scores, if they have one.
        held: bytes in addition to the result from the first layer to the last.
        extras: bytes of the result's extras.
        before: costs of the work before the first layer.
    """
    sizes, dtype = result_shape(layers, target, options, heads)
    shape = tuple(sizes.values())
    costs = list(before)
    with without(held):
        for layer in layers:
            size, operations = cost(layer)
            # The check of each layer against the host's output.
            if layer.prefix_error is None:
                op = only_port(layer)
                checked = apply_cost(op.chains, op.inputs)
                size = max(size, checked.elements * layer.output.element_size())
                operations += checked.operations
            costs.append(LayerCost(layer.name, layer.kind, size, operations))
    shape = shape if target is None else (*shape[:-2], shape[-1])
    result = torch.Size(shape).numel() * dtype.itemsize + extras
    return Estimate(method, shape, result, held, tuple(costs), allowed())


def map_cost(layer: Layer, options: MapOptions, *, extra_elements: int = 0) -> tuple[int, int]:
    """Return the bytes and operations of `attention_blocks` with the same `extra_elements`."""
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    scope = only_port(layer).scoped_map(options.scope)
    _, _, size = map_cut(scope, heads, extra_elements=extra_elements)
    return size, map_operations(scope, heads)


def postprocess_cost(layer: Layer, options: MapOptions, *, known: bool = False) -> tuple[int, int]:
    """Return the bytes and operations of `map_blocks`; `known` says that the map is computed already."""
    width, numbers = layer.output.element_size(), postprocess_elements(options.discard)
    size, operations = map_cost(layer, options, extra_elements=numbers)
    if options.normalize == "min-max":
        whole = map_bytes(layer)
        return max((1 + numbers) * whole, whole + size), 0 if known else operations
    if known:
        return postprocess_bytes(map_shape(layer), width, options.discard), 0
    return size, operations


def head_cost(layer: Layer, options: MapOptions) -> tuple[int, int]:
    """Return the bytes and operations of `map_blocks` with a weight of each head."""
    scope, pairs = only_port(layer).scoped_map(options.scope), prod(map_shape(layer))
    _, _, size = map_cut(scope, None, extra_elements=head_elements(layer, options))
    if options.normalize == "min-max":
        size += (1 + postprocess_elements(options.discard)) * map_bytes(layer)
    return size, map_operations(scope, None) + scope.heads * pairs


def composed_cost(layer: Layer, options: MapOptions) -> tuple[int, int]:
    """Return the bytes and operations of `composed` without its two products: the map, and multiplying by it."""
    batch, queries, keys = map_shape(layer)
    size, operations = postprocess_cost(layer, options)
    return size, operations + batch * queries * queries * keys


def vecmat_cost(layer: Layer, options: MapOptions, *, known: bool = False) -> tuple[int, int]:
    """Return the bytes and operations of `vecmat`: a linear-time pass, or blocks of the map."""
    batch, queries, keys = map_shape(layer)
    if options.is_linear and not known:
        elements, operations = left_multiply_cost(only_port(layer).scoped_map(options.scope), 1)
        return elements * layer.output.element_size(), operations
    if options.is_plain and not known:
        size, operations = map_cost(layer, options)
    else:
        size, operations = postprocess_cost(layer, options, known=known)
    # Each pair is weighted, at most once, and multiplied by the row.
    return size, operations + 2 * batch * queries * keys
