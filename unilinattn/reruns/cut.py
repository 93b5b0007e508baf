"""`cut`: run a host model without some edges, the terms T_ij x_j of its layers, so that everything later reacts."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import update_wrapper
from itertools import combinations
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.call import CACHES, is_cache
from unilinattn.call.entries import Entries
from unilinattn.call.nested import mapped
from unilinattn.discovery.search import refuse, remembered_mixers
from unilinattn.errors import InputError, ModelStateError, OptionError, UncoveredError, nearest
from unilinattn.host.inputs import bound_arguments, host_arguments, is_encoder_decoder
from unilinattn.host.isolation import current_run
from unilinattn.host.module_calls import require_covered_calls
from unilinattn.host.recorder import Recorder
from unilinattn.host.substitution import SUBSTITUTE_ABOVE
from unilinattn.host.wrappers import unwrapped
from unilinattn.operator.edges import Edges, Groups, Listed, Pairs, Selection, along, core_channels
from unilinattn.tracing.builder import LayerBuilder
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.recording import recorded_run
from unilinattn.tracing.trace import Trace, trace
from unilinattn.tracing.trust import require_exact

Replace = Literal["zero", "mean"]
"""Values in place of x_j in a cut T_ij x_j: zero, or the mean over the real tokens of the sequence."""

_uncut: ContextVar[bool] = ContextVar("unilinattn.uncut", default=False)


@dataclass(frozen=True, eq=False)
class Cut:
    """Edges that a run goes without.

    Attributes:
        edges: the edges.
        layers: indices or names of the layers, as in `Trace.layers`; None for all of them.
        heads, channels: the selected heads or channels of each layer's core; None for all of them.
        replace: values in place of x_j: "zero", "mean", or a trace with the x_j of another run.
        sequences: for each sequence of the run the index of its sequence in that trace; None for its own index.
    """

    edges: Edges
    layers: Sequence[int | str] | None = None
    heads: Selection | None = None
    channels: Selection | None = None
    replace: Replace | Trace = "zero"
    sequences: Int[Tensor, " batch"] | None = None

    def includes(self, index: int, name: str) -> bool:
        """Whether the layer is among those of the cut."""
        return self.layers is None or index in self.layers or name in self.layers

    def difference(self, index: int, layer: Layer) -> dict[str, Float[Tensor, "batch key in"]]:
        """Return x_j less the values in its place, for every port of a layer."""
        inputs = layer.operator.inputs
        if self.replace == "zero":
            return inputs
        if self.replace == "mean":
            return {port: x - _mean(x, layer.mask) for port, x in inputs.items()}
        return {port: x - self._other(index, layer, port, x) for port, x in inputs.items()}

    def _other(self, index: int, layer: Layer, port: str, x: Tensor) -> Tensor:
        assert isinstance(self.replace, Trace)
        layers = self.replace.layers
        other = layers[index].operator.inputs.get(port) if index < len(layers) else None
        if other is not None and self.sequences is not None:
            other = other[self.sequences.to(other.device)]
        if other is None or other.shape != x.shape:
            raise InputError(
                f"replace: the other inputs reach {layer.name} as "
                f"{'nothing' if other is None else tuple(other.shape)}, and these as {tuple(x.shape)}; give inputs "
                "with as many sequences of as many tokens."
            )
        return other.to(x)


@contextmanager
def cut(
    model: nn.Module,
    edges: Pairs,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    heads: Selection | None = None,
    channels: Selection | None = None,
    replace: Replace | Any = "zero",
) -> Iterator[None]:
    """Run a model without some edges: every call inside returns y_i - sum over cut (i, j) of T_ij x_j at the layers.

    The operator T of a layer is computed from the layer's input in the same run, after the cuts of earlier layers, so
    everything later reacts. Its frozen factors (attention weights, decays, gates, norms) are those of the layer before
    its own cut; attention weights are not renormalised. Geva et al. (EMNLP 2023) cut attention edges before the
    softmax; Endy et al. ("Mamba Knockout", ACL 2025) set entries of Mamba's matrices to zero, as here.

    The calls compute no gradients, run without a cache, and are serialised over threads, all of which run the cut
    model. Blocks may be nested in one thread if no edge of a layer is cut twice. The model is restored at the end, also
    after an exception. Cost of a call: a trace of the model, and a pass of each cut layer's operator for each group of
    edges with the same queries or the same keys.

    Args:
        model: the host model.
        edges: pairs (query, key), an iterable or an integer tensor (edge, 2); (batch, edge, 2) for edges of each
            sequence. Positions count all tokens, padding included; negative ones count from the end.
        layers: indices or names of the layers as in `Trace.layers`; None for all.
        heads: heads of the layers' cores that are cut, as indices, a slice or a function from a layer's operator to
            them; None for all. Exact because the operator is a sum over heads.
        channels: the same for single channels of the cores. Give only one of the two.
        replace: values in place of x_j in the cut T_ij x_j: "zero" removes it, "mean" is the mean of the layer's input
            over the sequence's real tokens; other inputs of the model, or a trace of them, give the x_j of that run at
            the same layer (resample ablation). Inputs are run once, when the block begins.

    Raises `InputError` for edges that are no pairs; `OptionError` for an unknown `replace`, and for `layers=None` in a
    model with an encoder and a decoder, whose edges would be ambiguous; `ModelStateError` if another thread has cut the
    model; and the errors of `trace` for `replace`. Calls inside raise `InputError` for edges outside the sequence or
    above the diagonal of a causal layer and for other inputs of another shape; `OptionError` for layers, heads or
    channels that do not exist and for an edge that two blocks cut; `ModelStateError` for a trace of the model;
    `ExactnessError` if a cut layer's operator misses the host's output; and the errors of `trace`.
    """
    model = unwrapped(model)
    if layers is None and is_encoder_decoder(model):
        raise OptionError(
            f"{type(model).__name__} has an encoder and a decoder, in which an edge names different tokens; name the "
            "layers of one of them with layers=[...]."
        )
    selected = [layers] if isinstance(layers, (int, str)) else None if layers is None else list(layers)
    new = Cut(Listed(edges), selected, heads, channels, _replacement(model, replace))
    # Compiled code of a model does not see that its forward is another one.
    plain = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        try:
            _install(model, new)
            with plain:
                yield
        finally:
            _remove(model, new)
    finally:
        # An interrupt may have ended the first attempt early.
        _remove(model, new)


def run_without(
    model: nn.Module,
    call: Callable[[], Any],
    arguments: Mapping[str, Any],
    cuts: Sequence[Cut],
    opaque: Collection[str],
    expected: Sequence[tuple[str, float]],
) -> Any:
    """Return `call()`, a run of a model on `arguments` without some edges.

    `opaque` are the paths of the layers without an adapter, `expected` the names of all layers with the number of
    sequences that each of them computes. Raises the errors of a call inside `cut`, and `UncoveredError` for other
    layers than those, in which an edge would be one of other tokens.
    """
    return _CutRecorder(model, arguments, cuts, opaque, expected).run(call)


class _CutForward:
    """The forward of a model while it is cut."""

    def __init__(self, model: nn.Module, first: Cut) -> None:
        forward = model.forward
        update_wrapper(self, forward)
        self.model, self.original, self.cuts = model, forward, [first]
        self.before = Entries([(vars(model), "forward")])
        self.thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _uncut.get():
            return self.original(*args, **kwargs)
        if current_run() is not None:
            raise ModelStateError(
                f"{type(self.model).__name__} is inside a `cut`, so its layers' outputs are not those of their "
                "operators; trace it outside of the block."
            )
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        named = bound_arguments(self.model, args, kwargs)
        for cache in CACHES:
            # An empty one too: whoever passes it takes it for filled at the next call.
            if named.get(cache) is not None and is_cache(cache, named[cache]):
                raise InputError(
                    f"{type(self.model).__name__} was given {cache} inside a `cut`, in which every call needs the "
                    "whole text; call it without, and `generate` with use_cache=False."
                )
        arguments = host_arguments(self.model, named)
        cuts = self._counted_cuts(arguments)
        # Layers without an adapter are recorded again.
        mixers = remembered_mixers(self.model, arguments, SUBSTITUTE_ABOVE) or ()
        recorder = _CutRecorder(self.model, named, cuts, [mixer.path for mixer in mixers])
        return recorder.run(lambda: recorder.inside(self.original, args, kwargs))

    def _counted_cuts(self, arguments: Mapping[str, Any]) -> list[Cut]:
        """Refuse a model with unknown mixers, and return the cuts with negative indices of layers counted from 0."""
        mixers = remembered_mixers(self.model, arguments, SUBSTITUTE_ABOVE)
        if mixers:
            refuse(self.model, (), mixers, arguments, strict=True)
        negative = any(isinstance(layer, int) and layer < 0 for each in self.cuts for layer in each.layers or ())
        if mixers is not None and not negative:
            return self.cuts
        count = len(_traced_uncut(self.model, arguments).layers)
        return [changed(each, layers=_counted(each.layers, count)) for each in self.cuts]


class _CutRecorder(Recorder):
    """Records each layer of a run, and replaces its output by the output without the cut edges."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        cuts: Sequence[Cut],
        opaque: Collection[str] = (),
        expected: Sequence[tuple[str, float]] | None = None,
    ) -> None:
        super().__init__(model, opaque=opaque)
        self._arguments, self._cuts, self._names = arguments, cuts, list[str]()
        self._expected = expected
        self._builder = LayerBuilder(model, arguments, None, within_run=True)

    def run(self, call: Callable[[], Any]) -> Any:
        """Return `call()` with the cuts; raise `OptionError` if a cut names layers that did not run."""
        output = recorded_run(self, call, self._arguments, above=SUBSTITUTE_ABOVE)
        for wanted in (layer for each in self._cuts for layer in each.layers or ()):
            if isinstance(wanted, str) and wanted not in self._names:
                raise OptionError(f"cut: no layer {wanted!r}" + nearest(wanted, self._names))
            if not isinstance(wanted, str) and wanted not in range(len(self._names)):
                raise OptionError(f"cut: layer {wanted} is out of range; layers 0 to {len(self._names) - 1} ran.")
        return output

    def inside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `own(*args, **kwargs)`, recorded as a call of the model: the hooks come too late for one under way."""
        self.enter("", self.model, args, kwargs)
        output = forward(*args, **kwargs)
        replaced = self.leave(self.model, args, kwargs, output)
        return output if replaced is None else replaced

    def on_layer(self, output: Any, result: Tensor) -> Any:
        """Return the output without the edges that are cut in this layer; None if there are none."""
        record, index = self.layers.pop(), len(self._names)
        if record.architecture is not self._recorded:
            # As in a trace, a call that its adapter does not cover is recorded, or has no operator.
            require_covered_calls([record], strict=False)
        layer = self._builder.build(record)
        self._names.append(layer.name)
        self._require_expected(layer)
        cuts = [each for each in self._cuts if each.includes(index, layer.name)]
        if not cuts:
            return None
        # Before the operator is there: the error is then that of values which building it computes.
        require_exact([layer])
        operator = layer.operator
        for each in cuts:
            if each.layers is None and operator.ports[0] != "x":
                raise OptionError(
                    f"{layer.name} takes its keys from {operator.ports[0]!r}, so an edge names other tokens in it than "
                    "in other layers; name the layers to cut with layers=[...]."
                )
        selections = [
            (each.edges.groups(operator), core_channels(operator, each.heads, each.channels)) for each in cuts
        ]
        _require_disjoint(selections, layer.name)
        remaining = layer.output
        for each, (groups, channels) in zip(cuts, selections, strict=True):
            remaining = remaining - along(operator, groups, each.difference(index, layer), channels)
        remaining = layer.as_returned(remaining).to(result)
        return mapped(output, lambda t: remaining if t is result else t)

    def _require_expected(self, layer: Layer) -> None:
        if self._expected is None:
            return
        actual = layer.name, layer.output.shape[0]
        if [actual] != list(self._expected[len(self._names) - 1 : len(self._names)]):
            raise UncoveredError(
                f"{type(self.model).__name__} calls {layer.name} on {actual[1]} sequences where the trace has another "
                "layer or another number of them, as a host may that computes images in turn or as one sequence."
            )


def _install(model: nn.Module, new: Cut) -> None:
    forward = vars(model).get("forward")
    if not isinstance(forward, _CutForward):
        model.forward = _CutForward(model, new)
    elif forward.thread != threading.get_ident():
        raise ModelStateError(
            f"{type(model).__name__} is inside a `cut` of another thread, which holds for calls of all threads; wait "
            "for its end, or cut a copy of the model."
        )
    else:
        forward.cuts = [*forward.cuts, new]


def _remove(model: nn.Module, old: Cut) -> None:
    """End one cut, and restore the model's forward after the last one; may be interrupted and repeated."""
    forward = vars(model).get("forward")
    if isinstance(forward, _CutForward):
        forward.cuts = [each for each in forward.cuts if each is not old]
        if not forward.cuts:
            forward.before.put_back()


