"""`Scoring`: a call of a method, from the axes of its scores to its estimate and its labelled result."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from math import prod
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.errors import UncoveredError
from unilinattn.memory import allowed, require_result, reserved, without
from unilinattn.operator.cost import apply_elements
from unilinattn.options.base import Options
from unilinattn.options.bases import Layerwise
from unilinattn.progress import progress
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.scoring.joint import Axes
from unilinattn.scoring.maps import ONE_ROW, map_shape
from unilinattn.scoring.selection import StepRows, mixing_operator, query_rows, streams_of
from unilinattn.scoring.vectors import HeadAxis
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Method = TypeVar("Method", bound=Options, covariant=True)

Fill = Callable[[StepRows, Float[Tensor, "batch *head row key"]], Float[Tensor, "batch row"] | None]
"""Writes rows of a step's map into a tensor of zeros, with a head axis for `heads`.

Returns the share of each row's own token if that is none of the keys, else None.
"""


@dataclass(frozen=True, kw_only=True)
class Scoring(Generic[Method]):
    """A call of a method: its arguments, its layers and the axes of its scores.

    Attributes:
        trace, options, target: the arguments of the method.
        layers: the layers of the method.
        heads: the head axis of the scores, None for scores without one.
        axes: the queries and keys of the scores, None for those of the first layer.
    """

    trace: Trace
    options: Method
    target: Target | None
    layers: Sequence[Layer]
    heads: HeadAxis | None = None
    axes: Axes | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the scores: ([layer,] batch, [head,] query, key), one query for a target."""
        batch, queries, keys = map_shape(self.layers[0]) if self.axes is None else self.axes.shape
        sizes = {"layer": len(self.layers)} if self.options.has_layer_axis else {}
        sizes["batch"] = batch
        if self.heads is not None:
            sizes["head"] = len(self.heads.heads)
        return {**sizes, "query": queries if self.target is None else 1, "key": keys}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scores."""
        return reduce(torch.promote_types, (layer.output.dtype for layer in self.layers))

    def allocate(self) -> Float[Tensor, "*axes"]:
        """Return zeros of `sizes`; every method of operators allocates its scores here.

        Raises `MemoryLimitError`, before it allocates, if they are larger than `max_memory`.
        """
        sizes, options = self.sizes, self.options
        shape = tuple(sizes.values())
        ways = [ONE_ROW] if self.target is None else ["take fewer sequences or a shorter one"]
        if "layer" in sizes and len(self.layers) > 1 and isinstance(options, Layerwise):
            ways.append("for fewer layers with layers=[...]")
        if "head" in sizes and sizes["head"] > 1:
            ways.append("for fewer heads with heads=[...]")
        require_result(shape, self.dtype.itemsize, f"{options.name}: the result ({', '.join(sizes)})", ", ".join(ways))
        return torch.zeros(shape, dtype=self.dtype, device=self.layers[0].output.device)

    def estimate(
        self,
        cost: Callable[[Layer], int] | None,
        *,
        resident: int = 0,
        extras: int = 0,
        before: Sequence[LayerCost] = (),
    ) -> Estimate:
        """Return the estimate of the call, given the bytes of each layer and the memory shared by all layers.

        Args:
            cost: returns the bytes of a layer; None for a method that computes nothing layer by layer.
            resident: bytes in addition to the result from the first layer to the last.
            extras: bytes of the result's extras.
            before: costs of the work before the first layer.
        """
        costs = list(before)
        if cost is not None:
            with without(resident):
                sizes = ((layer, max(cost(layer), _check_bytes(layer))) for layer in self.layers)
                costs += [LayerCost(layer.name, layer.kind, size) for layer, size in sizes]
        shape = tuple(size for axis, size in self.sizes.items() if self.target is None or axis != "query")
        result = prod(shape) * self.dtype.itemsize + extras
        return Estimate(self.options.name, shape, result, resident, tuple(costs), allowed())

    def result(
        self,
        scores: Float[Tensor, "*axes"],
        *,
        scope: str | None,
        dims: tuple[str, ...] | None = None,
        extras: Mapping[str, Tensor] | None = None,
        decomposition_error: Mapping[str, float] | None = None,
        completeness_gap: float | None = None,
        stream_error: dict[str, float] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> Attribution:
        """Return scores of `sizes` with labels, options and errors.

        `extras` have the same axes, or those without key, or without head and key. The result has the axes `dims`, by
        default those of the scores, without query for a target: the query axis of one row is then dropped. The worst
        `decomposition_error`, by the name of a layer or of the first layer of a composed step, is the completeness gap.
        Layers whose adapter covers only their core have no reconstruction error.
        """
        trace, layers, axes, heads = self.trace, self.layers, self.axes, self.heads
        if axes is None:
            written, read = streams_of(trace, layers[0])
            axes = Axes(trace, (written,), (read,))
        if dims is None:
            dims = tuple(axis for axis in self.sizes if self.target is None or axis != "query")
        extras = dict(extras or {})
        if len(dims) < scores.ndim:
            extras = {name: rows.squeeze(-2 if rows.shape == scores.shape else -1) for name, rows in extras.items()}
            scores = scores.squeeze(-2)
        if decomposition_error is not None:
            ordered = [decomposition_error[layer.name] for layer in layers if layer.name in decomposition_error]
            extras["decomposition_error"] = torch.tensor(ordered, dtype=torch.float64, device="cpu")
            completeness_gap = extras["decomposition_error"].max().item()
        errors = {}
        for layer in layers:
            try:
                errors[layer.name] = layer.reconstruction_error()
            except UncoveredError:
                continue
        return Attribution(
            scores=scores,
            dims=dims,
            method=self.options.name,
            options=stored_options(self.options, self.target),
            scope=scope,
            mask=axes.mask(),
            sinks=axes.sinks(),
            streams=axes.names,
            layers=tuple(layer.name for layer in layers),
            kinds=tuple(layer.kind for layer in layers),
            heads=None if heads is None else heads.heads,
            head_kind="head" if heads is None else heads.kind,
            left_out=tuple(layer.name for layer in trace.layers if layer.opaque),
            model=trace.model,
            versions=trace.versions,
            reconstruction_error=errors,
            warnings=(*trace.warnings, *warnings),
            stream_error=stream_error or {},
            completeness_gap=completeness_gap,
            extras=extras,
        )


def score_layers(scoring: Scoring[Layerwise], fill: Fill, *, whole: bool = False) -> Float[Tensor, "*axes"]:
    """Return each layer's scores, or their mean with layers="mean".

    `fill` writes the scores of a layer. With `whole` it computes all rows of a layer even for a target.
    """
    name, heads, scores = scoring.options.name, scoring.heads, scoring.allocate()
    for index, layer in enumerate(progress(scoring.layers, name)):
        targets = query_rows(scoring.trace, layer, scoring.target)
        rows = query_rows(scoring.trace, layer) if whole else targets
        slab = scores[index] if scoring.options.has_layer_axis else None
        alike = slab is not None and (slab.device, slab.dtype) == (layer.output.device, layer.output.dtype)
        if alike and slab is not None and rows.shape[1] == slab.shape[-2]:
            fill(StepRows(scoring.trace, (layer,), rows), slab)
            continue
        shape = (len(rows), *([] if heads is None else [len(heads.heads)]), rows.shape[1], scores.shape[-1])
        with reserved(prod(shape) * layer.output.element_size(), f"{name}: the map of {layer.name}", ONE_ROW):
            out = layer.output.new_zeros(shape)
            fill(StepRows(scoring.trace, (layer,), rows), out)
        if rows.shape[1] != targets.shape[1]:
            row = targets.unsqueeze(-1) if heads is None else targets[:, None, :, None]
            out = torch.take_along_dim(out, row, -2)
        if slab is None:
            scores.add_(out.to(scores), alpha=1 / len(scoring.layers))
        else:
            slab.copy_(out)
    return scores


def _check_bytes(layer: Layer) -> int:
    """Return the bytes of the check of a layer against the host's output, 0 if it is done."""
    if layer.prefix_error is not None:
        return 0
    op = mixing_operator(layer)
    return apply_elements(op.chains, op.inputs) * layer.output.element_size()


