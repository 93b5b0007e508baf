"""What a method will take, before it takes anything; each method states its own cost in its file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unilinattn.memory import allowed, in_words, without
from unilinattn.methods.maps import map_bytes, map_shape, treatment_bytes, treatment_size
from unilinattn.methods.options import MapOptions, Options
from unilinattn.methods.results import result_shape
from unilinattn.methods.selection import only_port
from unilinattn.trace import Layer, Target


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes while a method is at it: bytes beside all else, and multiply-adds."""

    name: str
    kind: str
    bytes: int
    operations: int


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a method will allocate and compute on one trace; printed, a table of its layers.

    The trace, its operators and, for gradients, the model's own run are not counted.

    Attributes:
        method: its name.
        shape: of the scores.
        result: bytes of the scores and of what comes with them.
        held: bytes beside the result from the first layer to the last.
        layers: each layer's bytes beside these, which go when the next layer comes, and its operations.
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
        """Bytes allocated beside the result at the peak."""
        return self.held + max(layer.bytes for layer in self.layers)

    @property
    def operations(self) -> int:
        """Multiply-adds of all layers."""
        return sum(layer.operations for layer in self.layers)

    def __repr__(self) -> str:
        """Show the totals and the layers, one a line."""
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
) -> Estimate:
    """Put together what a layer takes, (bytes, operations) by `cost`, with what is allocated for all of them."""
    shape, dtype = result_shape(layers, target, options)
    costs = []
    with without(held):
        for layer in layers:
            own, operations = cost(layer)
            # Every result is checked against what the host computed.
            checked = only_port(layer).apply_cost() if layer.prefix_error is None else None
            if checked is not None:
                own = max(own, checked.numbers * layer.output.element_size())
                operations += checked.operations
            costs.append(LayerCost(layer.name, layer.kind, own, operations))
    shape = shape if target is None else (*shape[:-2], shape[-1])
    result = torch.Size(shape).numel() * dtype.itemsize + extras
    return Estimate(method, shape, result, held, tuple(costs), allowed())


def map_cost(layer: Layer, options: MapOptions, *, beside: int = 0) -> tuple[int, int]:
    """Return the bytes and operations of `attention_blocks`."""
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    op = only_port(layer)
    _, size = op.block_rows(scope=options.scope, heads=heads, beside=beside)
    return size, op.map_operations(scope=options.scope, heads=heads)


def treated_cost(layer: Layer, options: MapOptions, *, known: bool = False) -> tuple[int, int]:
    """Return the bytes and operations of `map_blocks`; `known`: the map is there already."""
    width, numbers = layer.output.element_size(), treatment_size(options.discard)
    size, operations = map_cost(layer, options, beside=numbers)
    if options.normalize == "min-max":
        whole = map_bytes(layer)
        return max((1 + numbers) * whole, whole + size), 0 if known else operations
    if known:
        return treatment_bytes(map_shape(layer), width, options.discard), 0
    return size, operations


def composed_cost(layer: Layer, options: MapOptions) -> tuple[int, int]:
    """Return the bytes and operations of `composed` beside the two products: the map and its product with them."""
    batch, queries, keys = map_shape(layer)
    size, operations = treated_cost(layer, options)
    return size, operations + batch * queries * queries * keys


def carried_cost(layer: Layer, options: MapOptions, *, known: bool = False) -> tuple[int, int]:
    """Return the bytes and operations of `carried`: a linear-time pass, or blocks of the map."""
    batch, queries, keys = map_shape(layer)
    if options.is_linear and not known:
        numbers, operations = only_port(layer).left_multiply_cost(1, scope=options.scope)
        return numbers * layer.output.element_size(), operations
    if options.is_plain and not known:
        size, operations = map_cost(layer, options)
    else:
        size, operations = treated_cost(layer, options, known=known)
    # Each pair may be weighed, and is multiplied by the row.
    return size, operations + 2 * batch * queries * keys
