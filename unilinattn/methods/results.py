"""From scores to a labelled result."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.errors import UncoveredError
from unilinattn.methods.options import Layerwise, Options
from unilinattn.methods.selection import key_mask
from unilinattn.trace import Layer, Target, Trace

DIMS = ("layer", "batch", "query", "key")


def stacked(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    scores: Sequence[Float[Tensor, "batch row key"]],
    *,
    options: Layerwise,
    target: Target | None,
    scope: str,
    extras: dict[str, Sequence[Float[Tensor, "batch row"]]] | None = None,
    decomposition_error: Sequence[float] | None = None,
) -> Attribution:
    """Label what a layer-wise method found for each layer; layers="mean" averages here.

    `extras` hold a number a row and follow the scores; `decomposition_error` one a layer, the worst of which is
    the completeness gap.
    """
    device = scores[0].device
    tensors = {"scores": scores, **(extras or {})}
    whole = {name: torch.stack([part.to(device) for part in parts]) for name, parts in tensors.items()}
    if options.layers == "mean":
        whole = {name: tensor.mean(0) for name, tensor in whole.items()}
    if target is not None:
        whole = {name: tensor.squeeze(-2 if name == "scores" else -1) for name, tensor in whole.items()}
    found, gap = whole.pop("scores"), None
    if decomposition_error is not None:
        whole["decomposition_error"] = torch.tensor(decomposition_error, dtype=torch.float64)
        gap = whole["decomposition_error"].max().item()
    return labelled(
        trace,
        method,
        layers,
        found,
        dims=DIMS[1:] if options.layers == "mean" else DIMS,
        options=options,
        target=target,
        scope=scope,
        extras=whole,
        completeness_gap=gap,
    )


def labelled(
    trace: Trace,
    method: str,
    layers: Sequence[Layer],
    scores: Float[Tensor, "*axes"],
    *,
    options: Options,
    target: Target | None,
    scope: str,
    dims: tuple[str, ...] = DIMS[1:],
    extras: dict[str, Tensor] | None = None,
    completeness_gap: float | None = None,
) -> Attribution:
    """Put scores and all that is needed to read them into a result; with a target its `dims` lose "query".

    A layer whose adapter covers its core alone has no reconstruction error to state.
    """
    errors = {}
    for layer in layers:
        try:
            errors[layer.name] = layer.reconstruction_error()
        except UncoveredError:
            continue
    return Attribution(
        scores=scores,
        dims=dims if target is None else tuple(axis for axis in dims if axis != "query"),
        method=method,
        options=options.stored(target),
        scope=scope,
        mask=key_mask(trace, layers[0]),
        layers=tuple(layer.name for layer in layers),
        kinds=tuple(layer.kind for layer in layers),
        left_out=tuple(layer.name for layer in trace.layers if layer.opaque),
        model=trace.model,
        versions=trace.versions,
        reconstruction_error=errors,
        completeness_gap=completeness_gap,
        extras=extras or {},
    )
