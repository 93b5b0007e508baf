"""Run a traced model again on chosen sequences of its inputs, without some edges."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import tensors
from unilinattn.errors import InputError, UncoveredError
from unilinattn.host.draws import drawing
from unilinattn.host.inputs import call_host, ids_name
from unilinattn.host.logits import KEEP, at_positions, kept_positions, logits_of
from unilinattn.reruns.cut import Cut, run_without
from unilinattn.tracing.changed_inputs import changed_input
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True)
class Rerun:
    """The output of a run, its (batch, length), the positions of its logits, None for all, and its `plain_sizes`."""

    output: Any
    tokens: tuple[int, int]
    computed: Int[Tensor, " position"] | None
    sizes: Collection[int]

    def logits(
        self, positions: Int[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch position logit"] | Float[Tensor, "batch logit"]:
        """Return the logits at one position of each sequence, or at all; a model that classifies has no positions.

        Raises the errors of `logits_of`, and `InputError` for positions whose logits were not computed.
        """
        logits = logits_of(self.output, "the model", self.tokens, self.computed, sizes=self.sizes)
        if logits.ndim == 2:
            return logits
        if positions is None:
            if self.computed is not None:
                raise InputError(f"the inputs have {KEEP}, so not every position has logits; leave it out.")
            return logits
        return at_positions(logits, positions, self.computed).unsqueeze(1)


def traced_run(trace: Trace) -> Rerun | None:
    """Return the run that was traced, None if it lacks the logits of some positions."""
    explained, length = trace.explained_logit, trace.layers[-1].output.shape[1]
    if not explained.is_computed:
        return None
    tokens = trace.layers[-1].output.shape[0], length
    return Rerun(trace.output, tokens, kept_positions(trace.arguments, length), explained.sizes)


def rerun(
    trace: Trace,
    sequences: Int[Tensor, " run"],
    cuts: Sequence[Cut] = (),
    *,
    positions: Int[Tensor, " run"] | None = None,
    ids: Int[Tensor, "run length"] | None = None,
) -> Rerun:
    """Run a traced model without gradients on some of its sequences, without some edges.

    `sequences` are indices of the traced sequences, each any number of times. A host that accepts `logits_to_keep`
    computes only the logits at `positions`, one for each of these sequences. `ids` take the place of those of the
    sequences, for inputs that have them.

    The caller compares the weights with those of the trace, once for all runs, because that reads all of them.

    Raises the errors of a call inside `cut`.
    """
    model = trace.host
    arguments = of_sequences(trace, sequences)
    if ids is not None:
        name = ids_name(arguments)
        assert name is not None
        arguments[name] = ids.to(arguments[name])
    length = trace.layers[-1].output.shape[1]
    if positions is not None:
        arguments = trace.explained_logit.kept_at(model, arguments, lambda: [positions])
    copies = len(sequences) / trace.layers[-1].output.shape[0]
    expected = [(layer.name, copies * layer.output.shape[0]) for layer in trace.layers]
    with drawing(trace.draws):
        output = run_without(model, partial(call_host, model, arguments), arguments, cuts, trace.opaque, expected)
    return Rerun(output, (len(sequences), length), kept_positions(arguments, length), trace.explained_logit.sizes)


_repeats: "WeakKeyDictionary[Layer, bool]" = WeakKeyDictionary()
"""Whether a trace repeats, by its last layer."""


def repeats(trace: Trace) -> bool:
    """Whether one run computes several changed copies of the inputs, each as sequences of every layer by themselves.

    A host may compute its images in turn, or all of them as one sequence, or let the sequences of a batch share
    something, such as the capacity of experts; it runs on one copy at a time. The model runs on two copies, one of them
    with other ids, and on this one by itself, to tell, once for a trace.

    Raises `UncoveredError` if a sequence of a batch has another output by itself.
    """
    last = trace.layers[-1]
    if last not in _repeats:
        _repeats[last] = _computes_copies(trace)
        if not _repeats[last]:
            _require_alone(trace)
    return _repeats[last]


def _computes_copies(trace: Trace) -> bool:
    sequences = torch.arange(len(trace.layers[-1].output), device="cpu")
    name = ids_name(trace.arguments)
    ids = None if name is None else trace.arguments[name]
    if name is not None and ids is not None and len(ids) == len(sequences):
        # Equal copies may share something and not show it, such as a maximum over the batch.
        other = changed_input(trace.host, trace.arguments, name)[name]
        changed, output = (_output_of(trace, sequences.repeat(n), torch.cat([other, ids][:n])) for n in (1, 2))
        if changed is not None and output is not None:
            return _is_half(changed, output, 0) and _is_half(trace.output, output, 1)
    output = _output_of(trace, sequences.repeat(2))
    return output is not None and all(_is_half(trace.output, output, half) for half in (0, 1))


def _require_alone(trace: Trace) -> None:
    """Raise `UncoveredError` if a sequence of a batch has another output by itself than in it."""
    count = len(trace.layers[-1].output)
    for sequence in range(count if count > 1 else 0):
        output = _output_of(trace, torch.tensor([sequence], device="cpu"))
        pairs = zip(tensors(trace.output), tensors(output), strict=False)
        rows = ((x[sequence : sequence + 1], y) for x, y in pairs if x.ndim and len(x) == count)
        pair = next(((x, y) for x, y in rows if x.is_floating_point() and x.shape == y.shape), None)
        if pair is not None and not _is_same(*pair):
            raise UncoveredError(
                f"sequence {sequence} of {count} has another output of {trace.model} by itself than in the batch, as "
                "where experts take a number of tokens of all sequences, so runs of single sequences would not be "
                "those of the trace; trace one sequence at a time."
            )


def _output_of(trace: Trace, sequences: Int[Tensor, " run"], ids: Tensor | None = None) -> Any:
    """Return the output of a run, None if the host raises an error."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return rerun(trace, sequences, ids=ids).output
        # A host may raise any error on copies of inputs that it does not take apart.
        except Exception:
            return None


