"""Products of the maps of all steps, the last one leftmost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.memory import reserved
from unilinattn.methods.axes import Axes
from unilinattn.methods.costs import estimated, postprocess_cost, vecmat_cost
from unilinattn.methods.heads import HeadAxis
from unilinattn.methods.joint import Joint, Multiply
from unilinattn.methods.maps import ONE_ROW, map_blocks, map_shape, vecmat
from unilinattn.methods.results import allocate_scores, score_layers
from unilinattn.methods.scaled import LOG2_SCALE, Blocks, ScaledProduct
from unilinattn.methods.selection import every_position, one_scalar, query_rows, selected_layers, stackable_layers
from unilinattn.methods.vectors import at_target
from unilinattn.options.base import Options
from unilinattn.options.bases import Composable, MapOptions, ScalarOptions
from unilinattn.progress import progress
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Fill = Callable[
    [Sequence[Layer], Int[Tensor, "batch row"], Float[Tensor, "batch *head row key"]],
    Float[Tensor, "batch row"] | None,
]
"""Writes the rows of a step's map at some positions into a tensor of zeros.

Returns the share of each row's own token if that is none of the keys, else None.
"""

Weights = TypeVar("Weights")


def layers_of(trace: Trace, options: Composable) -> tuple[Layer, ...]:
    """Return the layers of a method whose scores are stacked or composed.

    Raises the errors of `selected_layers`, and `UncoveredError` for layers that cannot be stacked or composed.
    """
    if options.compose == "rollout":
        layers = selected_layers(trace, options.name, options.layers)
        Joint.of(trace, options.name, layers)
        return layers
    return stackable_layers(trace, options.name, options.layers)


def product_of_maps(
    joint: Joint, options: Options, layers: Sequence[Layer], target: Target | None, fill: Fill
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return P_n ... P_1, or its row of a target, and its scale as extras; `fill` writes the map P of a step."""
    method = options.name
    product = _identity(joint, options, layers, target)
    size = joint_bytes(joint, layers) + product.values.nbytes
    with reserved(size, f"{method}: the map of a step and its product", ONE_ROW):
        for step in progress(joint.steps if target is None else joint.steps[::-1], method):
            mixing = step[0].output.new_zeros(map_shape(step[0]))
            residual = fill(step, query_rows(joint.trace, step[0]), mixing)
            mixing = joint.whole(step, mixing, residual)
            if target is None:
                product.replace_by_map(mixing)
            else:
                product.left_multiply(mixing.to(product.values).__rmatmul__)
    return finished(product, joint, joint.rows(target))


@dataclass(frozen=True)
class Composed:
    """The labels of the scores of `score_steps`.

    Attributes:
        axes: the queries and keys of composed scores, None for those of layers.
        scale: the extras of a product.
        by_row: returns extras of the rows that were filled, by name and layer, at the rows of the scores.
    """

    axes: Axes | None
    scale: dict[str, Tensor]
    by_row: Callable[[Mapping[str, Mapping[str, Tensor]]], dict[str, dict[str, Tensor]]]


