"""`LiveRun`: a host run whose gradients are relevance, along the values and along all that the tokens decided."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from unilinattn.call.attention_interface import configurations, is_hidden
from unilinattn.call.nested import mapped, tensors
from unilinattn.call.parameters import constant_parameters
from unilinattn.errors import UncoveredError
from unilinattn.frozen.layers import shares_values, with_shared_values
from unilinattn.frozen.shares import Linearized, by_token, linearized
from unilinattn.frozen.token_pass import PassSpec, TokenPass, TokenRun, build_pass, shared_run
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.logits import Logit
from unilinattn.host.module_calls import layer_input
from unilinattn.host.recorder import MAIN, captured
from unilinattn.host.run import run
from unilinattn.operator.flow import Flow, evaluated_by
from unilinattn.operator.stages import Branch, Mix, Scale, Stage
from unilinattn.registry import visible_functions
from unilinattn.rules.forms import carried
from unilinattn.rules.live import Live
from unilinattn.rules.live_functions import Paths
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

SCALE = 2.0**64
"""A power of two by which gradients are multiplied in a backward pass: those of many layers' factors are tiny, and
numbers below the smallest normal one make products slow."""

Split = Literal["halves", "thirds"]

SPLITS: dict[Split, tuple[float, float]] = {"halves": (1 / 2, 1 / 2), "thirds": (1 / 3, 2 / 3)}
"""The parts of the values and of the matrix that mixes them; queries and keys share that of the matrix equally."""


@dataclass(frozen=True, eq=False)
class Relevances:
    """The relevance of each token for a scalar of the output, in float64.

    Attributes:
        tokens: the relevance by the rules of AttnLRP; it need not add up to the scalar.
        content: what the token sent along frozen factors. By the rules of functions it is `Shares.tokens`, which are
            checked to add up; it is not checked here.
        control: the part of `tokens` on paths through one factor or more: what the token decided.
        value: the scalar of the traced output; at length, that of the live run.
    """

    tokens: Float[Tensor, "batch key"]
    content: Float[Tensor, "batch key"]
    control: Float[Tensor, "batch key"]
    value: Float[Tensor, " batch"]


class LiveRun(TokenRun):
    """One run of a traced host by the rules of `rules.live`, which keeps its graph.

    A layer with a written adapter is its flow: of a core's product of a matrix and values, the values get one part of
    the relevance and the factors of the matrix the other, through the derivative of the mixer. Queries and keys are
    linear in each other, so each of them gets half of that part. All other layers run the host's code by the rules of
    functions.

    Args:
        trace: the trace.
        targets: positions whose logits the run computes, if the model accepts `logits_to_keep`; None for all.

    Raises `UncoveredError` for opaque layers and for a trace in pieces.
    """

    def __init__(self, trace: Trace, targets: Sequence[Target] | None = None) -> None:
        """Run the host."""
        trace.weights.require_same(trace.host, trace.model, "its relevances would not be those of the traced model")
        trace.require_whole("live runs")
        self._spec, self._pass = build_pass(PassSpec.of(trace, targets), LivePass)

    @runs_in_gradient_mode(True)
    def relevances(self, target: Any = -1, logit: Logit = None, split: Split = "halves") -> Relevances:
        """Return the relevances for a logit, or for another scalar of the output: three backward passes.

        `split` names the parts of a matrix and of the values that it mixes, see `SPLITS`.
        """
        output = self._pass.output
        scalar = linearized(output, mapped(output, torch.zeros_like), self._spec.scalar(target, logit))
        values, matrix = SPLITS[split]
        tokens = self._along(scalar, Paths(values=values, matrix=matrix))
        sent = self._along(scalar, Paths(factor=0.0, values=values, matrix=0.0))
        content = self._along(scalar, Paths(value=1.0, factor=0.0, values=1.0, matrix=0.0))
        return Relevances(tokens, content, tokens - sent, self._spec.value(scalar.value, target, logit))

    def _along(self, scalar: Linearized, paths: Paths) -> Float[Tensor, "batch key"]:
        """Return the gradient times each token's vector, with the constants that are added before the first block."""
        self._pass.paths.become(paths)
        groups = self._pass.leaves
        leaves = [leaf for group in groups for leaf in group]
        # Sixteen bits of float16 have no room for the scale.
        scale = 1.0 if any(t.dtype == torch.float16 for t in (*scalar.slopes, *leaves)) else SCALE
        scaled = scalar._replace(slopes=[slope * scale for slope in scalar.slopes])
        entries = self._pass.entries
        grads = iter(scaled.gradients([*leaves, *(entry.value for entry in entries.values())]))
        totals = [_inner(group, [next(grads) for _ in group]) for group in groups]
        for number, entry in entries.items():
            slope, group = next(grads), groups[number]
            if slope is None or entry.value.shape[:2] != group[0].shape[:2]:
                continue
            # The entry is J e + c for the vectors e, so that c has (entry - J e) . slope.
            back = torch.autograd.grad(entry.value, group, slope, retain_graph=True, allow_unused=True)
            totals[number] = totals[number] + by_token(entry.value, slope) - _inner(group, back)
        return torch.cat(totals, 1) / scale


