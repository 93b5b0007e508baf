"""`raw`: the attention map of each layer."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.operator.cost import heads_cut, rows_elements
from unilinattn.options import Raw
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.base import score_layers
from unilinattn.scoring.composition import Composition, layerwise, rollout_cost, rollout_of_maps
from unilinattn.scoring.maps import attention_rows, fill_attention, map_cost, map_shape, postprocess_, postprocess_bytes
from unilinattn.scoring.published import CodeRun, code_cost
from unilinattn.scoring.selection import StepRows, mixing_operator
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Raw, *, target: Target | None = None) -> Estimate:
    """Return the cost of `raw`: blocks of a map or a few rows, and their postprocessing; or that of `rollout`."""
    if options.is_published:
        return code_cost(trace, options, target)
    scoring = layerwise(trace, options, target, options.selected_heads, options.scope)
    if isinstance(scoring, Composition):
        return rollout_cost(scoring)
    axis = scoring.heads

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or options.normalize == "min-max" else 1
        width, scope = layer.output.element_size(), mixing_operator(layer).scoped_map(options.scope)
        scores = batch * rows * keys * width * (1 if axis is None else len(axis.heads))
        apart = scores if options.layers == "mean" or rows < queries or target is not None else 0
        if rows < queries:
            size = rows_elements(scope.chain, batch * keys, scope.groups, rows) * width
            size += 0 if axis is None else scores
        else:
            size = map_cost(layer, options) if axis is None else heads_cut(scope)[2]
        return apart + max(size, postprocess_bytes((batch, rows, keys), width, options.discard))

    return scoring.estimate(of)


@register_method(Raw, cost=cost)
def raw(trace: Trace, options: Raw, *, target: Target | None = None) -> Attribution:
    """Run `Raw`."""
    if options.is_published:
        code = CodeRun.of(trace, options, target)
        code.require_cls(trace.gradient()[-1])
        rows = [code.row(layer, rescaled=True) for layer in progress(code.scoring.layers, options.name)]
        return code.result(torch.stack([row.to(rows[0]) for row in rows]).mean(0))
    scoring = layerwise(trace, options, target, options.selected_heads, options.scope)
    if isinstance(scoring, Composition):
        return rollout_of_maps(scoring)
    axis = scoring.heads

    def fill(rows: StepRows, out: Float[Tensor, "batch *head row key"]) -> None:
        layer = rows.layer
        if axis is None and rows.are_all:
            fill_attention(out, layer, options)
        elif axis is None:
            out.copy_(attention_rows(layer, options, rows.index))
        elif rows.are_all:
            mixing_operator(layer).fill_heads(out, axis.heads, options.scope)
        else:
            out.copy_(mixing_operator(layer).rows(rows.index, scope=options.scope, heads=axis.heads))
        for scores in out.unbind(1) if axis is not None else [out]:
            postprocess_(scores, rows, sign=options.sign, discard=options.discard, normalize=options.normalize)

    # The map's minimum and maximum need the whole map.
    scores = score_layers(scoring, fill, whole=options.normalize == "min-max")
    return scoring.result(scores, scope=options.scope)
