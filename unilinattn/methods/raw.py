"""`raw`: the attention maps as they are, layer by layer."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.methods.maps import attention_rows, fill_attention, treat
from unilinattn.methods.options import RawOptions
from unilinattn.methods.results import filled, stacked
from unilinattn.methods.selection import stackable_layers
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace


@register_method("raw")
def raw(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. Options: `RawOptions`. Raises `OptionError` for options that do not exist, `UncoveredError` where
    the maps of the layers cannot be stacked.
    """
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)

    def fill(layer: Layer, rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch row key"]) -> None:
        if rows.shape[1] == layer.output.shape[1]:
            fill_attention(out, layer, chosen)
        else:
            out.copy_(attention_rows(layer, chosen, rows))
        treat(out, trace, layer, rows, sign=chosen.sign, discard=chosen.discard, normalize=chosen.normalize)

    # The map's own minimum and maximum need the whole of it.
    scores = filled(trace, "raw", layers, target, chosen, fill, whole=chosen.normalize == "min-max")
    return stacked(trace, "raw", layers, scores, options=chosen, target=target, scope=chosen.scope)
