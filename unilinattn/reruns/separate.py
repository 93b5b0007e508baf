"""Whether the number that a function of the output has for a sequence is one of this sequence alone."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import tensors
from unilinattn.errors import InputError, UncoveredError
from unilinattn.host.draws import drawing
from unilinattn.host.inputs import ids_name
from unilinattn.host.run import run
from unilinattn.host.scalars import OutputScalar, values_of
from unilinattn.host.vectors import at_path, example, pair_table
from unilinattn.reruns.rerun import of_sequences
from unilinattn.tracing.changed_inputs import changed_input
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

_latest: "WeakKeyDictionary[Layer, tuple[ref[Any], bool | None]]" = WeakKeyDictionary()
"""The function that was asked for last, and the answer, of each trace by its last layer."""


def is_separate(trace: Trace, function: Callable[[Any], Any]) -> bool | None:
    """Tell whether no sequence changes the number of another one; None if that is unknown.

    A row of a table of similarities, such as `out.logits_per_image[:, 0]`, is the number of an image and of the text of
    another sequence. The model runs twice, on its sequences or on two copies of a single one; each time all inputs but
    those of one sequence are others, whose number must stay.
    """
    last = trace.layers[-1]
    function_before, answer = _latest.get(last, (None, None))
    if function_before is None or function_before() is not function:
        answer = _measured(trace, function)
        # Some callable objects have no weak references.
        with suppress(TypeError):
            _latest[last] = ref(function), answer
    return answer


def require_separate(trace: Trace, function: Any) -> None:
    """Raise `InputError` for a function of the output whose number of a sequence another sequence changes."""
    if trace.token_shape[0] > 1 and callable(function) and is_separate(trace, function) is False:
        name = repr(function) if isinstance(function, OutputScalar) else "the function `logit`"
        raise InputError(
            f"{name} has a number for each of {trace.token_shape[0]} sequences that the inputs of other sequences "
            f"change, and scores are those of the tokens of one: read each sequence in its row, as "
            f"{example(trace.output)} does, or explain one sequence at a time."
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
    single = next((name for name, x in inputs.items() if len(x) == 1), None)
    if single is None:
        return ""
    count, sizes = max(map(len, inputs.values())), ", ".join(["-1"] * (inputs[single].ndim - 1))
    return (
        f"; {single} has one for the {count} of {' and '.join(name for name in inputs if name != single)}: give "
        f"{single}.expand({count}, {sizes}) and explain each pair, logit={example(trace.output)}"
    )


def _measured(trace: Trace, function: Callable[[Any], Any]) -> bool | None:
    batch = trace.token_shape[0]
    try:
        expected = values_of(function, trace.output, torch.arange(batch, device="cpu")).detach()
    except InputError:
        # A method of gradients takes the sum over sequences.
        return None
    count = max(2, batch)
    sequences = torch.arange(count, device="cpu") % batch
    dtype = trace.layers[-1].output.dtype
    # Terms as large as the output may cancel.
    largest = max(float(x.abs().max()) for x in tensors(trace.output) if x.is_floating_point() and x.numel())
    rounding = 64 * torch.finfo(dtype).eps * largest
    for unchanged in (0, count - 1):
        # A host may raise any error on inputs or numbers of sequences that it does not expect, and so may a function.
        try:
            with drawing(trace.draws):
                output = run(trace.host, _others_changed(trace, sequences, unchanged))
            values = values_of(function, output, sequences).to(expected)
        except Exception:
            return None
        size = torch.cat([values[values.isfinite()], expected]).abs().max()
        # Written so that a NaN is a change.
        limit = layer_tolerance(dtype) * float(size) + rounding
        if not float((values[unchanged] - expected[sequences[unchanged]]).abs()) <= limit:
            return False
    return True


def _others_changed(trace: Trace, sequences: Tensor, unchanged: int) -> dict[str, Any]:
    """Return the arguments of some sequences in which ids and numbers of all but one of them are others."""
    arguments = of_sequences(trace, sequences) if trace.token_shape[0] == 1 else dict(trace.arguments)
    of_ids, others = ids_name(arguments), torch.arange(len(sequences), device="cpu") != unchanged
    for name, value in arguments.items():
        is_input = isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(sequences)
        if is_input and (value.is_floating_point() or name == of_ids or name.endswith("input_ids")):
            changed = changed_input(trace.host, arguments, name)[name]
            chosen = others.to(value.device).view(-1, *[1] * (value.ndim - 1))
            arguments[name] = torch.where(chosen, changed, value)
    return arguments
