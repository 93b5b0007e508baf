"""Estimates of a method's memory and operations before it runs; each method's file states its cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unilinattn.memory import allowed, in_words, without
from unilinattn.methods.maps import map_bytes, map_shape, postprocess_bytes, postprocess_elements
from unilinattn.methods.options import MapOptions, Options
from unilinattn.methods.results import result_shape
from unilinattn.methods.selection import only_port
from unilinattn.operator.cost import apply_cost, left_multiply_cost, map_cut, map_operations
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer in a method: bytes allocated only during the layer, and multiply-adds."""

    name: str
    kind: str
    bytes: int
    operations: int


@dataclass(frozen=True, repr=False)
class Estimate:
    """Memory and operations of a method on one trace; prints as a table of its layers.

    The trace and its operators are not counted. If a method needs gradients, the first row is the model's forward
    and backward pass, which `max_memory` does not limit.

    Attributes:
        method: name of the method.
        shape: shape of the scores.
        result: bytes of the scores and of the result's extras.
        held: bytes in addition to the result from the first layer to the last.
        layers: cost of each layer, whose bytes are in addition to these and released before the next layer; preceded by
            the cost of the gradients, if any.
        allowed: bytes that `max_memory` allowed.
    """

    method: str
    shape: tuple[int, ...]
    result: int
    held: int
    layers: tuple[LayerCost, ...]
    allowed: int

    @property
    def beside(self) -> int:
        """Bytes allocated in addition to the result at the peak."""
        return self.held + max(layer.bytes for layer in self.layers)

    @property
    def operations(self) -> int:
        """Multiply-adds of all layers."""
        return sum(layer.operations for layer in self.layers)

    def __repr__(self) -> str:
        """Show the totals, then each layer on a line."""
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"Estimate of {self.method}: result {self.shape}, {in_words(self.result)}; {in_words(self.beside)} beside "
            f"it at the peak; {self.operations:.1e} multiply-adds; max_memory is {in_words(self.allowed)}"
        ]
        if self.held:
            lines.append(f"  {'all along':<{width}}  {in_words(self.held):>10}")
        for layer in self.layers:
            lines.append(
                f"  {layer.name:<{width}}  {in_words(layer.bytes):>10}  {layer.operations:>8.1e}  {layer.kind}"
            )
        return "\n".join(lines)


def estimated(
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    options: Options | None,
    cost: Callable[[Layer], tuple[int, int]],
    *,
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
        held: bytes in addition to the result from the first layer to the last.
        extras: bytes of the result's extras.
        before: costs of the work before the first layer.
    """
    shape, dtype = result_shape(layers, target, options)
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
