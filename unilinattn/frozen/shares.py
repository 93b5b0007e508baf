"""`Shares`: the parts of a scalar of a model's output, which add up to it; `Unembedding`: its last linear part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.frozen.refusals import without_shares
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import key_slots, stream_read, streams_read, token_streams

CANCELLATION = 1e4
"""Largest sum of the shares' absolute values in units of the logit, or of the terms of a difference of logits, that
rounding to float32 leaves three digits of."""


OF_ROWS = 1e-2
"""Largest difference of slopes, relative to the largest of them, at rows that only one scalar depends on."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Shares by layer, in float64, with an axis of layers: tokens + bias = value, up to rounding.

    By depth, a row is the stream that enters the block of a layer: `bias` is the share of what is added later, and
    `value` the linear part of the scalar. By layer, a row is what passes through the layer's output: `value` is the
    gradient there times the output.
    """

    tokens: Float[Tensor, "layer batch key"]
    bias: Float[Tensor, "layer batch"]
    value: Float[Tensor, "layer batch"]

    @property
    def gap(self) -> Float[Tensor, "layer batch"]:
        """The completeness gap |tokens + bias - value|."""
        return (self.tokens.sum(-1) + self.bias - self.value).abs()

    @property
    def size(self) -> Float[Tensor, "layer batch"]:
        """The sum of the parts' absolute values, whose rounding bounds that of the gap."""
        return self.tokens.abs().sum(-1) + self.bias.abs()


@dataclass(frozen=True, eq=False)
class Shares:
    """Parts of a scalar of the output, in float64: tokens + bias + remainder = value, up to rounding.

    Attributes:
        tokens: the share of each token.
        embedding: the part of `tokens` from constants that are added to a token's embedding, such as its position.
        bias: the share of the biases and other constants that are added later.
        remainder: the scalar less its linear part at the output; zero for a logit.
        value: the scalar of the traced output; at length, that of the frozen run.
        terms: the sum of the absolute values of the scalar's terms at the output, whose rounding is that of `value`.
        parts: shares by depth or by layer, if they were asked for.
    """

    tokens: Float[Tensor, "batch key"]
    embedding: Float[Tensor, "batch key"]
    bias: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]
    terms: Float[Tensor, " batch"]
    parts: Parts | None = None

    @property
    def gap(self) -> Float[Tensor, " batch"]:
        """The completeness gap |tokens + bias + remainder - value|."""
        return (self.tokens.sum(1) + self.bias + self.remainder - self.value).abs()

    @property
    def size(self) -> Float[Tensor, " batch"]:
        """The sum of the parts' absolute values, whose rounding bounds that of the gap."""
        return self.tokens.abs().sum(1) + self.bias.abs() + self.remainder.abs()


@dataclass(frozen=True, eq=False)
class AffineScalar:
    """A scalar of the output as a function of the tokens' vectors: sum of vectors . gradients + bias + remainder.

    Attributes:
        vectors: the vectors of the tokens, a tensor for each lookup, and the constants that are added to a stream of
            them, such as positions.
        gradients: the gradient of the scalar at each of `vectors`.
        outputs: the gradients of the scalar at the layers' outputs, None for a layer that it does not depend on; empty
            unless they were asked for.
        bias: the part of the biases and other constants that are added later.
        remainder: the scalar less its linear part at the output; zero for a logit.
        value: the scalar of the traced output; at length, that of the frozen run.
        terms: the sum of the absolute values of the scalar's terms at the output, whose rounding is that of `value`.
    """

    vectors: tuple[Float[Tensor, "batch key _"], ...]
    gradients: tuple[Float[Tensor, "batch key _"], ...]
    outputs: tuple[Tensor | None, ...]
    bias: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]
    terms: Float[Tensor, " batch"]

    @property
    def shares(self) -> Shares:
        """The parts of the scalar by token."""
        tokens = torch.stack([by_token(x, grad) for x, grad in zip(self.vectors, self.gradients, strict=True)]).sum(0)
        return Shares(tokens, torch.zeros_like(tokens), self.bias, self.remainder, self.value, self.terms)


