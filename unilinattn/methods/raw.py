"""`raw`: the attention map of each layer."""

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.methods.composition import rollout_cost, rollout_of_maps
from unilinattn.methods.costs import estimated, map_cost
from unilinattn.methods.heads import head_axis
from unilinattn.methods.maps import attention_rows, fill_attention, map_shape, postprocess_, postprocess_bytes
from unilinattn.methods.results import score_layers, to_result
from unilinattn.methods.selection import only_port, stackable_layers
from unilinattn.operator.cost import heads_cut, rows_elements
from unilinattn.options import Raw
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Raw, *, target: Target | None = None) -> Estimate:
    """Return the cost of `raw`: blocks of a map or a few rows, and their postprocessing; or that of `rollout`."""
    layers = stackable_layers(trace, "raw", options.layers)
    if options.compose == "rollout":
        return rollout_cost(trace, "raw", layers, target, options)
    extremes = options.normalize == "min-max"
    axis = head_axis("raw", layers, options.selected_heads, options.scope) if options.by_head else None

    def of_heads(layer: Layer) -> int:
        assert axis is not None
        batch, queries, keys = map_shape(layer)
        rows, width = queries if target is None or extremes else 1, layer.output.element_size()
        scope, count = only_port(layer).scoped_map(options.scope), len(axis.heads)
        apart = batch * count * rows * keys * width if rows < queries or target is not None else 0
        if rows == queries:
            _, _, size = heads_cut(scope)
        else:
            elements = rows_elements(scope.chain, batch * keys, scope.groups, rows)
            size = (elements + batch * count * rows * keys) * width
        treatment = postprocess_bytes((batch, rows, keys), width, options.discard)
        return apart + max(size, treatment)

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows, width = queries if target is None or extremes else 1, layer.output.element_size()
        apart = batch * rows * keys * width if options.layers == "mean" or rows < queries or target is not None else 0
        if rows == queries:
            size = map_cost(layer, options)
        else:
            scope = only_port(layer).scoped_map(options.scope)
            size = rows_elements(scope.chain, batch * keys, scope.groups, rows) * width
        return apart + max(size, postprocess_bytes((batch, rows, keys), width, options.discard))

    return estimated("raw", layers, target, options, of if axis is None else of_heads, heads=axis)


@register_method(Raw, cost=cost)
def raw(trace: Trace, options: Raw, *, target: Target | None = None) -> Attribution:
    """Run `Raw`."""
    layers = stackable_layers(trace, "raw", options.layers)
    if options.compose == "rollout":
        rho, scale = rollout_of_maps(trace, "raw", layers, target, options)
        return to_result(trace, "raw", layers, rho, options=options, target=target, scope=options.scope, scale=scale)

    axis = head_axis("raw", layers, options.selected_heads, options.scope) if options.by_head else None

    def fill_heads(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch head row key"]) -> None:
        assert axis is not None
        op, heads = only_port(layer), list(axis.heads)
        if rows.shape[1] == layer.output.shape[1]:
            op.fill_heads(out, heads, options.scope)
        else:
            out.copy_(op.rows(rows, scope=options.scope, heads=heads))
        for scores in out.unbind(1):
            postprocess_(
                scores, trace, layer, rows, sign=options.sign, discard=options.discard, normalize=options.normalize
            )

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        if rows.shape[1] == layer.output.shape[1]:
            fill_attention(out, layer, options)
        else:
            out.copy_(attention_rows(layer, options, rows))
        postprocess_(out, trace, layer, rows, sign=options.sign, discard=options.discard, normalize=options.normalize)

    # The map's minimum and maximum need the whole map.
    write, whole = fill if axis is None else fill_heads, options.normalize == "min-max"
    scores = score_layers(trace, "raw", layers, target, options, write, heads=axis, whole=whole)
    return to_result(trace, "raw", layers, scores, options=options, target=target, scope=options.scope, heads=axis)