def relative_gap(gap: Float[Tensor, "*row"], value: Float[Tensor, "*row"]) -> float:
    """Return the largest size of a gap relative to that of the number that it belongs to."""
    return float((gap.abs() / value.abs().clamp_min(torch.finfo(value.dtype).tiny)).max())


def stored_options(options: Options, target: Target | None) -> dict[str, Any]:
    """Return the options and the target as plain Python values, for the result."""
    plain = torch.as_tensor(target, device="cpu").tolist() if target is not None else None
    return {**options.model_dump(), "target": plain}


def trace_bytes(trace: Trace) -> int:
    """Return the bytes of a trace and of its operators as far as they are built, without the model's parameters."""
    # Tensors that share memory, such as a stream that enters one block and leaves another, count once.
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(trace, set())}
    for weight in chain(trace.host.parameters(), trace.host.buffers()):
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of a trace: those of its attributes, of theirs, and so on, but not of the model."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in visited and not isinstance(value, nn.Module | type):
        visited.add(id(value))
        # Layers, operators, stages, mixers and deferred factors are objects of this package.
        is_record = type(value).__module__.startswith("unilinattn.") and hasattr(value, "__dict__")
        fields = vars(value) if is_record else value
        fields = fields.values() if isinstance(fields, Mapping) else fields
        for field in fields if isinstance(fields, Collection) and not isinstance(fields, str) else ():
            yield from _tensors(field, visited)
