"""Targets and logits named by text, and the explained number of outputs without logits of tokens."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError
from unilinattn.host.inputs import is_encoder_decoder
from unilinattn.host.labels import token_text
from unilinattn.host.logits import chosen_ids, keeps_logits, positions_of
from unilinattn.host.probabilities import NO_SOFTMAX, LogitKind, logit_kind
from unilinattn.host.scalars import OutputScalar, PairSimilarity, RowLogit, VectorLength
from unilinattn.host.text import token_id
from unilinattn.host.vectors import at_path, pair_table, vectors_in
from unilinattn.options.base import Need
from unilinattn.options.bases import VECTOR_OF_TOKEN
from unilinattn.registry import Method
from unilinattn.reruns.separate import is_separate, require_pairs, require_separate
from unilinattn.tracing.trace import Target, Trace

NamedTarget = Target | str | re.Pattern[str]
"""A position, "last", "cls", or a text or pattern whose last token is the position (see `position_of`)."""


def position_of(trace: Trace, target: NamedTarget | None) -> Target | None:
    """Return the position of a target in each sequence, counted over real tokens.

    "last" is the last token and "cls" the only token that class logits read, wherever it stands. Another text, or a
    compiled pattern, is the last token of the only place in each input text where it matches.

    Raises `InputError` for a text that does not match once, for a text as target of other inputs than texts, and for
    "cls" if the logits read several tokens or if each token has logits.
    """
    if isinstance(target, str) and target == "last":
        return -1
    if isinstance(target, str) and target == "cls":
        return _read_position(trace)
    if not isinstance(target, (str, re.Pattern)):
        return target
    if trace.text is None:
        raise InputError(
            f"target {target!r} is a text, and the model was not given text; give a position, or explain the text "
            "itself: explain(model, text, tokenizer=tokenizer)."
        )
    if is_encoder_decoder(trace.host):
        raise InputError(
            f"target {target!r} is a text, and the targets of {trace.model} are tokens of its decoder, not of the "
            "input text; give a position among them, such as -1."
        )
    return trace.text.positions(target)


def logit_of(logit: Any, tokenizer: Any) -> Any:
    """Return the option `logit` with ids in place of texts; a pair is a tuple, though a saved result has a list.

    Raises `OptionError` for a text of several tokens, and `InputError` for a text without a tokenizer.
    """
    if isinstance(logit, (tuple, list)):
        return tuple(logit_of(name, tokenizer) for name in logit)
    if not isinstance(logit, str):
        return logit
    if tokenizer is None:
        raise InputError(f"logit {logit!r} is a text; give the id of a token, or also tokenizer=.")
    return token_id(tokenizer, logit)


OF_GRADIENTS: frozenset[Need] = frozenset({"gradients", "embedding gradients"})
"""Needs of methods by the model's gradient: that of a vector's length is zero behind a norm, which keeps the length."""

WITHOUT: Mapping[str, tuple[str, ...]] = {"label": ("log-odds",), "output": ("log-odds", "log-probability")}
"""Measures that a kind of logits does not have."""

OF_ROWS: frozenset[Need] = frozenset({"layers", "composition"})
"""Needs of methods that read off the rows of a target, which are tokens, beside its logit."""


def explained_options(trace: Trace, method: Method, target: Target | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that name the explained number where a target names no row of logits.

    Without logits it is the similarity of a pair, such as an image and a text, or else the length of the output's
    vector at the target, or of the whole output where the target names none of its rows, for methods that do not read
    the model's gradient; for logits of other things than tokens, such as object queries, the logit of the target's row.

    Raises `InputError` for a function whose number of a sequence another sequence changes (see `require_separate`),
    `OptionError` for a measure by a softmax of logits that have none, and `UncoveredError` for one image with several
    texts.
    """
    logit = options.get("logit")
    if method.options is None or "logit" not in method.options.model_fields:
        return options
    require_pairs(trace)
    require_separate(trace, logit)
    if callable(logit):
        return options
    measure = options.get("measure", getattr(method.options.model_fields.get("measure"), "default", "logit"))
    explained = trace.explained_logit
    if explained.exists:
        _require_softmax(trace, measure)
    if measure == "log-probability":
        return options
    if not explained.exists and logit is None and (similarity := similarity_of_pairs(trace)) is not None:
        return {**options, "logit": similarity}
    if not explained.exists:
        has_value = logit is None and not OF_GRADIENTS.intersection(method.needs or ())
        scalar = _vector_length(trace, target) if has_value else None
        return options if scalar is None else {**options, "logit": scalar}
    logits, (batch, length) = explained.logits, trace.token_shape
    is_row = logits.ndim == 3 and logits.shape[0] == batch and logits.shape[1] != length
    if not is_row or target is None or OF_ROWS.intersection(method.needs or ()) or keeps_logits(trace.host):
        return options
    rows = positions_of(target, torch.ones(logits.shape[:2], dtype=torch.bool, device="cpu"))
    return {**options, "logit": RowLogit.in_output(trace.output, rows, logit, measure, explained.sizes)}


