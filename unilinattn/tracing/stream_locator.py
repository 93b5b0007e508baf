"""`StreamLocator`: the residual streams of a run's layers, looked for where an earlier trace did not miss them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from unilinattn.discovery.search import FEWEST, state_of
from unilinattn.host.module_calls import CallRecord
from unilinattn.tracing.residual import locate_in_stream

Search = tuple[str, str, int]
"""The paths of a layer and of a block around it, and the number of the search among those of both in a run."""

_missing: "WeakKeyDictionary[nn.Module, tuple[object, dict[Search, str | None]]]" = WeakKeyDictionary()
"""The searches of each model in its last state that found no sum, with the module that reads the layer's output."""


class StreamLocator:
    """Finds the streams of the layers of one run, as `locate_in_stream` does.

    A search that finds no sum tries all candidates, and repeats for every trace: a block in which an earlier trace of
    the model in its present state found none is not searched again.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Prepare for a run of a model on `arguments`, before hooks are attached for it."""
        # A hook may change a sum, and a replaced forward the modules that receive it.
        hooks = tuple(
            (*module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
            for module in model.modules()
        )
        state = state_of(model, arguments), hooks
        earlier = _missing.get(model)
        if earlier is None or earlier[0] != state:
            earlier = _missing[model] = state, {}
        self._missing = earlier[1]
        self._searches: Counter[tuple[str, str]] = Counter()

    def __call__(self, layer: CallRecord, block: CallRecord) -> bool:
        """Set the site or the reader of a layer and return whether the sum was found (see `locate_in_stream`)."""
        self._searches[layer.name, block.name] += 1
        search = layer.name, block.name, self._searches[layer.name, block.name]
        if search in self._missing:
            layer.reader = layer.reader or self._missing[search]
            return False
        is_found = locate_in_stream(layer, block)
        if not is_found and _has_distinct_sums(layer):
            self._missing[search] = layer.reader
        return is_found


def _has_distinct_sums(layer: CallRecord) -> bool:
    """Tell whether a layer's vectors are enough, and finite, so that a sum of them would have been found."""
    vectors = (layer.entered, layer.output)
    return all(x is not None and x[..., 0].numel() >= FEWEST and bool(x.isfinite().all()) for x in vectors)
