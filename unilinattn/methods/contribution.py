"""`contribution`: exact vectors of token pairs against the gradient of a logit, composed like a rollout."""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.operator.cost import apply_elements
from unilinattn.options import Contribution
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import composition_from, weighted_cost, weighted_rollout
from unilinattn.scoring.maps import map_shape
from unilinattn.scoring.selection import key_mask, one_scalar, only_port, query_rows
from unilinattn.scoring.vectors import contribution_tiles, shares_cost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Gradients = dict[str, Float[Tensor, "batch query out"]]


def cost(trace: Trace, options: Contribution, *, target: Target | None = None) -> Estimate:
    """Return the cost of `contribution`: gradients, and for each of them the vectors of all pairs of each layer.

    With sign="keep" and a target, one adjoint pass takes their place.
    """
    scoring = composition_from(trace, options, target)
    one_row = target is not None or not one_scalar(trace, options.scalar)

    def of(layer: Layer) -> int:
        if options.sign == "keep" and one_row:
            op = only_port(layer)
            return apply_elements(op.chains, op.inputs) * layer.output.element_size()
        return shares_cost((layer,), map_shape(layer)[1], exact=True)

    resident = sum(layer.output.nbytes for layer in trace.layers)
    return weighted_cost(scoring, of, resident=resident)


@register_method(Contribution, cost=cost)
def contribution(trace: Trace, options: Contribution, *, target: Target | None = None) -> Attribution:
    """Run `Contribution`."""
    names = [layer.name for layer in trace.layers]

    def weigh(targets: Sequence[Target]) -> Iterator[Gradients]:
        return (dict(zip(names, each, strict=True)) for each in trace.gradients(targets, options.scalar))

    def multiply(gradients: Gradients, _: Tensor, rows: Tensor, layer: Layer) -> Tensor:
        return _product(rows, trace, layer, gradients[layer.name], options.sign)

    return weighted_rollout(composition_from(trace, options, target), "layer", weigh, multiply)


def _product(
    rows: Float[Tensor, "batch row query"],
    trace: Trace,
    layer: Layer,
    gradient: Float[Tensor, "batch query out"],
    sign: Sign,
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