def _require_softmax(trace: Trace, measure: str) -> None:
    """Raise `OptionError` for a measure by probabilities that the logits have not."""
    logits = trace.explained_logit.logits
    kind = logit_kind(trace.host, logits)
    is_itself = measure == "log-odds" and logits.shape[-1] == 1
    if measure in WITHOUT.get(kind, ()) and not is_itself:
        raise OptionError(
            f"measure={measure!r} reads probabilities of exclusive classes, and {trace.model} has none: "
            f"{NO_SOFTMAX[kind]}. Give measure='logit'."
        )


def similarity_of_pairs(trace: Trace) -> OutputScalar | None:
    """Return the similarity of the two inputs of each sequence.

    None for an output without a table of them, and for numbers that are relative to other pairs (VideoPrism), of which
    a single one is always 1.
    """
    path, batch = pair_table(trace.output), trace.token_shape[0]
    if path is None or at_path(trace.output, path).shape != (batch, batch):
        return None
    similarity = PairSimilarity(path, batch)
    return None if is_separate(trace, similarity) is False else similarity


def _vector_length(trace: Trace, target: Target | None) -> VectorLength | None:
    """Return the length of the output's vectors at the target, None for an output without numbers for each sequence.

    Padding does not count.
    """
    batch, length = trace.token_shape
    match vectors_in(trace.output, trace.token_shape):
        case (path, vectors) if vectors.ndim > 1 and vectors.shape[0] == batch:
            pass
        case _:
            return None
    vectors, rows = vectors.detach(), None
    if vectors.ndim == 3 and (target is not None or vectors.shape[1] == length):
        mask = trace.layers[-1].mask
        real = torch.ones(vectors.shape[:2], dtype=torch.bool, device="cpu")
        if mask is not None and mask.shape == real.shape:
            real = mask.cpu()
        rows = None if target is None else positions_of(target, real)
        counted = real if rows is None else torch.arange(vectors.shape[1], device="cpu") == rows[:, None]
        vectors = vectors * counted.to(vectors)[..., None]
    norms = vectors.flatten(1).norm(dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
    direction = vectors / norms.reshape(-1, *[1] * (vectors.ndim - 1))
    of_tokens = rows is not None and vectors.shape[1] == length
    return VectorLength(path, direction, None if rows is None else tuple(rows.tolist()), of_tokens)


def logit_names(trace: Trace, logit: Any, target: Any, tokenizer: Any) -> list[list[str]] | None:
    """Return the text of the token, or the label of the class, of each logit that the option `logit` names.

    `target` is the stored one. A list for each sequence, with two names for the difference of two logits; None for a
    function, without a tokenizer or labels, and for predictions at positions whose logits the model did not compute.
    """
    if isinstance(logit, str) or not trace.explained_logit.exists:
        return None
    # A pair is stored as a list.
    logit = tuple(logit) if isinstance(logit, list) else logit
    logits = trace.explained_logit.logits
    classes = _class_labels(trace, logits)
    if classes is None and (logits.ndim == 2 or not hasattr(tokenizer, "convert_ids_to_tokens")):
        return None
    if logit is not None:
        ids = chosen_ids(logits[:, -1] if logits.ndim == 3 else logits, logit)
    elif logits.ndim == 3 and target is None:
        return None
    elif (prediction := trace.explained_logit.prediction(target)) is not None:
        ids = prediction[:, None]
    else:
        return None
    return [[classes[index] if classes else token_text(tokenizer, index) for index in row] for row in ids.tolist()]


def explains_sequence(trace: Trace, logit: Any) -> bool:
    """Whether the option `logit` names one number of each sequence, such as the logit of its class or a function."""
    if isinstance(logit, str):
        return not logit.startswith(VECTOR_OF_TOKEN)
    return trace.explained_logit.exists and trace.explained_logit.logits.ndim == 2


def explained_kind(trace: Trace, logit: Any) -> LogitKind | None:
    """Return the kind of the logits that the option `logit` names, None for tokens and for a function."""
    if isinstance(logit, str) or not trace.explained_logit.exists:
        return None
    logits = trace.explained_logit.logits
    is_token = logits.ndim == 3 or logits.shape[-1] in trace.explained_logit.sizes
    return None if is_token and _class_labels(trace, logits) is None else logit_kind(trace.host, logits)


def _class_labels(trace: Trace, logits: Float[Tensor, "batch *token logit"]) -> list[str] | None:
    """Return the label of each logit of a classifier of sequences or tokens, None for logits of other things."""
    config = getattr(trace.host, "config", None)
    labels, count = getattr(config, "id2label", None), logits.shape[-1]
    # A language model has `id2label` too, with labels for none of its logits.
    if not labels or len(labels) != count or (logits.ndim == 3 and count == getattr(config, "vocab_size", None)):
        return None
    return [str(labels.get(index, index)) for index in range(count)]


def _read_position(trace: Trace) -> Int[Tensor, " batch"]:
    """Return the only token of each sequence at which the class logits have a gradient behind the last layer."""
    if trace.explained_logit.logits.ndim != 2:
        raise InputError(f"target 'cls': {trace.model} has logits at every token, so none is CLS; give a position.")
    read = (trace.gradient()[-1] != 0).any(-1)
    if (most := int(read.sum(1).max())) != 1:
        raise InputError(f"target 'cls': the class logits of {trace.model} read {most} tokens; give a position.")
    key = read.long().argmax(1)
    mask = trace.layers[-1].mask
    return key.cpu() if mask is None else (mask.long().cumsum(1).gather(1, key[:, None])[:, 0] - 1).cpu()
