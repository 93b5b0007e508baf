"""Whether the number that a function of the output has for a sequence is one of this sequence alone."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import InputError, UncoveredError
from unilinattn.host.draws import drawing
from unilinattn.host.inputs import ids_name
from unilinattn.host.logits import Logit, logits_of
from unilinattn.host.run import run
from unilinattn.host.scalars import OutputScalar, PairSimilarity, values_of
from unilinattn.host.vectors import at_path, example, expression, pair_table, vectors_in
from unilinattn.reruns.rerun import of_sequences
from unilinattn.tracing.changed_inputs import changed_input
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

_latest: "WeakKeyDictionary[Layer, tuple[Any, bool | None]]" = WeakKeyDictionary()
"""The function that was asked for last, or a reference to it, and the answer, of each trace by its last layer."""


def is_separate(trace: Trace, function: Callable[[Any], Any]) -> bool | None:
    """Tell whether no sequence changes the number of another one; None if that is unknown.

    A row of a table of similarities, such as `out.logits_per_image[:, 0]`, is the number of an image and of the text of
    another sequence. The model runs three times, on its sequences or on two copies of a single one: as in the trace,
    and twice with other inputs for all sequences but one, whose number must stay.
    """
    key: Any = function
    if not isinstance(function, PairSimilarity):
        if isinstance(function, OutputScalar):
            return True
        # Some callable objects have no weak references.
        with suppress(TypeError):
            key = ref(function)
    last = trace.layers[-1]
    if last not in _latest or _latest[last][0] != key:
        _latest[last] = key, _measured(trace, function)
    return _latest[last][1]


def require_separate(trace: Trace, logit: Logit) -> None:
    """Raise `InputError` for a function, or logits, of the output of which another sequence changes the number of one.

    Logits of classes may be similarities only if there are as many classes as sequences.
    """
    batch, explained = trace.token_shape[0], trace.explained_logit
    if callable(logit):
        function, name = logit, "the function `logit`"
    elif explained.exists and explained.logits.shape == (batch, batch):
        function, name = lambda output: logits_of(output, trace.model, sizes=explained.sizes)[:, 0], "each logit"
    else:
        return
    if batch > 1 and is_separate(trace, function) is False:
        path, table = vectors_in(trace.output) or ((), None)
        of_pairs = table is not None and table.shape == (batch, batch)
        advice = f"lambda out: {expression(path, trace.output)}.diagonal()" if of_pairs else example(trace.output)
        raise InputError(
            f"{name} has a number for each of {batch} sequences that the inputs of other sequences change, and scores "
            f"are those of the tokens of one: read each sequence in its row, as logit={advice} does, or explain one "
            "sequence at a time."
        )


def require_pairs(trace: Trace) -> None:
    """Raise `UncoveredError` for one image with several texts, or one text with several images."""
    if advice := advise_pairs(trace):
        raise UncoveredError(f"{trace.model} reads inputs with different numbers of sequences{advice}.")


def advise_pairs(trace: Trace) -> str:
    """Return the end of a sentence on one image with several texts, or one text with several images; else nothing."""
    table = pair_table(trace.output)
    if table is None or len(set(at_path(trace.output, table).shape)) == 1:
        return ""
    of_ids = ids_name(trace.arguments)
    inputs = {
        name: x
        for name, x in trace.arguments.items()
        if isinstance(x, Tensor) and (name == of_ids or (x.is_floating_point() and x.ndim > 2))
    }
    count = max(map(len, inputs.values()), default=1)
    single = next((name for name, x in inputs.items() if len(x) == 1 < count), None)
    if single is None:
        return ""
    sizes = ", ".join(["-1"] * (inputs[single].ndim - 1))
    return (
        f"; {single} has one for the {count} of {' and '.join(name for name in inputs if name != single)}: give "
        f"{single}.expand({count}, {sizes}) and explain each pair, logit={example(trace.output)}"
    )


def _measured(trace: Trace, function: Callable[[Any], Any]) -> bool | None:
    batch = trace.token_shape[0]
    count = max(2, batch)
    sequences = torch.arange(count, device="cpu") % batch
    # A host may raise any error on inputs or numbers of sequences that it does not expect, and so may a function.
    try:
        traced, *others = (_numbers(trace, function, sequences, unchanged) for unchanged in (None, 0, count - 1))
    except Exception:
        return None
    if not bool(traced.isfinite().all()):
        return None
    size = torch.cat([traced, *others]).nan_to_num(0, 0, 0).abs().max()
    limit = layer_tolerance(trace.layers[-1].output.dtype) * float(size)
    changes = (float((numbers - traced)[kept].abs()) for numbers, kept in zip(others, (0, count - 1), strict=True))
    # Written so that a NaN is a change.
    return all(change <= limit for change in changes)


def _numbers(
    trace: Trace, function: Callable[[Any], Any], sequences: Int[Tensor, " run"], unchanged: int | None
) -> Float[Tensor, " run"]:
    """Return the numbers of a run in which ids and numbers of all sequences but one are others, or of none if None."""
    arguments = of_sequences(trace, sequences) if trace.token_shape[0] == 1 else dict(trace.arguments)
    if unchanged is not None:
        arguments |= _others_changed(trace, arguments, torch.arange(len(sequences), device="cpu") == unchanged)
    with drawing(trace.draws):
        output = run(trace.host, arguments)
    return values_of(function, output, sequences)


def _others_changed(trace: Trace, arguments: Mapping[str, Any], same: Bool[Tensor, " run"]) -> dict[str, Any]:
    """Return the ids and numbers among arguments, with others for all sequences that are not the same."""
    of_ids, result = ids_name(arguments), {}
    for name, value in arguments.items():
        is_input = isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(same)
        if is_input and (value.is_floating_point() or name == of_ids or name.endswith("input_ids")):
            changed = changed_input(trace.host, arguments, name)[name]
            result[name] = torch.where(same.to(value.device).view(-1, *[1] * (value.ndim - 1)), value, changed)
    return result