def _replacement(model: nn.Module, replace: Any) -> Replace | Trace:
    if isinstance(replace, str):
        if replace not in get_args(Replace):
            raise OptionError(
                f"unknown replace {replace!r}" + nearest(replace, get_args(Replace)) + " Or other inputs."
            )
        return cast(Replace, replace)
    return replace if isinstance(replace, Trace) else _traced_uncut(model, replace)


def _traced_uncut(model: nn.Module, inputs: Any) -> Trace:
    """Trace a model, also inside a `cut`, whose edges it keeps."""

    def run() -> Trace:
        _uncut.set(True)
        return trace(model, inputs)

    return copy_context().run(run)


def _counted(layers: Sequence[int | str] | None, count: int) -> Sequence[int | str] | None:
    """Return layers with negative indices counted from the first one."""
    if layers is None:
        return None
    return [index + count if isinstance(index, int) and -count <= index < 0 else index for index in layers]


def _mean(x: Float[Tensor, "batch key in"], mask: Bool[Tensor, "batch query"] | None) -> Float[Tensor, "batch 1 in"]:
    """Return the mean over the real tokens of each sequence."""
    if mask is None or mask.shape != x.shape[:2]:
        return x.mean(1, keepdim=True)
    weights = mask.to(x)[..., None]
    return (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp_min(1)


def _require_disjoint(selections: Sequence[tuple[Groups, Tensor | None]], name: str) -> None:
    """Raise `OptionError` if two cuts share an edge of a layer, in channels of its core that they share."""
    for (groups, some), (other, others) in combinations(selections, 2):
        if some is not None and others is not None and not bool((some & others).any()):
            continue
        queries = torch.einsum("bgq,bhq->bgh", groups.queries.float(), other.queries.float())
        keys = torch.einsum("bgk,bhk->bgh", groups.keys.float(), other.keys.float())
        if bool((queries * keys).any()):
            raise OptionError(f"two nested cuts share an edge of {name}; give each edge of a layer to one of them.")
