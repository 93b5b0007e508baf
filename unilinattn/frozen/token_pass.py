"""`TokenPass`: one pass of a host in which the vectors of the tokens are leaves of the graph."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad

from unilinattn.errors import UncoveredError
from unilinattn.frozen.layers import require_transparent
from unilinattn.frozen.shares import Stream
from unilinattn.host.draws import States, drawing
from unilinattn.host.explained import ExplainedLogit
from unilinattn.host.forwards import Forward
from unilinattn.host.inputs import call_host
from unilinattn.host.logits import Logit, one_each
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.products import Products
from unilinattn.host.wrappers import require_gradients
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.lookups import TokenIds
from unilinattn.tracing.reaching import ExplainedVectors, Read, Source, explained_numbers, require_alone
from unilinattn.tracing.token_source import Sources, find_sources, without_lookups
from unilinattn.tracing.token_streams import TokenStream
from unilinattn.tracing.tokens import OTHER_VECTORS, TokenArgument, TokenCall, blocks_of, first_stream
from unilinattn.tracing.trace import Target, Trace

Pass = TypeVar("Pass", bound="TokenPass")


@dataclass(frozen=True)
class PassSpec:
    """A model, its arguments, where its tokens get their vectors, and which of its outputs are explained.

    Attributes:
        model: the host model.
        arguments: its arguments.
        layers: the traced layers in order of execution.
        sources: where the tokens of each stream get their vectors.
        read: returns the tensors of an output that nothing else reaches.
        blocks: the paths of the modules that contain layers of one of these streams, with the number of its source (see
            `block_names`).
        explained: the logits of the trace.
        positions: those of the logits that the model computes, None for all.
        batch: the number of sequences.
        products: those of the trace, for the first pass.
        draws: those of the trace.
    """

    model: nn.Module
    arguments: Mapping[str, Any]
    layers: Sequence[Layer]
    sources: Sequence[Source]
    read: Read
    blocks: Mapping[tuple[str, int], int]
    explained: ExplainedLogit
    positions: Int[Tensor, " position"] | None
    batch: int
    products: Products | None = None
    draws: States | None = None

    @classmethod
    def of(cls, trace: Trace, targets: Sequence[Target] | None) -> Self:
        """Return the spec of passes that compute the logits at `targets`, None for all positions."""
        model, layers, explained = trace.host, trace.layers, trace.explained_logit
        arguments, positions = explained.arguments(model, targets)
        require_transparent(layers)
        require_gradients(model)
        with drawing(trace.draws):
            sources, read = _sources_read(trace, arguments)
        groups = [[layers[index] for index in source.stream.layers] for source in sources]
        blocks = blocks_of(model, groups if len(groups) > 1 else [layers])
        batch, products, draws = trace.token_shape[0], trace.products, trace.draws
        return cls(model, arguments, layers, sources, read, blocks, explained, positions, batch, products, draws)

    def scalar(self, target: Any, logit: Logit) -> Callable[[Any], Float[Tensor, " batch"]]:
        """Return the function from an output of the model to the explained scalar of each sequence."""
        if callable(logit):
            with drawing(self.draws):
                require_alone(self.model, self.arguments, self.sources, self.layers, lambda output: [logit(output)])
        return lambda output: one_each(self.explained.scalar(output, target, logit, self.positions), self.batch)

    def value(self, scalar: Float[Tensor, " batch"], target: Any, logit: Logit) -> Float[Tensor, " batch"]:
        """Return the scalar of the traced output, or that of a pass if the trace did not compute it."""
        observed = self.explained.observed(target, logit)
        return scalar if observed is None else observed.detach().to(scalar)


def _sources_read(trace: Trace, arguments: Mapping[str, Any]) -> tuple[Sources, Read]:
    """Return the sources of a trace's tokens, and what they decide of its output: all of it or only its vectors.

    A model without logits may return the features of its images next to the vectors that a text and they decide.
    `PassSpec.scalar` refuses a function of the output that reads these features.
    """
    try:
        return find_sources(trace.host, arguments, trace.layers), explained_numbers
    except UncoveredError:
        if trace.explained_logit.exists:
            raise
        vectors = ExplainedVectors(trace.token_shape)
        with suppress(UncoveredError):
            return find_sources(trace.host, arguments, trace.layers, vectors), vectors
        raise


def build_pass(spec: PassSpec, build: Callable[[PassSpec], Pass]) -> tuple[PassSpec, Pass]:
    """Return a pass that met the vectors of all tokens, and its spec.

    A host that embeds its ids by no lookup of their numbers passes again, with the vectors that enter its first block.
    Raises `UncoveredError` if these are unknown, too.
    """
    made = build(spec)
    if all(made.leaves):
        return spec, made
    for source, leaves in zip(spec.sources, made.leaves, strict=True):
        if isinstance(source.origin, TokenCall) and not leaves:
            raise UncoveredError(_without_call(spec, source.origin))
    refusal = UncoveredError(
        f"{type(spec.model).__name__} does not look up its token ids by torch.nn.functional.embedding, so the "
        "vectors of the tokens are unknown; give the model inputs_embeds instead of ids."
    )
    try:
        with drawing(spec.draws):
            sources = without_lookups(spec.model, spec.arguments, spec.layers, spec.sources, spec.read)
    except UncoveredError as error:
        raise refusal from error
    spec = replace(spec, sources=sources, products=None)
    made = build(spec)
    if not all(made.leaves):
        raise refusal
    return spec, made


def _without_call(spec: PassSpec, call: TokenCall) -> str:
    """Return why a pass did not meet the call that returns the tokens' vectors."""
    for layer in spec.layers:
        if layer.output.shape == call.vectors.shape and call.is_same(layer.output):
            return (
                f"the vectors that enter the model's first block are those that {layer.name} returns, a layer that "
                "mixes tokens, so none of them is that of one token."
            )
    return OTHER_VECTORS


