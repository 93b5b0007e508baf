"""`explain` and `compare`: from a model and its inputs, or a trace, to labelled results."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unilinattn.errors import ExactnessWarning, InputError, NonFiniteError, OptionError, UncoveredError, nearest
from unilinattn.host.isolation import with_gradients
from unilinattn.host.products import recorded_products
from unilinattn.kernels.precision import full_precision
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.check import Checker
from unilinattn.methods.default import COMPOSED, by_vectors, chosen_method, default_note
from unilinattn.methods.doubts import equal_weights, head_underflow, only_zeros, warn_of_sinks
from unilinattn.methods.labelled import Tokens, with_labels
from unilinattn.methods.needs import REFUSALS, advised
from unilinattn.methods.targets import NamedTarget, explained_options, logit_of, position_of
from unilinattn.options import AltiLogit, AttnLrp, Logit, Lrp, Options
from unilinattn.options.base import refuse_class
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.registry import Method, list_methods
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.base import trace_bytes
from unilinattn.tracing.trace import Target, Trace, trace
from unilinattn.tracing.trust import Trust, require_exact, trusting

RUNNING_AGAIN = frozenset([None, *(each.name for each in (AltiLogit, AttnLrp, Logit, Lrp))])
"""Names of the methods that run the traced model again on the same inputs, the default among them."""


def explain(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    method: str | Options | None = None,
    target: NamedTarget | None = None,
    tokens: Tokens | None = None,
    grid: tuple[int, int] | None = None,
    bos: bool = False,
    max_memory: int | None = None,
    progress: bool = True,
    trust: Trust = "require",
    check: bool = False,
    **options: Any,
) -> Attribution:
    """Explain a model on inputs by one method.

    The model runs once to be traced; a trace needs no run, except for gradients and for methods that run it again with
    frozen factors. These take the results of linear layers and the weights of attentions from the run that was traced
    by the same call, up to `max_memory` of them.

    Args:
        model_or_trace: the model, or a trace of it.
        inputs: inputs of the model as in `trace`, such as a text or an image; None for a trace.
        tokenizer: the tokenizer of texts; it also labels the tokens and reads the option `logit` if that is a text.
        processor: the processor of images, as in `trace`.
        method: a method, such as `methods.Latim(p=1)`, or the name of one; by default `AttnLrp(split="thirds")` for a
            model with causal softmax attention and `Lrp(measure="log-odds")` for others, of the logit for labels with a
            sigmoid each and for a regression, of a dual encoder (CLIP) for the similarity of each pair; for a model
            without logits `Alti(compose="rollout")`, or where its layers cannot be composed `Lrp` or `AttnLrp` of the
            length of its output, or `latim` or `raw` of each layer, with a warning; the result names it.
        target: a position, or one for each sequence, counted over real tokens and negative from their end; "last";
            "cls" for the token that class logits read; a text or a compiled pattern, for the last token of the only
            place in each input text where it matches; None keeps every query.
        tokens: labels of the keys: texts, or a tokenizer for the texts of the model's ids.
        grid: the (rows, columns) of an image's patches, for vision models whose patches are unknown to
            `Trace.image_tokens`.
        bos: whether the tokenizer's beginning-of-text token goes before each text, as in `trace`.
        max_memory: bytes that each operation may take in addition to its inputs and result, by default 1 GiB.
        progress: whether long work shows a progress bar on a terminal or in a notebook.
        trust: "require" raises an error for a layer whose reconstruction error exceeds the tolerance of its dtype (see
            `docs/exactness.md`) before a method uses it, and for shares that miss the logit by more than that
            tolerance; "warn" warns, and the result keeps the warning.
        check: whether to run the model with other tokens in place of those with the largest scores, and of random ones,
            and store the falls of the explained value in `checks`, as `Attribution.check` returns them.
        options: options of a method that is given by its name.

    Raises `OptionError` for an unknown method or option, `InputError` for inputs, a target or labels that do not
    fit, `ExactnessError` for a layer that misses the host's output, `NonFiniteError` for scores beyond the range of
    their dtype, `MemoryLimitError` before anything too large is allocated, `UncoveredError` for a model that the method
    does not cover, and the errors of `trace`. An error of coverage or exactness names the methods that work here: what
    they need is tried on traces of up to 4096 tokens, which takes about ten runs of the model.
    """
    name, options = (None, options) if method is None else named(method, options)
    with limited_to(max_memory), bars(progress), trusting(trust):
        with recorded_products() if name in RUNNING_AGAIN else nullcontext():
            traced = traced_inputs(model_or_trace, inputs, tokenizer, processor, bos=bos)
        target, options = _by_position(traced, tokenizer, target, options)
        entry, options = chosen_method(name, options, traced)
        advice = advised(traced, target, entry, options, note=default_note(entry, name))
        options = explained_options(traced, entry, target, options)
        with traced.weights.compared(), advice:
            try:
                result = run_method(entry, traced, target, options)
            except REFUSALS as refusal:
                if name is not None or entry.name != COMPOSED.name:
                    raise
                result, options = by_vectors(run_method, traced, target, options, refusal)
            finally:
                traced.products = None
        result = with_labels(result, traced, tokens, tokenizer, grid)
        reader = traced.text.tokenizer if tokenizer is None and traced.text is not None else tokenizer
        result = replace(result, checker=Checker(traced, target, options.get("logit"), reader))
        if check:
            result = replace(result, checks=[result.check(batch=b) for b in range(result.sizes.get("batch", 1))])
    return warn_of_sinks(result, traced)


def estimate(
    model_or_trace: nn.Module | Trace,
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    method: str | Options | None = None,
    target: NamedTarget | None = None,
    bos: bool = False,
    max_memory: int | None = None,
    trust: Trust = "require",
    **options: Any,
) -> Estimate:
    """Estimate the memory of `explain` with the same arguments: that of the result, that in addition to it, the trace.

    A model runs once, to be traced, and its operators are built and checked. A dual encoder, and with several sequences
    and a function as `logit` any model, runs three times more, to tell that no sequence changes the number of another.
    Nothing else is allocated, and nothing is refused for its size. Bytes are within a factor of two of the measured
    ones at lengths where they matter.

    Raises `UncoveredError` for a method without an estimate (`knockout` and the methods of captum, which run the model
    many times), and the errors of `explain` for invalid arguments.
    """
    name, options = (None, options) if method is None else named(method, options)
    if name is not None and registered(name).cost is None:
        costed = [other for other, entry in list_methods().items() if entry.cost is not None]
        raise UncoveredError(
            f"{name} has no estimate, because it was registered without a `cost`. A method that only runs the model "
            f"takes the time and memory of these runs; the page of the method states how many they are. Methods that "
            f"have an estimate: {', '.join(costed)}."
        )
    with limited_to(max_memory), trusting(trust):
        traced = traced_inputs(model_or_trace, inputs, tokenizer, processor, bos=bos)
        target, options = _by_position(traced, tokenizer, target, options)
        entry, options = chosen_method(name, options, traced)
        assert entry.cost is not None
        note = default_note(entry, name)
        with advised(traced, target, entry, options, note=note, costed=True), full_precision():
            options = explained_options(traced, entry, target, options)
            return replace(entry.cost(traced, target=target, **options), trace=trace_bytes(traced))


def compare(
    models: Mapping[str, nn.Module | Trace],
    inputs: Any = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    methods: Sequence[str | Options] = ("logit", "rollout", "latim"),
    target: NamedTarget | None = None,
    tokens: Tokens | None = None,
    grid: tuple[int, int] | None = None,
    bos: bool = False,
    max_memory: int | None = None,
    progress: bool = True,
    trust: Trust = "require",
    **options: Any,
) -> Comparison:
    """Explain several models on the same inputs by several methods.

    Each model runs once, except for gradients. `models` maps names to models or traces, and `methods` are names or
    objects with options: `compare(models, ids, methods=["rollout", methods.Latim(p=1)])`. An option applies to every
    method, so each must be a name that accepts it; a mapping under a method's name, such as `latim={"p": 1}`, applies
    only to that method. The other arguments are those of `explain`.

    Raises `OptionError` for an unknown method and for an option that a method does not accept, `InputError` for inputs,
    a target or labels that do not fit, and the other errors of `explain`.
    """
    if isinstance(methods, str) or not methods:
        raise OptionError(f"methods={methods!r}; give a list of method names" + nearest(methods, list_methods()))
    if not isinstance(models, Mapping) or not models:
        raise InputError(
            f"models is {'an empty' if isinstance(models, Mapping) else 'a'} {type(models).__name__}; compare needs a "
            'mapping from names to models or traces, such as {"mamba": model}.'
        )
    by_method = {name: value for name, value in options.items() if name in list_methods()}
    for name, value in by_method.items():
        if name not in methods or not isinstance(value, Mapping):
            raise OptionError(
                f"{name}={value!r}: options under a method's name are a mapping, for one of the methods that are "
                f"compared: {', '.join(map(str, methods))}."
            )
    shared = {name: value for name, value in options.items() if name not in by_method}
    rows = {}
    for method in methods:
        label, more = (method.label, {}) if isinstance(method, Options) else (method, by_method.get(method, {}))
        rows[label] = named(method, {**shared, **more})
    results: dict[str, dict[str, Attribution]] = {}
    with limited_to(max_memory), bars(progress), trusting(trust):
        for model, host in steps(models.items(), "models"):
            traced = traced_inputs(host, None if isinstance(host, Trace) else inputs, tokenizer, processor, bos=bos)
            results[model] = {}
            for label, (method, keywords) in rows.items():
                entry = registered(method)
                position, keywords = _by_position(traced, tokenizer, target, keywords)
                with advised(traced, position, entry, keywords):
                    keywords = explained_options(traced, entry, position, keywords)
                    result = run_method(entry, traced, position, keywords)
                results[model][label] = warn_of_sinks(with_labels(result, traced, tokens, tokenizer, grid), traced)
    return Comparison(results)


def run_method(method: Method, trace: Trace, target: Target | None, options: Mapping[str, Any]) -> Attribution:
    """Run a method, check the layers of its result against the host's outputs, and keep the warnings in the result.

    Raises `NonFiniteError` if a score is NaN or infinite.
    """
    with full_precision():
        result = with_gradients(lambda: method.function(trace, target=target, **options))
        doubts = require_exact(layer for layer in trace.layers if layer.name in result.layers)
        _require_finite(result)
        zeros = head_underflow(result, trace, target) or only_zeros(result)
        doubts = (*doubts, *zeros, *equal_weights(result, trace, target), *result.warnings)
    for doubt in doubts:
        warnings.warn(doubt, ExactnessWarning, stacklevel=3)
    return replace(result, warnings=doubts) if doubts else result


def _require_finite(result: Attribution) -> None:
    scores = result.scores
    # Unlike `isfinite`, extremes take no memory; NaN is both.
    if scores.numel() and not torch.stack(scores.aminmax()).isfinite().all():
        wrong = int((~scores.isfinite()).sum())
        dtype = str(scores.dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"{result.method}: {wrong} of {scores.numel()} scores are NaN or infinite, though all {len(result.layers)} "
            f"layers are finite. An entry of a layer's map, or a sum over layers, exceeds "
            f"{torch.finfo(scores.dtype).max:.0e}, the range of {dtype}: {_remedy(result)}"
        )


def _remedy(result: Attribution) -> str:
    if result.options.get("heads") == "product":
        return "take heads='geometric-mean', the root of the product over heads, or trace the model in float64."
    return (
        "trace the model in float64 (model.double()), or normalise the maps (normalize='rows', if the method has it)."
    )


def named(method: str | Options, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a method and its options as keywords, before the model runs.

    Raises `OptionError` for an unknown name or a class, and for keywords beside an object, which has its options.
    """
    refuse_class(method)
    if isinstance(method, Options):
        if options:
            raise OptionError(
                f"{method!r} has its options; give {', '.join(options)} to {type(method).__name__}, or the name "
                f"{method.name!r} with all of them."
            )
        return registered(method.name).name, method.keywords
    return registered(method).name, dict(options)


