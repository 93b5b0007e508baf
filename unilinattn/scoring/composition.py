"""Products of the maps of all steps, the last one leftmost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.memory import reserved
from unilinattn.options.base import Options
from unilinattn.options.bases import Composable, Composed, MapOptions, ScalarOptions
from unilinattn.progress import progress
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.scoring.base import Fill, Method, Scoring, score_layers
from unilinattn.scoring.joint import Joint, Multiply
from unilinattn.scoring.maps import ONE_ROW, map_blocks, map_shape, postprocess_cost, vecmat, vecmat_cost
from unilinattn.scoring.scaled import LOG2_SCALE, Blocks, ScaledProduct
from unilinattn.scoring.selection import (
    StepRows,
    every_position,
    layers_from,
    one_scalar,
    query_rows,
    selected_layers,
    stackable_layers,
)
from unilinattn.scoring.vectors import at_target, head_axis
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Weights = TypeVar("Weights")


@dataclass(frozen=True, kw_only=True)
class Composition(Scoring[Method]):
    """A call of a method that multiplies the maps of its layers, with these maps among the tokens of all streams."""

    joint: Joint

    @property
    def map_bytes(self) -> int:
        """The bytes of a map among all tokens."""
        output = self.trace.layers[-1].output
        return output.shape[0] * self.joint.length**2 * output.element_size()


def composition(
    trace: Trace, options: Options, target: Target | None, layers: Sequence[Layer], *, whole: bool = False
) -> Composition[Any]:
    """Return the composition of layers; raise the errors of `Joint.of`.

    `whole`: without a target the queries are all tokens, not only those of the target's stream.
    """
    joint = Joint.of(trace, options.name, layers)
    axes = joint.axes(whole=whole and target is None)
    return Composition(trace=trace, options=options, target=target, layers=layers, axes=axes, joint=joint)


def composition_from(
    trace: Trace, options: Composed, target: Target | None, *, whole: bool = False
) -> Composition[Any]:
    """Return the composition of the layers from `start_layer` on."""
    return composition(trace, options, target, layers_from(trace, options.name, options.start_layer), whole=whole)


def layerwise(
    trace: Trace, options: Composable, target: Target | None, heads: Any, scope: str = "core"
) -> Scoring[Any]:
    """Return the call of a method whose scores are stacked, with an axis of `heads` by head, or composed.

    Raises the errors of `selected_layers`, and `UncoveredError` for layers that cannot be stacked or composed.
    """
    if options.compose == "rollout":
        return composition(trace, options, target, selected_layers(trace, options.name, options.layers), whole=True)
    layers = stackable_layers(trace, options.name, options.layers)
    axis = head_axis(options.name, layers, heads, scope) if options.by_head else None
    return Scoring(trace=trace, options=options, target=target, layers=layers, heads=axis)


def score_steps(
    scoring: Scoring[Composable], fill: Fill, *, whole: bool = False
) -> tuple[Float[Tensor, "*axes"], dict[str, Tensor]]:
    """Return the scores of each layer as `score_layers` does, or composed the product of the steps' maps and its scale.

    `fill` writes the scores of a layer, or of a step of layers that are composed.
    """
    if isinstance(scoring, Composition):
        return product_of_maps(scoring, fill)
    return score_layers(scoring, fill, whole=whole), {}


def at_rows(scoring: Scoring[Composable], by_layer: Mapping[str, Float[Tensor, "batch _"]]) -> Float[Tensor, "*axes"]:
    """Return a number for each row of the scores by layer, or by step of a composition; the mean for layers="mean".

    `by_layer`: by the name of a layer, or of the first layer of a step, the numbers of the rows that `fill` wrote.
    """
    trace, target, rows = scoring.trace, scoring.target, []
    for layer in scoring.layers:
        if (numbers := by_layer.get(layer.name)) is None:
            continue
        if isinstance(scoring, Composition):
            rows.append(scoring.joint.spread(layer, numbers, scoring.joint.rows(target)))
        else:
            rows.append(at_target(numbers, trace, layer, target))
    stacked = torch.stack([each.to(scoring.layers[0].output.device) for each in rows])
    return stacked.mean(0) if scoring.options.layers == "mean" else stacked


def stacked_count(scoring: Scoring[Composable]) -> int:
    """Return how many layers `at_rows` has: steps if composed, 1 for a mean."""
    if isinstance(scoring, Composition):
        return len(scoring.joint.steps)
    return 1 if scoring.options.layers == "mean" else len(scoring.layers)


def product_of_maps(scoring: Composition[Any], fill: Fill) -> tuple[Float[Tensor, "batch row key"], dict[str, Tensor]]:
    """Return P_n ... P_1, or its row of a target, and its scale as extras; `fill` writes the map P of a step."""
    joint, method, target = scoring.joint, scoring.options.name, scoring.target
    product = _identity(scoring)
    with reserved(scoring.map_bytes + product.values.nbytes, f"{method}: the map of a step and its product", ONE_ROW):
        for step in progress(joint.steps if target is None else joint.steps[::-1], method):
            mixing = step[0].output.new_zeros(map_shape(step[0]))
            residual = fill(StepRows(joint.trace, step, query_rows(joint.trace, step[0])), mixing)
            mixing = joint.whole(step, mixing, residual)
            if target is None:
                product.replace_by_map(mixing)
            else:
                product.left_multiply(mixing.to(product.values).__rmatmul__)
    return finished(product, joint, joint.rows(target))


def product_cost(
    scoring: Composition[Any],
    cost: Callable[[Sequence[Layer]], int],
    *,
    resident: int = 0,
    extras: int = 0,
    before: Sequence[LayerCost] = (),
) -> Estimate:
    """Return the cost of `product_of_maps`; `cost` is that of a step's map, and the others are those of `estimate`."""
    step_of = {layer.name: step for step in scoring.joint.steps for layer in step}
    resident += (2 if scoring.target is None else 1) * scoring.map_bytes
    return scoring.estimate(lambda layer: cost(step_of[layer.name]), resident=resident, extras=extras, before=before)


