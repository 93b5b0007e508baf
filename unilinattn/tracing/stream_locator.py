"""`StreamLocator`: the residual streams of a run's layers, looked for where an earlier trace did not miss them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from unilinattn.discovery.search import FEWEST, state_of
from unilinattn.host.module_calls import NO_SUM, CallRecord
from unilinattn.tracing.residual import locate_in_stream

Search = tuple[str, str, int]
"""The paths of a layer and of a block around it, and the number of the search among those of both in a run."""


class Outcome(NamedTuple):
    """The candidates of a search, whether one is a sum, and the module that reads the layer's output, if any."""

    candidates: tuple[int | None, ...]
    is_found: bool
    reader: str | None


_earlier: "WeakKeyDictionary[nn.Module, tuple[object, dict[Search, Outcome]]]" = WeakKeyDictionary()
"""The outcomes of the searches of each model in its last state."""


class StreamLocator:
    """Finds the streams of the layers of one run, as `locate_in_stream` does.

    A search tries candidates, all of them if none is a sum, and repeats for every trace. The outcome for an earlier
    trace of the model in its present state saves the most of it: a sum is verified, and a block in which none was found
    is not searched again.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Prepare for a run of a model on `arguments`, before hooks are attached for it."""
        # A hook may change a sum, and a replaced forward the modules that receive it.
        hooks = tuple(
            (path, *module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
            for path, module in model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        )
        state = state_of(model, arguments), hooks
        earlier = _earlier.get(model)
        if earlier is None or earlier[0] != state:
            earlier = _earlier[model] = state, {}
        self._outcomes = earlier[1]
        self._searches: Counter[tuple[str, str]] = Counter()

    def __call__(self, layer: CallRecord, block: CallRecord) -> bool:
        """Set the site or the reader of a layer and return whether the sum was found (see `locate_in_stream`)."""
        self._searches[layer.name, block.name] += 1
        search = layer.name, block.name, self._searches[layer.name, block.name]
        outcome = self._outcomes.get(search)
        if outcome is not None and not outcome.is_found:
            layer.reader = layer.reader or outcome.reader
            return False
        layer.candidates, layer.earlier_candidates = [], () if outcome is None else outcome.candidates
        is_found = locate_in_stream(layer, block)
        latest = Outcome(tuple(layer.candidates), is_found, layer.reader)
        is_verified = is_found and NO_SUM not in latest.candidates
        if latest != outcome and (is_verified or _has_distinct_sums(layer)):
            self._outcomes[search] = latest
        return is_found


def _has_distinct_sums(layer: CallRecord) -> bool:
    """Tell whether a layer's vectors are enough, and finite, so that a sum of them would have been found."""
    vectors = (layer.entered, layer.output)
    return all(x is not None and x[..., 0].numel() >= FEWEST and bool(x.isfinite().all()) for x in vectors)
