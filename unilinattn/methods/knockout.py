"""`knockout`: the effect on the model's output of cutting tokens or edges in the running model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, InstanceOf, field_serializer, field_validator, model_validator
from torch import Tensor

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.logits import one_each, picked
from unilinattn.memory import require_result
from unilinattn.methods.maps import ONE_ROW
from unilinattn.methods.options import ScalarOptions
from unilinattn.methods.results import make_result
from unilinattn.methods.selection import composable_steps, key_mask, stackable_layers
from unilinattn.operator.edges import Edges, Listed, Outgoing
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.reruns.cut import Cut
from unilinattn.reruns.rerun import Rerun, rerun
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

TOKENS = 4096
"""Tokens in one run of the model, which cuts other edges in each of its sequences."""


class KnockoutOptions(ScalarOptions):
    """Options of `knockout`."""

    layers: Literal["all"] | int | Annotated[Sequence[int | str], Field(min_length=1)] = Field(
        "all", description="layers that are cut: every layer, an index, or a list of indices or names"
    )
    window: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="None cuts the layers together; a number cuts that many consecutive ones of them around each "
        "layer, fewer at the ends, and gives the scores a layer axis (Geva et al. 2023)",
    )
    edges: Annotated[Sequence[tuple[int, int]], Field(min_length=1)] | None = Field(
        None,
        description="None cuts all edges of a token to other tokens, one token after the other; a list of pairs "
        "(query, key) cuts these, one edge after the other, and needs a target. Positions count padding, negative "
        "ones from the end",
    )
    heads: int | Annotated[Sequence[int], Field(min_length=1)] | Callable[[Any], Any] | None = Field(
        None,
        description="heads of the layers' cores that are cut, or a function from a layer's operator to them; None for "
        "all",
    )
    channels: int | Annotated[Sequence[int], Field(min_length=1)] | Callable[[Any], Any] | None = Field(
        None, description="the same for single channels of the cores (feature knockout, Endy et al. 2025)"
    )
    replace: Literal["zero", "mean"] | InstanceOf[Trace] = Field(
        "zero",
        description="values in place of x_j in the cut T_ij x_j: none, the mean of the layer's input over the real "
        "tokens, or those of a trace of other inputs",
    )
    measure: Literal["logit", "log-probability"] = Field(
        "logit", description="the effect is the drop of the logit, or of its log-probability in nats"
    )

    @field_validator("edges", mode="before")
    @classmethod
    def _pairs(cls, edges: Any) -> Any:
        # A tensor, and a saved result, hold each pair as a list.
        lists = isinstance(edges, list | tuple) and all(isinstance(pair, list | tuple) for pair in edges)
        return [tuple(pair) for pair in edges] if lists else edges

    @field_serializer("heads", "channels", "replace")
    def _named_too(self, value: Any) -> Any:
        if isinstance(value, Trace):
            return f"another run of {value.model}"
        return getattr(value, "__qualname__", repr(value)) if callable(value) else value

    @model_validator(mode="after")
    def _one_selection(self) -> Self:
        if self.heads is not None and self.channels is not None:
            raise ValueError("heads and channels both restrict the cut; give one of them")
        if self.measure != "logit" and callable(self.logit):
            raise ValueError(f"measure={self.measure!r} needs a token or class id, and logit is a function")
        return self


@register_method("knockout", options=KnockoutOptions, needs=("logit", "layers", "one stream", "cuts"))
def knockout(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Knockout: the drop of the target's logit when a token's edges to other tokens are cut in the running model.

    score_j = f - f(cut of j). f(cut of j) is the logit of a run in which every layer returns y_i - sum over i != j of
    T_ij x_j, with the operators of that run (see `unilinattn.cut`), and f that of the run without cuts. The logit is
    the model's prediction without cuts, or that of the option `logit`. Geva et al. (EMNLP 2023) cut attention edges
    before the softmax; Endy et al. ("Mamba Knockout", ACL 2025) set entries of Mamba's matrices to zero, as here.

    Scores: (batch, query, key) with the drop at every query, without `query` for a target, for a model with one vector
    of logits for each sequence and for a function as `logit`. With `edges` they are (batch, query, key), the drop for
    the target when the edge from key to query is cut, and zero for other edges. With `window` a layer axis is first.

    Options: `KnockoutOptions`. Raises `OptionError` for an unknown option or value, `InputError` for edges outside the
    sequence or above the diagonal of a causal layer and for a model without logits, and `UncoveredError` if layers are
    on different streams.
    """
    chosen = KnockoutOptions.of("knockout", options)
    layers = stackable_layers(trace, "knockout", chosen.layers)
    composable_steps(trace, "knockout", layers)
    layers = tuple(layer for layer in trace.layers if layer in layers)
    measured = _Measured(trace, target, chosen)
    if chosen.edges is not None and measured.has_queries:
        raise OptionError("knockout: edges are cut for one target; give a position as target, such as target=-1.")
    queries = measured.base.shape[1]
    if measured.has_queries and queries != layers[0].output.shape[1]:
        raise UncoveredError(
            f"knockout: the model has logits at {queries} positions, and {layers[0].name} has "
            f"{layers[0].output.shape[1]} tokens, so its queries are not those of the logits; give a target."
        )
    indices = [index for index, layer in enumerate(trace.layers) if layer in layers]
    windows = [indices] if chosen.window is None else list(_windows(indices, chosen.window))
    batch, length = layers[0].output.shape[:2]
    has_queries = measured.has_queries or chosen.edges is not None
    shape = (len(windows), batch, length if has_queries else 1, length)
    require_result(shape, measured.base.element_size(), "knockout: the result", ONE_ROW)
    scores = measured.base.new_zeros(shape)
    places = _edges(chosen.edges, length, batch) if chosen.edges else _tokens(trace, layers[0])
    parts = places.split(max(1, TOKENS // length))
    steps = [(at, window, part) for at, window in enumerate(windows) for part in parts]
    for at, window, part in progress(steps, "knockout"):
        sequences, query, key = part.unbind(1)
        edges: Edges = Listed(part[:, None, 1:]) if chosen.edges else Outgoing(key)
        cut = Cut(edges, window, chosen.heads, chosen.channels, chosen.replace, sequences)
        effect = measured.drop(sequences, cut)
        rows = query[:, None] if chosen.edges else torch.arange(shape[2]).expand(len(part), -1)
        scores[at, sequences[:, None], rows, key[:, None]] = effect
    if measured.has_queries and layers[0].mask is not None:
        scores.masked_fill_(~layers[0].mask.to(scores.device)[:, :, None], 0)
    scores = scores if chosen.window is not None else scores[0]
    dims = (*(("layer",) if chosen.window is not None else ()), "batch", *(("query",) if has_queries else ()), "key")
    scores = scores if has_queries else scores.squeeze(-2)
    return make_result(trace, "knockout", layers, scores, dims=dims, options=chosen, target=target, scope="layer")


class _Measured:
    """The number that is explained, of runs with and without cuts.

    Attributes:
        base: the number without cuts, for each sequence and query; one query for a target.
        has_queries: whether each query has a number.
    """

    def __init__(self, trace: Trace, target: Target | None, options: KnockoutOptions) -> None:
        self._trace, self._options, self._target = trace, options, target
        self._positions = None if target is None else trace.positions(target)
        self._ids: Int[Tensor, "batch query id"] | None = None
        self.has_queries = False
        everything = torch.arange(trace.layers[-1].output.shape[0])
        self.base = self._numbers(self._run(everything), everything)

    def drop(self, sequences: Int[Tensor, " run"], cut: Cut) -> Float[Tensor, "run query"]:
        """Return by how much a cut lowers the number, for some sequences."""
        cuts = self._numbers(self._run(sequences, cut), sequences)
        return self.base[sequences.to(self.base.device)] - cuts.to(self.base)

    def _run(self, sequences: Tensor, *cuts: Cut) -> Rerun:
        kept = None if callable(self._options.logit) else self._positions
        return rerun(self._trace, sequences, cuts, positions=kept)

    def _numbers(self, run: Rerun, sequences: Tensor) -> Float[Tensor, "run query"]:
        if callable(self._options.logit):
            return one_each(self._options.logit(run.output), len(sequences)).unsqueeze(1)
        logits = run.logits(None if self._positions is None else self._positions[sequences])
        self.has_queries = logits.ndim == 3 and self._positions is None
        logits = logits if logits.ndim == 3 else logits.unsqueeze(1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._options.measure == "log-probability":
            logits = logits.log_softmax(-1)
        if self._ids is None:
            self._ids = self._trace.explained_logit.ids(self._target, self._options.logit, logits)
        return picked(logits, self._ids[sequences.to(logits.device)])


def _windows(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield for each layer the `size` layers around it, fewer at the ends."""
    for at in range(len(indices)):
        yield list(indices[max(0, at - (size - 1) // 2) : at + size // 2 + 1])


def _tokens(trace: Trace, layer: Layer) -> Int[Tensor, "place 3"]:
    """Return (sequence, 0, key) for every real token."""
    mask = key_mask(trace, layer)
    real = torch.ones(layer.output.shape[:2], dtype=torch.bool) if mask is None else mask.cpu()
    sequences, keys = real.nonzero().unbind(1)
    return torch.stack([sequences, torch.zeros_like(keys), keys], dim=1)


def _edges(edges: Sequence[tuple[int, int]], length: int, batch: int) -> Int[Tensor, "place 3"]:
    """Return (sequence, query, key) for every edge of every sequence; raise `InputError` for one outside of it."""
    pairs = torch.tensor(edges)
    outside = ((pairs < -length) | (pairs >= length)).any(1)
    if bool(outside.any()):
        edge = tuple(pairs[outside][0].tolist())
        raise InputError(f"knockout: edge {edge} is out of range; positions are {-length} to {length - 1}.")
    pairs = pairs % length
    sequences = torch.arange(batch).repeat_interleave(len(pairs))
    return torch.cat([sequences[:, None], pairs.repeat(batch, 1)], dim=1)