def live(trace: Trace, targets: Sequence[Target] | None = None) -> LiveRun:
    """Run a traced model once more by the rules of relevance, see `LiveRun`."""
    trace.weights.require_same(trace.host, trace.model, "its relevances would not be those of the traced model")
    with trace.weights.compared():
        return shared_run(trace, targets, "live", lambda positions: LiveRun(trace, positions))


class LivePass(TokenPass):
    """One pass of a host by the rules of `rules.live`.

    Attributes:
        paths: the weights of the next backward pass.
        output: the output.
    """

    def __init__(self, spec: PassSpec) -> None:
        """Run the host."""
        super().__init__(spec)
        self.paths = Paths()
        mixers = replaced_forwards(self.model, self._replaced)
        self.output = run(self.model, self._compute, gradients=True, mixers=mixers, observer=self._observed())

    @contextmanager
    def _observed(self) -> Iterator[None]:
        # Layers whose adapter needs a capture run the host's code. The host's attention is one of torch's functions,
        # unless it is hidden in another kernel.
        hidden = any(is_hidden(config) for config in configurations(self.model))
        captures = captured(self.model, needed=lambda architecture: hidden or not architecture.needs_capture)
        with self.attached(), constant_parameters(self.model), captures, visible_functions(self.model):
            yield

    def _compute(self) -> Any:
        # Leaves among the arguments are made before the rules apply, which let no host switch gradients on.
        arguments = self.arguments()
        with Live(self.where, self.paths, self.marker()), evaluated_by(partial(_evaluate, self.paths)):
            output = self.call_host(arguments)
        require_visible(output, type(self.model).__name__)
        return mapped(output, lambda t: t if t.requires_grad else t.detach())

    def _replaced(self, path: str, module: nn.Module, host: Forward) -> Forward | None:
        """Return the forward of a traced layer with a written adapter, or of a linear layer with a known product."""
        if module not in self._queues:
            return self.known_product(module, host)
        queue = self._queues[module]

        def forward(*args: Any, **kwargs: Any) -> Any:
            layer = queue.pop(0)
            shares = shares_values(layer)
            if layer.needs_capture and not shares:
                return host(*args, **kwargs)
            arguments = bound_arguments(module, args, kwargs)
            with torch._C.DisableTorchFunction():
                x = layer_input(arguments.values())
                read = None if x is None else layer.as_read(x.to(layer.input.dtype), layer.input.shape)
            if x is None or read is None or not x.requires_grad:
                return host(*args, **kwargs)
            # Values of an earlier layer are carried too.
            flow = layer.flow_in_run(read, arguments if shares else None)
            output = live_output(layer, flow, x.dtype)
            returned = mapped(layer.structure, lambda tensor: output if tensor is MAIN else tensor)
            return with_shared_values(layer, arguments, returned)

        return forward


def live_output(layer: Layer, flow: Flow, dtype: torch.dtype) -> Tensor:
    """Return the recorded output of a layer, in the graph of its live flow."""
    computed = flow.value
    with torch._C.DisableTorchFunction():
        # The value is the recorded one, so that later factors are those of the trace.
        rounding = (layer.output - computed).detach()
        return layer.as_returned(computed + rounding).to(dtype)


def _evaluate(paths: Paths, stages: Sequence[Stage], x: Tensor) -> Tensor:
    """Apply stages to a carried tensor, which shares its relevance with all factors but slopes and scales of norms."""
    for stage in stages:
        # A gate is computed when it is first needed, and its activation has a rule too.
        factor = stage.scale if isinstance(stage, Scale) else None
        with torch._C.DisableTorchFunction():
            if isinstance(stage, Branch):
                x = torch.stack([_evaluate(paths, chain, x) for chain in stage.chains]).sum(0)
                continue
            if isinstance(stage, Mix) and carried(list(vars(stage.mixer).values())):
                x = paths.weighted(x, "values")
            if isinstance(stage, Scale) and factor is not None:
                factor = factor.detach() if stage.role in ("act", "norm") else factor
                if factor.requires_grad:
                    factor, x = paths.weighted(factor, "factor"), paths.weighted(x, "value")
                stage = replace(stage, factor=factor)
            x = stage.apply(x)
    return x


def require_visible(output: Any, model: str) -> None:
    """Raise `UncoveredError` if an output depends on an autograd function of another package with several tensors."""
    nodes = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        # A function of one tensor is no product of two, and has its derivative.
        if isinstance(node, BackwardCFunction) and sum(earlier is not None for earlier, _ in node.next_functions) > 1:
            function: Any = type(node)._forward_cls
            if function.__module__.partition(".")[0] != "unilinattn":
                raise UncoveredError(
                    f"{model} computes in {function.__module__}.{function.__qualname__}, an autograd function whose "
                    "products the rules of relevance do not see. Use the module's plain code."
                )
        following = [earlier for earlier, _ in node.next_functions if earlier is not None and earlier not in visited]
        visited.update(following)
        nodes += following


def _inner(vectors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Float[Tensor, "batch key"]:
    """Return the inner products of the vectors of each token with gradients, summed over lookups."""
    products = [by_token(x, grad) for x, grad in zip(vectors, grads, strict=True) if grad is not None]
    return torch.stack(products).sum(0) if products else vectors[0].new_zeros(vectors[0].shape[:2]).double()
