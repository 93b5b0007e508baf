"""Attention sinks of a model on an input: the norm of each token's stream, and the mass that its keys draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import InputError, UncoveredError
from unilinattn.kernels.precision import full_precision
from unilinattn.methods.labelled import Tokens, labels_of_tokens
from unilinattn.methods.run import traced_inputs
from unilinattn.operator.edges import is_causal
from unilinattn.operator.selection import Heads
from unilinattn.scoring.selection import layers_in, mixing_operator
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.sinks import OUTLIER, norm_ratios, positions, sink_tokens
from unilinattn.tracing.trace import Trace

EXCESS = 0.3
"""Share of the mass beyond that of even attention above which a head sinks into a key.

Gu et al. (2025) call a first token a sink of a head above a mean weight of 0.3; the excess is that weight for long
sequences, and discounts short ones, in which even attention has large weights.
"""

HELD = 8
"""Elements of four bytes held for each entry of a block: about four tensors in float64."""

NAMED = 8
"""Largest number of tokens that a `repr` lists for each sequence."""


TICKS = 24
"""Largest number of tokens, or layers, whose names a picture shows."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sinks:
    """Stream norms and column masses of the tokens of one stream, and the attention sinks by each of them.

    Attributes:
        model: name of the model.
        scope: scope of the maps.
        layers: names of the layers.
        norms: norm of the stream that enters a layer over the median of the sequence's real tokens, (layer, batch,
            token); NaN at padding, and in layers without a stream.
        masses: by layer the column mass of each head, (batch, head, token): the mean over the queries that can see the
            key, other than the key itself, of |a_ij| / sum_j |a_ij|; NaN at padding and at keys without such a query.
        even: the column mass of even attention, (batch, token).
        readers: the number of such queries, (batch, token).
        by_norm: the positions of each sequence's sinks by `norms`, those of `result.sinks` of a method; None without
            streams.
        by_mass: the positions of each sequence's sinks by `masses`.
        tokens: the texts of each sequence's tokens, None if they are unknown.
        real: real tokens, (batch, token).
    """

    model: str
    scope: str
    layers: tuple[str, ...]
    norms: Float[Tensor, "layer batch token"]
    masses: tuple[Float[Tensor, "batch head token"], ...]
    even: Float[Tensor, "batch token"]
    readers: Float[Tensor, "batch token"]
    by_norm: tuple[tuple[int, ...], ...] | None
    by_mass: tuple[tuple[int, ...], ...]
    tokens: Sequence[Sequence[str]] | None
    real: Bool[Tensor, "batch token"]

    @property
    def sinking(self) -> Float[Tensor, "batch token"]:
        """The share of all heads of all layers that sink into each token; NaN at keys without a query."""
        return torch.cat([_sinking(mass, self.even) for mass in self.masses], 1).mean(1)

    def __repr__(self) -> str:
        """Name the sinks of each sequence, and the tokens that draw the largest mass."""
        lines = [f"Sinks of {self.model}, scope {self.scope}, {len(self.layers)} layers"]
        rows: list[tuple[str, ...]] = [("token", "norm / median", "column mass", "heads that sink", "sink by")]
        for index in range(len(self.real)):
            several = f"sequence {index}: " if len(self.real) > 1 else ""
            lines.append(f"  {several}{self._sentence(index)}")
            rows += self._rows(index, several)
        return "\n".join([*lines, aligned(rows, right=range(1, 4), indent=2)])

    def plot(self, where: Where = None, *, batch: int = 0) -> Figure:
        """Draw log10 of the norm ratio, and the mean and the maximum over heads of the column mass, token by layer.

        Cells without a number are white. Without streams the ratio is left out; its colours end at 10 times the median
        or above. `batch`: index of the sequence.

        Raises `InputError` for an index out of range.
        """
        if not -len(self.real) <= batch < len(self.real):
            raise InputError(f"batch={batch}; there are {len(self.real)} sequences, 0 to {len(self.real) - 1}.")
        real = self.real[batch].nonzero().flatten()
        masses = torch.stack([self._over_heads(mass[batch][:, real]) for mass in self.masses])
        labels = None
        if self.tokens is not None and len(real) <= TICKS:
            labels = [self.tokens[batch][key] for key in real.tolist()]
        ratios = self.norms[:, batch, real]
        norms = torch.where(ratios > 0, ratios.log10(), torch.nan)
        pictures = [
            ("stream norm / median, log10", norms, max(log10(OUTLIER), float(norms.nan_to_num().abs().max()))),
            ("column mass, mean over heads", masses[:, 0], 1.0),
            ("column mass, largest of the heads", masses[:, 1], 1.0),
        ]
        if self.by_norm is None:
            del pictures[0]
        layers = [str(index) for index in range(len(self.layers))] if len(self.layers) <= TICKS else None
        axes: dict[str, Any] = dict(rows="token", columns="layer", row_labels=labels, column_labels=layers)
        panels = [heat_map(values.T, title, limit=limit, **axes) for title, values, limit in pictures]
        return draw(where, panels, size=(4.0, max(2.4, 0.17 * min(len(real), TICKS) + 0.8)))

    def _sentence(self, index: int) -> str:
        if int(self.real[index].sum()) == 1:
            return "one token, which nothing is compared with and no other token reads"
        norm, mass = self._positions(index)
        named = [self._name(index, key) for key in sorted({*norm, *mass})]
        return f"attention sinks: {', '.join(named)}" if named else "no attention sinks"

    def _rows(self, index: int, several: str) -> list[tuple[str, ...]]:
        """Return a row for each sink, and for the other tokens that draw the largest mass up to `NAMED` in all."""
        norm, mass = self._positions(index)
        drawn = torch.stack([each[index].mean(0) for each in self.masses]).mean(0)
        sinks = sorted({*norm, *mass})
        order = drawn.nan_to_num(-1).argsort(descending=True).tolist()
        others = [key for key in order if bool(self.real[index, key]) and key not in sinks]
        rows = []
        for key in [*sinks, *others][:NAMED]:
            ways = [way for way, positions in (("norm", norm), ("mass", mass)) if key in positions]
            numbers = (self.norms[:, index, key].nanmedian(), drawn[key], self.sinking[index, key])
            shown = [
                "-" if bool(x.isnan()) else f"{float(x):{spec}}"
                for x, spec in zip(numbers, (".3g", ".2f", ".0%"), strict=True)
            ]
            rows.append((f"{several}{self._name(index, key)}", *shown, " and ".join(ways)))
        return rows

    def _positions(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sinks of a sequence by norm and by mass."""
        return () if self.by_norm is None else self.by_norm[index], self.by_mass[index]

    def _name(self, index: int, key: int) -> str:
        position = int(self.real[index, :key].sum())
        return f"{position}" if self.tokens is None else f"{position} {self.tokens[index][key]!r}"

    @staticmethod
    def _over_heads(mass: Float[Tensor, "head token"]) -> Float[Tensor, "2 token"]:
        return torch.stack([mass.mean(0), mass.amax(0)])


@full_precision()
def sinks(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    bos: bool = False,
    scope: str = "core",
    heads: Heads = None,
) -> Sinks:
    """Measure the attention sinks of each sequence: tokens with an outlying stream norm, or that draw most of the maps.

    By norm a token is a sink where `result.sinks` of a method names it: above 10 times the median at half of the layers
    or more. By mass a head sinks into a key if its column mass m exceeds the mass e of even attention by more than 0.3
    of the largest possible excess, m - e > 0.3 (1 - e). A token is a sink if half of the heads of all layers or more
    sink into it, and if half of the sequence's other tokens or more can see it: the last tokens of a causal model have
    few queries, whose answers they may be. Padding counts in positions.

    The layers are those that read and write the tokens of the last layer. In a causal layer later queries see a key,
    also where a window hides it. Takes the time of the maps, O(heads x L^2), and the memory of the blocks that
    `max_memory` allows.

    Args:
        model_or_trace: the model, or a trace of it.
        inputs, tokenizer, bos: as in `trace`, None for a trace.
        tokens: labels of the tokens, as in `explain`.
        scope: scope of the maps, see `MixerOperator.matrix`.
        heads: None measures every head of the scope; a reduction such as "mean" measures the reduced map.

    Raises `UncoveredError` for a model without such a layer, `OptionError` for an unknown scope, `InputError` for
    inputs or labels that do not fit, `MemoryLimitError` if a row does not fit, and the errors of `trace`.
    Source: Xiao et al., "Efficient streaming language models with attention sinks" (ICLR 2024); Gu et al., "When
    attention sink emerges in language models" (ICLR 2025), section 3.1.
    """
    trace = traced_inputs(model_or_trace, inputs, tokenizer, bos=bos)
    stream = trace.target_stream
    layers = [layer for layer in layers_in(trace, stream) if not layer.opaque]
    if not layers:
        raise UncoveredError(f"{trace.model} has no layer with an operator whose keys and queries are the same tokens.")
    real = torch.ones(stream.shape, dtype=torch.bool, device="cpu") if layers[0].mask is None else layers[0].mask.cpu()
    readers, even = _even(real, causal=all(is_causal(layer.operator) for layer in layers))
    masses = tuple(_column_masses(layer, scope, heads, real, readers) for layer in layers)
    return Sinks(
        model=trace.model,
        scope=scope,
        layers=tuple(layer.name for layer in layers),
        norms=torch.stack([_ratios(layer, real) for layer in layers]),
        masses=masses,
        even=even,
        readers=readers,
        by_norm=sink_tokens(layers, stream.shape),
        by_mass=_by_mass(masses, even, readers, real),
        tokens=_labels(trace, tokenizer if tokens is None else tokens, real),
        real=real,
    )


def _even(
    real: Bool[Tensor, "batch token"], *, causal: bool
) -> tuple[Float[Tensor, "batch token"], Float[Tensor, "batch token"]]:
    """Return the number of queries other than the key itself that can see each key, and its mass by even attention."""
    count = real.double().sum(1, keepdim=True)
    reached = real.double().cumsum(1)
    keys = reached if causal else count.expand_as(reached)
    weight = torch.where(real, 1 / keys, 0)
    readers = count - (reached if causal else 1)
    total = weight.sum(1, keepdim=True) - (weight.cumsum(1) if causal else weight)
    defined = real & (readers > 0)
    return torch.where(defined, readers, 0), torch.where(defined, total / readers, torch.nan)


def _column_masses(
    layer: Layer, scope: str, heads: Heads, real: Bool[Tensor, "batch token"], readers: Float[Tensor, "batch token"]
) -> Float[Tensor, "batch head token"]:
    op = mixing_operator(layer)
    count = op.num_heads(scope) if heads is None else 1
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for rows, block in op.row_blocks(scope=scope, heads=heads, extra_elements=HELD * count):
        by_head = block if block.ndim == 4 else block.unsqueeze(1)
        keys, queries = (mask.to(block.device) for mask in (real[:, None, None], real[:, None, rows, None]))
        weights = by_head.double().abs().masked_fill(~(keys & queries), 0)
        sums = weights.sum(-1, keepdim=True)
        # A row of zeros reads no key.
        shares = weights / sums.masked_fill(sums == 0, 1)
        shares.diagonal(rows.start, -2, -1).zero_()
        total = total + shares.sum(2).cpu()
    return total / readers.masked_fill(readers == 0, torch.nan).unsqueeze(1)


def _ratios(layer: Layer, real: Bool[Tensor, "batch token"]) -> Float[Tensor, "batch token"]:
    ratios = norm_ratios(layer)
    none = torch.full(real.shape, torch.nan, dtype=torch.float64, device="cpu")
    return none if ratios is None or ratios.shape != real.shape else ratios.double()


def _sinking(
    mass: Float[Tensor, "batch head token"], even: Float[Tensor, "batch token"]
) -> Float[Tensor, "batch head token"]:
    """Return 1 where a head sinks into a key and 0 elsewhere, NaN at keys without a query."""
    even = even.unsqueeze(1)
    return torch.where(mass.isnan(), torch.nan, (mass - even > EXCESS * (1 - even)).double())


def _by_mass(
    masses: Sequence[Float[Tensor, "batch head token"]],
    even: Float[Tensor, "batch token"],
    readers: Float[Tensor, "batch token"],
    real: Bool[Tensor, "batch token"],
) -> tuple[tuple[int, ...], ...]:
    share = torch.cat([_sinking(mass, even) for mass in masses], 1).mean(1)
    return positions((share >= 0.5) & (2 * readers >= real.sum(1, keepdim=True) - 1))


def _labels(trace: Trace, tokens: Any, real: Bool[Tensor, "batch token"]) -> list[list[str]] | None:
    """Return the texts of the tokens; raise `InputError` if they do not fit."""
    if tokens is None and trace.text is not None:
        tokens = trace.text.tokenizer
    if tokens is None:
        return None
    stream = trace.target_stream
    streams = {stream.name: stream.shape[1]} if len(trace.streams) > 1 else {}
    labels = labels_of_tokens(tokens, trace, streams)
    if [len(row) for row in labels] != [real.shape[1]] * len(real):
        raise InputError(
            f"tokens must be {len(real)} lists of {real.shape[1]} texts; got {[len(row) for row in labels]}."
        )
    return labels
