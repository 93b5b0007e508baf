"""Runs of a model under a recorder of its layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.discovery.enclosing import UnregisteredMixer
from unilinattn.discovery.search import refuse, remembered_mixers, unregistered_mixers
from unilinattn.host.draws import States, drawing
from unilinattn.host.inputs import call_host, last_real, real_tokens
from unilinattn.host.isolation import isolated
from unilinattn.host.logits import logits_at
from unilinattn.host.module_calls import require_covered_calls
from unilinattn.host.products import Products
from unilinattn.host.recorder import Recorder
from unilinattn.host.run import run
from unilinattn.host.substitution import may_be_long, operators_at_length
from unilinattn.progress import bars
from unilinattn.tracing.stream_locator import StreamLocator


def covered_run(
    model: nn.Module, arguments: Mapping[str, Any], *, strict: bool, progress: bool, above: int
) -> tuple[Recorder, Any, Tensor]:
    """Run a model whose modules that mix tokens all have adapters, or become opaque layers.

    Returns the recorder, the output, and the state of the random number generator before the run. The first run of a
    model is followed by a search for mixers without an adapter; if there are any, the model runs again.

    Raises the errors of `refuse`, of `require_covered_calls` and of `recorded_run`.
    """
    mixers = remembered_mixers(model, arguments, above)
    if mixers:
        refuse(model, (), mixers, arguments, strict=strict)
    seed = torch.get_rng_state()
    is_known = mixers is not None
    recorder, output = _recorded(model, arguments, mixers or (), strict if is_known else None, progress, above)
    if mixers is None:
        mixers = unregistered_mixers(model, arguments, recorder.layers, above)
        refuse(model, recorder.layers, mixers, arguments, strict=strict)
        if mixers:
            # The same numbers again, so that a host which draws some has the output of one call.
            torch.set_rng_state(seed)
            recorder, output = _recorded(model, arguments, mixers, strict, progress, above)
        else:
            # A check may run a module again, which may keep tables of positions.
            isolated(model, lambda: require_covered_calls(recorder.layers, strict=strict))
    refuse(model, recorder.layers, (), arguments, strict=strict)
    return recorder, output, seed


def _recorded(
    model: nn.Module,
    arguments: Mapping[str, Any],
    mixers: Sequence[UnregisteredMixer],
    strict: bool | None,
    progress: bool,
    above: int,
) -> tuple[Recorder, Any]:
    """Run the model with `mixers` as opaque layers; return the recorder and the output.

    The calls are checked (see `require_covered_calls`), unless `strict` is None. A check may run a module again, which
    may keep tables of positions, so the model is restored afterwards.
    """
    paths = [mixer.path for mixer in mixers]
    locate = StreamLocator(model, arguments)
    recorder = Recorder(model, opaque=paths, locate=locate, products=Products.of_run())
    last = [last_real(real_tokens(arguments))]

    def call() -> Any:
        return call_host(model, logits_at(model, arguments, lambda: last, above=above))

    def check() -> None:
        if strict is not None:
            require_covered_calls(recorder.layers, strict=strict)

    with bars(progress):
        return recorder, recorded_run(recorder, call, arguments, above=above, after=check)


def recorded_run(
    recorder: Recorder,
    call: Callable[[], Any],
    arguments: Mapping[str, Any],
    *,
    above: int,
    after: Callable[[], object] | None = None,
) -> Any:
    """Return `call()`, a recorded run of the recorder's model on `arguments`.

    Causal mixers run through their operators on more than `above` tokens. Raises the errors of `run`, for which `after`
    is, and of `operators_at_length`.
    """
    model = recorder.model
    long = may_be_long(arguments, above)
    mixers = operators_at_length(model, real_tokens(arguments), recorder.note_prefix, above) if long else None
    return run(model, call, mixers=mixers, observer=recorder.attached(), after=after)


def depends_on_draws(model: nn.Module, arguments: Mapping[str, Any], states: States) -> bool:
    """Tell whether the output of a model depends on the random numbers that it draws: two runs with other ones.

    A host that may leave layers out in training draws for each of them in any case. `states` are those of its
    generators.
    """

    def output(seed: int) -> list[Tensor]:
        others = {device: torch.Generator(device).manual_seed(seed).get_state() for device in states}
        with drawing(others):
            return list(tensors(run(model, arguments)))

    first, second = output(1), output(2)
    pairs = zip(first, second, strict=False)
    same = all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    return not same or len(first) != len(second)
