"""`raw`: the attention maps as they are, layer by layer."""

from typing import Any

from unilinattn.attribution import Attribution
from unilinattn.methods.maps import SIGNS, attention_map, attention_rows, picked, treated
from unilinattn.methods.options import RawOptions
from unilinattn.methods.results import stacked
from unilinattn.methods.selection import query_rows, real_pairs, stackable_layers
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.trace import Target, Trace


@register_method("raw")
def raw(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. Options: `RawOptions`. Raises `OptionError` for options that do not exist, `UncoveredError` where
    the maps of the layers cannot be stacked.
    """
    chosen = RawOptions.of("raw", options)
    layers = stackable_layers(trace, "raw", chosen.layers)
    maps = []
    for layer in progress(layers, "raw"):
        wanted = query_rows(trace, layer, target)
        # The map's own minimum and maximum need the whole of it.
        rows = query_rows(trace, layer) if chosen.normalize == "min-max" else wanted
        whole = target is None or rows is not wanted
        scores = SIGNS[chosen.sign](attention_map(layer, chosen) if whole else attention_rows(layer, chosen, rows))
        real = real_pairs(trace, layer, rows)
        scores = treated(scores, real, rows, discard=chosen.discard, normalize=chosen.normalize)
        maps.append(picked(scores, wanted) if rows is not wanted else scores)
    return stacked(trace, "raw", layers, maps, options=chosen, target=target, scope=chosen.scope)
