"""Warn where padding reaches real tokens."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from unilinattn.host.inputs import real_tokens
from unilinattn.host.module_calls import CallRecord


def warn_of_leaks(arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> None:
    """Warn if padding reaches real tokens, on either side."""
    mask = real_tokens(arguments)
    if mask is None:
        return
    after = mask.flip(1).cumsum(1).flip(1) == 0
    for side, other, padded in (("left", "right", mask | after), ("right", "left", ~after)):
        leak = None if bool(padded.all()) else _leak(layers, padded)
        if leak is None:
            continue
        elsewhere = _leak(layers, padded.sort(dim=1, descending=side == "left").values)
        advice = f"pad on the {other}" if elsewhere is None else "trace texts of different lengths one by one"
        warnings.warn(
            f"{side} padding reaches real tokens in this model: {leak}. Its operators reproduce that; {advice}.",
            stacklevel=3,
        )


def _leak(layers: Sequence[CallRecord], mask: Bool[Tensor, "batch length"]) -> str | None:
    """Return the `padding_leak` of the first layer that has one for this mask, None if none has."""
    leaks = (
        f.architecture.padding_leak(f.module, mask) for f in layers if f.architecture and f.architecture.padding_leak
    )
    return next((leak for leak in leaks if leak is not None), None)