def _is_half(expected: Any, output: Any, half: int) -> bool:
    """Tell whether the first (0) or the second half (1) of the rows of an output are those of another one."""
    # A loss, which is one number of all sequences, may come first, or a table of the similarities of all pairs.
    outputs = zip(tensors(expected), tensors(output), strict=False)
    pair = next(((x, y.chunk(2)[half]) for x, y in outputs if _is_twice(x, y)), None)
    return pair is not None and _is_same(*pair)


def _is_same(expected: Tensor, output: Tensor) -> bool:
    limit = layer_tolerance(expected.dtype) * float(expected.float().norm())
    return float((output - expected).float().norm()) <= limit


def _is_twice(expected: Tensor, copies: Tensor) -> bool:
    shape = expected.shape
    return expected.is_floating_point() and expected.ndim > 0 and copies.shape == (2 * shape[0], *shape[1:])


def of_sequences(trace: Trace, sequences: Int[Tensor, " run"]) -> dict[str, Any]:
    """Return the arguments of a traced call for some of its sequences, each any number of times.

    All rows of an argument belong to the only sequence of a call. Whether a run of several sequences computes each by
    itself tells `repeats`. Raises `UncoveredError` if an argument has other rows than one for each of several
    sequences, or if the model draws random numbers, unless all sequences are asked for in order.
    """
    batch = trace.layers[-1].output.shape[0]
    if trace.draws is not None and batch > 1 and not torch.equal(sequences.cpu(), torch.arange(batch, device="cpu")):
        raise UncoveredError(
            f"{trace.model} draws random numbers, and may draw others for a sequence of a batch than for this sequence "
            "by itself; explain one sequence at a time."
        )

    def selected(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or name == KEEP:
            return value
        if len(value) == batch:
            return value[sequences.to(value.device)]
        if value.ndim == 1 or len(value) == 1 or torch.equal(sequences.cpu(), torch.arange(batch, device="cpu")):
            return value
        if batch == 1:
            return torch.cat([value] * len(sequences))
        raise UncoveredError(
            f"{name} has shape {tuple(value.shape)}, and the layers of {trace.model} have {batch} sequences, "
            "so the rows of one sequence are unknown and it cannot run again by itself."
        )

    return {name: selected(name, value) for name, value in trace.arguments.items()}
