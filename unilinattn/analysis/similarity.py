"""Similarity of attention maps: rank correlation and Jensen-Shannon divergence, between layers and models."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from math import log

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.analysis.statistics import candidate_keys, row_distributions
from unilinattn.errors import InputError, UncoveredError
from unilinattn.evaluation.metrics import rank_correlation
from unilinattn.host.labels import token_text
from unilinattn.memory import reserved
from unilinattn.operator.edges import is_causal
from unilinattn.scoring.maps import map_bytes
from unilinattn.scoring.selection import only_port
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True)
class MapSimilarity:
    """Similarity of two attention maps.

    Attributes:
        rank_correlation: Spearman's correlation of the absolute weights of each row, averaged over rows.
        divergence: Jensen-Shannon divergence of each row's distributions in bits, 0 to 1, averaged over rows.
    """

    rank_correlation: float
    divergence: float


@dataclass(frozen=True, eq=False, repr=False)
class LayerSimilarity:
    """Similarity of the maps of all layers of one or several models.

    Attributes:
        names: "model: layer" of each row and column.
        rank_correlation: (layer, layer).
        divergence: (layer, layer), in bits.
    """

    names: tuple[str, ...]
    rank_correlation: Float[Tensor, "layer layer"]
    divergence: Float[Tensor, "layer layer"]

    def __repr__(self) -> str:
        """Show each pair of layers, the most similar by rank first."""
        pairs = torch.triu_indices(len(self.names), len(self.names), 1, device="cpu").T.tolist()
        pairs.sort(key=lambda pair: -float(self.rank_correlation[tuple(pair)]))
        rows = [("layer", "layer", "rank correlation", "divergence")]
        rows += [
            (self.names[a], self.names[b], f"{self.rank_correlation[a, b]:.2f}", f"{self.divergence[a, b]:.2f}")
            for a, b in pairs
        ]
        return "LayerSimilarity\n" + aligned(rows, right=(2, 3))

    def plot(self, where: Where = None) -> Figure:
        """Draw both matrices; layers are numbered in the order of `names`."""
        numbers = [str(number) for number in range(len(self.names))]
        labels = [f"{name}  {number}" for name, number in zip(self.names, numbers, strict=True)]
        drawn = (
            ("rank correlation", self.rank_correlation, labels),
            ("Jensen-Shannon divergence, bits", self.divergence, numbers),
        )
        panels = [
            heat_map(values, title, rows="", columns="layer", row_labels=rows, column_labels=numbers, limit=1.0)
            for title, values, rows in drawn
        ]
        return draw(where, panels, size=(4.4, 3.2))


def map_similarity(
    a: Float[Tensor, "batch query key"], b: Float[Tensor, "..."], valid: Bool[Tensor, "batch query key"]
) -> MapSimilarity:
    """Return the rank correlation and the divergence of two maps over their valid keys.

    Both compare absolute weights: each row is ranked by |a_ij|, and is a distribution p_ij = |a_ij| / sum_j |a_ij|. The
    divergence is H((p + q) / 2) - (H(p) + H(q)) / 2 with the entropy H in bits. Rows with fewer than two valid keys are
    left out; the rank correlation also leaves out rows in which all weights of a map are equal.

    Raises `InputError` for different shapes, a row of zeros, and if no row is left.
    Source: Spearman (1904); Lin, "Divergence Measures Based on the Shannon Entropy" (1991).
    """
    if a.shape != b.shape:
        raise InputError(f"the maps have shapes {tuple(a.shape)} and {tuple(b.shape)}; compare maps of equal shape.")
    valid = valid.to(a.device).expand(a.shape)
    valid = valid & (valid.sum(-1, keepdim=True) > 1)
    rows = int(valid.any(-1).sum())
    if not rows:
        raise InputError("no row has two or more valid keys, so there is nothing to compare.")
    p, q = (row_distributions(x, valid, "a map") for x in (a, b.to(a.device)))
    entropy = [torch.special.entr(x).sum(-1) for x in ((p + q) / 2, p, q)]
    divergence = (entropy[0] - (entropy[1] + entropy[2]) / 2).clamp(min=0) / log(2)
    ordered = valid & _varies(p, valid) & _varies(q, valid)
    return MapSimilarity(rank_correlation(p, q, ordered).mean, float(divergence.sum() / rows))


def layer_similarity(
    traces: Trace | Mapping[str, Trace],
    *,
    scope: str = "core",
    orders: Mapping[str, Sequence[int]] | None = None,
) -> LayerSimilarity:
    """Return the similarity of every two layers' maps, reduced over heads by their mean, within and between models.

    The traces hold the same sequences. Keys are the real tokens, up to the row's own token if both maps are causal. All
    maps are held at once, and every two of them compared. `orders`: for models whose class tokens stand elsewhere, the
    tokens to compare by the model's name, in an order that is common to all models.

    Raises `InputError` for traces of different shapes or padding and for a row of zeros, `UncoveredError` for a layer
    with several inputs, and `MemoryLimitError` if the maps are larger than `max_memory` allows.
    """
    models = {traces.model: traces} if isinstance(traces, Trace) else traces
    layers = [(name, trace, layer) for name, trace in models.items() for layer in trace.layers if not layer.opaque]
    names = tuple(f"{name}: {layer.name}" if len(models) > 1 else layer.name for name, _, layer in layers)
    maps, keys = [], []
    with ExitStack() as stack:
        for name, trace, layer in layers:
            # Besides the map, its mask is held.
            size = map_bytes(layer) + map_bytes(layer) // layer.output.element_size()
            stack.enter_context(reserved(size, f"the map of {layer.name}", "compare fewer or shorter sequences"))
            alpha = only_port(layer).matrix(scope)
            valid = candidate_keys(trace, layer, slice(None), is_causal(layer.operator))
            if orders is not None and name in orders:
                order = torch.tensor(orders[name], device=alpha.device)
                alpha, valid = (x[:, order][:, :, order] for x in (alpha, valid.expand(alpha.shape)))
            maps.append(alpha)
            keys.append(valid)
        if any(each.shape != maps[0].shape for each in maps):
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in zip(names, maps, strict=True))
            raise InputError(f"the maps have different shapes ({shapes}); trace the same sequences with every model.")
        ranks, divergence = (
            torch.eye(len(maps), dtype=torch.float64, device="cpu"),
            torch.zeros(len(maps), len(maps), device="cpu").double(),
        )
        for a, b in torch.triu_indices(len(maps), len(maps), 1, device="cpu").T.tolist():
            # The union: a causal map compared with one that is not weights later keys by zero.
            similarity = map_similarity(maps[a], maps[b], keys[a] | keys[b].to(keys[a].device))
            ranks[a, b] = ranks[b, a] = similarity.rank_correlation
            divergence[a, b] = divergence[b, a] = similarity.divergence
    return LayerSimilarity(names, ranks, divergence)


def _varies(share: Float[Tensor, "batch query key"], valid: Bool[Tensor, "batch query key"]) -> Tensor:
    """Return whether the valid weights of each row differ, (batch, query, 1)."""
    high = share.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    low = share.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    return high > low


@dataclass
class SampleSimilarity:
    """Sums of the similarities of layers over texts or images, for models that read one as the same tokens.

    Attributes:
        scope: scope of the maps.
        counts: number of samples on which the maps of two models were compared.
        refused: a message for each model without maps that can be compared.
        sums: the sums of rank correlation and divergence of two layers, each named "model: layer".
    """

    scope: str
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, traces: Mapping[str, Trace]) -> None:
        """Add the similarities on one sample, or on a batch of samples, given each model's trace."""
        groups: dict[Hashable, dict[str, Trace]] = {}
        orders = {}
        for name, trace in traces.items():
            if name not in self.refused:
                alignment, order = _alignment(name, trace)
                groups.setdefault(alignment, {})[name] = trace
                if order is not None:
                    orders[name] = order
        for group in groups.values():
            if (similar := self._measured(group, orders)) is None:
                continue
            batch = len(next(iter(group.values())).layers[-1].output)
            # The names of a single model's layers have no model in front.
            (only, *others) = group
            names = unique(similar.names if others else [f"{only}: {name}" for name in similar.names])
            for i, a in enumerate(names):
                for j, b in enumerate(names):
                    pair = torch.stack((similar.rank_correlation[i, j], similar.divergence[i, j]))
                    self.sums[a, b] = self.sums.get((a, b), torch.zeros_like(pair)) + pair * batch
            for first, second in product(group, group):
                self.counts[first, second] = self.counts.get((first, second), 0) + batch

    def _measured(self, group: dict[str, Trace], orders: Mapping[str, Sequence[int]]) -> LayerSimilarity | None:
        """Return the similarities in a group, from which models without maps that fit are removed."""
        try:
            return layer_similarity(group, scope=self.scope, orders=orders)
        except (UncoveredError, InputError) as reason:
            if len(group) == 1:
                self.refused[group.popitem()[0]] = str(reason)
                return None
            covered = {
                name: trace for name, trace in group.items() if self._measured({name: trace}, orders) is not None
            }
            if len(covered) == len(group):
                raise
        for name in group.keys() - covered.keys():
            del group[name]
        return self._measured(group, orders) if group else None

    def mean(self, layers: Mapping[str, Sequence[str]]) -> LayerSimilarity | None:
        """Return the means over the samples on which two models were compared, given the layers of each model."""
        keys = {
            f"{name}: {layer}": name
            for name, names in layers.items()
            for layer in names
            if name not in self.refused and any(f"{name}: {layer}" in pair for pair in self.sums)
        }
        if not keys:
            return None
        values = torch.full((2, len(keys), len(keys)), torch.nan, dtype=torch.float64, device="cpu")
        for i, (a, first) in enumerate(keys.items()):
            for j, (b, second) in enumerate(keys.items()):
                if (a, b) in self.sums:
                    values[:, i, j] = self.sums[a, b] / self.counts[first, second]
        return LayerSimilarity(tuple(keys), *values)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with the number of a repetition behind it: a module that is called twice makes two layers."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} (call {seen[name]})")
    return tuple(out)


def _alignment(model: str, trace: Trace) -> tuple[Hashable, Sequence[int] | None]:
    """Return a value that is equal for two models which read a sample alike, and the order of its tokens, if known.

    Two models read the same parts of a text at the same positions if the texts of their tokens are equal. Images have
    the same grid of patches and number of class tokens, in the order class tokens, then patches.
    """
    if trace.ids is not None:
        reader = None if trace.text is None else trace.text.tokenizer
        return tuple(token_text(reader, token) if reader else token for token in trace.ids.flatten().tolist()), None
    if (tokens := trace.image_tokens) is None:
        return model, None
    return (tokens.grid, len(tokens.cls)), (*tokens.cls, *tokens.patches)