class BlockCall(NamedTuple):
    """A call of a module, with the stream of tokens that entered a block."""

    path: str
    module: nn.Module
    stream: Stream | None


class TokenPass(Observer[BlockCall]):
    """One pass of a host that finds the tokens' vectors and the streams that enter its blocks.

    Attributes:
        leaves: the vectors of the tokens of each source, one tensor for each lookup.
        entries: the stream that enters the first block, by the number of its source.
    """

    sees_given_inputs = False

    def __init__(self, spec: PassSpec) -> None:
        super().__init__(spec.model)
        self._spec = spec
        self.leaves: list[list[Tensor]] = [[] for _ in spec.sources]
        self.entries: dict[int, Stream] = {}
        self._in_blocks: set[int] = set()
        self._calls: Counter[str] = Counter()
        self._queues: dict[nn.Module, list[Layer]] = {}
        for layer in spec.layers:
            self._queues.setdefault(layer.module, []).append(layer)

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments; those that have the tokens' vectors are leaves."""
        arguments = dict(self._spec.arguments)
        for number, source in enumerate(self._spec.sources):
            if isinstance(source.origin, TokenArgument):
                arguments[source.origin.name] = self.leaf(number, arguments[source.origin.name])
        return arguments

    def call_host(self, arguments: Mapping[str, Any]) -> Any:
        """Call the model, which draws the random numbers of the trace."""
        with drawing(self._spec.draws):
            return call_host(self.model, arguments)

    def known_product(self, module: nn.Module, host: Forward) -> Forward | None:
        """Return a linear layer's forward that uses the products of the traced run, None without any."""
        return None if self._spec.products is None else self._spec.products.forward_of(module, host)

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> BlockCall:
        """Find the stream that enters a block."""
        self._calls[path] += 1
        number = self._spec.blocks.get((path, 0), self._spec.blocks.get((path, self._calls[path])))
        if number is None:
            return BlockCall(path, module, None)
        args, kwargs = inputs
        entered, shape = None, self._spec.sources[number].stream.shape if len(self.leaves) > 1 else None
        # The mode of the run counts the functions that the host calls.
        with torch._C.DisableTorchFunction():
            stream = first_stream((*args, *kwargs.values()), shape)
            if stream is not None and stream.requires_grad:
                entered = Stream(stream, forward_ad.unpack_dual(stream).tangent)
        if entered is None:
            return BlockCall(path, module, None)
        self.entries.setdefault(number, entered)
        # The code before the first block of a list may scale the embeddings.
        if path.rpartition(".")[2].isdigit() and number not in self._in_blocks:
            self._in_blocks.add(number)
            self.entered(entered)
        return BlockCall(path, module, entered)

    def entered(self, stream: Stream) -> None:
        """Follow the stream that enters the first block of a list."""

    def where(self) -> str:
        """Return the path and the class of the module that is running, for errors."""
        path, module, _ = self.stack[-1]
        return f"{path or 'the model'} ({type(module).__name__})"

    def leaf(self, number: int, vectors: Tensor) -> Tensor:
        """Return tokens' vectors as a leaf of the graph; the host may write into the copy that it gets."""
        origin = self._spec.sources[number].origin
        # Ids may be looked up in another shape, and windows are sequences of the layers.
        by_token = vectors
        if origin is not None:
            by_token = origin.tokens(vectors).reshape(*self._spec.sources[number].stream.shape, -1)
        self.leaves[number].append(by_token.detach().clone().requires_grad_())
        carried = self.leaves[number][-1].clone()
        if origin is not None and by_token is not vectors:
            carried = origin.in_host(carried.reshape(origin.tokens(vectors).shape))
        return carried

    def marker(self) -> Callable[[Any, Any, Any], Any]:
        """Return the function that makes tokens' vectors carried, from a function, its arguments and its result."""
        marks = [self._mark_of(number, source) for number, source in enumerate(self._spec.sources)]

        def mark(func: Any, args: Any, result: Any) -> Any:
            for each in marks:
                marked = each(func, args, result)
                if marked is not result:
                    return marked
            return result

        return mark

    def _mark_of(self, number: int, source: Source) -> Callable[[Any, Any, Any], Any]:
        """Return the function that marks the vectors of one source."""
        ids = None if source.ids is None else TokenIds(self._spec.arguments[source.ids])
        call = source.origin if isinstance(source.origin, TokenCall) else None

        def mark(func: Any, args: Any, result: Any) -> Any:
            if ids is None:
                # Layers are not computed, so that their calls of this function cannot be counted: the numbers tell.
                if call is None or self.leaves[number] or not call.counts(func, result) or not call.is_same(result):
                    return result
                return self.leaf(number, result)
            if not ids.looks_up(func, args, result):
                return result
            return ids.as_looked_up(self.leaf(number, ids.by_token(result)), result.shape)

        return mark


