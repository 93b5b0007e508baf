"""`raw`: the attention map of each layer."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.methods.composition import rollout_cost, rollout_of_maps
from unilinattn.methods.costs import estimated, map_cost
from unilinattn.methods.maps import attention_rows, fill_attention, map_shape, postprocess_, postprocess_bytes
from unilinattn.methods.options import Composable, MapOptions
from unilinattn.methods.results import score_layers, to_result
from unilinattn.methods.selection import only_port, stackable_layers
from unilinattn.operator.cost import rows_cost
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class RawOptions(MapOptions, Composable):
    """Options of `raw`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `raw`: blocks of a map or a few rows, and their postprocessing; or that of `rollout`."""
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)
    if chosen.compose == "rollout":
        return rollout_cost(trace, "raw", layers, target, chosen)
    extremes = chosen.normalize == "min-max"

    def of(layer: Layer) -> tuple[int, int]:
        batch, queries, keys = map_shape(layer)
        rows, width = queries if target is None or extremes else 1, layer.output.element_size()
        apart = batch * rows * keys * width if chosen.layers == "mean" or rows < queries or target is not None else 0
        if rows == queries:
            size, operations = map_cost(layer, chosen)
        else:
            scope = only_port(layer).scoped_map(chosen.scope)
            elements, operations = rows_cost(scope.chain, batch * keys, scope.groups, rows)
            size = elements * width
        return apart + max(size, postprocess_bytes((batch, rows, keys), width, chosen.discard)), operations

    return estimated("raw", layers, target, chosen, of)


@register_method("raw", options=RawOptions, cost=cost)
def raw(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. With compose="rollout" it is A_n ... A_1 with A_l = I + mean_h alpha_l: the method `rollout`, for a
    choice of layers.

    Options: `RawOptions`. Raises `OptionError` for an unknown option or value, and `UncoveredError` if the maps of
    the layers cannot be stacked or composed.
    """
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)
    if chosen.compose == "rollout":
        rho = rollout_of_maps(trace, "raw", layers, target, chosen)
        return to_result(trace, "raw", layers, rho, options=chosen, target=target, scope=chosen.scope)

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        if rows.shape[1] == layer.output.shape[1]:
            fill_attention(out, layer, chosen)
        else:
            out.copy_(attention_rows(layer, chosen, rows))
        postprocess_(out, trace, layer, rows, sign=chosen.sign, discard=chosen.discard, normalize=chosen.normalize)

    # The map's minimum and maximum need the whole map.
    scores = score_layers(trace, "raw", layers, target, chosen, fill, whole=chosen.normalize == "min-max")
    return to_result(trace, "raw", layers, scores, options=chosen, target=target, scope=chosen.scope)
