"""Runs of a model under a recorder of its layers."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from unilinattn.host.inputs import call_host, last_real, real_tokens
from unilinattn.host.logits import logits_at
from unilinattn.host.recorder import Recorder
from unilinattn.host.run import run
from unilinattn.host.substitution import may_be_long, operators_at_length
from unilinattn.progress import bars
from unilinattn.tracing.residual import locate_in_stream


def recorded(
    model: nn.Module, given: Mapping[str, Any], opaque: Collection[str], *, progress: bool, above: int
) -> tuple[Recorder, Any]:
    """Run the model with the modules at the paths `opaque` as opaque layers; return the recorder and the output."""
    recorder = Recorder(model, opaque=opaque, locate=locate_in_stream)
    last = [last_real(real_tokens(given))]

    def call() -> Any:
        return call_host(model, logits_at(model, given, lambda: last, above=above))

    with bars(progress):
        return recorder, recorded_run(recorder, call, given, above=above)


def recorded_run(recorder: Recorder, call: Callable[[], Any], given: Mapping[str, Any], *, above: int) -> Any:
    """Return `call()`, a recorded run of the recorder's model on `given`.

    Causal mixers run through their operators on more than `above` tokens. Raises the errors of `run` and of
    `operators_at_length`.
    """
    model = recorder.model
    long = may_be_long(given, above)
    mixers = operators_at_length(model, real_tokens(given), recorder.note_prefix, above) if long else None
    return run(model, call, mixers=mixers, observer=recorder.attached())
