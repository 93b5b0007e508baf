"""`contribution`: exact vectors of token pairs against the gradient of a logit, composed like a rollout."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.row_product.naive import apply_sign
from unilinattn.methods.costs import estimated
from unilinattn.methods.maps import map_shape, sum_on_first, unit_rows
from unilinattn.methods.results import allocate_scores, make_result
from unilinattn.methods.scaled import ScaledProduct, finished
from unilinattn.methods.selection import (
    composable_steps,
    every_position,
    key_mask,
    layers_from,
    one_scalar,
    only_port,
    query_rows,
)
from unilinattn.methods.vectors import contribution_tiles, shares_cost
from unilinattn.operator.cost import apply_elements
from unilinattn.options import Contribution
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Gradients = dict[str, Float[Tensor, "batch query out"]]


def cost(trace: Trace, options: Contribution, *, target: Target | None = None) -> Estimate:
    """Return the cost of `contribution`: gradients, and for each of them the vectors of all pairs of each layer.

    With sign="keep" and a target, one adjoint pass takes their place.
    """
    layers = layers_from(trace, "contribution", options.start_layer)
    composable_steps(trace, "contribution", layers)
    one_row = target is not None or not one_scalar(trace, options.scalar)

    def of(layer: Layer) -> int:
        if options.sign == "keep" and one_row:
            op = only_port(layer)
            return apply_elements(op.chains, op.inputs) * layer.output.element_size()
        return shares_cost((layer,), map_shape(layer)[1], exact=True)

    held = sum(layer.output.nbytes for layer in trace.layers)
    before = [LayerCost("gradients", "forward and backward pass", trace.gradient_cost(options.scalar))]
    return estimated("contribution", layers, target, options, of, held=held, before=before)


@register_method(Contribution, cost=cost)
def contribution(trace: Trace, options: Contribution, *, target: Target | None = None) -> Attribution:
    """Run `Contribution`."""
    layers = layers_from(trace, "contribution", options.start_layer)
    steps = composable_steps(trace, "contribution", layers)
    rows = query_rows(trace, layers[0], target)
    product = ScaledProduct(allocate_scores("contribution", layers, target))
    together = target is not None or one_scalar(trace, options.scalar)
    targets = every_position(trace) if not together else [-1 if target is None else target]
    names = [layer.name for layer in trace.layers]
    gradients = (dict(zip(names, each, strict=True)) for each in trace.gradients(targets, options.scalar))
    for position, gradient in progress(zip(targets, gradients, strict=True), "contribution", total=len(targets)):
        of_target = rows if together else query_rows(trace, layers[0], position)
        rho = ScaledProduct(unit_rows(of_target, layers[0]))
        for step in steps[::-1]:
            rho.left_multiply(partial(_through, trace, step, gradient, options.sign))
        at = torch.arange(rows.shape[1], device=rows.device).expand_as(rows) if together else of_target
        product.write(at, rho)
    scores, scale = finished(product, trace, layers[0], target)
    scores = scores if target is None else scores.squeeze(1)
    return make_result(
        trace, "contribution", layers, scores, options=options, target=target, scope="layer", extras=scale
    )


def _through(
    trace: Trace,
    step: Sequence[Layer],
    gradient: Mapping[str, Float[Tensor, "batch query out"]],
    sign: Literal["keep", "clamp", "abs"],
    rows: Float[Tensor, "batch row query"],
) -> Float[Tensor, "batch row key"]:
    """Return rows times I + the sum of the maps of a step's layers."""
    return rows + sum_on_first(_product(rows, trace, layer, gradient[layer.name], sign) for layer in step).to(rows)


def _product(
    rows: Float[Tensor, "batch row query"],
    trace: Trace,
    layer: Layer,
    gradient: Float[Tensor, "batch query out"],
    sign: Literal["keep", "clamp", "abs"],
) -> Float[Tensor, "batch row key"]:
    """Return rows times the layer's map dy_i . T_ij x_j: tiles of all pairs, or for one signed row an adjoint pass."""
    op, keys, out = only_port(layer), key_mask(trace, layer), rows.new_zeros(*rows.shape[:2], map_shape(layer)[2])
    rows = rows.to(layer.output)
    rows = rows if layer.mask is None else rows * layer.mask.unsqueeze(1)
    if sign == "keep" and rows.shape[1] == 1:
        out = (op.adjoint(rows.transpose(1, 2) * gradient) * op.inputs[op.ports[0]]).sum(-1).unsqueeze(1)
    else:
        for tile in contribution_tiles((layer,), (1.0,), query_rows(trace, layer), "exact"):
            products = apply_sign(sign, tile.products(gradient[:, tile.rows]))
            out[:, :, tile.cols] += rows[:, :, tile.rows] @ products
    return out if keys is None else out * keys.unsqueeze(1)
