"""`FrozenRun`: a host run as one affine map of its tokens, whose shares and biases add up to its output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.frozen.forms import recording_sources
from unilinattn.frozen.freezing import Freezing
from unilinattn.frozen.layers import frozen_output, require_covered
from unilinattn.frozen.live_layer import live_output
from unilinattn.frozen.modules import plain_output
from unilinattn.frozen.shares import (
    Linearized,
    Shares,
    Stream,
    Unembedding,
    biases,
    block_streams,
    by_depth,
    by_layer,
    by_token,
    doubt_of,
    embedding_part,
    linearized,
)
from unilinattn.host.inputs import bound_arguments, call_host
from unilinattn.host.isolation import in_gradient_mode, isolated
from unilinattn.host.logits import Logit, kept_positions, logits_at, one_each
from unilinattn.host.nested import mapped, tensors
from unilinattn.host.recomputation import captures
from unilinattn.host.recorder import MAIN, refuse_dropout
from unilinattn.host.wrappers import plain_run, require_gradients
from unilinattn.registry import architecture_of, plain_form_of
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.lookups import TokenIds
from unilinattn.tracing.token_source import find_source, require_alone
from unilinattn.tracing.tokens import TokenCall, block_names, first_stream
from unilinattn.tracing.trace import Target, Trace
from unilinattn.tracing.trust import require_trust

By = Literal["tokens", "depth", "layer"]
"""Shares of the tokens' embeddings, of the stream that enters each layer's block, or through each layer's output."""

RULES = ("freeze", "half")
"""Freeze the activated one of two factors, or let both share the relevance of their product."""

Observe = Callable[[Any, Logit], Float[Tensor, " batch"] | None]
"""The same scalar of the traced output, None if the model did not compute it."""

Choose = Callable[[Any, Any, Logit], Float[Tensor, " batch"]]
"""The scalar of an output that a target and a `Logit` name, for each sequence."""


