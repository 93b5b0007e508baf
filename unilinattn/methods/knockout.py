"""`knockout`: the effect on the model's output of cutting tokens or edges in the running model."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.logits import one_each, picked
from unilinattn.memory import require_result
from unilinattn.operator.edges import Edges, Listed, Outgoing
from unilinattn.options import Knockout
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.reruns.cut import Cut
from unilinattn.reruns.rerun import Rerun, rerun
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.composition import composition
from unilinattn.scoring.maps import ONE_ROW
from unilinattn.scoring.selection import selected_layers, stream_mask, streams_of
from unilinattn.tracing.token_streams import TokenStream
from unilinattn.tracing.trace import Target, Trace

TOKENS = 4096
"""Tokens in one run of the model, which cuts other edges in each of its sequences."""


@register_method(Knockout)
def knockout(trace: Trace, options: Knockout, *, target: Target | None = None) -> Attribution:
    """Run `Knockout`."""
    layers = selected_layers(trace, "knockout", options.layers)
    layers = tuple(layer for layer in trace.layers if layer in layers)
    scoring = composition(trace, options, target, layers)
    joint = scoring.joint
    replace = options.replace
    assert isinstance(replace, str | Trace)
    measured = _Measured(trace, target, options)
    if options.edges is not None and measured.has_queries:
        raise OptionError("knockout: edges are cut for one target; give a position as target, such as target=-1.")
    if options.edges is not None and len(joint.streams) > 1:
        raise OptionError(
            "knockout: edges name the tokens of one stream, and these layers read those of "
            f"{' and '.join(stream.name for stream in joint.streams)}; name layers of one with layers=[...]."
        )
    queries, (batch, length) = measured.base.shape[1], trace.target_stream.shape
    if measured.has_queries and queries != length:
        raise UncoveredError(
            f"knockout: the model has logits at {queries} positions, and {trace.layers[-1].name} has {length} tokens, "
            "so its queries are not those of the logits; give a target."
        )
    indices = [index for index, layer in enumerate(trace.layers) if layer in layers]
    windows = [indices] if options.window is None else list(_windows(indices, options.window))
    has_queries = measured.has_queries or options.edges is not None
    shape = (len(windows), batch, length if has_queries else 1, joint.length)
    require_result(shape, measured.base.element_size(), "knockout: the result", ONE_ROW)
    scores = measured.base.new_zeros(shape)
    sites = {s: _edges(options.edges, length, batch) if options.edges else _tokens(trace, s) for s in joint.streams}
    chunks = [(s, chunk) for s, each in sites.items() for chunk in each.split(max(1, TOKENS // joint.length))]
    steps = [(index, window, *chunk) for index, window in enumerate(windows) for chunk in chunks]
    for index, window, stream, chunk in progress(steps, "knockout"):
        # All edges of a token are those of the layers that read it.
        reading = [each for each in window if streams_of(trace, trace.layers[each])[1] == stream]
        if not reading:
            continue
        sequences, query, key = chunk.unbind(1)
        edges: Edges = Listed(chunk[:, None, 1:]) if options.edges else Outgoing(key)
        cut = Cut(edges, reading, options.heads, options.channels, replace, sequences)
        effect = measured.drop(sequences, cut)
        rows = query[:, None] if options.edges else torch.arange(shape[2], device="cpu").expand(len(chunk), -1)
        scores[index, sequences[:, None], rows, joint.slot(stream).start + key[:, None]] = effect
    if measured.has_queries and trace.layers[-1].mask is not None:
        scores.masked_fill_(~trace.layers[-1].mask.to(scores.device)[:, :, None], 0)
    scores = scores if options.window is not None else scores[0]
    dims = (*(("layer",) if options.window is not None else ()), "batch", *(("query",) if has_queries else ()), "key")
    return scoring.result(scores, scope="layer", dims=dims)


class _Measured:
    """The number that is explained, of runs with and without cuts.

    Attributes:
        base: the number without cuts, for each sequence and query; one query for a target.
        has_queries: whether each query has a number.
    """

    def __init__(self, trace: Trace, target: Target | None, options: Knockout) -> None:
        self._trace, self._options, self._target = trace, options, target
        self._positions = None if target is None else trace.positions(target)
        self._ids: Int[Tensor, "batch query id"] | None = None
        self.has_queries = False
        everything = torch.arange(trace.layers[-1].output.shape[0], device="cpu")
        self.base = self._numbers(self._run(everything), everything)

    def drop(self, sequences: Int[Tensor, " run"], cut: Cut) -> Float[Tensor, "run query"]:
        """Return by how much a cut lowers the number, for some sequences."""
        cuts = self._numbers(self._run(sequences, cut), sequences)
        return self.base[sequences.to(self.base.device)] - cuts.to(self.base)

    def _run(self, sequences: Tensor, *cuts: Cut) -> Rerun:
        positions = None if callable(self._options.scalar) else self._positions
        return rerun(self._trace, sequences, cuts, positions=positions)

    def _numbers(self, run: Rerun, sequences: Tensor) -> Float[Tensor, "run query"]:
        if callable(self._options.scalar):
            return one_each(self._options.scalar(run.output), len(sequences)).unsqueeze(1)
        logits = run.logits(None if self._positions is None else self._positions[sequences])
        self.has_queries = logits.ndim == 3 and self._positions is None
        logits = logits if logits.ndim == 3 else logits.unsqueeze(1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._options.measure == "log-probability":
            logits = logits.log_softmax(-1)
        if self._ids is None:
            self._ids = self._trace.explained_logit.ids(self._target, self._options.scalar, logits)
        return picked(logits, self._ids[sequences.to(logits.device)])


def _windows(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield for each layer the `size` layers around it, fewer at the ends."""
    for centre in range(len(indices)):
        yield list(indices[max(0, centre - (size - 1) // 2) : centre + size // 2 + 1])


def _tokens(trace: Trace, stream: TokenStream) -> Int[Tensor, "place 3"]:
    """Return (sequence, 0, key) for every real token of a stream."""
    mask = stream_mask(trace, stream)
    real = torch.ones(stream.shape, dtype=torch.bool, device="cpu") if mask is None else mask.cpu()
    sequences, keys = real.nonzero().unbind(1)
    return torch.stack([sequences, torch.zeros_like(keys), keys], dim=1)


def _edges(edges: Sequence[tuple[int, int]], length: int, batch: int) -> Int[Tensor, "place 3"]:
    """Return (sequence, query, key) for every edge of every sequence; raise `InputError` for one outside of it."""
    pairs = torch.tensor(edges, device="cpu")
    outside = ((pairs < -length) | (pairs >= length)).any(1)
    if bool(outside.any()):
        edge = tuple(pairs[outside][0].tolist())
        raise InputError(f"knockout: edge {edge} is out of range; positions are {-length} to {length - 1}.")
    pairs = pairs % length
    sequences = torch.arange(batch, device="cpu").repeat_interleave(len(pairs))
    return torch.cat([sequences[:, None], pairs.repeat(batch, 1)], dim=1)
