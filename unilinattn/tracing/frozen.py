"""`FrozenRun`: a host run as one affine map of its tokens, whose shares and biases add up to its output."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from unilinattn.errors import ExactnessError, OptionError, UncoveredError, nearest
from unilinattn.tracing.freezing import Freezing
from unilinattn.tracing.frozen_layer import frozen_output
from unilinattn.tracing.inputs import bound_arguments, call_host, token_ids
from unilinattn.tracing.isolation import in_gradient_mode, isolated
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.live_layer import live_output
from unilinattn.tracing.logits import Logit
from unilinattn.tracing.nested import mapped, tensors
from unilinattn.tracing.recomputation import captures
from unilinattn.tracing.recorder import MAIN, refuse_dropout
from unilinattn.tracing.shares import Shares
from unilinattn.tracing.tokens import block_names, find_tokens, first_stream
from unilinattn.tracing.trust import tolerance
from unilinattn.tracing.wrappers import plain_run, require_gradients

RULES = ("freeze", "half")
"""Freeze the activated one of two factors, or let both share the relevance of their product."""

Observe = Callable[[Any, Logit], Float[Tensor, " batch"] | None]
"""The same scalar of the traced output, None if the model did not compute it."""

Choose = Callable[[Any, Any, Logit], Float[Tensor, " batch"]]
"""The scalar of an output that a target and a `Logit` name, for each sequence."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A tensor of the run's graph and its tangent, the part of it that comes from constants."""

    value: Tensor
    tangent: Tensor | None


