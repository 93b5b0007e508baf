"""`explain` and `compare`: from a model and its inputs, or a trace, to labelled results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from unilinattn.attribution import Attribution, Comparison
from unilinattn.errors import InputError, OptionError, UncoveredError, nearest
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.costs import Estimate
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.registry import method as registered
from unilinattn.registry import methods as all_methods
from unilinattn.trace import Target, Trace, trace

Tokens = Sequence[str] | Sequence[Sequence[str]]
"""Texts of the key tokens, padding included: one list a sequence, or one list for a single sequence."""


def explain(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    method: str = "rollout",
    target: Target | None = None,
    tokens: Tokens | None = None,
    grid: tuple[int, int] | None = None,
    max_memory: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Attribution:
    """Explain a model on inputs by one method; from a trace nothing is run again but what gradients need.

    `target` is a position, or one a sequence, counted over real tokens, negative from their end; None keeps every
    query. `tokens` and `grid`, the (rows, columns) of an image's patches, label the result.

    `max_memory` bounds the bytes that each operation takes beside its inputs and its result, 1 GiB unless told.
    Work of more than a moment shows a progress bar on a terminal or in a notebook, unless `progress` is False.

    Raises `OptionError` for an unknown method or option, `InputError` for inputs, a target or labels that do not
    fit, `MemoryLimitError` before anything too large is allocated, and whatever `trace` raises.
    """
    chosen = registered(method)
    with limited_to(max_memory), bars(progress):
        found = _traced(model_or_trace, inputs)
        result: Attribution = chosen.function(found, target=target, **options)
    return _with_labels(result, tokens, grid)


def estimate(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    method: str = "rollout",
    target: Target | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> Estimate:
    """Say what `explain` will take with the same arguments: bytes of the result, bytes beside it, multiply-adds.

    A model is run once, to be traced, and operators are built; nothing else is allocated, and nothing is refused for
    its size. Bytes and operations are within a factor of two of what is measured, at lengths where they matter.

    Raises `UncoveredError` for a method that was registered without its cost, else what `explain` does for wrong
    arguments.
    """
    chosen = registered(method)
    if chosen.cost is None:
        known = [name for name, entry in all_methods().items() if entry.cost is not None]
        raise UncoveredError(
            f"{method} was registered without its cost, so nothing can be estimated; give register_method a `cost`. "
            f"Methods that have one: {', '.join(known)}."
        )
    with limited_to(max_memory):
        found: Estimate = chosen.cost(_traced(model_or_trace, inputs), target=target, **options)
    return found


def compare(
    models: Mapping[str, nn.Module | Trace],
    inputs: Any = None,
    *,
    methods: Sequence[str] = ("rollout", "latim"),
    target: Target | None = None,
    tokens: Tokens | None = None,
    grid: tuple[int, int] | None = None,
    max_memory: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Explain several models on the same inputs by several methods; each model runs once, beside gradients.

    An option goes to every method, so each must take it; a mapping under a method's name goes to that method alone:
    `compare(models, ids, methods=["rollout", "latim"], latim={"p": 1})`. `max_memory` and `progress` as in `explain`.

    Raises `OptionError` for unknown methods and for options that a method does not take, naming the method;
    `InputError` for inputs, a target or labels that do not fit.
    """
    if isinstance(methods, str) or not methods:
        raise OptionError(f"methods={methods!r}; give a list of method names" + nearest(methods, all_methods()))
    if not models:
        raise InputError("compare needs a mapping from names to models or traces, at least one; it was given none.")
    chosen = {name: registered(name) for name in methods}
    own = {name: value for name, value in options.items() if name in all_methods()}
    for name, value in own.items():
        if name not in chosen or not isinstance(value, Mapping):
            raise OptionError(
                f"{name}={value!r}: options under a method's name are a mapping, for one of the methods that are "
                f"compared: {', '.join(chosen)}."
            )
    shared = {name: value for name, value in options.items() if name not in own}
    results: dict[str, dict[str, Attribution]] = {}
    with limited_to(max_memory), bars(progress):
        for model, host in steps(models.items(), "models"):
            found = _traced(host, None if isinstance(host, Trace) else inputs)
            results[model] = {
                name: _with_labels(
                    entry.function(found, target=target, **{**shared, **own.get(name, {})}), tokens, grid
                )
                for name, entry in chosen.items()
            }
    return Comparison(results)


def _traced(model_or_trace: nn.Module | Trace, inputs: Any) -> Trace:
    if isinstance(model_or_trace, Trace):
        if inputs is not None:
            raise InputError("a trace holds its inputs already; pass the trace alone, or the model with other inputs.")
        return model_or_trace
    if inputs is None:
        raise InputError(
            f"{type(model_or_trace).__name__} needs inputs: a tensor of ids or pixels, or a mapping of its keyword "
            "arguments."
        )
    return trace(model_or_trace, inputs)


def _with_labels(result: Attribution, tokens: Tokens | None, grid: tuple[int, int] | None) -> Attribution:
    if tokens is None and grid is None:
        return result
    return replace(result, tokens=None if tokens is None else _rows_of(tokens), grid=grid)


def _rows_of(tokens: Tokens) -> list[list[str]]:
    texts = [token for token in tokens if isinstance(token, str)]
    return [texts] if len(texts) == len(tokens) else [list(row) for row in tokens]
