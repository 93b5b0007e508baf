"""Warn where padding reaches real tokens."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from unilinattn.host.inputs import real_tokens
from unilinattn.host.module_calls import CallRecord
from unilinattn.registry import UNREGISTERED
from unilinattn.tracing.layer import Layer


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


def warn_of_recorded_leaks(layers: Sequence[Layer]) -> None:
    """Warn if padding reaches real tokens in a recorded layer: its operator is applied to vectors of padding only."""
    for layer in layers:
        mask = layer.mask
        is_recorded = layer.architecture == UNREGISTERED and layer.prefix_error is None
        if mask is None or not is_recorded or not mask.shape == layer.input.shape[:2] == layer.output.shape[:2]:
            continue
        padding = torch.randn(layer.input.shape, generator=torch.Generator().manual_seed(0)).to(layer.input)
        inputs = {port: torch.zeros_like(x) for port, x in layer.operator.inputs.items()}
        inputs["x"] = padding * ~mask[..., None]
        if bool(layer.operator.apply(inputs, bias=False)[mask].any()):  # Masked weights are exactly zero.
            warnings.warn(
                f"padding reaches real tokens in this model: {layer.name} ({type(layer.module).__name__}) does not "
                "mask it. Its operators reproduce that; trace texts of different lengths one by one.",
                stacklevel=3,
            )
            return


def _leak(layers: Sequence[CallRecord], mask: Bool[Tensor, "batch length"]) -> str | None:
    """Return the `padding_leak` of the first layer that has one for this mask, None if none has."""
    leaks = (
        f.architecture.padding_leak(f.module, mask) for f in layers if f.architecture and f.architecture.padding_leak
    )
    return next((leak for leak in leaks if leak is not None), None)
