"""`knockout`: the effect on the model's output of cutting tokens or edges in the running model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.memory import require_result
from unilinattn.operator.edges import Edges, Listed, Outgoing
from unilinattn.options import Knockout
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.reruns.cut import Cut
from unilinattn.reruns.rerun import Rerun, rerun, traced_run
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.composition import composition
from unilinattn.scoring.maps import ONE_ROW
from unilinattn.scoring.numbers import ExplainedNumber, run_bytes, runs_at_once
from unilinattn.scoring.selection import selected_layers, stream_mask, streams_of
from unilinattn.tracing.token_streams import TokenStream
from unilinattn.tracing.trace import Target, Trace


@register_method(Knockout)
def knockout(trace: Trace, options: Knockout, *, target: Target | None = None) -> Attribution:
    """Run `Knockout`."""
    layers = selected_layers(trace, "knockout", options.layers)
    layers = tuple(layer for layer in trace.layers if layer in layers)
    scoring = composition(trace, options, target, layers)
    joint = scoring.joint
    if any(stream.shape[0] > joint.batch for stream in joint.streams):
        sizes = ", ".join(f"{stream.name} {stream.shape[0]} x {stream.shape[1]}" for stream in joint.streams)
        raise UncoveredError(
            "knockout cuts tokens in copies of a sequence, and not in one of its images (sequences x tokens: "
            f"{sizes}); layers=[...] selects layers of {trace.target_stream.name}."
        )
    replace = options.replace
    assert isinstance(replace, str | Trace)
    number = ExplainedNumber(trace, [(target, options.scalar)], options.measure)

    trace.weights.require_same(trace.host, trace.model, "these runs would not be those of the traced model")

    def measured(run: Rerun, sequences: Int[Tensor, " run"]) -> Float[Tensor, "run query"]:
        numbers = number(run, sequences)
        return numbers if number.has_queries else numbers.unsqueeze(1)

    every = torch.arange(trace.layers[-1].output.shape[0], device="cpu")
    base = measured(traced_run(trace) or rerun(trace, every, positions=number.positions), every)
    if options.edges is not None and number.has_queries:
        raise OptionError("knockout: edges are cut for one target; give a position as target, such as target=-1.")
    if options.edges is not None and len(joint.streams) > 1:
        raise OptionError(
            "knockout: edges name the tokens of one stream, and these layers read those of "
            f"{' and '.join(stream.name for stream in joint.streams)}; name layers of one with layers=[...]."
        )
    queries, (batch, length) = base.shape[1], trace.target_stream.shape
    if number.has_queries and queries != length:
        raise UncoveredError(
            f"knockout: the model has logits at {queries} positions, and {trace.layers[-1].name} has {length} tokens, "
            "so its queries are not those of the logits; give a target."
        )
    indices = [index for index, layer in enumerate(trace.layers) if layer in layers]
    windows = [indices] if options.window is None else list(_windows(indices, options.window))
    has_queries = number.has_queries or options.edges is not None
    shape = (len(windows), batch, length if has_queries else 1, joint.length)
    require_result(shape, base.element_size(), "knockout: the result", ONE_ROW)
    scores = base.new_zeros(shape)
    sites = {s: _edges(options.edges, length, batch) if options.edges else _tokens(trace, s) for s in joint.streams}

    def fall(reading: Sequence[int], chunk: Int[Tensor, "run 3"]) -> Float[Tensor, "run query"]:
        """Return the fall of the numbers in a run that cuts other edges in each of its sequences."""
        sequences, _, key = chunk.unbind(1)
        edges: Edges = Listed(chunk[:, None, 1:]) if options.edges else Outgoing(key)
        cut = Cut(edges, reading, options.heads, options.channels, replace, sequences)
        positions = None if number.positions is None else number.positions[sequences]
        run = rerun(trace, sequences, [cut], positions=positions)
        return base[sequences.to(base.device)] - measured(run, sequences).to(base)

    at_once = runs_at_once(trace, joint.length, run_bytes(trace, options.scalar), options.scalar)
    chunks = [(s, chunk) for s, each in sites.items() for chunk in each.split(at_once)]
    steps = [(index, window, *chunk) for index, window in enumerate(windows) for chunk in chunks]
    for index, window, stream, chunk in progress(steps, "knockout"):
        # All edges of a token are those of the layers that read it.
        reading = [each for each in window if streams_of(trace, trace.layers[each])[1] == stream]
        if not reading:
            continue
        sequences, query, key = chunk.unbind(1)
        effect = _of_runs(partial(fall, reading), chunk, stream.shape[1])
        rows = query[:, None] if options.edges else torch.arange(shape[2], device="cpu").expand(len(chunk), -1)
        scores[index, sequences[:, None], rows, joint.slot(stream).start + key[:, None]] = effect
    if number.has_queries and trace.layers[-1].mask is not None:
        scores.masked_fill_(~trace.layers[-1].mask.to(scores.device)[:, :, None], 0)
    scores = scores if options.window is not None else scores[0]
    dims = (*(("layer",) if options.window is not None else ()), "batch", *(("query",) if has_queries else ()), "key")
    return scoring.result(scores, scope="layer", dims=dims)


def _of_runs(
    fall: Callable[[Int[Tensor, "run 3"]], Float[Tensor, "run query"]], chunk: Int[Tensor, "run 3"], tokens: int
) -> Float[Tensor, "run query"]:
    """Return `fall(chunk)`; of two runs if one of as many sequences as tokens is refused.

    In a host whose tensors begin with tokens, sequences and tokens could not be told apart.
    """
    try:
        return fall(chunk)
    except UncoveredError:
        if len(chunk) != tokens or tokens == 1:
            raise
    return torch.cat([fall(part) for part in chunk.split(tokens - 1)])


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
