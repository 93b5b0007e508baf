"""`FrozenRun`: a host run as one affine map of its tokens, whose shares and biases add up to its output."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.frozen.passes import FREEZE, FrozenPass, Rule
from unilinattn.frozen.shares import (
    AffineScalar,
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
    has_constants,
    linearized,
)
from unilinattn.frozen.token_pass import PassSpec, TokenRun, build_pass, shared_run
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.logits import Logit
from unilinattn.tracing.trace import Target, Trace
from unilinattn.tracing.trust import require_trust

By = Literal["tokens", "depth", "layer"]
"""Shares of the tokens' embeddings, of the stream that enters each layer's block, or through each layer's output."""


class FrozenRun(TokenRun):
    """One run of a traced host in which every factor that the input decided is a constant.

    Each traced layer is its operator: its value is the recorded output, its gradient `op.adjoint`. The code between
    the layers runs by the rules of `rules.freezing`. The output is then an affine map of the tokens' embeddings: a
    token's share is its gradient times its embedding, and the bias is the tangent of the constants that were added.
    The tokens of inputs without ids are the vectors that enter the first block.

    The run keeps its graph, whose memory is that of the factors of all token-wise code. A scalar of the output costs
    one backward pass.

    Args:
        trace: the trace.
        targets: positions whose logits the run computes, if the model accepts `logits_to_keep`; None for all.
        rule: how products share relevance.

    Attributes:
        outputs, mixed, shared: those of the `FrozenPass` whose graph the run keeps.
        doubt: the first warning of `complete_shares` about shares that do not add up, None if there is none.

    Raises `OptionError` for another rule and for gamma without the half rule, and `UncoveredError` for a function
    without a rule and for opaque layers.
    """

    def __init__(self, trace: Trace, targets: Sequence[Target] | None = None, *, rule: Rule = FREEZE) -> None:
        """Run the host."""
        if not isinstance(rule, Rule) or (rule.gamma and not rule.half):
            raise OptionError(
                f"unknown rule {rule!r}; give FREEZE, HALF or Rule(half=True, gamma=0.25) of unilinattn.frozen.passes."
            )
        trace.require_whole("frozen runs")
        self._layers, self._spec, self._rule = trace.layers, PassSpec.of(trace, targets), rule
        self.doubt: str | None = None
        for layer in self._layers:
            # An operator that replaced the host's forward is built when it is needed, one at a time.
            if layer.prefix_error is None:
                _ = layer.operator
        self._spec, self._pass = build_pass(self._spec, partial(FrozenPass, rule=rule))
        self.outputs, self.mixed, self.shared = self._pass.outputs, self._pass.mixed, self._pass.shared

    @runs_in_gradient_mode(True)
    def shares(self, target: Any = -1, logit: Logit = None, *, by: By = "tokens") -> Shares:
        """Return the parts of a logit, or of another scalar of the output: one backward pass.

        A scalar that is not linear in the output is explained by its gradient there (see `Shares.remainder`). With
        by="depth", `Shares.parts` has the shares of the stream that enters each layer's block, and with by="layer" the
        part of the scalar that passes through each layer, for one more pass of each operator (see `Parts`).

        Raises `InputError` for a target or logit that does not fit, `OptionError` for an unknown `by`, and
        `UncoveredError` if the scalar does not depend on the tokens or a layer's block has no stream of tokens.
        """
        if by not in get_args(By):
            raise OptionError(f"unknown shares by {by!r}" + nearest(by, get_args(By)))
        run = self._pass
        scalar = self._linearized(target, logit, run)
        entries = [run.entries.get(number) for number in range(len(self.streams))]
        leaves = [leaf for group in run.leaves for leaf in group]
        streams = self._depth_streams() if by == "depth" else []
        more = run.outputs if by == "layer" else [stream.value for stream in streams]
        at_entries = [entry.value for entry in entries if entry is not None]
        grads = iter(scalar.gradients([*leaves, *at_entries, *more]))
        tokens = torch.cat([_summed(group, [next(grads) for _ in group]) for group in run.leaves], 1)
        constants = [
            embedding_part(entry, None if entry is None else next(grads), group[0])
            for entry, group in zip(entries, run.leaves, strict=True)
        ]
        embedding, parts = torch.cat(constants, 1), None
        if embedding.shape != tokens.shape:
            raise UncoveredError(
                f"{type(self._spec.model).__name__} runs its layers on {len(embedding)} sequences for {len(tokens)} of "
                "its input, such as several copies of the stream, and shares are those of one stream."
            )
        if by == "depth":
            parts = by_depth(scalar, streams, list(grads))
        elif by == "layer":
            parts = by_layer(self._layers, list(grads))
        return Shares(
            tokens + embedding,
            embedding,
            scalar.constant - embedding.sum(1),
            scalar.value - scalar.linear,
            self._spec.value(scalar.value, target, logit),
            scalar.terms,
            parts,
        )

    def _depth_streams(self) -> list[Stream]:
        if len(self.streams) > 1:
            raise UncoveredError(
                f"{type(self._spec.model).__name__} has several streams of tokens "
                f"({', '.join(stream.name for stream in self.streams)}), and shares by depth are those of the stream "
                "that enters a block; use by='layer' or by='tokens'."
            )
        return block_streams(self._layers, self._pass.streams, self._pass.leaves[0][0].shape[1])

    @runs_in_gradient_mode(True)
    def unembedding(self, target: Any = -1, logit: Logit = None) -> Unembedding:
        """Return a logit, or another scalar of the output, as a function of the last residual stream.

        The stream is the last sum of two carried tensors of one shape (batch, length, channel): every layer is added to
        it, and the final norm reads it. Raises the errors of `shares`, and `UncoveredError` if the stream is normed or
        multiplied between two layers, or begun anew by the last one, so that layers are not all added to one stream.
        """
        stream = self._pass.last_stream
        if stream is None or stream.value.shape != self._layers[-1].output.shape:
            raise UncoveredError(
                f"{type(self._spec.model).__name__} norms or multiplies its residual stream between its layers, or its "
                "last residual sum is hidden in a kernel, so its layers are not added to one stream that the final "
                "norm reads, and their contributions to a logit cannot be told apart there."
            )
        scalar = self._linearized(target, logit, self._pass)
        (slope,) = scalar.gradients([stream.value])
        gradient = torch.zeros_like(stream.value) if slope is None else slope
        constant = 0 if stream.tangent is None else by_token(stream.tangent, gradient).sum(1)
        bias, remainder = scalar.constant - constant, scalar.value - scalar.linear
        value = self._spec.value(scalar.value, target, logit)
        return Unembedding(stream.value.detach(), gradient, bias, remainder, value)

    def complete_shares(self, target: Any = -1, logit: Logit = None, *, by: By = "tokens") -> Shares:
        """Return `shares` after checking that they add up.

        Raises `ExactnessError` if a gap exceeds the tolerance of the host's dtype (see `tracing.trust`) relative to the
        parts' size; it names the first module that is not affine. Inside `trusting("warn")` the message is kept in
        `doubt` instead.
        """
        shares = self.shares(target, logit, by=by)
        self._require_sum(shares, by)
        return shares

    def _require_sum(self, shares: Shares, by: By) -> None:
        accepted = max(layer_tolerance(layer.precision) for layer in self._layers)
        doubt = None if self.doubt else doubt_of(shares, by, self._layers, accepted, self.culprit)
        if doubt is not None:
            require_trust(doubt)
            self.doubt = f"{doubt}."

    @runs_in_gradient_mode(True)
    def affine(self, target: Any = -1, logit: Logit = None, *, outputs: bool = False) -> AffineScalar:
        """Return a logit, or another scalar of the output, as a function of the tokens' vectors: one backward pass.

        `outputs` asks for the gradients at the layers' outputs too. Raises the errors of `complete_shares`, and
        `UncoveredError` for a model with several streams of tokens.
        """
        if len(self.streams) > 1:
            raise UncoveredError(
                f"{type(self._spec.model).__name__} has several streams of tokens "
                f"({', '.join(stream.name for stream in self.streams)}), and other values are those of one stream."
            )
        run, (leaves,) = self._pass, self._pass.leaves
        scalar, entry = self._linearized(target, logit, run), run.entries.get(0)
        vectors, leading = [leaf.detach() for leaf in leaves], list(leaves)
        if entry is not None and has_constants(entry, leaves[0].shape[1]):
            assert entry.tangent is not None
            vectors, leading = [*vectors, entry.tangent], [*leading, entry.value]
        slopes = scalar.gradients([*leading, *(run.outputs if outputs else ())])
        gradients = [torch.zeros_like(x) if slope is None else slope for x, slope in zip(vectors, slopes, strict=False)]
        early = by_token(vectors[-1], gradients[-1]).sum(1) if len(vectors) > len(leaves) else 0
        affine = AffineScalar(
            tuple(vectors),
            tuple(gradients),
            slopes[len(leading) :],
            scalar.constant - early,
            scalar.value - scalar.linear,
            self._spec.value(scalar.value, target, logit),
            scalar.terms,
        )
        self._require_sum(affine.shares, "tokens")
        return affine

    @runs_in_gradient_mode(True)
    def bias_by_source(self, target: Any = -1, logit: Logit = None) -> dict[str, Float[Tensor, " batch"]]:
        """Return the parts of `Shares.bias` by the module that adds them, which sum to it: path to (batch,), float64.

        A traced layer is one source, and "" the model itself. Constants that are added to the tokens' embeddings are in
        `Shares.embedding` and not here. Runs the host once more, and takes a backward pass for each sequence, because a
        bias is the same tensor for all of them.
        """
        run = FrozenPass(self._spec, rule=self._rule, records_sources=True)
        scalar = self._linearized(target, logit, run)
        entries = [e for number, e in run.entries.items() if has_constants(e, run.leaves[number][0].shape[1])]
        return biases(scalar, run.sources, self._layers, run.outputs, entries)

    def _linearized(self, target: Any, logit: Logit, run: FrozenPass) -> Linearized:
        return linearized(run.output, run.tangents, self._spec.scalar(target, logit), run.origins)

    @runs_in_gradient_mode(True)
    def gradients(self, edges: Sequence[GradientEdge], target: Any = -1, logit: Logit = None) -> tuple[Tensor, ...]:
        """Return the gradients of a scalar of the output at edges of the run's graph: one backward pass."""
        scalar = self._linearized(target, logit, self._pass)
        return torch.autograd.grad(scalar.outputs, edges, scalar.slopes, retain_graph=True)

    def culprit(self) -> str | None:
        """Return the first module whose output is not the affine map of its tokens, None if every output is.

        Runs the host once more with tangents that are equal to the values: where they differ, a part of the value took
        a path that torch functions do not see, such as a compiled function.
        """
        return FrozenPass(self._spec, rule=self._rule, whole=True).suspect


def _summed(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Float[Tensor, "batch key"]:
    """Return the shares of the tokens of one stream, whose vectors are the leaves."""
    shares = [by_token(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    return torch.stack(shares).sum(0) if shares else leaves[0].new_zeros(leaves[0].shape[:2], dtype=torch.float64)


def frozen(trace: Trace, targets: Sequence[Target] | None = None, *, rule: Rule = FREEZE) -> FrozenRun:
    """Run a traced model once more as one affine map of its tokens, see `FrozenRun`.

    Args:
        trace: the trace.
        targets: positions whose logits the run computes, if the model accepts `logits_to_keep`; None for all.
        rule: how products share relevance; by default the activated factor of a product is frozen.

    Raises `ModelStateError` if a weight changed since the trace, and the errors of `FrozenRun`.
    """
    trace.weights.require_same(trace.host, trace.model, "its shares would not be those of the traced model")
    return shared_run(trace, targets, rule, lambda positions: FrozenRun(trace, positions, rule=rule))