def rollout_of_maps(scoring: Composition[MapOptions]) -> Attribution:
    """Return A_n ... A_1 with A = I + the sum of the maps of a step's layers, or its row of a target.

    The scale is an extra of the result, for a product beyond the range of its dtype (see `ScaledProduct`). Layers of
    several streams are composed among the tokens of all of them (see `Joint`).

    For a target only its row is multiplied by the maps: in linear time and without any map, if the options keep the
    plain mean over heads.
    """
    trace, joint, options, target = scoring.trace, scoring.joint, scoring.options, scoring.target
    product = _identity(scoring)
    if target is None:
        _add_maps(product, joint, options.name, lambda layer: map_blocks(trace, layer, options))
    else:
        rows = query_rows(trace, trace.layers[-1], target)

        def multiply(row: Tensor, layer: Layer) -> Tensor:
            # Several images of a sequence have as many rows.
            return vecmat(row, trace, layer, options, target=rows.expand(len(row), -1))

        _multiply_rows(product, joint, options.name, multiply)
    rho, scale = finished(product, joint, joint.rows(target))
    return scoring.result(rho, scope=options.scope, extras=scale)


def rollout_cost(scoring: Composition[MapOptions]) -> Estimate:
    """Return the cost of `rollout_of_maps`: a second product and blocks of a map, or the pass of a row."""
    one_row = scoring.target is not None
    cost = partial(vecmat_cost if one_row else postprocess_cost, options=scoring.options)
    return scoring.estimate(cost, resident=0 if one_row else scoring.map_bytes)


def weighted_cost(scoring: Composition[ScalarOptions], cost: Callable[[Layer], int], *, resident: int) -> Estimate:
    """Return the cost of `weighted_rollout`; the model's gradients come before the first layer."""
    passes = scoring.trace.gradient_cost(scoring.options.scalar)
    gradients = LayerCost("gradients", "forward and backward pass", passes)
    return scoring.estimate(cost, resident=resident, before=[gradients])


def weighted_rollout(
    scoring: Composition[ScalarOptions],
    scope: str,
    weigh: Callable[[Sequence[Target]], Iterable[Weights]],
    multiply: Callable[
        [Weights, Int[Tensor, "batch row"], Float[Tensor, "batch row query"], Layer], Float[Tensor, "batch row key"]
    ],
    blocks: Callable[[Weights, Layer], Blocks] | None = None,
) -> Attribution:
    """Return B_n ... B_1 with B = I + the sum of the weighted maps of a step's layers, and its scale as extras.

    Without a target row i has the weights of the scalar at position i, unless all positions have one scalar. The
    queries are those of the last layer's stream.

    Args:
        scoring: the call, with the method whose scalar the weights are of.
        scope: scope of the maps.
        weigh: yields the weights of each target.
        multiply: returns rows, at these positions, times the weighted map of a layer.
        blocks: yields the weighted map of a layer in blocks of rows, for rows that all have the same weights; by
            default these are multiplied by the maps as rows, too.
    """
    trace, joint, target, method = scoring.trace, scoring.joint, scoring.target, scoring.options.name
    product = ScaledProduct(scoring.allocate())
    every = joint.rows(None)[:, joint.slot(trace.target_stream)] if target is None else joint.rows(target)
    # One scalar has one gradient, so the maps of a step are the same for all rows and are multiplied once.
    shared = target is None and one_scalar(trace, scoring.options.scalar)
    if shared and blocks is not None and len(joint.streams) == 1:
        product.values.scatter_(2, every.unsqueeze(-1), 1.0)
        (weights,) = weigh([-1])
        _add_maps(product, joint, method, partial(blocks, weights))
    else:
        targets = [target] if target is not None else [-1] if shared else every_position(trace)
        several = len(targets) > 1
        weighted = zip(targets, weigh(targets), strict=True)
        for position, weights in progress(weighted, method, total=len(targets)) if several else weighted:
            positions = query_rows(trace, trace.layers[-1], None if shared else position)
            rows = ScaledProduct(joint.unit_rows(every if shared else joint.rows(position)))
            # The bar counts targets, or the steps of a single one.
            _multiply_rows(rows, joint, None if several else method, partial(multiply, weights, positions))
            product.write(positions if target is None else torch.zeros_like(positions), rows)
    rho, scale = finished(product, joint, every)
    return scoring.result(rho, scope=scope, extras=scale)


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
        if (begins := joint.entries.get(step[0].name)) is not None:
            product.take(begins)


def _multiply_rows(rows: ScaledProduct, joint: Joint, bar: str | None, multiply: Multiply) -> None:
    """Multiply rows from the right by I + the maps of each step, the last one first; `bar` names the progress bar."""
    for step in progress(joint.steps[::-1], bar) if bar is not None else joint.steps[::-1]:
        rows.left_multiply(partial(joint.through, step, multiply))


def _identity(scoring: Composition[Any]) -> ScaledProduct:
    rows = scoring.joint.rows(scoring.target)
    return ScaledProduct(scoring.allocate().scatter_(2, rows.unsqueeze(-1), 1.0))
