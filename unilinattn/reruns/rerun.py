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
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import token_streams
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
    """Whether one run computes several copies of the inputs, each as sequences of every layer.

    A host may compute its images in turn, or all of them as one sequence; it runs on one copy at a time. Where an
    input or a layer has other rows than the sequences of the last layer, or there are several streams of tokens, the
    model runs on two copies to tell, once for a trace.
    """
    last = trace.layers[-1]
    if last not in _repeats:
        batch, rows = len(last.output), [value for value in trace.arguments.values() if isinstance(value, Tensor)]
        sizes = {len(value) for value in (*(row for row in rows if row.ndim > 1), *(x.output for x in trace.layers))}
        _repeats[last] = (sizes <= {batch} and len(token_streams(trace.layers)) == 1) or _computes_copies(trace)
    return _repeats[last]


def _computes_copies(trace: Trace) -> bool:
    batch = len(trace.layers[-1].output)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            output = rerun(trace, torch.arange(batch, device="cpu").repeat(2)).output
        # A host may raise any error on copies of inputs that it does not take apart.
        except Exception:
            return False
    # A loss, which is one number of all sequences, may come first, or a table of the similarities of all pairs.
    outputs = zip(tensors(trace.output), tensors(output), strict=False)
    expected, copies = next(((x, y) for x, y in outputs if _is_twice(x, y)), (None, None))
    if expected is None or copies is None:
        return False
    limit = layer_tolerance(expected.dtype) * float(expected.float().norm())
    return all(float((copy - expected).float().norm()) <= limit for copy in copies.chunk(2))


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