class FrozenRun:
    """One run of a traced host in which every factor that the input decided is a constant.

    Each traced layer is its operator: its value is the recorded output, its gradient `op.adjoint`. The code between
    the layers runs by the rules of `tracing.freezing`. The output is then an affine map of the tokens' embeddings: a
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
        rule: what a product of two factors of different rank freezes (see `Freezing`).

    Attributes:
        outputs: the layers' outputs in the run's graph.
        mixed: the edges of the run's graph after each layer's cores, if the rule is "half" (see `live_layer`).
        shared: names of functions that multiplied two factors of equal rank, each of which got half.

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
        _require_covered(model, layers)
        require_gradients(model)
        self.outputs: list[Tensor] = []
        self.mixed: list[list[GradientEdge]] = []
        self._layers, self._choose, self._observe = layers, choose, observe
        self._blocks = block_names(model, layers)
        self._leaves: list[Tensor] = []
        self._suspect: str | None = None
        self._model, self._given, self._rule = model, given, rule
        self._streams: dict[str, Stream] = {}
        self._path: list[tuple[str, nn.Module]] = []
        self._ids = token_ids(given)
        self._place: int | str | None = None
        if self._ids is None:
            self._place = in_gradient_mode(False, lambda: find_tokens(model, given, self._blocks))
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

    def shares(self, target: Any = -1, logit: Logit = None, *, depth: bool = False) -> Shares:
        """Return the parts of a logit, or of another scalar of the output: one backward pass.

        A scalar that is not linear in the output is explained by its gradient there (see `Shares.remainder`). With
        `depth` also the shares of the stream that enters each block. Raises `InputError` for a target or logit that
        does not fit, and `UncoveredError` if the scalar does not depend on the tokens.
        """
        return in_gradient_mode(True, lambda: self._shares(target, logit, depth=depth))

    def _shares(self, target: Any, logit: Logit, *, depth: bool) -> Shares:
        point = mapped(self._output, lambda t: t.detach().requires_grad_(t.is_floating_point()))
        value = self._choose(point, target, logit)
        at = [tensor for tensor in tensors(point) if tensor.requires_grad]
        slopes = torch.autograd.grad(value.sum(), at, allow_unused=True)
        outputs = [tensor for tensor in tensors(self._output) if tensor.is_floating_point()]
        tangents = [tensor for tensor in tensors(self._tangents) if tensor.is_floating_point()]
        used = [k for k, slope in enumerate(slopes) if slope is not None and outputs[k].requires_grad]
        if not used:
            raise UncoveredError("the scalar does not depend on an output of the model that depends on its tokens.")
        linear = sum(_by_sequence(slopes[k] * outputs[k].detach()) for k in range(len(at)) if slopes[k] is not None)
        bias = sum(_by_sequence(slopes[k] * tangents[k]) for k in range(len(at)) if slopes[k] is not None)
        # Of the modules in which the tokens' vectors arrive, the first; for `depth` those in lists, the blocks.
        streams = list(self._streams.values())[:1]
        blocks = [self._streams[name] for name in self._streams if name.rpartition(".")[2].isdigit()] if depth else []
        wanted = [*self._leaves, *(stream.value for stream in (*streams, *blocks))]
        grads = torch.autograd.grad(
            [outputs[k] for k in used], wanted, [slopes[k] for k in used], retain_graph=True, allow_unused=True
        )
        given = zip(self._leaves, grads, strict=False)
        tokens = torch.stack([_by_token(leaf, g) for leaf, g in given if g is not None]).sum(0)
        embedding = torch.zeros_like(tokens)
        entered = list(zip((*streams, *blocks), grads[len(self._leaves) :], strict=True))
        if entered and entered[0][0].tangent is not None and entered[0][1] is not None:
            constants = _by_token(entered[0][0].tangent, entered[0][1])
            if constants.shape == tokens.shape:
                embedding = constants
        value = value.detach().double()
        observed = self._observe(target, logit)
        layers = [_by_token(stream.value.detach(), g) for stream, g in entered[len(streams) :] if g is not None]
        return Shares(
            tokens + embedding,
            embedding,
            bias - embedding.sum(1),
            value - linear,
            value if observed is None else observed.detach().to(value),
            torch.stack(layers) if layers else None,
        )

    def complete_shares(self, target: Any = -1, logit: Logit = None) -> Shares:
        """Return `shares`, checked.

        Raises `ExactnessError` if the gap exceeds the tolerance of the host's dtype (see `tracing.trust`) relative to
        the parts' size; it names the first module that is not affine.
        """
        shares = self.shares(target, logit)
        error = float((shares.gap / shares.size.clamp_min(torch.finfo(torch.float64).tiny)).max())
        accepted = max(tolerance(layer.precision) for layer in self._layers)
        # Written so that a NaN is refused too.
        if not error <= accepted:
            raise ExactnessError(
                f"shares and biases miss the logit by {error:.1e} of their size, and {accepted:.0e} is accepted. The "
                f"first module that is not affine in the frozen run: {self.culprit() or 'none'}. A compiled "
                "function or a custom autograd function hides its computation; use the module's plain code."
            )
        return shares

    def gradients(self, edges: Sequence[GradientEdge], target: Any = -1, logit: Logit = None) -> tuple[Tensor, ...]:
        """Return the gradients of a scalar of the output at edges of the run's graph: one backward pass."""

        def run() -> tuple[Tensor, ...]:
            point = mapped(self._output, lambda t: t.detach().requires_grad_(t.is_floating_point()))
            at = [tensor for tensor in tensors(point) if tensor.requires_grad]
            slopes = torch.autograd.grad(self._choose(point, target, logit).sum(), at, allow_unused=True)
            outputs = (tensor for tensor in tensors(self._output) if tensor.is_floating_point())
            used = [(x, g) for x, g in zip(outputs, slopes, strict=True) if g is not None and x.requires_grad]
            return torch.autograd.grad([x for x, _ in used], edges, [g for _, g in used], retain_graph=True)

        return in_gradient_mode(True, run)

    def culprit(self) -> str | None:
        """Return the first module whose output is not the affine map of its tokens, None if every output is.

        Runs the host once more with tangents that are equal to the values: where they differ, a part of the value took
        a path that torch functions do not see, such as a compiled function.
        """
        run = FrozenRun.__new__(FrozenRun)
        vars(run).update(vars(self), outputs=[], mixed=[], _leaves=[], _streams={}, _path=[], _suspect=None)
        in_gradient_mode(True, lambda: run._run(whole=True))
        return run._suspect

    def _run(self, *, whole: bool) -> tuple[Any, Any]:
        """Run the host; return its output and the output's tangents, which with `whole` are those of all parts."""

        def run() -> tuple[Any, Any]:
            refuse_dropout(self._model)
            self._attach(whole)
            with plain_run(self._model), captures(self._model), forward_ad.dual_level():
                given = dict(self._given)
                if isinstance(self._place, str):
                    given[self._place] = self._leaf(given[self._place], whole)
                with Freezing(self._where, self._marker(whole), half=self._rule == "half") as mode:
                    try:
                        output = call_host(self._model, given)
                    except NotImplementedError as error:
                        if isinstance(error, UncoveredError):
                            raise
                        raise UncoveredError(
                            f"{self._where()} computes in a function without a forward-mode derivative, such as a "
                            "fused kernel, so the part of its biases in the output is unknown. Use a layer-wise "
                            "method such as 'alti', or the module's plain code."
                        ) from error
                self.shared = frozenset(mode.shared)
                tangents = mapped(output, _tangent)
                values = mapped(output, lambda t: forward_ad.unpack_dual(t).primal if t.is_floating_point() else t)
            return values, tangents

        return isolated(self._model, run)

    def _leaf(self, vectors: Tensor, whole: bool) -> Tensor:
        """Return tokens' vectors as a leaf of the graph; the host may write into the copy that it gets."""
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
        for module, queue in queues.items():
            module.forward = lambda *args, module=module, queue=queue, **kwargs: self._layer(
                queue.pop(0), bound_arguments(module, args, kwargs)
            )

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._path.append((name, module))
        if name in self._blocks and name not in self._streams:
            stream = first_stream((*args, *kwargs.values()))
            if stream is not None and stream.requires_grad:
                with torch._C.DisableTorchFunction():
                    self._streams[name] = Stream(stream, forward_ad.unpack_dual(stream).tangent)

    def _leave(self, output: Any) -> None:
        for tensor in tensors(output):
            if self._suspect is None and tensor.requires_grad:
                with torch._C.DisableTorchFunction():
                    value, tangent = forward_ad.unpack_dual(tensor)
                    missing = (value if tangent is None else value - tangent).detach().norm()
                    if not float(missing) <= tolerance(value.dtype) * float(value.detach().norm()):
                        self._suspect = self._where()
        self._path.pop()

    def _where(self) -> str:
        name, module = self._path[-1]
        return f"{name or 'the model'} ({type(module).__name__})"

    def _layer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return what a layer returned in the trace, with its output in the graph."""
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
        count = 0

        def mark(func: Any, args: Any, result: Any) -> Any:
            nonlocal count
            count += 1
            if self._ids is None:
                is_tokens = count - 1 == self._place
            else:
                is_tokens = func is functional.embedding and args and args[0].data_ptr() == self._ids.data_ptr()
            return self._leaf(result, whole) if is_tokens else result

        return mark


def _require_covered(model: nn.Module, layers: Sequence[Layer]) -> None:
    for layer in layers:
        if layer.opaque:
            raise UncoveredError(f"{layer.name} is opaque: no adapter knows it, so its part in the output is unknown.")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UncoveredError(
            f"{type(model).__name__} has two streams of tokens, and shares are those of one; trace the decoder with "
            "its encoder's output, or use a layer-wise method."
        )


def _tangent(tensor: Tensor) -> Tensor:
    """Return a tensor's tangent; a constant is a source, a carried tensor without a tangent has none."""
    if not tensor.is_floating_point():
        return tensor
    value, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        return torch.zeros_like(value) if tensor.requires_grad else value
    return tangent.detach().clone()


def _by_sequence(product: Tensor) -> Float[Tensor, " batch"]:
    return product.double().flatten(1).sum(1)


def _by_token(x: Tensor, grad: Tensor) -> Float[Tensor, "batch key"]:
    return (x.detach().double() * grad.double()).flatten(2).sum(2)
