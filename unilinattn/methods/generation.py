"""`explain_generation`: generate text, and explain every generated token by one trace of the finished text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.errors import OptionError
from unilinattn.frozen.token_pass import one_run
from unilinattn.host.generation import generated, prompt_ids
from unilinattn.host.text import is_text, words_of
from unilinattn.host.wrappers import unwrapped
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.default import chosen_method
from unilinattn.methods.doubts import warn_of_sinks
from unilinattn.methods.labelled import Tokens, labels_of_tokens
from unilinattn.methods.needs import advised
from unilinattn.methods.run import named, run_method
from unilinattn.options import Options
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.results.attribution import Attribution
from unilinattn.results.scores import extra_dims
from unilinattn.results.streams import slots
from unilinattn.tracing.trace import trace
from unilinattn.tracing.trust import Trust, trusting


def explain_generation(
    model: nn.Module,
    prompt: Any,
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 20,
    method: str | Options | None = None,
    generate_kwargs: Mapping[str, Any] | None = None,
    tokens: Tokens | None = None,
    bos: bool = False,
    max_memory: int | None = None,
    progress: bool = True,
    trust: Trust = "require",
    **options: Any,
) -> Attribution:
    """Generate text by `model.generate`, and explain every generated token: one row each.

    The finished text is traced once: the prompt and its continuation, or the prompt as the tokens of an encoder and
    the generated text as those of its decoder. The row of a generated token explains its own logit at the position
    before it, from which it was generated; methods that explain no logit give the row of that position.

    Scores: (batch 1, query, key), with a `layer` axis in front for a method that keeps one. The queries are the
    generated tokens, labelled by `query_tokens`, and the keys are the tokens of the finished text, the prompt's first.
    The scores of a token itself and of those behind it are zero. Extras have the query axis too: with `logit`, the
    shares, `bias` and `remainder` of a row sum to its `logit`, up to its `gap`. `completeness_gap` is that of the worst
    row. The options "target" and "logit" of the result hold the position and the id of each row.

    Cost: one generation, one trace, and the method for one target a token. `logit`, `lrp`, `attn_lrp`, `alti_logit` and
    `transformer_attribution` run the model once by their rules, and each token costs backward passes. Gradients of the
    model itself (captum's) run it on a copy of the text for each token, in batches that `max_memory` bounds.

    Args:
        model: a language model with `generate`, as transformers has.
        prompt: a text, its token ids (1, length), or a mapping with `input_ids`.
        tokenizer: the tokenizer of the prompt, which also labels the tokens.
        max_new_tokens: largest number of generated tokens; fewer if the model ends its text.
        method: name of the method, by default that of `explain`.
        generate_kwargs: further arguments of `model.generate`, such as {"do_sample": True}; greedy by default.
        tokens: labels of the finished text's tokens, or a tokenizer for them.
        bos, max_memory, progress, trust: as in `explain`.
        options: options of the method, but no `target` or `logit`.

    Raises `InputError` for several prompts, prompts with images or padding, and for more tokens than the model has
    positions; `OptionError` for `target`, `logit` and a `bos` that cannot be added; `UncoveredError` for a model that
    does not generate; and the errors of `explain`.
    """
    name, options = (None, options) if method is None else named(method, options)
    for option in ("target", "logit"):
        if option in options:
            raise OptionError(
                f"{option}={options[option]!r}: every generated token is explained, by its own logit; for another "
                f"{option} call explain on the finished text."
            )
    settings = dict(generate_kwargs or {})
    with limited_to(max_memory), bars(progress), trusting(trust):
        host = unwrapped(model)
        text = generated(host, prompt_ids(host, prompt, tokenizer, bos=bos), max_new_tokens, settings)
        traced = trace(host, text.inputs)
        entry, options = chosen_method(name, options, traced)
        positions = list(range(text.first - 1, text.ids.shape[1] - 1))
        targets = text.ids[0, text.first :].tolist()
        names_a_logit = entry.options is not None and "logit" in entry.options.model_fields
        rows = []
        # The weights are those of the trace, which has just ended: none is read again for each token.
        with one_run(traced, list(zip(positions, targets, strict=True))), traced.weights.compared():
            for position, token in zip(steps(positions, "generated tokens"), targets, strict=True):
                keywords = {**options, **({"logit": token} if names_a_logit else {})}
                with advised(traced, position, entry, keywords):
                    rows.append(run_method(entry, traced, position, keywords))
    stored = {
        **rows[0].options,
        "target": [positions],
        **({"logit": [targets]} if names_a_logit else {}),
        "max_new_tokens": max_new_tokens,
        "generate_kwargs": {name: _plain(value) for name, value in settings.items()},
    }
    labels: dict[str, Any] = {}
    labelled_by = tokenizer if tokens is None else tokens
    if labelled_by is not None:
        texts = labels_of_tokens(labelled_by, traced, rows[0].streams.get("key", {}))
        labels = {"tokens": texts, "query_tokens": [row[-len(targets) :] for row in texts]}
    is_one_text = tokenizer is not None and not rows[0].streams
    if is_one_text and (words := words_of(tokenizer, text.ids[0].tolist(), text.first)) is not None:
        labels |= {"word_ids": [words[0]], "offsets": [words[1]]}
    result = replace(_stacked(rows, positions), options=stored, **labels)
    return warn_of_sinks(result, traced, tokenizer if is_text(prompt) else None)


def _stacked(rows: Sequence[Attribution], positions: Sequence[int]) -> Attribution:
    """Return results of one target each as one result with a query axis, with zeros at keys behind the targets."""
    first, extras = rows[0], {}
    # The keys of an encoder come before those of the decoder, whose positions count from its own first token.
    slot = slots(first.streams["key"]).get(next(iter(first.streams["query"]))) if first.streams else None
    start = 0 if slot is None else slot.start
    positions = [start + position for position in positions]
    for name in dict.fromkeys(name for row in rows for name in row.extras):
        # Only the rows beyond the range of their dtype have a scale.
        absent = torch.zeros(first.scores.shape[:-1], dtype=torch.float64, device="cpu")
        tensors = [row.extras.get(name, absent) for row in rows]
        if tensors[0].shape == first.scores.shape:
            extras[name] = _causal(torch.stack(tensors, -2), positions)
        elif extra_dims(name, first.dims, first.scores.shape, tensors[0].shape):
            extras[name] = torch.stack(tensors, -1)
        else:
            # One number for each layer, such as its decomposition error: that of the worst row.
            extras[name] = torch.stack(tensors).amax(0)
    gaps = [row.completeness_gap for row in rows if row.completeness_gap is not None]
    return replace(
        first,
        scores=_causal(torch.stack([row.scores for row in rows], -2), positions),
        streams={**first.streams, "query": {name: len(rows) for name in first.streams["query"]}}
        if first.streams
        else {},
        dims=(*first.dims[:-1], "query", "key"),
        extras=extras,
        completeness_gap=max(gaps, default=None),
        warnings=tuple(dict.fromkeys(warning for row in rows for warning in row.warnings)),
    )


def _causal(values: Float[Tensor, "*axes query key"], positions: Sequence[int]) -> Float[Tensor, "*axes query key"]:
    """Return the values with exact zeros behind each row's position, where sampling and rounding leave others."""
    keys = torch.arange(values.shape[-1], device=values.device)
    return values.masked_fill(keys > torch.tensor(positions, device=values.device)[:, None], 0)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)
