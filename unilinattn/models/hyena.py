"""Hyena: long convolutions with implicit filters, alternating with gates."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError
from unilinattn.models.numerics import causal_convolution, working_dtype


class Sine(nn.Module):
    """sin(freq x) with one learned frequency per channel."""

    def __init__(self, channels: int, frequency: float) -> None:
        super().__init__()
        self.freq = nn.Parameter(torch.full((1, channels), float(frequency)))

    def forward(self, x: Float[Tensor, "... channel"]) -> Float[Tensor, "... channel"]:
        """Return sin(freq x) in the dtype of x."""
        return torch.sin(self.freq.to(x.dtype) * x)


class PositionalFeatures(nn.Module):
    """Time from 0 to 1 over `l_max` tokens, with cosines and sines of `(emb_dim - 1) / 2` frequencies."""

    z: Tensor
    t: Tensor

    def __init__(self, emb_dim: int, l_max: int) -> None:
        super().__init__()
        bands = (emb_dim - 1) // 2
        time = torch.linspace(0, 1, l_max)[:, None]
        angles = 2 * math.pi * torch.arange(l_max)[:, None] / l_max * torch.linspace(1e-4, bands - 1, bands)
        self.register_buffer("z", torch.cat([time, angles.cos(), -angles.sin()], dim=-1)[None])
        self.register_buffer("t", time[None])


class DecayWindow(nn.Module):
    """The decay rates of the exponential windows, which fall to 1% at 1.5 (slow channels) to 0.3 (fast) of `l_max`."""

    deltas: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("deltas", torch.linspace(math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, channels)[None, None])


class HyenaFilter(nn.Module):
    """An implicit filter: a small sine network of the position, times one exponential window per channel.

    h(t) = FFN(features(t)) (exp(-|delta| t) + shift), Poli et al. (2023), Section 3.3; `bias` is the skip next
    to the convolution, one number per channel.
    """

    def __init__(
        self,
        channels: int,
        l_max: int,
        emb_dim: int = 3,
        filter_order: int = 64,
        num_inner_mlps: int = 2,
        w: float = 1.0,
        modulate: bool = True,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        if emb_dim < 3 or emb_dim % 2 == 0:
            raise OptionError(f"emb_dim is {emb_dim}; time, cosines and sines: pass an odd number, 3 or more.")
        self.l_max = l_max
        self.modulate = modulate
        self.shift = shift
        self.bias = nn.Parameter(torch.randn(channels))
        self.pos_emb = PositionalFeatures(emb_dim, l_max)
        sine = Sine(filter_order, w)
        inner = [layer for _ in range(num_inner_mlps) for layer in (nn.Linear(filter_order, filter_order), sine)]
        self.implicit_filter = nn.Sequential(
            nn.Linear(emb_dim, filter_order), sine, *inner, nn.Linear(filter_order, channels, bias=False)
        )
        self.modulation = DecayWindow(channels)

    def forward(self, length: int) -> Float[Tensor, "channel length"]:
        """Return the first `length` taps of each channel, tap 0 first, in float32 at least.

        Raises `InputError` if `length` exceeds `l_max`.
        """
        if length > self.l_max:
            raise InputError(f"The sequence has {length} tokens; this filter has l_max={self.l_max}: cut the input.")
        dtype = working_dtype(self.bias)
        taps = self.pos_emb.z[0, :length].to(dtype)
        for layer in self.implicit_filter:
            if isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else layer.bias.to(dtype)
                taps = nn.functional.linear(taps, layer.weight.to(dtype), bias)
            else:
                taps = layer(taps)
        if self.modulate:
            decay = torch.exp(-self.pos_emb.t[0, :length].to(dtype) * self.modulation.deltas[0].to(dtype).abs())
            taps = taps * (decay + self.shift)
        return taps.mT


class Hyena(nn.Module):
    """The Hyena mixer: x_1 * (h_1 conv (x_2 * (h_2 conv ... (x_N * v)))), and an output projection.

    Takes and returns (batch, length, d_model), without residual or norm. One projection gives `order` gates and
    the values, whose channels pass a short convolution; `order` - 1 long convolutions (each with a skip)
    alternate with the gates, the last gate first. The layer of Poli et al., "Hyena Hierarchy: Towards Larger
    Convolutional Language Models" (2023), Definition 3.1, with the parameter names and shapes of the authors'
    operator and of HyenaDNA, whose mixers' state dicts load: `in_proj`, `out_proj`, `short_filter`,
    `filter_fn.bias`, `filter_fn.pos_emb.z` and `.t`, `filter_fn.implicit_filter.<i>.weight`, `.bias` and `.freq`
    (one shared sine, listed at each of its layers), `filter_fn.modulation.deltas`.
    HyenaDNA has `emb_dim` 5, `w` 10 and `shift` 0.05 (its code's default; the original operator's is 0).

    Omitted from the original: dropout, several heads with one filter, outer mixing, blocks, a wider inner dimension,
    an activation before the projection, a projection between orders, normalised filters, learned positional features,
    and separate learning rates.

    `filters(length)` returns the long filters, (order - 1, d_model, length), in the order of application; `skips` their
    skips. The convolutions run in float32 at least.

    Raises `OptionError` if `order` is below 2 or `emb_dim` is not odd and at least 3. A sequence longer than `l_max`
    raises `InputError`, where the original cuts it.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        order: int = 2,
        filter_order: int = 64,
        short_filter_order: int = 3,
        emb_dim: int = 3,
        num_inner_mlps: int = 2,
        w: float = 1.0,
        modulate: bool = True,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        if order < 2:
            raise OptionError(f"order is {order}; pass 2 or more.")
        self.d_model = d_model
        self.order = order
        width = (order + 1) * d_model
        self.in_proj = nn.Linear(d_model, width)
        self.out_proj = nn.Linear(d_model, d_model)
        self.short_filter = nn.Conv1d(width, width, short_filter_order, padding=short_filter_order - 1, groups=width)
        self.filter_fn = HyenaFilter(
            d_model * (order - 1), l_max, emb_dim, filter_order, num_inner_mlps, w, modulate, shift
        )

    def filters(self, length: int) -> Float[Tensor, "filter d_model length"]:
        """Return the long filters (order - 1, d_model, length), in the order of application."""
        return self.filter_fn(length).unflatten(0, (self.d_model, self.order - 1)).transpose(0, 1)

    @property
    def skips(self) -> Float[Tensor, "filter d_model"]:
        """The skip of each long convolution, in the order of `filters`."""
        return self.filter_fn.bias.unflatten(0, (self.d_model, self.order - 1)).mT

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over the tokens up to and including the current one."""
        length = hidden_states.shape[1]
        filters = self.filters(length)
        projected = self.short_filter(self.in_proj(hidden_states).transpose(1, 2))[..., :length]
        *gates, value = projected.to(filters.dtype).split(self.d_model, dim=1)
        skips = self.skips.to(filters.dtype)
        for gate, taps, skip in zip(gates[:0:-1], filters, skips, strict=True):
            value = gate * value
            value = causal_convolution(value, taps) + skip[:, None] * value
        return self.out_proj((gates[0] * value).transpose(1, 2).to(hidden_states.dtype))


class MultiHyena(nn.Module):
    """The multi-head Hyena mixer: q_i sum_j h_{i-j} k_j v_j per head, and an output projection.

    Takes and returns (batch, length, d_model), without residual or norm. Each of `num_heads` heads sends the
    outer products of its keys and values through one long convolution (with a skip) and reads them with its
    queries; q, k and v pass a short convolution first. The operator of Massaroli et al., "Laughing Hyena
    Distillery: Extracting Compact Recurrences From Convolutions" (2023), Section 4. With as many heads as
    channels it is `Hyena` of order 2, parameter for parameter. No checkpoint of it is public.

    Omitted from the original: the distillation into a recurrence, and everything that `Hyena` omits.

    `filter_fn(length)` returns the filters, (num_heads, length), `filter_fn.bias` their skips. The convolutions run in
    float32 at least.

    Raises `OptionError` if `num_heads` does not divide `d_model`.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        num_heads: int,
        filter_order: int = 64,
        short_filter_order: int = 3,
        emb_dim: int = 3,
        num_inner_mlps: int = 2,
        w: float = 1.0,
        modulate: bool = True,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise OptionError(f"num_heads is {num_heads}; pass a divisor of d_model, which is {d_model}.")
        self.num_heads = num_heads
        width = 3 * d_model
        self.in_proj = nn.Linear(d_model, width)
        self.out_proj = nn.Linear(d_model, d_model)
        self.short_filter = nn.Conv1d(width, width, short_filter_order, padding=short_filter_order - 1, groups=width)
        self.filter_fn = HyenaFilter(num_heads, l_max, emb_dim, filter_order, num_inner_mlps, w, modulate, shift)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each head over the tokens up to and including the current one."""
        length = hidden_states.shape[1]
        taps = self.filter_fn(length)
        projected = self.short_filter(self.in_proj(hidden_states).transpose(1, 2))[..., :length].to(taps.dtype)
        q, k, v = projected.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        products = k[:, :, :, None] * v[:, :, None]
        skip = self.filter_fn.bias.to(taps.dtype)[:, None, None, None]
        state = causal_convolution(products, taps[:, None, None]) + skip * products
        read = (q[:, :, :, None] * state).sum(2).flatten(1, 2)
        return self.out_proj(read.transpose(1, 2).to(hidden_states.dtype))