class FrozenRun:
    """One run of a traced host in which every factor that the input decided is a constant.

    Each traced layer is its operator: its value is the recorded output, its gradient `op.adjoint`. The code between
    the layers runs by the rules of `frozen.freezing`. The output is then an affine map of the tokens' embeddings: a
    token's share is its gradient times its embedding, and the bias is the tangent of the constants that were added.
    The tokens of inputs without ids are the vectors that enter the first block.

    The run keeps its graph, whose memory is that of the factors of all token-wise code. A scalar of the output costs
    one backward pass.

    Args:
        model: the host model.
        given: its arguments.
        layers: the traced layers in order of execution.
        choose: returns the scalar that a target and a `Logit` name, from an output.
        observe: returns this scalar in the trace.
        rule: how a product of two factors of different rank is frozen (see `Freezing`).

    Attributes:
        outputs: the layers' outputs in the run's graph.
        mixed: the edges of the run's graph after each layer's cores, if the rule is "half" (see `live_layer`).
        shared: names of functions that multiplied two factors of equal rank, each of which got half.
        doubt: the first warning of `complete_shares` about shares that do not add up, None if there is none.

    Raises `UncoveredError` for a function without a rule, for opaque layers and for models with two streams of tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Any],
        layers: Sequence[Layer],
        choose: Choose,
        observe: Observe,
        *,
        rule: str = "freeze",
    ) -> None:
        """Run the host."""
        if rule not in RULES:
            raise OptionError(f"unknown rule {rule!r}" + nearest(rule, RULES))
        require_covered(model, layers)
        require_gradients(model)
        self.outputs: list[Tensor] = []
        self.mixed: list[list[GradientEdge]] = []
        self._layers, self._choose, self._observe = layers, choose, observe
        self._blocks = block_names(model, layers)
        self._leaves: list[Tensor] = []
        self._suspect: str | None = None
        self._last_stream: Stream | None = None
        self._began = False
        self._model, self._given, self._rule = model, given, rule
        self.doubt: str | None = None
        self._entry: Stream | None = None
        self._streams: list[Stream | None] = []
        self._sources: list[tuple[str, Tensor]] | None = None
        self._path: list[tuple[str, nn.Module, Stream | None]] = []
        self._place = find_source(model, given, layers)
        for layer in layers:
            # An operator that replaced the host's forward is built when it is needed, one at a time.
            if layer.prefix_error is None:
                _ = layer.operator
        self._output, self._tangents = in_gradient_mode(True, lambda: self._run(whole=False))
        if not self._leaves:
            raise UncoveredError(
                f"{type(model).__name__} does not look up its token ids by torch.nn.functional.embedding, so the "
                "vectors of the tokens are unknown; give the model inputs_embeds instead of ids."
            )

    def shares(self, target: Any = -1, logit: Logit = None, *, by: By = "tokens") -> Shares:
        """Return the parts of a logit, or of another scalar of the output: one backward pass.

        A scalar that is not linear in the output is explained by its gradient there (see `Shares.remainder`). With
        by="depth", `Shares.parts` has the shares of the stream that enters each layer's block, and with by="layer" the
        part of the scalar that passes through each layer, for one more pass of each operator (see `Parts`).

        Raises `InputError` for a target or logit that does not fit, `OptionError` for an unknown `by`, and
        `UncoveredError` if the scalar does not depend on the tokens or a layer's block has no stream of tokens.
        """
        return in_gradient_mode(True, lambda: self._shares(target, logit, by))

    def unembedding(self, target: Any = -1, logit: Logit = None) -> Unembedding:
        """Return a logit, or another scalar of the output, as a function of the last residual stream.

        The stream is the last sum of two carried tensors of one shape (batch, length, channel): every layer is added to
        it, and the final norm reads it. Raises the errors of `shares`, and `UncoveredError` if the stream is normed or
        multiplied between two layers, so that layers are not all added to the same stream.
        """
        return in_gradient_mode(True, lambda: self._unembedding(target, logit))

    def _unembedding(self, target: Any, logit: Logit) -> Unembedding:
        stream = self._last_stream
        if stream is None:
            raise UncoveredError(
                f"{type(self._model).__name__} norms or multiplies its residual stream between its layers, or its last "
                "residual sum is hidden in a kernel, so its layers are not added to one stream that the final norm "
                "reads, and their contributions to a logit cannot be told apart there."
            )
        scalar = self._linearized(target, logit)
        (slope,) = scalar.gradients([stream.value])
        gradient = torch.zeros_like(stream.value) if slope is None else slope
        constant = 0 if stream.tangent is None else by_token(stream.tangent, gradient).sum(1)
        bias, remainder = scalar.constant - constant, scalar.value - scalar.linear
        return Unembedding(stream.value.detach(), gradient, bias, remainder, self._value(scalar, target, logit))

    def _value(self, scalar: Linearized, target: Any, logit: Logit) -> Float[Tensor, " batch"]:
        """Return the scalar of the traced output, or that of this run if the trace did not compute it."""
        observed = self._observe(target, logit)
        return scalar.value if observed is None else observed.detach().to(scalar.value)

    def _shares(self, target: Any, logit: Logit, by: By) -> Shares:
        if by not in get_args(By):
            raise OptionError(f"unknown shares by {by!r}" + nearest(by, get_args(By)))
        scalar = self._linearized(target, logit)
        entry = [] if self._entry is None else [self._entry.value]
        streams = block_streams(self._layers, self._streams, self._leaves[0].shape[1]) if by == "depth" else []
        more = self.outputs if by == "layer" else [stream.value for stream in streams]
        grads = scalar.gradients([*self._leaves, *entry, *more])
        given = zip(self._leaves, grads, strict=False)
        tokens = torch.stack([by_token(leaf, g) for leaf, g in given if g is not None]).sum(0)
        grads = grads[len(self._leaves) :]
        constants = embedding_part(self._entry, grads[0] if entry else None, tokens.shape[1])
        embedding = torch.zeros_like(tokens) if constants is None else constants
        grads, parts = grads[len(entry) :], None
        if by != "tokens":
            parts = by_depth(scalar, streams, grads) if by == "depth" else by_layer(self._layers, grads)
        return Shares(
            tokens + embedding,
            embedding,
            scalar.constant - embedding.sum(1),
            scalar.value - scalar.linear,
            self._value(scalar, target, logit),
            parts,
        )

    def complete_shares(self, target: Any = -1, logit: Logit = None, *, by: By = "tokens") -> Shares:
        """Return `shares` after checking that they add up.

        Raises `ExactnessError` if a gap exceeds the tolerance of the host's dtype (see `tracing.trust`) relative to the
        parts' size; it names the first module that is not affine. Inside `trusting("warn")` the message is kept in
        `doubt` instead.
        """
        shares = self.shares(target, logit, by=by)
        accepted = max(layer_tolerance(layer.precision) for layer in self._layers)
        doubt = None if self.doubt else doubt_of(shares, by, self._layers, accepted, self.culprit)
        if doubt is not None:
            require_trust(doubt)
            self.doubt = f"{doubt}."
        return shares

    def bias_by_source(self, target: Any = -1, logit: Logit = None) -> dict[str, Float[Tensor, " batch"]]:
        """Return the parts of `Shares.bias` by the module that adds them, which sum to it: path to (batch,), float64.

        A traced layer is one source, and "" the model itself. Constants that are added to the tokens' embeddings are in
        `Shares.embedding` and not here. Runs the host once more, and takes a backward pass for each sequence, because a
        bias is the same tensor for all of them.
        """
        run = self._again(_sources=[])
        return in_gradient_mode(True, lambda: run._bias_by_source(target, logit))

    def _bias_by_source(self, target: Any, logit: Logit) -> dict[str, Tensor]:
        self._output, self._tangents = self._run(whole=False)
        assert self._sources is not None
        return biases(self._linearized(target, logit), self._sources, self._layers, self.outputs, self._entry)

    def _linearized(self, target: Any, logit: Logit) -> Linearized:
        batch = len(self._layers[-1].output)
        if callable(logit):
            require_alone(self._model, self._given, self._place, self._layers, logit)
        return linearized(
            self._output, self._tangents, lambda output: one_each(self._choose(output, target, logit), batch)
        )

    def _again(self, **changed: Any) -> "FrozenRun":
        """Return a copy of this run that has not run yet, with some attributes changed."""
        run = FrozenRun.__new__(FrozenRun)
        fresh: dict[str, Any] = {name: [] for name in ("outputs", "mixed", "_leaves", "_streams", "_path")}
        vars(run).update({**vars(self), **fresh, "_entry": None, "_began": False, **changed})
        return run

    def gradients(self, edges: Sequence[GradientEdge], target: Any = -1, logit: Logit = None) -> tuple[Tensor, ...]:
        """Return the gradients of a scalar of the output at edges of the run's graph: one backward pass."""

        def run() -> tuple[Tensor, ...]:
            scalar = self._linearized(target, logit)
            return torch.autograd.grad(scalar.outputs, edges, scalar.slopes, retain_graph=True)

        return in_gradient_mode(True, run)

    def culprit(self) -> str | None:
        """Return the first module whose output is not the affine map of its tokens, None if every output is.

        Runs the host once more with tangents that are equal to the values: where they differ, a part of the value took
        a path that torch functions do not see, such as a compiled function.
        """
        run = self._again(_suspect=None)
        in_gradient_mode(True, lambda: run._run(whole=True))
        return run._suspect

    def _run(self, *, whole: bool) -> tuple[Any, Any]:
        """Run the host; return its output and the output's tangents, which with `whole` are those of all parts."""

        def run() -> tuple[Any, Any]:
            refuse_dropout(self._model)
            self._attach(whole)
            sources = self._sources
            record = None if sources is None else lambda leaf: sources.append((self._path[-1][0], leaf))
            with (
                plain_run(self._model),
                captures(self._model),
                forward_ad.dual_level(),
                recording_sources(record),
            ):
                given = dict(self._given)
                if isinstance(self._place, str):
                    given[self._place] = self._leaf(given[self._place], whole)
                with Freezing(self._where, self._marker(whole), half=self._rule == "half") as mode:
                    self._mode = mode
                    try:
                        output = call_host(self._model, given)
                    except NotImplementedError as error:
                        if isinstance(error, UncoveredError):
                            raise
                        raise UncoveredError(
                            f"{self._where()} computes in a function without a forward-mode derivative, such as a "
                            "fused kernel, so the part of its biases in the output is unknown. Use the module's "
                            "plain code, or give it one (`register_plain_form`)."
                        ) from error
                del self._mode  # Through its cycle with the run, the graph would outlive both.
                self.shared = frozenset(mode.shared)
                if mode.last_sum is not None and mode.in_stream(mode.last_sum):
                    self._last_stream = Stream(mode.last_sum, forward_ad.unpack_dual(mode.last_sum).tangent)
                tangents = mapped(output, _tangent)
                # A view of a parameter requires a gradient again after the run.
                values = mapped(output, lambda t: forward_ad.unpack_dual(t).primal if t.requires_grad else t.detach())
            return values, tangents

        return isolated(self._model, run)

    def _leaf(self, vectors: Tensor, whole: bool) -> Tensor:
        """Return tokens' vectors as a leaf of the graph; the host may write into the copy that it gets."""
        if isinstance(self._place, TokenCall):
            self._place.require_same(vectors)
        self._leaves.append(vectors.detach().clone().requires_grad_())
        carried = self._leaves[-1].clone()
        return forward_ad.make_dual(carried, vectors.detach().clone()) if whole else carried

    def _attach(self, whole: bool) -> None:
        """Replace the forwards of the traced layers and follow the calls of all modules; `isolated` undoes both."""
        queues: dict[nn.Module, list[Layer]] = {}
        for layer in self._layers:
            queues.setdefault(layer.module, []).append(layer)
        for name, module in self._model.named_modules():
            module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: self._enter(name, module, args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda module, args, output: self._leave(output if whole else None))
            form = None if module in queues else plain_form_of(type(module))
            if form is not None:
                module.forward = partial(plain_output, self._where, module, form, module.forward)
        for module, queue in queues.items():
            module.forward = lambda *args, module=module, queue=queue, **kwargs: self._mixer(
                queue.pop(0), bound_arguments(module, args, kwargs)
            )

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered = None
        if name in self._blocks:
            # The mode of the run counts the functions that the host calls.
            with torch._C.DisableTorchFunction():
                stream = first_stream((*args, *kwargs.values()))
                if stream is not None and stream.requires_grad:
                    entered = Stream(stream, forward_ad.unpack_dual(stream).tangent)
            self._entry = self._entry or entered
            # The code before the first block of a list may scale the embeddings.
            if entered is not None and name.rpartition(".")[2].isdigit() and not self._began:
                self._began = True
                self._mode.enter_stream(entered.value)
        self._path.append((name, module, entered))

    def _leave(self, output: Any) -> None:
        for tensor in tensors(output):
            if self._suspect is None and tensor.requires_grad:
                with torch._C.DisableTorchFunction():
                    value, tangent = forward_ad.unpack_dual(tensor)
                    missing = (value if tangent is None else value - tangent).detach().norm()
                    if not float(missing) <= layer_tolerance(value.dtype) * float(value.detach().norm()):
                        self._suspect = self._where()
        self._path.pop()

    def _where(self) -> str:
        name, module, _ = self._path[-1]
        return f"{name or 'the model'} ({type(module).__name__})"

    def _mixer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with the tensors that depend on tokens in the graph."""
        numbered = (stream for name, _, stream in self._path if name.rpartition(".")[2].isdigit())
        self._streams.append(next((stream for stream in numbered if stream is not None), None))
        returned = self._layer(layer, arguments)
        architecture = architecture_of(type(layer.module))
        if architecture is None or architecture.shared_values is None:
            return returned
        values = architecture.shared_values(layer.module, arguments)
        return mapped(returned, lambda t: values if t.shape == values.shape and not t.requires_grad else t)

    def _layer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with its output in the graph."""
        mixed: list[GradientEdge] = []
        if self._rule == "half":
            output, mixed = live_output(layer, arguments)
        with torch._C.DisableTorchFunction():
            if self._rule == "freeze":
                output = frozen_output(layer, arguments)
            self.mixed.append(mixed)
            self.outputs.append(output)
            return mapped(layer.structure, lambda tensor: output if tensor is MAIN else tensor)

    def _marker(self, whole: bool) -> Callable[[Any, Any, Any], Any]:
        """Return the function that makes tokens' vectors carried, from a function, its arguments and its result."""
        place, ids = self._place, TokenIds(self._given) if self._place is None else None
        is_place = place.finder() if isinstance(place, TokenCall) else lambda func, result: False

        def mark(func: Any, args: Any, result: Any) -> Any:
            if ids is None:
                return self._leaf(result, whole) if is_place(func, result) else result
            ids.follow(args, result)
            if not ids.looked_up(func, args):
                return result
            return self._leaf(ids.by_token(result), whole).reshape(result.shape)

        return mark