@dataclass(frozen=True, eq=False)
class Unembedding:
    """A scalar of the output as a function of the last residual stream: stream . gradient + bias + remainder = value.

    Attributes:
        stream: the residual stream after the last sum, before the final norm.
        gradient: the gradient of the scalar at the stream, through the frozen final norm and head.
        bias: the part of the biases and other constants after the stream.
        remainder: the scalar less its linear part at the output; zero for a logit.
        value: the scalar of the traced output; at length, that of the frozen run.
    """

    stream: Float[Tensor, "batch query out"]
    gradient: Float[Tensor, "batch query out"]
    bias: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class Stream:
    """A tensor of the run's graph and its tangent, the part of it that comes from constants."""

    value: Tensor
    tangent: Tensor | None


class Linearized(NamedTuple):
    """The first-order part of a scalar of the output.

    Attributes:
        value: the scalar of each sequence.
        linear: its gradient at the output times the output.
        constant: its gradient at the output times the output's tangent.
        terms: the sum of the absolute values that `linear` adds up.
        outputs, slopes: the tensors of the output that depend on tokens, and the gradients there.
        unreached: the part of `constant` from tensors that do not depend on tokens.
    """

    value: Float[Tensor, " batch"]
    linear: Float[Tensor, " batch"]
    constant: Float[Tensor, " batch"]
    terms: Float[Tensor, " batch"]
    outputs: list[Tensor]
    slopes: list[Tensor]
    unreached: Float[Tensor, " batch"]

    def gradients(self, inputs: Sequence[Tensor], sequence: int | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the scalar with respect to tensors of the graph; of one sequence if it is given."""
        slopes = self.slopes
        if sequence is not None:
            slopes = [torch.zeros_like(slope) for slope in slopes]
            for single, slope in zip(slopes, self.slopes, strict=True):
                # Logits in rows of codebooks have several rows for each sequence.
                of_sequence = (t.unflatten(0, (len(self.value), -1))[sequence] for t in (single, slope))
                next(of_sequence).copy_(next(of_sequence))
        return torch.autograd.grad(self.outputs, inputs, slopes, retain_graph=True, allow_unused=True)


def linearized(
    output: Any,
    tangents: Any,
    choose: Callable[[Any], Float[Tensor, " batch"]],
    origins: Sequence[str | None] = (),
) -> Linearized:
    """Return the first-order part of the scalar that `choose` returns from an output.

    `origins` names the function that made each tensor of the output that is a frozen factor.

    Raises `UncoveredError` if it does not depend on a tensor of the output that depends on tokens, or if the rows of
    this tensor are not those of the sequences in turn.
    """
    point = mapped(output, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    value = choose(point)
    leaves = [tensor for tensor in tensors(point) if tensor.requires_grad]
    if not value.requires_grad:
        raise UncoveredError("the scalar does not depend on an output of the model, so it has no shares.")
    slopes = torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
    _require_rows_in_turn(value, leaves, slopes)
    values = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    constants = [tensor for tensor in tensors(tangents) if tensor.is_floating_point()]
    terms = [(s, v, c) for s, v, c in zip(slopes, values, constants, strict=True) if s is not None]
    reached = [(s, v) for s, v, _ in terms if v.requires_grad]
    if not reached:
        made = [name for name, t in zip(origins, tensors(output), strict=False) if t.is_floating_point()]
        read = [(v.detach(), name) for slope, v, name in zip_longest(slopes, values, made) if slope is not None]
        raise UncoveredError(without_shares(read))
    value = value.detach().double()
    count, none = len(value), torch.zeros_like(value)
    linear = sum((_by_sequence(s * v.detach(), count) for s, v, _ in terms), none)
    constant = sum((_by_sequence(s * c, count) for s, _, c in terms), none)
    sizes = sum((_by_sequence((s * v.detach()).abs(), count) for s, v, _ in terms), none)
    unreached = sum((_by_sequence(s * c, count) for s, v, c in terms if not v.requires_grad), none)
    return Linearized(value, linear, constant, sizes, [v for _, v in reached], [s for s, _ in reached], unreached)


def _require_rows_in_turn(
    value: Float[Tensor, " batch"], outputs: Sequence[Tensor], slopes: Sequence[Tensor | None]
) -> None:
    """Raise `UncoveredError` if a scalar depends on rows of an output that are not those of its sequence, in turn.

    Logits in rows of codebooks have as many rows for each sequence.
    """
    pairs = [(x, s) for x, s in zip(outputs, slopes, strict=True) if s is not None and s.shape[:1] != value.shape]
    if not pairs or len(value) == 1:
        return
    # The scalars times 1, 2, 3, ... have these multiples of the slopes at rows that no other scalar depends on.
    weights = torch.arange(1, len(value) + 1, dtype=value.dtype, device=value.device)
    weighted = torch.autograd.grad((weights * value).sum(), [x for x, _ in pairs], retain_graph=True)
    for other, (_, slope) in zip(weighted, pairs, strict=True):
        rows, rest = divmod(len(slope) if slope.ndim else 1, len(value))
        multiples = weights.repeat_interleave(rows).view(-1, *[1] * (slope.ndim - 1))
        if rest or (other - slope * multiples).abs().max() > OF_ROWS * other.abs().max():
            raise UncoveredError(
                f"the scalar of one of {len(value)} sequences depends on rows of an output of shape "
                f"{tuple(slope.shape)} that are not those of this sequence in turn; explain one sequence at a time."
            )


def block_streams(layers: Sequence[Layer], streams: Sequence[Stream | None], keys: int) -> list[Stream]:
    """Return the stream that enters each layer's block; raise `UncoveredError` if one is missing or of other tokens."""
    entering = []
    for layer, stream in zip(layers, streams, strict=True):
        if stream is None or stream.value.shape[1] != keys:
            raise UncoveredError(
                f"no stream of the model's tokens enters a numbered block around {layer.name}, so its shares by depth "
                "are unknown; use by='layer' or by='tokens'."
            )
        entering.append(stream)
    return entering


def embedding_part(
    entry: Stream | None, grad: Tensor | None, vectors: Float[Tensor, "batch key channel"]
) -> Float[Tensor, "batch key"]:
    """Return the share of the constants in the stream that enters the first block, zeros if it has other tokens."""
    if entry is None or grad is None or not has_constants(entry, vectors.shape[1]):
        return vectors.new_zeros(vectors.shape[:2], dtype=torch.float64)
    assert entry.tangent is not None
    return by_token(entry.tangent, grad)


def has_constants(entry: Stream, keys: int) -> bool:
    """Tell whether a stream has constants beside the vectors of its `keys` tokens."""
    return entry.tangent is not None and entry.tangent.shape[1] == keys


def by_depth(scalar: Linearized, streams: Sequence[Stream], grads: Sequence[Tensor | None]) -> Parts:
    """Return the shares of the stream that enters each layer's block."""
    tokens, bias = [], []
    for stream, slope in zip(streams, grads, strict=True):
        grad = torch.zeros_like(stream.value) if slope is None else slope
        tokens.append(by_token(stream.value, grad))
        # The constants that were added before the block are in its stream, and so in the shares.
        earlier = 0 if stream.tangent is None else by_token(stream.tangent, grad).sum(1)
        bias.append(scalar.constant - earlier)
    return Parts(torch.stack(tokens), torch.stack(bias), scalar.linear.expand(len(streams), -1))


def by_layer(layers: Sequence[Layer], grads: Sequence[Tensor | None]) -> Parts:
    """Return sum_i g_i . T_ij x_j for each layer, where g is the scalar's gradient at the layer's output.

    The keys are the tokens of all streams that the layers read (see `streams_read`).
    """
    streams = streams_read(layers)
    slots = key_slots(streams, streams[0].shape[0])
    length, streams = max(slot.stop for slot in slots.values()), token_streams(layers)
    tokens, bias, value = [], [], []
    for layer, slope in zip(layers, grads, strict=True):
        op = layer.operator
        grad = torch.zeros_like(op.output) if slope is None else slope.to(op.output)
        share = grad.new_zeros(grad.shape[0], length, dtype=torch.float64)
        for port, x in op.inputs.items():
            share[:, slots[stream_read(layer, port, layers, streams)]] += by_token(x, op.adjoint(grad, port=port))
        tokens.append(share)
        bias.append(_by_sequence(grad * op.bias, len(grad)))
        value.append(_by_sequence(grad * op.output, len(grad)))
    return Parts(torch.stack(tokens), torch.stack(bias), torch.stack(value))


def biases(
    scalar: Linearized,
    sources: Sequence[tuple[str, Tensor]],
    layers: Sequence[Layer],
    outputs: Sequence[Tensor],
    entries: Sequence[Stream],
) -> dict[str, Float[Tensor, " batch"]]:
    """Return the share of the constants by module: sources of the graph, layers, and "" for constants in the output."""
    names, leaves = [name for name, _ in sources], [leaf for _, leaf in sources]
    enters = [entry.value for entry in entries]
    by_module = {"": scalar.unreached}
    for b in range(len(scalar.value)):
        grads = scalar.gradients([*leaves, *outputs, *enters], b)
        shares = [_inner(leaf, g) for leaf, g in zip(leaves, grads, strict=False)]
        for entered, slope in zip(enters, grads[len(leaves) + len(outputs) :], strict=True):
            if slope is not None:
                # A constant that reaches the logit through the first block's stream belongs to the tokens' embeddings.
                early = torch.autograd.grad(entered, leaves, slope, retain_graph=True, allow_unused=True)
                shares = [share - _inner(leaf, g) for share, leaf, g in zip(shares, leaves, early, strict=True)]
        through = zip(layers, grads[len(leaves) :], strict=False)
        shares += [_inner(layer.operator.bias, g) for layer, g in through]
        for name, share in zip([*names, *(layer.name for layer in layers)], shares, strict=True):
            by_module.setdefault(name, torch.zeros_like(scalar.value))[b] += share
    return {name: total for name, total in by_module.items() if bool(total.any())}


def doubt_of(
    shares: Shares, by: str, layers: Sequence[Layer], accepted: float, culprit: Callable[[], str | None]
) -> str | None:
    """Return a message about shares whose gap exceeds `accepted` times their size, or that cancel; None for others.

    `culprit` returns the first module that is not affine.
    """
    tiny = torch.finfo(torch.float64).tiny
    error = float((shares.gap / shares.size.clamp_min(tiny)).max())
    # Written so that a NaN is refused too.
    if not error <= accepted:
        if bool((shares.gap <= accepted * shares.terms).all()) and culprit() is None:
            return (
                f"the scalar is zero up to rounding: terms of {float(shares.terms.max()):.1e} add up to "
                f"{float(shares.value.abs().max()):.1e}, as the channels behind a norm do, whatever the input. Explain "
                "one that depends on the tokens"
            )
        name, several = culprit(), len(shares.value) > 1
        crossed = (
            "The logit of a sequence may read the others, as the similarities of all images and all texts do; explain "
            "one sequence at a time. Or a"
        )
        return (
            f"shares and biases miss the logit by {error:.1e} of their size, and {accepted:.0e} is accepted. The first "
            f"module that is not affine in the frozen run: {name or 'none'}. "
            f"{crossed if several and name is None else 'A'} compiled function or a custom autograd function hides its "
            "computation; use the module's plain code"
        )
    # A difference of logits may be near zero while its shares are as exact as those of each: its terms are its scale.
    scale = shares.terms.maximum(shares.value.abs()).clamp_min(tiny)
    sizes = (shares.size / scale)[shares.gap > accepted * scale]
    if bool((sizes > CANCELLATION).any()):
        return (
            f"shares and biases are {float(sizes.max()):.1e} times as large as the logit, and rounding of what cancels "
            "makes their sum miss it. Clamps and gates that are frozen may make shares grow with each layer; float64 "
            "has more digits"
        )
    if shares.parts is None:
        return None
    errors = (shares.parts.gap / shares.parts.size.clamp_min(tiny)).amax(1).nan_to_num(torch.inf)
    worst = int(errors.argmax())
    error, name = float(errors[worst]), layers[worst].name
    if error <= accepted:
        return None
    reason = {
        "depth": f"tokens reach the logit beside the stream that enters the block of {name}, for instance "
        "where a model feeds the embeddings or values of an earlier layer in again. Use by='layer' or by='tokens'",
        "layer": f"the operator of {name} misses the host's output",
    }
    return f"shares by {by} miss their sum by {error:.1e} of their size, and {accepted:.0e} is accepted: {reason[by]}"


def by_token(x: Tensor, grad: Tensor) -> Float[Tensor, "batch key"]:
    """Return the inner product of two streams at each token, in float64."""
    return (x.detach().double() * grad.double()).flatten(2).sum(2)


def _inner(constant: Tensor, grad: Tensor | None) -> Tensor | float:
    return 0.0 if grad is None else (constant.detach().double() * grad.double()).sum()


def _by_sequence(product: Tensor, count: int) -> Float[Tensor, " batch"]:
    return product.double().reshape(count, -1).sum(1)