def score_steps(
    trace: Trace,
    options: Composable,
    layers: Sequence[Layer],
    target: Target | None,
    fill: Fill,
    *,
    heads: HeadAxis | None = None,
    whole: bool = False,
) -> tuple[Float[Tensor, "*axes"], Composed]:
    """Return the scores of each layer as `score_layers` does, or composed the product of the steps' maps.

    `fill` writes the scores of a layer, or of a step of layers that are composed.
    """
    by_name = {layer.name: layer for layer in layers}
    if options.compose == "rollout":
        joint = Joint.of(trace, options.name, layers)
        scores, scale = product_of_maps(joint, options, layers, target, fill)
        rows = joint.rows(target)

        def spread(extras: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
            return {
                name: joint.spread([(by_name[layer], numbers) for layer, numbers in each.items()], rows)
                for name, each in extras.items()
            }

        return scores, Composed(joint.axes(whole=target is None), scale, spread)

    def rows_of(extras: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        return {
            name: {layer: at_target(numbers, trace, by_name[layer], target) for layer, numbers in each.items()}
            for name, each in extras.items()
        }

    scores = score_layers(trace, options, layers, target, fill, heads=heads, whole=whole)
    return scores, Composed(None, {}, rows_of)


def stacked_count(trace: Trace, options: Composable, layers: Sequence[Layer]) -> int:
    """Return how many layers have extras in the result of `score_steps`: steps if composed, 1 for a mean."""
    if options.compose == "rollout":
        return len(Joint.of(trace, options.name, layers).steps)
    return 1 if options.layers == "mean" else len(layers)


def product_cost(
    joint: Joint, layers: Sequence[Layer], target: Target | None, cost: Callable[[Sequence[Layer]], int]
) -> tuple[Callable[[Layer], int], int]:
    """Return the bytes of each layer in `product_of_maps` and those held throughout; `cost` is that of a map."""
    step_of = {layer.name: step for step in joint.steps for layer in step}

    return lambda layer: cost(step_of[layer.name]), (2 if target is None else 1) * joint_bytes(joint, layers)


def joint_bytes(joint: Joint, layers: Sequence[Layer]) -> int:
    """Return the bytes of a map among all tokens of a composition."""
    output = layers[0].output
    return output.shape[0] * joint.length**2 * output.element_size()


def rollout_of_maps(
    trace: Trace, options: MapOptions, layers: Sequence[Layer], target: Target | None
) -> tuple[Joint, Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return A_n ... A_1 with A = I + the sum of the maps of a step's layers, or its row of a target, and its scale.

    The scale is an extra of the result, for a product beyond the range of its dtype (see `ScaledProduct`). Layers of
    several streams are composed among the tokens of all of them (see `Joint`).

    For a target only its row is multiplied by the maps: in linear time and without any map, if the options keep the
    plain mean over heads.
    """
    joint = Joint.of(trace, options.name, layers)
    product = _identity(joint, options, layers, target)
    if target is None:
        _add_maps(product, joint, options.name, lambda layer: map_blocks(trace, layer, options))
    else:
        rows = query_rows(trace, trace.layers[-1], target)

        def multiply(row: Tensor, layer: Layer) -> Tensor:
            return vecmat(row, trace, layer, options, target=rows)

        _multiply_rows(product, joint, options.name, multiply)
    return joint, *finished(product, joint, joint.rows(target))


def rollout_cost(trace: Trace, options: MapOptions, layers: Sequence[Layer], target: Target | None) -> Estimate:
    """Return the cost of `rollout_of_maps`: a second product and blocks of a map, or the pass of a row."""
    joint = Joint.of(trace, options.name, layers)

    cost = partial(postprocess_cost if target is None else vecmat_cost, options=options)
    resident = joint_bytes(joint, layers) if target is None else 0
    return estimated(options, layers, target, cost, resident=resident, axes=joint.axes(whole=target is None))


def weighted_rollout(
    joint: Joint,
    options: ScalarOptions,
    layers: Sequence[Layer],
    target: Target | None,
    weigh: Callable[[Sequence[Target]], Iterable[Weights]],
    multiply: Callable[
        [Weights, Int[Tensor, "batch row"], Float[Tensor, "batch row query"], Layer], Float[Tensor, "batch row key"]
    ],
    blocks: Callable[[Weights, Layer], Blocks] | None = None,
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return B_n ... B_1 with B = I + the sum of the weighted maps of a step's layers, and its scale as extras.

    Without a target row i has the weights of the scalar at position i, unless all positions have one scalar. The
    queries are those of the last layer's stream.

    Args:
        joint: the layers that are composed.
        options: the method, whose scalar the weights are of.
        layers: the layers of the method.
        target: the only row to compute.
        weigh: yields the weights of each target.
        multiply: returns rows, at these positions, times the weighted map of a layer.
        blocks: yields the weighted map of a layer in blocks of rows, for rows that all have the same weights; by
            default these are multiplied by the maps as rows, too.
    """
    trace, method = joint.trace, options.name
    product = ScaledProduct(allocate_scores(options, layers, target, axes=joint.axes(whole=False)))
    every = joint.rows(None)[:, joint.slot(trace.target_stream)] if target is None else joint.rows(target)
    # One scalar has one gradient, so the maps of a step are the same for all rows and are multiplied once.
    shared = target is None and one_scalar(trace, options.scalar)
    if shared and blocks is not None and len(joint.streams) == 1:
        product.values.scatter_(2, every.unsqueeze(-1), 1.0)
        (weights,) = weigh([-1])
        _add_maps(product, joint, method, partial(blocks, weights))
        return finished(product, joint, every)
    targets = [target] if target is not None else [-1] if shared else every_position(trace)
    several = len(targets) > 1
    weighted = zip(targets, weigh(targets), strict=True)
    for position, weights in progress(weighted, method, total=len(targets)) if several else weighted:
        positions = query_rows(trace, trace.layers[-1], None if shared else position)
        rows = ScaledProduct(joint.unit_rows(every if shared else joint.rows(position)))
        # The bar counts targets, or the steps of a single one.
        _multiply_rows(rows, joint, None if several else method, partial(multiply, weights, positions))
        product.write(positions if target is None else torch.zeros_like(positions), rows)
    return finished(product, joint, every)


def finished(
    product: ScaledProduct, joint: Joint, rows: Int[Tensor, "batch row"]
) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return the values of a product without pairs of padding, and its exponents as an extra if it has any."""
    joint.blank(product.values, rows)
    log2_scale = product.finish()
    return product.values, {} if log2_scale is None else {LOG2_SCALE: log2_scale}


def _add_maps(product: ScaledProduct, joint: Joint, method: str, blocks: Callable[[Layer], Blocks]) -> None:
    """Multiply a product from the left by I + the maps of each step, which `blocks` yields in blocks of rows."""
    for step in progress(joint.steps, method):
        product.add_maps(partial(joint.blocks, step, blocks), joint.dropped(step))


def _multiply_rows(rows: ScaledProduct, joint: Joint, bar: str | None, multiply: Multiply) -> None:
    """Multiply rows from the right by I + the maps of each step, the last one first; `bar` names the progress bar."""
    for step in progress(joint.steps[::-1], bar) if bar is not None else joint.steps[::-1]:
        rows.left_multiply(partial(joint.through, step, multiply))


def _identity(joint: Joint, options: Options, layers: Sequence[Layer], target: Target | None) -> ScaledProduct:
    scores = allocate_scores(options, layers, target, axes=joint.axes(whole=target is None))
    return ScaledProduct(scores.scatter_(2, joint.rows(target).unsqueeze(-1), 1.0))