class TokenRun:
    """A run whose passes have the vectors of the tokens as leaves; its numbers are those of these tokens."""

    _spec: PassSpec

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """The streams whose tokens are leaves, one after the other."""
        return tuple(source.stream for source in self._spec.sources)

    @property
    def grid(self) -> tuple[int, int] | None:
        """The (rows, columns) of the tokens, if they are those of an image that enters the first block."""
        source = self._spec.sources[0]
        grid = None if source.origin is None or len(self._spec.sources) > 1 else source.origin.grid
        # Windows of an image have a grid each.
        return grid if grid is not None and grid[0] * grid[1] == source.stream.shape[1] else None


Run = TypeVar("Run")
Case = tuple[Target, Logit]
"""A target and the logit that is explained there."""


def shared_run(
    trace: Trace, targets: Sequence[Target] | None, rule: Hashable, run: Callable[[Sequence[Target] | None], Run]
) -> Run:
    """Return `run(targets)`, or inside of `one_run` and `latest_run` a run by this rule that they keep.

    The caller compares the weights with those of the trace.
    """
    if trace in _latest:
        positions = None if targets is None else tuple(tuple(trace.positions(each).tolist()) for each in targets)
        key, latest = (rule, positions), _latest[trace]
        if key not in latest:
            # The graph of the former run is free before another one is made.
            latest.clear()
            latest[key] = run(targets)
        return latest[key]
    if targets is None or trace not in _shared:
        return run(targets)
    cases, runs = _shared[trace]
    if rule not in runs:
        runs[rule] = run([target for target, _ in cases])
    return runs[rule]


def shared_cases(trace: Trace, case: Case) -> Sequence[Case]:
    """Return the cases of `one_run` if `case` is one of them, or this case."""
    return _shared[trace][0] if trace in _shared and case in _shared[trace][0] else [case]


_shared: "WeakKeyDictionary[Trace, tuple[Sequence[Case], dict[object, Any]]]" = WeakKeyDictionary()
_latest: "WeakKeyDictionary[Trace, dict[Hashable, Any]]" = WeakKeyDictionary()


@contextmanager
def one_run(trace: Trace, cases: Sequence[Case]) -> Iterator[None]:
    """Inside the context, `frozen` and `live` return one run by each rule, which computes the logits of all `cases`.

    For a method that runs once for each of them. The runs keep their graphs until the context ends.
    """
    _shared[trace] = cases, {}
    try:
        yield
    finally:
        del _shared[trace]


@contextmanager
def latest_run(trace: Trace) -> Iterator[None]:
    """Inside the context, `frozen` and `live` return the run before if it is by the same rule for the same targets.

    For methods that run in turn. One run keeps its graph at a time.
    """
    _latest[trace] = {}
    try:
        yield
    finally:
        del _latest[trace]
