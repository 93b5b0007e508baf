"""`raw`: the attention map of each layer."""

from collections.abc import Sequence
from typing import Any, Self

from jaxtyping import Float, Int
from pydantic import model_validator
from torch import Tensor

from unilinattn.methods.composition import rollout_cost, rollout_of_maps
from unilinattn.methods.costs import estimated, map_cost
from unilinattn.methods.heads import head_axis
from unilinattn.methods.maps import attention_rows, fill_attention, map_shape, postprocess_, postprocess_bytes
from unilinattn.methods.options import Composable, MapOptions
from unilinattn.methods.results import score_layers, to_result
from unilinattn.methods.selection import only_port, stackable_layers
from unilinattn.operator.cost import heads_cut, rows_elements
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class RawOptions(MapOptions, Composable):
    """Options of `raw`."""

    @model_validator(mode="after")
    def _each_head(self) -> Self:
        if self.by_head and isinstance(self.heads, str) and self.heads != "mean":
            raise ValueError(
                f"by_head=True keeps every head, so heads={self.heads!r} has nothing to reduce; leave heads out for "
                "all of them, or give an index or a list"
            )
        return self

    @property
    def selected_heads(self) -> int | Sequence[int] | None:
        """The heads of the head axis, None for all."""
        return None if isinstance(self.heads, str) else self.heads


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `raw`: blocks of a map or a few rows, and their postprocessing; or that of `rollout`."""
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)
    if chosen.compose == "rollout":
        return rollout_cost(trace, "raw", layers, target, chosen)
    extremes = chosen.normalize == "min-max"
    axis = head_axis("raw", layers, chosen.selected_heads, chosen.scope) if chosen.by_head else None

    def of_heads(layer: Layer) -> int:
        assert axis is not None
        batch, queries, keys = map_shape(layer)
        rows, width = queries if target is None or extremes else 1, layer.output.element_size()
        scope, count = only_port(layer).scoped_map(chosen.scope), len(axis.heads)
        apart = batch * count * rows * keys * width if rows < queries or target is not None else 0
        if rows == queries:
            _, _, size = heads_cut(scope)
        else:
            elements = rows_elements(scope.chain, batch * keys, scope.groups, rows)
            size = (elements + batch * count * rows * keys) * width
        treatment = postprocess_bytes((batch, rows, keys), width, chosen.discard)
        return apart + max(size, treatment)

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows, width = queries if target is None or extremes else 1, layer.output.element_size()
        apart = batch * rows * keys * width if chosen.layers == "mean" or rows < queries or target is not None else 0
        if rows == queries:
            size = map_cost(layer, chosen)
        else:
            scope = only_port(layer).scoped_map(chosen.scope)
            size = rows_elements(scope.chain, batch * keys, scope.groups, rows) * width
        return apart + max(size, postprocess_bytes((batch, rows, keys), width, chosen.discard))

    return estimated("raw", layers, target, chosen, of if axis is None else of_heads, heads=axis)


@register_method("raw", options=RawOptions, cost=cost, needs=("layers",))
def raw(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. With compose="rollout" it is A_n ... A_1 with A_l = I + mean_h alpha_l: the method `rollout`, for a
    choice of layers. With by_head=True the scores are (layer, batch, head, query, key), the map alpha_h of each head
    that `heads` selects; `sign`, `discard` and `normalize` apply to each of them.

    Options: `RawOptions`. Raises `OptionError` for an unknown option or value, and `UncoveredError` if the maps of
    the layers cannot be stacked or composed, or have different numbers of heads with by_head=True.
    """
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)
    if chosen.compose == "rollout":
        rho, scale = rollout_of_maps(trace, "raw", layers, target, chosen)
        return to_result(trace, "raw", layers, rho, options=chosen, target=target, scope=chosen.scope, scale=scale)

    axis = head_axis("raw", layers, chosen.selected_heads, chosen.scope) if chosen.by_head else None

    def fill_heads(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch head row key"]) -> None:
        assert axis is not None
        op, heads = only_port(layer), list(axis.heads)
        if rows.shape[1] == layer.output.shape[1]:
            op.fill_heads(out, heads, chosen.scope)
        else:
            out.copy_(op.rows(rows, scope=chosen.scope, heads=heads))
        for scores in out.unbind(1):
            postprocess_(
                scores, trace, layer, rows, sign=chosen.sign, discard=chosen.discard, normalize=chosen.normalize
            )

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        if rows.shape[1] == layer.output.shape[1]:
            fill_attention(out, layer, chosen)
        else:
            out.copy_(attention_rows(layer, chosen, rows))
        postprocess_(out, trace, layer, rows, sign=chosen.sign, discard=chosen.discard, normalize=chosen.normalize)

    # The map's minimum and maximum need the whole map.
    write, whole = fill if axis is None else fill_heads, chosen.normalize == "min-max"
    scores = score_layers(trace, "raw", layers, target, chosen, write, heads=axis, whole=whole)
    return to_result(trace, "raw", layers, scores, options=chosen, target=target, scope=chosen.scope, heads=axis)
