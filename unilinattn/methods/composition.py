"""Products of the maps of all steps, the last one leftmost."""

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.memory import reserved
from unilinattn.methods.costs import estimated, postprocess_cost, vecmat_cost
from unilinattn.methods.maps import ONE_ROW, map_bytes, map_shape, step_blocks, sum_on_first, vecmat
from unilinattn.methods.results import allocate_scores
from unilinattn.methods.scaled import ScaledProduct, finished
from unilinattn.methods.selection import composable_steps, query_rows
from unilinattn.options.bases import MapOptions
from unilinattn.progress import progress
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Fill = Callable[[Sequence[Layer], Int[Tensor, "batch row"], Float[Tensor, "batch row key"]], None]
"""Writes the rows of a step's map at some positions into a tensor of zeros."""


def product_of_maps(
    trace: Trace, method: str, layers: Sequence[Layer], target: Target | None, fill: Fill
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return P_n ... P_1, or its row of a target, and its scale as extras; `fill` writes the map P of a step.

    Raises `UncoveredError` if layers are on different streams.
    """
    steps = composable_steps(trace, method, layers)
    product = ScaledProduct(_identity(trace, method, layers, target))
    size = map_bytes(layers[0]) + product.values.nbytes
    with reserved(size, f"{method}: the map of a step and its product", ONE_ROW):
        for step in progress(steps if target is None else steps[::-1], method):
            mixing = step[0].output.new_zeros(map_shape(step[0]))
            fill(step, query_rows(trace, step[0]), mixing)
            if target is None:
                product.replace_by_map(mixing)
            else:
                product.left_multiply(mixing.to(product.values).__rmatmul__)
    return finished(product, trace, layers[0], target)


def product_cost(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    target: Target | None,
    cost: Callable[[Sequence[Layer]], int],
) -> tuple[Callable[[Layer], int], int]:
    """Return the bytes of each layer in `product_of_maps` and those held throughout; `cost` is that of a map."""
    step_of = {layer.name: step for step in composable_steps(trace, method, layers) for layer in step}

    return lambda layer: cost(step_of[layer.name]), (2 if target is None else 1) * map_bytes(layers[0])


def rollout_of_maps(
    trace: Trace, method: str, layers: Sequence[Layer], target: Target | None, options: MapOptions
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return A_n ... A_1 with A = I + the sum of the maps of a step's layers, or its row of a target, and its scale.

    The scale is an extra of the result, for a product beyond the range of its dtype (see `ScaledProduct`).

    For a target only its row is multiplied by the maps: in linear time and without any map, if the options keep the
    plain mean over heads. Raises `UncoveredError` if layers are on different streams.
    """
    steps = composable_steps(trace, method, layers)
    rows = query_rows(trace, layers[0], target)
    product = ScaledProduct(_identity(trace, method, layers, target))
    for step in progress(steps if target is None else steps[::-1], method):
        if target is None:
            product.add_maps(partial(step_blocks, trace, step, options))
        else:
            product.left_multiply(partial(_row_through, trace, step, options, rows))
    return finished(product, trace, layers[0], target)


def _row_through(
    trace: Trace,
    step: Sequence[Layer],
    options: MapOptions,
    target: Int[Tensor, "batch 1"],
    row: Float[Tensor, "batch 1 query"],
) -> Float[Tensor, "batch 1 key"]:
    """Return a row times I + the sum of the maps of a step's layers."""
    return row + sum_on_first(vecmat(row, trace, layer, options, target=target) for layer in step).to(row)


def rollout_cost(
    trace: Trace, method: str, layers: Sequence[Layer], target: Target | None, options: MapOptions
) -> Estimate:
    """Return the cost of `rollout_of_maps`: a second product and blocks of a map, or the pass of a row."""
    composable_steps(trace, method, layers)

    cost = partial(postprocess_cost if target is None else vecmat_cost, options=options)
    return estimated(method, layers, target, None, cost, held=map_bytes(layers[0]) if target is None else 0)


def _identity(
    trace: Trace, method: str, layers: Sequence[Layer], target: Target | None
) -> Float[Tensor, "batch row key"]:
    rows = query_rows(trace, layers[0], target)
    return allocate_scores(method, layers, target).scatter_(2, rows.unsqueeze(-1), 1.0)
