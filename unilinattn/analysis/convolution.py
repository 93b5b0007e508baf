"""The channels of a layer's short convolution by token (Induction, section 4.2.2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.evaluation.metrics import rank_correlation
from unilinattn.mixers import Reversed
from unilinattn.operator.stages import Mix, walk
from unilinattn.tracing.layer import Layer


@dataclass(frozen=True, eq=False, repr=False)
class ConvolutionTaps:
    """The taps of a short convolution: which token each channel carries.

    Attributes:
        layer: name of the layer.
        taps: (channel, lag); lag 0 is the current token, lag 1 the previous one.
        correlation: Spearman's correlation of the taps' absolute values over channels, (lag, lag).
    """

    layer: str
    taps: Float[Tensor, "channel lag"]
    correlation: Float[Tensor, "lag lag"]

    def __repr__(self) -> str:
        """Show the number of channels by token, and the correlation of the current and the previous token's taps."""
        counts = ", ".join(f"{len(self.channels(lag))} lag {lag}" for lag in range(self.taps.shape[1]))
        return (
            f"ConvolutionTaps({self.layer}, channels: {counts}; rank correlation of lags 0 and 1: "
            f"{self.correlation[0, 1]:.2f})"
        )

    def channels(self, lag: int) -> Int[Tensor, " channel"]:
        """Return the channels that carry the token `lag` positions back: its tap is their largest in absolute value.

        Raises `OptionError` for a lag that the convolution does not reach.
        """
        if not 0 <= lag < self.taps.shape[1]:
            raise OptionError(f"lag={lag} is out of range: the convolution has lags 0 to {self.taps.shape[1] - 1}.")
        return (self.taps.abs().argmax(1) == lag).nonzero().flatten()

    def plot(self, where: Where = None) -> Figure:
        """Draw the absolute taps, channels sorted by the tap of the current token (Induction Fig. 4)."""
        order = self.taps[:, 0].abs().argsort(descending=True)
        lags = [str(lag) for lag in range(self.taps.shape[1])]
        title = f"{self.layer}: absolute taps"
        panel = heat_map(self.taps[order].abs().T, title, rows="lag", columns="channel, sorted", row_labels=lags)
        return draw(where, [panel], size=(5.2, 2.2))


def convolution_taps(layer: Layer, *, conv: int = 0) -> ConvolutionTaps:
    """Return the taps of a layer's short convolution, and the rank correlation of their absolute values.

    A negative correlation of two lags shows that channels carry one of the two tokens (Induction section 4.2.2).
    `conv` selects the convolution of a layer with several, such as the directions of ViM.

    Raises `UncoveredError` for a layer without a short convolution, `OptionError` for one out of range, and
    `InputError` for one with a single tap, or with taps that are equal for all channels, whose correlation is
    undefined.
    """
    op = layer.operator
    every = [s.mixer for chain in op.chains.values() for s in walk(chain) if isinstance(s, Mix) and s.role == "conv"]
    if not every:
        raise UncoveredError(f"{layer.name} has no short convolution.")
    if not 0 <= conv < len(every):
        raise OptionError(f"conv={conv} is out of range: {layer.name} has {len(every)} convolutions, numbered from 0.")
    mixer = every[conv]
    # The second direction of a bidirectional layer is a reversed convolution. The base class declares no taps.
    taps: Tensor = getattr(mixer.mixer if isinstance(mixer, Reversed) else mixer, "taps")  # noqa: B009
    if taps.shape[1] < 2:
        raise InputError(f"the convolution of {layer.name} has one tap in {layer.output.shape[1]} tokens: no lags.")
    size = taps.abs().double().T
    lags = range(len(size))
    pairs = [[rank_correlation(size[None, a], size[None, b]).mean for b in lags] for a in lags]
    return ConvolutionTaps(layer.name, taps, torch.tensor(pairs, dtype=torch.float64, device="cpu"))
