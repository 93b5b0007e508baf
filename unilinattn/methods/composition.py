"""Products of the maps of all steps, the last one leftmost."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.memory import reserved
from unilinattn.methods.costs import estimated, postprocess_cost, vecmat_cost
from unilinattn.methods.heads import HeadAxis
from unilinattn.methods.maps import ONE_ROW, map_blocks, map_bytes, map_shape, sum_on_first, unit_rows, vecmat
from unilinattn.methods.results import allocate_scores, score_layers
from unilinattn.methods.scaled import Blocks, ScaledProduct, finished
from unilinattn.methods.selection import composable_steps, every_position, one_scalar, query_rows
from unilinattn.options.base import Options
from unilinattn.options.bases import Composable, MapOptions, ScalarOptions
from unilinattn.progress import progress
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Fill = Callable[[Sequence[Layer], Int[Tensor, "batch row"], Float[Tensor, "batch *head row key"]], None]
"""Writes the rows of a step's map at some positions into a tensor of zeros."""

Multiply = Callable[[Float[Tensor, "batch row query"], Layer], Float[Tensor, "batch row key"]]
"""Returns rows times the map of a layer."""

Steps = Sequence[Sequence[Layer]]
Weights = TypeVar("Weights")


def product_of_maps(
    trace: Trace, options: Options, layers: Sequence[Layer], target: Target | None, fill: Fill
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return P_n ... P_1, or its row of a target, and its scale as extras; `fill` writes the map P of a step.

    Raises `UncoveredError` if layers are on different streams.
    """
    method = options.name
    steps = composable_steps(trace, method, layers)
    product = _identity(trace, options, layers, target)
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


def score_steps(
    trace: Trace,
    options: Composable,
    layers: Sequence[Layer],
    target: Target | None,
    fill: Fill,
    *,
    heads: HeadAxis | None = None,
    whole: bool = False,
) -> tuple[Float[Tensor, "*axes"], dict[str, Tensor]]:
    """Return the scores of each layer as `score_layers` does, or composed the product of the steps' maps and its scale.

    `fill` writes the scores of a layer, or of a step of layers that are composed.
    """
    if options.compose == "rollout":
        return product_of_maps(trace, options, layers, target, fill)
    return score_layers(trace, options, layers, target, fill, heads=heads, whole=whole), {}


def stacked_count(trace: Trace, options: Composable, layers: Sequence[Layer]) -> int:
    """Return how many layers have extras in the result of `score_steps`: steps if composed, 1 for a mean."""
    if options.compose == "rollout":
        return len(composable_steps(trace, options.name, layers))
    return 1 if options.layers == "mean" else len(layers)


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
    trace: Trace, options: MapOptions, layers: Sequence[Layer], target: Target | None
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return A_n ... A_1 with A = I + the sum of the maps of a step's layers, or its row of a target, and its scale.

    The scale is an extra of the result, for a product beyond the range of its dtype (see `ScaledProduct`).

    For a target only its row is multiplied by the maps: in linear time and without any map, if the options keep the
    plain mean over heads. Raises `UncoveredError` if layers are on different streams.
    """
    steps = composable_steps(trace, options.name, layers)
    product = _identity(trace, options, layers, target)
    if target is None:
        _add_maps(product, steps, options.name, lambda layer: map_blocks(trace, layer, options))
    else:
        rows = query_rows(trace, layers[0], target)
        _multiply_rows(product, steps, options.name, lambda row, layer: vecmat(row, trace, layer, options, target=rows))
    return finished(product, trace, layers[0], target)


def rollout_cost(trace: Trace, options: MapOptions, layers: Sequence[Layer], target: Target | None) -> Estimate:
    """Return the cost of `rollout_of_maps`: a second product and blocks of a map, or the pass of a row."""
    composable_steps(trace, options.name, layers)

    cost = partial(postprocess_cost if target is None else vecmat_cost, options=options)
    return estimated(options, layers, target, cost, resident=map_bytes(layers[0]) if target is None else 0)


def weighted_rollout(
    product: ScaledProduct,
    trace: Trace,
    options: ScalarOptions,
    steps: Steps,
    target: Target | None,
    weigh: Callable[[Sequence[Target]], Iterable[Weights]],
    multiply: Callable[
        [Weights, Int[Tensor, "batch row"], Float[Tensor, "batch row query"], Layer], Float[Tensor, "batch row key"]
    ],
    blocks: Callable[[Weights, Layer], Blocks] | None = None,
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return B_n ... B_1 with B = I + the sum of the weighted maps of a step's layers, and its scale as extras.

    Without a target row i has the weights of the scalar at position i, unless all positions have one scalar.

    Args:
        product: zeros of the result's shape, written into.
        trace: the trace.
        options: the method, whose scalar the weights are of.
        steps: the layers that are composed.
        target: the only row to compute.
        weigh: yields the weights of each target.
        multiply: returns rows, at these positions, times the weighted map of a layer.
        blocks: yields the weighted map of a layer in blocks of rows, for rows that all have the same weights; by
            default these are multiplied by the maps as rows, too.
    """
    # One scalar has one gradient, so the maps of a step are the same for all rows and are multiplied once.
    first, method, shared = steps[0][0], options.name, target is None and one_scalar(trace, options.scalar)
    if shared and blocks is not None:
        product.values.scatter_(2, query_rows(trace, first).unsqueeze(-1), 1.0)
        (weights,) = weigh([-1])
        _add_maps(product, steps, method, partial(blocks, weights))
        return finished(product, trace, first, target)
    targets = [target] if target is not None else [-1] if shared else every_position(trace)
    several = len(targets) > 1
    weighted = zip(targets, weigh(targets), strict=True)
    for position, weights in progress(weighted, method, total=len(targets)) if several else weighted:
        positions = query_rows(trace, first, None if shared else position)
        rows = ScaledProduct(unit_rows(positions, first))
        # The bar counts targets, or the steps of a single one.
        _multiply_rows(rows, steps, None if several else method, partial(multiply, weights, positions))
        product.write(positions if target is None else torch.zeros_like(positions), rows)
    return finished(product, trace, first, target)


def _add_maps(product: ScaledProduct, steps: Steps, method: str, blocks: Callable[[Layer], Blocks]) -> None:
    """Multiply a product from the left by I + the maps of each step, which `blocks` yields in blocks of rows."""
    for step in progress(steps, method):
        product.add_maps(partial(_step_blocks, step, blocks))


def _step_blocks(step: Sequence[Layer], blocks: Callable[[Layer], Blocks]) -> Blocks:
    return chain.from_iterable(map(blocks, step))


def _multiply_rows(rows: ScaledProduct, steps: Steps, bar: str | None, multiply: Multiply) -> None:
    """Multiply rows from the right by I + the maps of each step, the last one first; `bar` names the progress bar."""
    for step in progress(steps[::-1], bar) if bar is not None else steps[::-1]:
        rows.left_multiply(partial(_through, step, multiply))


def _through(
    step: Sequence[Layer], multiply: Multiply, rows: Float[Tensor, "batch row query"]
) -> Float[Tensor, "batch row key"]:
    return rows + sum_on_first(multiply(rows, layer) for layer in step).to(rows)


def _identity(trace: Trace, options: Options, layers: Sequence[Layer], target: Target | None) -> ScaledProduct:
    rows = query_rows(trace, layers[0], target)
    return ScaledProduct(allocate_scores(options, layers, target).scatter_(2, rows.unsqueeze(-1), 1.0))
