"""Statistics of attention maps side by side: distance, entropy, sparsity and effective memory of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Paint, Where, draw, lines
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.operator.edges import is_causal
from unilinattn.operator.selection import Heads
from unilinattn.scoring.selection import only_port, query_rows, real_pairs
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

HELD = 16
"""Elements of four bytes held for each entry of a block: about eight tensors in float64."""

STATISTICS = {"distance": "tokens", "entropy": "nats", "sparsity": "0 even, 1 one key", "memory": "tokens"}
"""The statistics and their units."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one layer's maps, by head, averaged over the rows of all sequences.

    Attributes:
        layer: name of the layer.
        rows: number of rows in the averages: those of real tokens with two or more keys.
        distance: mean distance sum_j p_ij |i - j|.
        entropy: -sum_j p_ij log p_ij.
        sparsity: Hoyer's (sqrt(n) - |a_i|_1 / |a_i|_2) / (sqrt(n) - 1) for a row of n keys.
        memory: smallest distance within which a row has the share `within` of its mass.
    """

    layer: str
    rows: int
    distance: Float[Tensor, " head"]
    entropy: Float[Tensor, " head"]
    sparsity: Float[Tensor, " head"]
    memory: Float[Tensor, " head"]


@dataclass(frozen=True, repr=False)
class MapStatistics:
    """Statistics of the attention maps of several models, layer by layer.

    Attributes:
        models: the layers' statistics by model.
        scope: the scope of the maps.
        within: the share of a row's mass that the effective memory holds.
    """

    models: Mapping[str, tuple[LayerStatistics, ...]]
    scope: str
    within: float

    def __repr__(self) -> str:
        """Show the mean over heads of each statistic, one line for each layer."""
        rows = [("model", "layer", "heads", *STATISTICS)]
        rows += [
            (model, x.layer, str(len(x.distance)), *(f"{float(getattr(x, name).mean()):.2f}" for name in STATISTICS))
            for model, layers in self.models.items()
            for x in layers
        ]
        head = f"MapStatistics, scope {self.scope}, memory of {self.within:.0%}"
        return f"{head}\n{aligned(rows, right=range(2, len(rows[0])))}"

    def plot(self, where: Where = None) -> Figure:
        """Draw each statistic against the relative depth, a line for each model."""
        panels: list[Paint] = []
        for name, unit in STATISTICS.items():
            series = {m: [float(getattr(x, name).mean()) for x in layers] for m, layers in self.models.items()}
            legend = not panels
            panels.append(lines(series, name, across="relative depth", upwards=unit, legend=legend))
        return draw(where, panels, size=(3.0, 2.7))


def map_statistics(
    traces: Trace | Mapping[str, Trace], *, scope: str = "core", heads: Heads = None, within: float = 0.9
) -> MapStatistics:
    """Return statistics of the attention maps of each layer, of one model or of several side by side.

    Each row of a map is taken as a distribution over its keys, p_ij = |a_ij| / sum_j |a_ij|, also in maps with signs.
    The keys of a row are the real ones, in a causal map up to the row's token. Rows with a single key are left out, and
    so are layers whose queries and keys are different tokens (cross-attention). Takes the time of the maps, O(heads x
    L^2), and the memory of the blocks that `max_memory` allows.

    Args:
        traces: a trace, or traces by the names of their models.
        scope: scope of the maps, see `MixerOperator.matrix`.
        heads: None measures every head of the scope; a reduction such as "mean" measures the reduced map, which is
            faster for channels and lets signs cancel.
        within: the share of a row's mass that defines its effective memory, above 0 and at most 1.

    Raises `InputError` for a row of zeros and for sequences of one token, `OptionError` for `within` out of range or an
    unknown scope, and `MemoryLimitError` if a row does not fit.
    Source: attention distance as in Raghu et al. (NeurIPS 2021), sparsity as in Hoyer (JMLR 2004).
    """
    if not 0 < within <= 1:
        raise OptionError(f"within={within}; give a share of a row's mass above 0 and at most 1.")
    models = {traces.model: traces} if isinstance(traces, Trace) else traces
    measured = {
        name: tuple(_measure(trace, layer, scope, heads, within) for layer in _self_mixing(trace))
        for name, trace in models.items()
    }
    return MapStatistics(measured, scope, within)


def row_distributions(
    scores: Float[Tensor, "*batch row key"], valid: Bool[Tensor, "*batch row key"], name: str
) -> Float[Tensor, "*batch row key"]:
    """Return p_ij = |a_ij| / sum_j |a_ij| over the valid keys, in float64; rows without a valid key are zero.

    Hidden attention has signs and rows that sum to anything, so absolute values are the one normalisation that is
    defined for every map. Raises `InputError` for a row that is zero at all valid keys, with the `name` of the map.
    """
    size = scores.double().abs().masked_fill(~valid, 0)
    total = size.sum(-1, keepdim=True)
    empty = (total == 0) & valid.any(-1, keepdim=True)
    if bool(empty.any()):
        index = tuple(empty.squeeze(-1).nonzero()[0].tolist())
        raise InputError(f"{name} has a row of zeros, which is no distribution over keys: index {index}.")
    return size / total.masked_fill(total == 0, 1)


def candidate_keys(trace: Trace, layer: Layer, rows: slice, causal: bool) -> Bool[Tensor, "batch row key"]:
    """Return the keys that each of some rows may weight: real ones, and in a causal map no later ones.

    Rows with fewer than two such keys have none, because their weights are a single number.
    """
    positions = query_rows(trace, layer)[:, rows]
    valid = real_pairs(trace, layer, positions)
    if causal:
        valid = valid & (torch.arange(valid.shape[-1], device=valid.device) <= positions.unsqueeze(-1))
    return valid & (valid.sum(-1, keepdim=True) > 1)


def _self_mixing(trace: Trace) -> list[Layer]:
    layers = [layer for layer in trace.layers if not layer.opaque and next(iter(layer.ports)) == "x"]
    if not layers:
        raise UncoveredError(f"{trace.model} has no layer with an operator whose keys are its own tokens.")
    return layers


def _measure(trace: Trace, layer: Layer, scope: str, heads: Heads, within: float) -> LayerStatistics:
    op, causal = only_port(layer), is_causal(layer.operator)
    count = op.num_heads(scope) if heads is None else 1
    totals, rows = torch.zeros(4, 1, dtype=torch.float64, device="cpu"), 0
    for block_rows, block in op.row_blocks(scope=scope, heads=heads, extra_elements=HELD * count):
        valid = candidate_keys(trace, layer, block_rows, causal)
        rows += int(valid.any(-1).sum())
        by_head = block if block.ndim == 4 else block.unsqueeze(1)
        every = valid.unsqueeze(1).expand_as(by_head)
        share = row_distributions(by_head, every, f"the {scope} map of {layer.name}")
        totals = totals + torch.stack(_row_statistics(share, valid, block_rows, within)).sum((1, 3)).cpu()
    if not rows:
        raise InputError(f"no row of {layer.name} has two or more keys; trace sequences of two or more tokens.")
    return LayerStatistics(layer.name, rows, *(totals / rows))


def _row_statistics(
    share: Float[Tensor, "batch head row key"], valid: Bool[Tensor, "batch row key"], rows: slice, within: float
) -> list[Float[Tensor, "batch head row"]]:
    """Return distance, entropy, sparsity and memory of each row; 0 for rows without keys."""
    lag = _lags(share, rows)
    counted = valid.any(-1).unsqueeze(1)
    root = valid.sum(-1).double().sqrt().unsqueeze(1)
    length = share.pow(2).sum(-1).sqrt()
    sparsity = (root - 1 / torch.where(counted, length, 1)) / torch.where(counted, root - 1, 1)
    by_lag = torch.zeros_like(share).scatter_add_(-1, lag.expand_as(share), share)
    # The last sum is 1 up to rounding, so that a share of 1 is reached too.
    reached = by_lag.cumsum(-1) < within * (1 - 1e-12)
    values = [(share * lag).sum(-1), torch.special.entr(share).sum(-1), sparsity, reached.sum(-1).double()]
    return [torch.where(counted, value, 0.0) for value in values]


def _lags(share: Float[Tensor, "batch head row key"], rows: slice) -> Int[Tensor, "row key"]:
    """Return |i - j|."""
    query = torch.arange(rows.start, rows.stop, device=share.device)
    return (query[:, None] - torch.arange(share.shape[-1], device=share.device)).abs()
