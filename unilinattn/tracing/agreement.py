"""Compare a trace's output with that of the model as the user calls it, where the trace changes the call.

A trace runs softmax attention that is no plain softmax of scores, such as one with sinks, by the eager function of the
host's file, and adds arguments that the user left out.
Cost: one run of the model, for the first trace of a model in its present state and of a kind of input, and two more in
float32 where the outputs of a model of low precision differ.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call.attention_interface import configurations
from unilinattn.call.exactness import layer_tolerance
from unilinattn.discovery.search import state_of
from unilinattn.discovery.widened import is_low, widened
from unilinattn.errors import InputError
from unilinattn.host.fields import by_field
from unilinattn.host.inputs import real_tokens
from unilinattn.host.logits import logits_in
from unilinattn.host.recorder import Recorder, main_tensor
from unilinattn.host.run import run

CACHE_FLAG = "use_cache"
"""The argument by which a host keeps the states of its tokens."""

_notes: "WeakKeyDictionary[nn.Module, tuple[object, tuple[str, ...]]]" = WeakKeyDictionary()
"""The key of the last comparison of each model, and its sentences."""


def call_of(model: nn.Module, inputs: Any, arguments: Mapping[str, Any], *, opaque: bool) -> dict[str, Any]:
    """Return the arguments of the user's call, with the cache that it fills where this may change the output.

    A host with layers that have no adapter may compute something else with a cache, and one of transformers finds
    packed sequences in the positions only without one.
    """
    named = by_field(inputs) if isinstance(inputs, Mapping) else {}
    call = {name: value for name, value in arguments.items() if not named or name in named or name == CACHE_FLAG}
    if CACHE_FLAG in call and (opaque or "position_ids" in named):
        call[CACHE_FLAG] = named.get(CACHE_FLAG, getattr(getattr(model, "config", None), CACHE_FLAG, False))
    return call


def compared_with_call(
    model: nn.Module, call: Mapping[str, Any], arguments: Mapping[str, Any], output: Any, seed: Tensor
) -> tuple[str, ...]:
    """Return a sentence for each change of the trace that changes the output: arguments that it added or replaced.

    Args:
        model: the model.
        call: the arguments that the user gave, and whether the model fills a cache by default.
        given: the arguments of the traced run.
        output: the output of the traced run.
        seed: the state of the random number generator before that run.

    The differences are relative to the output's norm, over real tokens; those within the tolerance of its dtype (see
    `docs/exactness.md`) are rounding, and so are larger ones of a model of low precision that has none in float32.

    Raises `InputError` if the cache that the call fills by default changes the output.
    """
    added = [name for name in arguments if name not in call or (name == CACHE_FLAG and call[name])]
    implementations = {config._attn_implementation_internal for config in configurations(model)} - {None, "eager"}
    if not added and not implementations:
        return ()
    key = (state_of(model, arguments), _kind(arguments), tuple(added))
    earlier = _notes.get(model)
    if earlier is not None and earlier[0] == key:
        return earlier[1]
    notes: tuple[str, ...] = ()
    plain = run(model, call, seed=seed)
    difference = _difference(plain, output, arguments)
    if difference > _accepted(plain) and not _is_rounding(model, call, arguments, seed):
        if _difference(plain, run(model, call, seed=torch.get_rng_state()), arguments) > _accepted(plain):
            notes = (f"{type(model).__name__} draws random numbers: two runs of it differ.",)
        elif CACHE_FLAG in added and _difference(
            run(model, {**call, CACHE_FLAG: False}, seed=seed), output, arguments
        ) <= _accepted(plain):
            raise InputError(
                f"{type(model).__name__} returns another output with a cache, as this call does, than without one "
                f"(relative difference {difference:.1e}), and a trace runs without a cache. Pass {CACHE_FLAG}=False to "
                "explain the model without it."
            )
        elif added and _difference(run(model, arguments, seed=seed), output, arguments) <= _accepted(plain):
            names = " and ".join(added)
            notes = (
                f"the trace passes {names} to {type(model).__name__}, computed from the attention mask; without them "
                f"the model returns another output (relative difference {difference:.1e}).",
            )
        else:
            notes = (
                f"{type(model).__name__} with its attention implementation ({', '.join(sorted(implementations))}) "
                f"returns another output than with the eager attention of its file (relative difference "
                f"{difference:.1e}), from which the operators are read: they explain the model after "
                "model.set_attn_implementation('eager').",
            )
    _notes[model] = key, notes
    return notes


def _is_rounding(model: nn.Module, call: Mapping[str, Any], arguments: Mapping[str, Any], seed: Tensor) -> bool:
    """Tell whether a model of low precision returns the same output for the call and in a traced run in float32.

    Each of its layers rounds, so what the outputs differ by grows with the depth, and on a GPU with its kernels.
    """
    if not is_low(model, arguments):
        return False
    # A kernel, or a function of another package, may accept no other dtype than the model's.
    with suppress(Exception), widened():
        plain = run(model, call, seed=seed)
        traced = run(model, arguments, observer=Recorder(model).attached(), seed=seed)
        return _difference(plain, traced, arguments) <= layer_tolerance(torch.float32)
    return False


def _difference(output: Any, other: Any, arguments: Mapping[str, Any]) -> float:
    """Return the largest relative difference of two outputs over sequences, over real tokens; 0 without tensors."""
    first, second = _compared(output), _compared(other)
    if first is None or second is None or first.shape != second.shape:
        return 0.0
    mask = real_tokens(arguments)
    if mask is not None and mask.shape == first.shape[:2]:
        first, second = first[mask.to(first.device)], second[mask.to(second.device)]
    finite = first.isfinite() & second.isfinite()
    first, second = first.double().masked_fill(~finite, 0), second.double().masked_fill(~finite, 0)
    return float((first - second).norm() / first.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _compared(output: Any) -> Tensor | None:
    logits = logits_in(output)
    return main_tensor(output) if logits is None else logits


def _accepted(output: Any) -> float:
    compared = _compared(output)
    return layer_tolerance(torch.float32 if compared is None else compared.dtype)


def _kind(arguments: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the axes of each argument and whether one of its masks pads."""
    axes = tuple(sorted((name, x.ndim) for name, x in arguments.items() if isinstance(x, Tensor)))
    return axes, real_tokens(arguments) is not None
