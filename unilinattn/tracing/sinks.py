"""Find the attention sinks of a run: tokens whose residual stream is far larger than that of the others."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.tracing.layer import Layer

OUTLIER = 10.0
"""Ratio of a token's stream norm to the median of its sequence above which it is an outlier.

A massive activation, a channel of 1000 times the median magnitude of the hidden state (Sun et al., 2024), gives a state
of d normally distributed channels 1000 / (1.48 sqrt(d)) times its norm: 10 or more up to d = 4500. The tokens that
vision transformers use as registers have about 10 times the norm of the others (Darcet et al., 2024).
"""


def sink_tokens(layers: Sequence[Layer], shape: tuple[int, int]) -> tuple[tuple[int, ...], ...] | None:
    """Return the positions of each sequence's attention sinks: outliers at half of the layers or more.

    A token is an outlier at a layer if the norm of the stream that enters it exceeds `OUTLIER` times the median over
    the real tokens. At most half of a sequence's tokens can be. Padding counts in positions. Layers without a stream
    or with another (batch, tokens) than `shape` are left out; None if no layer remains.

    Source: Sun et al., "Massive activations in large language models" (2024); Xiao et al., "Efficient streaming
    language models with attention sinks" (2024).
    """
    ratios = [ratio for layer in layers if (ratio := norm_ratios(layer)) is not None and tuple(ratio.shape) == shape]
    if not ratios:
        return None
    return positions(2 * (torch.stack(ratios) > OUTLIER).sum(0) >= len(ratios))


def norm_ratios(layer: Layer) -> Float[Tensor, "batch token"] | None:
    """Return the norm of the stream that enters a layer over the median of the real tokens; None without a stream.

    NaN at padding, and in a sequence whose median is zero.
    """
    norms = layer.stream_norms
    if norms is None:
        return None
    if layer.mask is not None:
        norms = norms.masked_fill(~layer.mask, torch.nan)
    # The lower of two medians, so that one of two tokens can be an outlier.
    median = norms.nanmedian(dim=1, keepdim=True).values
    return (norms / median.masked_fill(median == 0, torch.nan)).cpu()


def positions(marked: Bool[Tensor, "batch token"]) -> tuple[tuple[int, ...], ...]:
    """Return the marked positions of each sequence."""
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in marked)
