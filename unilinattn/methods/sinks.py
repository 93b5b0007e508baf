"""Warn of attention sinks: a result names the tokens whose scores measure no word."""

import warnings
from dataclasses import replace

from unilinattn.errors import SinkWarning
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.sinks import OUTLIER

MOST_NAMED = 8
"""Largest number of sinks that a warning names."""


def warn_of_sinks(result: Attribution) -> Attribution:
    """Return the result with a warning that names its attention sinks, if it has any, and raise that warning."""
    names = _names(result)
    if not names:
        return result
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    several = len(names) > 1
    message = (
        f"attention sink{'s' * several}: {', '.join(names[:MOST_NAMED])}{more}. The residual stream there is more than "
        f"{OUTLIER:g} times as large as at the median token in half of the layers or more. Such a token is usually "
        "read whatever its word is, so its score says little about the word, and rankings leave it out. To measure a "
        "word, replace it in the input."
    )
    warnings.warn(message, SinkWarning, stacklevel=3)
    return replace(result, warnings=(*result.warnings, message))


def _names(result: Attribution) -> list[str]:
    """Return the position, counted over real tokens, and the text of each sink, with its sequence among several."""
    names = []
    for index, keys in enumerate(result.sinks or ()):
        for key in keys:
            position = key if result.mask is None else int(result.mask[index, :key].sum())
            text = "" if result.tokens is None else f" {result.tokens[index][key]!r}"
            sequence = f" of sequence {index}" if result.sizes.get("batch", 1) > 1 else ""
            names.append(f"position {position}{text}{sequence}")
    return names
