"""The facilities of a trace that methods need, each with a trial, and the methods that work on a trace."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.autograd.function import BackwardCFunction

from unilinattn.errors import ExactnessError, StreamError, UncoveredError, UnilinattnError
from unilinattn.frozen.live import LiveRun
from unilinattn.frozen.passes import FREEZE, HALF, HALF_WITH_EDGES, Rule
from unilinattn.frozen.run import frozen
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import Logit
from unilinattn.kernels.precision import full_precision
from unilinattn.methods.targets import explained_options
from unilinattn.operator.edges import Outgoing
from unilinattn.options.base import Need
from unilinattn.registry import Method, list_methods
from unilinattn.reruns.cut import Cut
from unilinattn.reruns.embedded import EmbeddedModel
from unilinattn.reruns.rerun import rerun
from unilinattn.scoring.cores import cores
from unilinattn.scoring.gradient_maps import core_mixers
from unilinattn.scoring.joint import Joint
from unilinattn.scoring.numbers import TokenFunction, captum
from unilinattn.scoring.selection import (
    only_target,
    query_rows,
    residual_of,
    selected_layers,
    stackable_layers,
    stream_errors,
    stream_groups,
    streams_of,
)
from unilinattn.scoring.vectors import contribution_tiles
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

TRIED = 4096
"""Most tokens of a layer in a trace on which needs are tried. Together they take about ten runs of the model."""

NAME = "the trial"
"""The name of the method in the errors of trials, which nobody reads."""


def _stackable(needs: "Needs") -> None:
    for layer in stackable_layers(needs.trace, NAME, needs.layers):
        query_rows(needs.trace, layer, needs.target)


def _composition(needs: "Needs") -> None:
    joint = Joint.of(needs.trace, NAME, needs.selected())
    joint.rows(needs.target)
    _ = joint.entries


def _residual(needs: "Needs") -> None:
    layers = needs.selected()
    for layer in layers:
        residual_of(needs.trace, layer, NAME)
    stream_errors(needs.trace, layers, NAME)


def _contributions(needs: "Needs") -> None:
    for layer in needs.selected():
        next(contribution_tiles((layer,), (1.0,), query_rows(needs.trace, layer)[:, -1:], "exact"))


def _maps(needs: "Needs") -> None:
    for layer in needs.selected():
        layer.operator.scoped_map()


def _matrices(needs: "Needs") -> None:
    """Try the gradient at the cores of each layer, by which its matrices are weighted."""
    for layer in needs.selected():
        core_mixers(layer)
        layer.core_pullback()(torch.zeros_like(layer.output))


def _gradients(needs: "Needs") -> None:
    next(needs.trace.gradients([needs.row], needs.logit))


def _inner_gradients(needs: "Needs") -> None:
    for layer in needs.selected():
        layer.pullback()(torch.zeros_like(layer.output))


def _frozen(rule: Rule, needs: "Needs") -> None:
    frozen(needs.trace, needs.targets, rule=rule).complete_shares(needs.row, needs.logit)


def _core_relevances(needs: "Needs") -> bool:
    """Tell whether the relevance at each core of the layers of the target's stream is known."""
    trace, selected = needs.trace, needs.selected()
    run = frozen(trace, needs.targets, rule=HALF_WITH_EDGES)
    # Layers of a tower whose vectors take the places of tokens are constant, and no row reaches them.
    pairs = zip(trace.layers, run.mixed, strict=True)
    edges = {layer.name: mixed for layer, mixed in pairs if streams_of(trace, layer)[0] == trace.target_stream}
    return all(len(edges[layer.name]) == len(cores(layer)) for layer in selected if layer.name in edges)


def _live(needs: "Needs") -> None:
    LiveRun(needs.trace, needs.targets).relevances(needs.row, needs.logit)


def _last_stream(needs: "Needs") -> bool:
    frozen(needs.trace, needs.targets).unembedding(needs.row, needs.logit)
    return all(layer.stream is not None for layer in needs.selected())


def _cuts(needs: "Needs") -> bool:
    trace, first = needs.trace, torch.zeros(1, dtype=torch.long, device="cpu")
    indices = [trace.layers.index(layer) for layer in needs.selected()]
    reading = [each for each in indices if streams_of(trace, trace.layers[each])[1] == trace.target_stream]
    positions = None if callable(needs.logit) or needs.target is None else trace.positions(needs.target)[first]
    run = rerun(trace, first, (Cut(Outgoing(first), reading, sequences=first),), positions=positions)
    if callable(needs.logit):
        return True
    logits = run.logits(positions)
    # Without a target the queries of the logits are those of the layers.
    return positions is not None or logits.ndim < 3 or logits.shape[1] == trace.target_stream.shape[1]


def _embeddings(gradient: bool, needs: "Needs") -> None:
    captum()
    model = EmbeddedModel(needs.trace)

    def run() -> None:
        function = TokenFunction(needs.trace, model, [(needs.row, needs.logit)])
        value = function(function.vectors, function.rows) if gradient else function.value
        if gradient:
            torch.autograd.grad(value.sum(), function.vectors)

    in_gradient_mode(True, lambda: model.isolated(run))


REFUSALS = (UncoveredError, StreamError, ExactnessError)
"""Errors by which a method refuses a trace that another may explain."""

