"""The default method of `explain`, by the kind of model."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.host.inputs import is_encoder_decoder
from unilinattn.host.probabilities import logit_kind
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.methods.needs import REFUSALS, refusal_of
from unilinattn.methods.targets import explained_options, similarity_of_pairs
from unilinattn.mixers import CoreMixer, Dense, Softmax
from unilinattn.operator.stages import Mix, walk
from unilinattn.options import Alti, AttnLrp, Logit, Lrp, Options
from unilinattn.registry import Method
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.selection import layers_in, stream_groups
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

CAUSAL: Options = AttnLrp(split="thirds")
"""Default method of `explain` for models with logits and causal softmax attention: it counts what a token decided."""

OTHER: Options = Lrp(measure="log-odds")
"""Default method of `explain` for other models with logits, whose relevances add up to the log-odds."""

WITHOUT_SOFTMAX: Options = Lrp(measure="logit")
"""Default method of `explain` in place of `OTHER` for logits of no softmax: of independent labels, of a regression."""

SHARES: type[Options] = Logit
"""The method of options that neither of these has, such as `by`."""

COMPOSED = Alti(compose="rollout")
"""Default method of `explain` for models without logits.

Among the methods that compose all layers from maps it finds the known answers of the trained Mamba models best, as
`unilinattn compare` shows.
"""

SINGLE = ("latim", "raw")
"""Methods of single layers, one of which takes the place of `COMPOSED` where the layers cannot be composed."""


def chosen_method(name: str | None, options: dict[str, Any], traced: Trace) -> tuple[Method, dict[str, Any]]:
    """Return the named method and `options`; without a name the model's default method and its options.

    Options that only `SHARES` has, such as `by`, name it.
    """
    if name is not None:
        return registered(name), options
    has_number = traced.explained_logit.exists or options.get("logit") is not None
    if not has_number and similarity_of_pairs(traced) is None:
        return registered(COMPOSED.name), {**COMPOSED.keywords, **options}
    default = _of_scalar(traced)
    fields = options.keys() - type(default).model_fields.keys()
    if fields and options.keys() <= SHARES.model_fields.keys():
        return registered(SHARES.name), options
    return registered(default.name), {**default.keywords, **options}


def _of_scalar(traced: Trace) -> Options:
    """Return the default method of a model whose explained number is known."""
    layers = traced.layers
    if is_encoder_decoder(traced.host):
        # The start of a decoder is a single token, which tells nothing beside the tokens of an encoder.
        layers = tuple(layers_in(traced, traced.target_stream))
    if _attends_causally(layers):
        return CAUSAL
    explained = traced.explained_logit
    has_softmax = not explained.exists or logit_kind(traced.host, explained.logits) == "class"
    return OTHER if has_softmax else WITHOUT_SOFTMAX


def _attends_causally(layers: Sequence[Layer]) -> bool:
    """Whether a layer mixes earlier tokens by a matrix without more structure, as softmax attention does.

    A matrix between other numbers of tokens, as of a pool, tells nothing, and one of a single token only if all are.
    """
    single = several = False
    for mixer, mask in (pair for layer in layers for pair in _matrices(layer)):
        if mixer.shape[3] == 1:
            single = True
        elif _is_causal(mixer, mask):
            return True
        else:
            several = True
    return single and not several


def _matrices(layer: Layer) -> Iterator[tuple[CoreMixer, Bool[Tensor, "batch query"] | None]]:
    """Yield the square token mixers of a layer that are matrices without more structure, and its real tokens."""
    if layer.opaque or layer.in_pieces:
        return
    # The method checks its layers too.
    layer.build()
    for stage in (stage for chain in layer.operator.chains.values() for stage in walk(chain)):
        mixer = stage.mixer if isinstance(stage, Mix) else None
        if isinstance(mixer, (Dense, Softmax)) and mixer.shape[2] == mixer.shape[3]:
            yield mixer, layer.mask


def _is_causal(mixer: CoreMixer, mask: Bool[Tensor, "batch query"] | None) -> bool:
    """Whether real tokens read no later ones; a host may give padding an even average over all tokens."""
    batch, _, queries, keys = mixer.shape
    if mixer.is_lower_triangular or mask is None or mask.shape != (batch, queries):
        return mixer.is_lower_triangular
    blocks = ((rows, block(slice(0, keys))) for rows, block in mixer.blocks(ROWS))
    return not any(bool((block * mask[:, None, rows, None]).triu(rows.start + 1).any()) for rows, block in blocks)


Run = Callable[[Method, Trace, Target | None, Mapping[str, Any]], Attribution]
"""Runs a method on a trace, a target and options."""


def by_vectors(
    run: Run, traced: Trace, target: Target | None, options: dict[str, Any], refusal: Exception
) -> tuple[Attribution, dict[str, Any]]:
    """Return the result of the default for a known number on the length of the output's vectors, and its options.

    If that works neither, or if `options` has some that it does not know, the result is that of `by_layer`.
    """
    more = {name: value for name, value in options.items() if COMPOSED.keywords.get(name) != value}
    # Where shares do not cover a model, relevances may.
    for default in dict.fromkeys((_of_scalar(traced), CAUSAL)):
        method = registered(default.name)
        try:
            selected = explained_options(traced, method, target, {**default.keywords, **more})
            if selected.get("logit") is None:
                continue
            result = run(method, traced, target, selected)
        except Exception as error:
            if not isinstance(error, OptionError) and refusal_of(error, traced) is None:
                raise
            continue
        return _in_place(result, refusal, f"This is {method.name} of {selected['logit']!r}."), selected
    return by_layer(run, traced, target, options, refusal), options


def by_layer(
    run: Run, traced: Trace, target: Target | None, options: Mapping[str, Any], refusal: Exception
) -> Attribution:
    """Return the result of the first method of `SINGLE` that works; raise the refusal of the default if none does.

    If no method takes all layers, the largest group with equal tokens is explained.
    """
    single = {name: value for name, value in options.items() if COMPOSED.keywords.get(name) != value}
    group = [] if "layers" in options else [{"layers": list(each)} for each in stream_groups(traced)[:1]]
    for selected, method in product(({}, *group), map(registered, SINGLE)):
        try:
            result = run(method, traced, target, {**single, **selected})
        except (OptionError, *REFUSALS):
            continue
        count = f"{len(result.layers)} of the {len(traced.layers)}" if selected else "the"
        return _in_place(result, refusal, f"These are {count} layers one by one, by {method.name}.")
    raise refusal


def _in_place(result: Attribution, refusal: Exception, note: str) -> Attribution:
    """Return a result in place of the default's, with a warning that says why; it is given, too."""
    reason = str(refusal).partition(". ")[0].rstrip(".")
    note = (
        f"{COMPOSED.name} composed over all layers, the default for a model without logits, does not work here: "
        f"{reason}. {note}"
    )
    warnings.warn(note, UserWarning, stacklevel=4)
    return replace(result, warnings=(*result.warnings, note))


def default_note(method: Method, named: str | None) -> str:
    """Return the sentence of a refusal that names the default method, empty if the user named one."""
    composed = " composed over all layers" if method.name == COMPOSED.name else ""
    return "" if named is not None else f"No method was named, so this was the default, {method.name!r}{composed}. "