def _tangent(tensor: Tensor) -> Tensor:
    """Return a tensor's tangent; a constant is a source, a carried tensor without a tangent has none."""
    if not tensor.is_floating_point():
        return tensor
    value, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        return torch.zeros_like(value) if tensor.requires_grad else value.detach()
    return tangent.detach().clone()


def frozen(trace: Trace, targets: Sequence[Target] | None = None, *, rule: str = "freeze") -> FrozenRun:
    """Run a traced model once more as one affine map of its tokens, see `FrozenRun`.

    Args:
        trace: the trace.
        targets: positions whose logits the run computes, if the model accepts `logits_to_keep`; None for all.
        rule: "freeze" freezes the activated factor of a product, "half" gives both factors half of its relevance.

    Raises `ModelStateError` if a weight changed since the trace, and the errors of `FrozenRun`.
    """
    trace.weights.require_same(trace.host, trace.model, "its shares would not be those of the traced model")
    if targets is None or trace not in _shared:
        return _frozen(trace, targets, rule)
    every, runs = _shared[trace]
    if rule not in runs:
        runs[rule] = _frozen(trace, every, rule)
    return runs[rule]


Trace.frozen = frozen

_shared: "WeakKeyDictionary[Trace, tuple[Sequence[Target], dict[str, FrozenRun]]]" = WeakKeyDictionary()


@contextmanager
def one_frozen_run(trace: Trace, targets: Sequence[Target]) -> Iterator[None]:
    """Inside the context, `frozen` returns one run by each rule, which computes the logits of all `targets`.

    For a method that runs once for each of them. The runs keep their graphs until the context ends.
    """
    _shared[trace] = targets, {}
    try:
        yield
    finally:
        del _shared[trace]


def _frozen(trace: Trace, targets: Sequence[Target] | None, rule: str) -> FrozenRun:
    trace.require_whole("frozen runs")
    given = trace.arguments
    if targets is not None:
        wanted = partial(logits_at, trace.host, given, lambda: [trace.positions(t) for t in targets], above=0)
        given = in_gradient_mode(False, wanted)
    kept = kept_positions(given, trace.layers[-1].output.shape[1])
    choose = partial(trace.explained_logit.scalar, kept=kept)
    return FrozenRun(trace.host, given, trace.layers, choose, trace.explained_logit.observed, rule=rule)
