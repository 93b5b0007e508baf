"""`effects`: the fall of a logit with other tokens, split into content, control and interaction."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import ExactnessWarning, InputError, OptionError, UncoveredError, nearest
from unilinattn.frozen.run import FrozenRun, frozen
from unilinattn.frozen.shares import AffineScalar, by_token
from unilinattn.host.inputs import ids_name
from unilinattn.host.logits import Logit
from unilinattn.kernels.precision import full_precision
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.labelled import labels_of_tokens
from unilinattn.methods.run import traced_inputs
from unilinattn.methods.targets import NamedTarget, logit_names, logit_of, position_of
from unilinattn.operator.heads import HeadContributions
from unilinattn.operator.operator import MixerOperator
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.reruns.replacements import Replacement, against_inputs, ids_of, replacements
from unilinattn.reruns.rerun import of_sequences
from unilinattn.reruns.separate import require_separate
from unilinattn.results.effects import Effects, Replaced
from unilinattn.scoring.base import trace_bytes
from unilinattn.scoring.numbers import runs_at_once
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace
from unilinattn.tracing.trust import Trust, require_exact, trusting

By = Literal["tokens", "layer", "head"]
"""Effects through the whole model, through each layer, or through each head of it."""


def effects(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    target: NamedTarget = -1,
    logit: Any = None,
    replaced: Any = None,
    replacement: Any = None,
    against: Any = None,
    by: By = "tokens",
    draws: int = 4,
    seed: int = 0,
    max_memory: int | None = None,
    progress: bool = True,
    trust: Trust = "require",
) -> Effects:
    """Split the effect of each token on a logit into content, control and interaction, by other tokens in its place.

    A run is f(V, F): F are the factors that the input decides (attention, step sizes, decays, gates, norms), V the
    values that they carry, the vectors of the tokens. With x the inputs and x' those with other tokens,

        effect = f(V x, F x) - f(V x', F x'), the fall of the logit,
        content = f(V x, F x) - f(V x', F x), the part that the tokens send along the factors of x,
        control = f(V x, F x) - f(V x, F x'), the part that they decide about the values of x, and
        interaction = (f(V x', F x) - f(V x', F x')) - (f(V x, F x) - f(V x, F x')), which add up to the effect.

    They are exact interventions: each is a value of the frozen run of x or x', which is affine in the vectors (see
    `FrozenRun`). By layer, x' enters one layer l, and all that follows is frozen at x: with g the gradient at the
    layer's output and y = T h + b its operator, effect = g . (y - y'), content = g . T (h - h'), control =
    g . ((T - T') h + b - b') and interaction = g . (T' - T) (h - h'). By head, a layer is the sum of its heads and
    of a last part, "rest", which holds its biases and what passes around its core.

    Cost: for x and for each replacement a run of the model, a frozen run and a backward pass, of as many replacements
    at once as `max_memory` allows; by layer a pass of each operator in addition, by head one for each head.

    Args:
        model_or_trace, inputs, tokenizer, processor, max_memory, progress, trust: as in `explain`.
        target: the position whose logit is explained, as in `explain`.
        logit: the id or text of a token, a class, a pair of them for their difference, or a function of the output that
            is linear in it; by default the prediction on `inputs`, for all replacements.
        replaced: the tokens that are replaced: a position, (first, stop) of several at once, a text that occurs once,
            or a list of these; by default each real token by itself, but for placeholders of images and other inputs.
        replacement: ids or texts in their place, as many tokens as are replaced or one; the mean is over those of a
            list. By default `draws` random ids for each token, which differ, and are no special ids.
        against: a text or ids of the same shape, in place of all tokens at once; instead of the two above.
        by: "tokens", "layer" or "head".
        draws, seed: number of random ids for each token, and the seed of the random numbers.

    Raises `InputError` for inputs without ids, for tokens, targets and replacements that do not exist, inputs of
    another length or mask, and a function that is not linear; `OptionError` for an invalid option; `UncoveredError` for
    a model without a frozen run; and the errors of `explain`.
    """
    if by not in get_args(By):
        raise OptionError(f"unknown effects by {by!r}" + nearest(by, get_args(By)))
    if against is not None and (replaced is not None or replacement is not None):
        raise OptionError("against= replaces all tokens; give it without replaced= and replacement=.")
    if target is None:
        raise OptionError("target=None; effects are those of one logit: give a position, such as target=-1.")
    with limited_to(max_memory), bars(progress), trusting(trust), full_precision():
        traced = traced_inputs(model_or_trace, inputs, tokenizer, processor)
        tokenizer = traced.text.tokenizer if tokenizer is None and traced.text is not None else tokenizer
        position, scalar = position_of(traced, target), logit_of(logit, tokenizer)
        assert position is not None
        if against is not None:
            changes = against_inputs(traced, against, tokenizer)
        else:
            changes = replacements(traced, tokenizer, replaced, replacement, draws, seed)
        measured = _Measurement(traced, position, scalar, by)
        numbers = measured.of(changes)
    for doubt in measured.doubts:
        warnings.warn(doubt, ExactnessWarning, stacklevel=2)
    effect, content, control, interaction, by_token = (
        torch.stack([draws_of.mean(0) for draws_of in column]) for column in zip(*numbers, strict=True)
    )
    return Effects(
        traced.model,
        by,
        _names(traced, scalar, position, tokenizer, len(measured.frozen.value)),
        measured.frozen.value,
        tuple(_labelled(traced, change, tokenizer) for change in changes),
        measured.names,
        effect,
        content,
        control,
        interaction,
        by_token,
        max(float((whole - sum(terms)).abs().max()) for whole, *terms, _ in numbers),
        measured.doubts,
    )


Numbers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Effect, content, control and interaction, (draw, [part]), and the content by token, (draw, [part,] token)."""


@dataclass(frozen=True, eq=False)
class _Four:
    """The scalar with values and factors of either input, for each draw.

    Attributes:
        same: f(V x, F x).
        values: f(V x', F x).
        factors: f(V x, F x').
        both: f(V x', F x').
        content, interaction: the content and the interaction by token.
    """

    same: Float[Tensor, " draw"]
    values: Float[Tensor, " draw"]
    factors: Float[Tensor, " draw"]
    both: Float[Tensor, " draw"]
    content: Float[Tensor, "draw token"]
    interaction: Float[Tensor, "draw token"]

    @property
    def numbers(self) -> Numbers:
        """The four numbers and the content by token."""
        effect, content, control = self.same - self.both, self.same - self.values, self.same - self.factors
        return effect, content, control, self.interaction.sum(1), self.content

    def without(self, other: "_Four") -> "_Four":
        """Return the rest of a sum, less one of its terms."""
        return _Four(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


class _Measurement:
    """The frozen run of the inputs, beside which other inputs are measured.

    Attributes:
        frozen: the scalar of the frozen run of the inputs.
        names: the layers or heads, empty by tokens.
        doubts: a sentence for each doubt about operators and shares.
    """

    def __init__(self, traced: Trace, target: Any, logit: Logit, by: By) -> None:
        """Run the model, frozen."""
        self._trace, self._target, self._logit, self._by = traced, target, logit, by
        self.doubts: tuple[str, ...] = ()
        require_separate(traced, logit)
        self.frozen = self._affine(traced, target, logit)
        if by != "tokens":
            _require_rows(traced)
        names = {"tokens": [], "layer": [[layer.name] for layer in traced.layers]}.get(by)
        self.names = tuple(chain.from_iterable(map(_heads, traced.layers) if names is None else names))
        sequences = traced.token_shape[0]
        size = (trace_bytes(traced) + traced.frozen_cost(1)) // sequences
        self._at_once = runs_at_once(traced, traced.token_shape[1], size, logit)

    def of(self, changes: Sequence[Replacement]) -> list[Numbers]:
        """Return the numbers of each draw, for each of the replacements, which are ordered by sequence."""
        pieces = [
            (sequence, ids)
            for sequence, rows in groupby(changes, lambda change: change.sequence)
            for ids in torch.cat([change.ids for change in rows]).split(self._at_once)
        ]
        numbers = [self._of_piece(*piece) for piece in steps(pieces, "effects")]
        counts = [len(change.ids) for change in changes]
        columns = (torch.cat(column).split(counts) for column in zip(*numbers, strict=True))
        return list(zip(*columns, strict=True))

    def _of_piece(self, sequence: int, ids: Int[Tensor, "draw length"]) -> Numbers:
        traced = self._trace
        arguments = of_sequences(traced, torch.full((len(ids),), sequence, device="cpu"))
        name = ids_name(arguments)
        assert name is not None
        dtype = traced.layers[0].operator.output.dtype
        other = trace(traced.host, {**arguments, name: ids}, dtype=dtype, progress=False)
        if [layer.name for layer in other.layers] != [layer.name for layer in traced.layers]:
            raise UncoveredError(f"{traced.model} runs other layers on the replaced tokens, so nothing is comparable.")
        target, logit = self._for(sequence)
        there = self._affine(other, target, logit)
        self._require_linear(there)
        if self._by == "tokens":
            return _through_model(self.frozen, there, sequence).numbers
        fours = [
            four
            for layer, changed, grad in zip(traced.layers, other.layers, self.frozen.outputs, strict=True)
            for four in _through_layer(layer, changed, grad, sequence, by_head=self._by == "head")
        ]
        effect, content, control, interaction, tokens = (
            torch.stack(each, 1) for each in zip(*(four.numbers for four in fours), strict=True)
        )
        return effect, content, control, interaction, tokens

    def _affine(self, traced: Trace, target: Any, logit: Logit) -> AffineScalar:
        run: FrozenRun = frozen(traced, None if callable(logit) else [target])
        doubts = require_exact(traced.layers)
        scalar = run.affine(target, logit, outputs=self._by != "tokens")
        doubts = (*doubts, *([] if run.doubt is None else [run.doubt]))
        self.doubts = tuple(dict.fromkeys((*self.doubts, *doubts)))
        return scalar

    def _for(self, sequence: int) -> tuple[int, Logit]:
        """Return the target and the logit of one sequence: the prediction is that on the traced inputs."""
        count = self._trace.token_shape[0]
        target = int(torch.as_tensor(self._target).expand(count)[sequence])
        if self._logit is not None:
            return target, self._logit
        prediction = self._trace.explained_logit.prediction(self._target)
        assert prediction is not None
        return target, int(prediction[sequence])

    def _require_linear(self, there: AffineScalar) -> None:
        if not callable(self._logit):
            return
        allowed_error = max(layer_tolerance(layer.precision) for layer in self._trace.layers)
        remainders = torch.cat([self.frozen.remainder, there.remainder])
        if float(remainders.max() - remainders.min()) > allowed_error * float(self.frozen.terms.max()):
            raise InputError(
                "effects: the function `logit` is not linear in the model's output, and a frozen run is one linear map "
                "up to there; give a token or class id, or a pair of them for their difference."
            )


def _through_model(here: AffineScalar, there: AffineScalar, sequence: int) -> _Four:
    row = slice(sequence, sequence + 1)
    same = here.value[row].expand(len(there.value))
    values, factors = here.bias[row] + here.remainder[row], there.bias + there.remainder
    content, interaction = [], []
    for x, grad, other, other_grad in zip(here.vectors, here.gradients, there.vectors, there.gradients, strict=True):
        values = values + by_token(other, grad[row]).sum(1)
        factors = factors + by_token(x[row], other_grad).sum(1)
        difference = x[row].double() - other.double()
        content.append(by_token(difference, grad[row]))
        interaction.append(by_token(difference, other_grad.double() - grad[row].double()))
    return _Four(same, values, factors, there.value, torch.stack(content).sum(0), torch.stack(interaction).sum(0))


def _through_layer(
    layer: Layer, changed: Layer, slope: Tensor | None, sequence: int, *, by_head: bool
) -> Iterator[_Four]:
    """Yield the numbers of each part of a layer, for a gradient at its output."""
    op, other = layer.operator, changed.operator
    row, count = slice(sequence, sequence + 1), len(other.output)
    grad = torch.zeros_like(op.output) if slope is None else slope.to(op.output)
    grads = grad[row].expand(count, *grad.shape[1:])

    def of(port: str, pulled: Tensor, other_pulled: Tensor) -> _Four:
        h, h_other = op.inputs[port][row], other.inputs[port]
        here = pulled[row]
        return _Four(
            by_token(h, here).sum(1).expand(count),
            by_token(h_other, here).sum(1),
            by_token(h, other_pulled).sum(1),
            by_token(h_other, other_pulled).sum(1),
            by_token(h.double() - h_other.double(), here),
            by_token(h.double() - h_other.double(), other_pulled.double() - here.double()),
        )

    bias, other_bias = _product(grad[row], op.bias[row]), _product(grads, other.bias)
    values, factors = bias.expand(count), other_bias
    content, interaction = [], []
    for port in op.ports:
        four = of(port, op.adjoint(grad, port=port), other.adjoint(grads, port=port))
        values, factors = values + four.values, factors + four.factors
        content.append(four.content)
        interaction.append(four.interaction)
    # The first and the last number are those of the recorded outputs, so that the gap compares the operators with them.
    same, both = _product(grad[row], op.output[row]).expand(count), _product(grads, other.output)
    rest = _Four(same, values, factors, both, torch.stack(content).sum(0), torch.stack(interaction).sum(0))
    if by_head:
        heads, other_heads = _contributions(op), _contributions(other)
        for head in range(heads.count):
            four = of(op.ports[0], heads.adjoint(grad, head), other_heads.adjoint(grads, head))
            rest = rest.without(four)
            yield four
    yield rest


def _contributions(op: MixerOperator) -> HeadContributions:
    return HeadContributions.of(op, range(op.num_heads("core")), joint=False)


def _heads(layer: Layer) -> list[str]:
    count = _contributions(layer.operator).count
    return [*(f"{layer.name}, head {head}" for head in range(count)), f"{layer.name}, rest"]


def _product(x: Tensor, grad: Tensor) -> Float[Tensor, " batch"]:
    return (x.double() * grad.double()).flatten(1).sum(1)


def _require_rows(traced: Trace) -> None:
    batch, length = ids_of(traced).shape
    for layer in traced.layers:
        for port, x in layer.operator.inputs.items():
            if tuple(x.shape[:2]) != (batch, length):
                raise UncoveredError(
                    f"{layer.name} reads {port!r} of shape {tuple(x.shape)}, which are no {batch} sequences of "
                    f"{length} tokens; take by='tokens'."
                )


def _names(traced: Trace, logit: Logit, target: Any, tokenizer: Any, sequences: int) -> tuple[str, ...]:
    """Return the name of each sequence's logit."""
    if callable(logit):
        return ("logit(output)",) * sequences
    names = logit_names(traced, logit, target, tokenizer)
    if names is None:
        prediction = None if logit is not None else traced.explained_logit.prediction(target)
        ids: Sequence[Any] = [logit] * sequences if prediction is None else [[token] for token in prediction.tolist()]
        return tuple(
            " - ".join(f"logit {each}" for each in (row if isinstance(row, (list, tuple)) else [row])) for row in ids
        )
    return tuple(" - ".join(map(repr, row)) for row in names)


def _labelled(traced: Trace, change: Replacement, tokenizer: Any) -> Replaced:
    row = change.sequence
    if tokenizer is None:
        text = " ".join(map(str, ids_of(traced)[row, change.tokens].tolist()))
    else:
        labels = labels_of_tokens(tokenizer, traced)[row]
        text = "".join(labels[token] for token in change.tokens.tolist())
    return Replaced(row, change.first, change.last, text, len(change.ids))