def traced_inputs(
    model_or_trace: nn.Module | Trace, inputs: Any, tokenizer: Any, processor: Any = None, *, bos: bool = False
) -> Trace:
    """Return a trace unchanged, or that of a model on its inputs.

    Raises `InputError` for both, or for neither, and `ModelStateError` if the weights changed since the trace, which
    its operators read.
    """
    if isinstance(model_or_trace, Trace):
        if bos:
            raise OptionError("a trace holds its tokens already; pass bos=True to `trace`.")
        if isinstance(inputs, str) and inputs in list_methods():
            raise InputError(f"a trace holds its inputs already; name the method as method={inputs!r}.")
        if inputs is not None:
            raise InputError("a trace holds its inputs already; pass only the trace, or the model with other inputs.")
        host, name = model_or_trace.host, model_or_trace.model
        model_or_trace.weights.require_same(host, name, "its operators would not be those of the traced model")
        return model_or_trace
    if inputs is None:
        raise InputError(
            f"{type(model_or_trace).__name__} needs inputs: a text, an image, a tensor of ids or pixels, or a mapping "
            "of its keyword arguments."
        )
    return trace(model_or_trace, inputs, tokenizer=tokenizer, processor=processor, bos=bos)


def _by_position(
    traced: Trace, tokenizer: Any, target: NamedTarget | None, options: Mapping[str, Any]
) -> tuple[Target | None, dict[str, Any]]:
    """Return the target as positions, and the options with the id of a logit that is named by its text."""
    if tokenizer is None and traced.text is not None:
        tokenizer = traced.text.tokenizer
    named = {"logit": logit_of(options["logit"], tokenizer)} if "logit" in options else {}
    return position_of(traced, target), {**options, **named}