TRIALS: Mapping[Need, Callable[["Needs"], object]] = MappingProxyType(
    {
        "logit": lambda needs: only_target(needs.trace, needs.target, needs.logit),
        "one target": lambda needs: only_target(needs.trace, needs.target, needs.logit) is not None,
        "layers": _stackable,
        "composition": _composition,
        "residual": _residual,
        "contributions": _contributions,
        "maps": _maps,
        "matrices": _matrices,
        "gradients": _gradients,
        "inner gradients": _inner_gradients,
        "frozen run": partial(_frozen, FREEZE),
        "half rule": partial(_frozen, HALF),
        "core relevances": _core_relevances,
        "live run": _live,
        "last stream": _last_stream,
        "cuts": _cuts,
        "embeddings": partial(_embeddings, False),
        "embedding gradients": partial(_embeddings, True),
    }
)
"""Tries a need of a call: an error or False says that the trace does not meet it."""

OF_WHOLE_TRACES: frozenset[Need] = frozenset(
    {"logit", "one target", "gradients", "frozen run", "half rule", "live run", "embeddings", "embedding gradients"}
)
"""Needs that are the same for all layers and for some."""


@dataclass(frozen=True)
class Needs:
    """The needs that a call of a method meets; each is tried once, when it is asked for.

    Attributes:
        trace: the trace.
        target: the target of the method.
        logit: its option `logit`.
        layers: its option `layers`.
        tried: whether each need that was tried is met.
    """

    trace: Trace
    target: Target | None
    logit: Logit
    layers: Literal["all"] | tuple[int, ...]
    tried: dict[Need, bool] = field(default_factory=dict)

    @property
    def row(self) -> Target:
        """The target, or the last position in place of every position."""
        return -1 if self.target is None else self.target

    @property
    def targets(self) -> list[Target] | None:
        """The positions of a frozen run."""
        return None if callable(self.logit) else [self.row]

    def selected(self) -> tuple[Layer, ...]:
        """Return the layers; raise the errors of `selected_layers`."""
        return selected_layers(self.trace, NAME, self.layers)

    def of_layers(self, layers: tuple[int, ...]) -> "Needs":
        """Return the needs of the call on some layers, of which those of whole traces are known."""
        return replace(self, layers=layers, tried={n: met for n, met in self.tried.items() if n in OF_WHOLE_TRACES})

    def met(self, need: Need) -> bool:
        """Try a need; False for every need of a trace with a layer of more than `TRIED` tokens."""
        if need not in self.tried:
            tokens = max(x[..., 0].numel() for layer in self.trace.layers for x in (layer.input, layer.output))
            self.tried[need] = tokens <= TRIED and self._try(need)
        return self.tried[need]

    def _try(self, need: Need) -> bool:
        with warnings.catch_warnings(), full_precision():
            warnings.simplefilter("ignore")
            try:
                return TRIALS[need](self) is not False
            # Whatever fails here would replace the refusal that asks for advice.
            except Exception:
                return False

    def methods(self) -> list[str]:
        """Return the methods whose needs are met, with their default options but for those of the call."""
        return [
            name
            for name, entry in list_methods().items()
            if entry.needs is not None
            and (self.layers == "all" or (entry.options is not None and "layers" in entry.options.model_fields))
            and all(map(self.met, entry.needs))
        ]


def advice(trace: Trace, target: Target | None, logit: Logit, accepted: Callable[[str], bool]) -> str:
    """Return the sentences that name the accepted methods that work on a trace, by trial of their needs.

    If none stacks all layers, the largest group of layers with equal axes is named with which some methods work.
    """
    needs = Needs(trace, target, logit, "all")
    names = [name for name in needs.methods() if accepted(name)]
    sentences = [f"Methods that work here with their default options: {_listed(names)}."] if names else []
    if not any("layers" in (list_methods()[name].needs or ()) for name in names):
        for group in stream_groups(trace):
            names = needs.of_layers(group).methods()
            if names:
                sentences.append(f"With layers={list(group)}, which are of one kind: {_listed(names)}.")
                break
    return " ".join(sentences) or "No other method works here."


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


@contextmanager
def advised(
    trace: Trace,
    target: Target | None,
    method: Method,
    options: Mapping[str, Any],
    *,
    note: str = "",
    costed: bool = False,
) -> Iterator[None]:
    """Add a note and `advice` to the refusal of a method; with `costed` only methods with an estimate are named."""

    def number(name: str) -> Logit:
        option = {"logit": options.get("logit")}
        logit: Logit = explained_options(trace, list_methods()[name], target, option)["logit"]
        return logit

    def accepted(name: str) -> bool:
        refused, other = name == method.name and not options.keys() - {"logit"}, list_methods()[name]
        # What `logit` explains where a target names no logit is no number for every method.
        is_known = "logit" not in (other.needs or ()) or type(number(name)) is type(number("logit"))
        return is_known and not refused and not (costed and other.cost is None)

    try:
        yield
    except Exception as error:
        refusal = refusal_of(error, trace)
        if refusal is None:
            raise
        raise type(refusal)(f"{refusal} {note}{advice(trace, target, number('logit'), accepted)}") from error


def refusal_of(error: Exception, trace: Trace) -> UncoveredError | StreamError | ExactnessError | None:
    """Return an error that refuses a trace, or that for an autograd function without a backward pass, else None."""
    return error if isinstance(error, REFUSALS) else _of_backward_pass(error, trace)


def _of_backward_pass(error: Exception, trace: Trace) -> UncoveredError | None:
    """Return the refusal for an error that an autograd function of the host raised in a backward pass, else None."""
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    if not any(code is BackwardCFunction.apply.__code__ for code in frames) or isinstance(error, UnilinattnError):
        return None
    return UncoveredError(
        f"an autograd function of {trace.model} fails in the backward pass ({type(error).__name__}: {error})."
    )
