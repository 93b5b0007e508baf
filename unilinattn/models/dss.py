"""DSS: a fixed convolution by a diagonal state space model, in its softmax and exponential forms."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError, nearest
from unilinattn.models.hippo import hippo_legs
from unilinattn.models.numerics import complex_from_pairs, convolution_with_skip, working_dtype

VERSIONS = ("softmax", "exp")


def bounded_reciprocal(x: Complex[Tensor, "*shape"], epsilon: float) -> Complex[Tensor, "*shape"]:
    """Return conj(x) / (x conj(x) + epsilon): 1 / x with a norm that stays bounded."""
    return x.conj() / (x * x.conj() + epsilon)


class DSSKernel(nn.Module):
    """The convolution kernels of DSS, one per channel, from complex poles shared by all channels.

    K_l = Re sum_n W_n / Lambda_n s_n(l), where s is the softmax over l < L of dt Lambda_n l (version "softmax":
    Proposition 1a; the kernel depends on the length L), or s_n(l) = (exp(dt Lambda_n) - 1) exp(dt Lambda_n l)
    with Re Lambda = -exp(Lambda_log_neg_re) (version "exp": Proposition 1b, zero-order hold). dt has separate
    values for the real and the imaginary part. Initialised with the skew-symmetric part of HiPPO-LegS.
    """

    def __init__(self, d_model: int, d_state: int, version: str, dt_min: float, dt_max: float, epsilon: float) -> None:
        super().__init__()
        self.version = version
        self.epsilon = epsilon
        poles = hippo_legs(2 * d_state).poles[:d_state].conj().to(torch.complex64)
        log_dt = torch.empty(d_model, 1).uniform_(math.log(dt_min), math.log(dt_max))
        self.log_dt = nn.Parameter(log_dt.repeat(1, 2))
        self.W = nn.Parameter(torch.randn(1, d_model, d_state, 2))
        if version == "exp":
            self.Lambda_log_neg_re = nn.Parameter(torch.log(-poles.real))
            self.Lambda_im = nn.Parameter(poles.imag.contiguous())
        else:
            self.Lambda = nn.Parameter(torch.view_as_real(poles.resolve_conj()).clone())

    def poles(self) -> Complex[Tensor, " state"]:
        """Return Lambda, in complex64 at least."""
        if self.version == "softmax":
            return complex_from_pairs(self.Lambda)
        dtype = working_dtype(self.Lambda_im)
        return torch.complex(-self.Lambda_log_neg_re.to(dtype).exp(), self.Lambda_im.to(dtype))

    def forward(self, length: int) -> Float[Tensor, "d_model length"]:
        """Return the taps of each channel for sequences of `length` tokens, tap 0 first, in float32 at least."""
        poles = self.poles()
        dt = self.log_dt.to(poles.real.dtype).exp()
        step = torch.complex(dt[:, :1] * poles.real, dt[:, 1:] * poles.imag)
        weights = complex_from_pairs(self.W)[0]
        taps = torch.arange(length, device=dt.device, dtype=dt.dtype)
        if self.version == "exp":
            norm = (poles * poles.conj()).real.clamp(self.epsilon)
            weights = weights * torch.expm1(step) * poles.conj() / norm
            return (weights[..., None] * torch.exp(step[..., None] * taps)).sum(1).real
        # A growing pole is evaluated from the end, so that no exponential exceeds one.
        grows = poles.real > 0
        start = torch.where(grows, length - 1, 0)[:, None]
        rows = torch.exp(step[..., None] * (taps - start))
        shrinking = torch.where(grows, -step, step)
        total = bounded_reciprocal(torch.expm1(shrinking * length) * poles, self.epsilon)
        return ((weights * torch.expm1(shrinking) * total)[..., None] * rows).sum(1).real


class DSS(nn.Module):
    """The DSS mixer: one fixed causal convolution per channel, a skip, GELU, and an output projection.

    Takes and returns (batch, length, d_model), without residual or norm: W gelu(K * u + D u) + b. The layer of
    Gupta, Gu and Berant, "Diagonal State Spaces are as Effective as Structured State Spaces" (2022), with the
    parameter names and shapes of the authors' standalone layer, whose state dicts load: `D`, `kernel.log_dt`,
    `kernel.W`, `kernel.Lambda` (softmax) or `kernel.Lambda_log_neg_re` and `kernel.Lambda_im` (exp), complex
    numbers as two real ones, `output_linear.weight`, and `output_linear.bias` as a column.

    Omitted from the original: dropout, several kernels per channel, bidirectional kernels, the gated variant, an
    activation after the projection, one dt for both parts, the clipped, unscaled and log-imaginary kernels, random
    poles, and separate learning rates.

    `kernel(length)` returns the kernels, (d_model, length); with version "softmax" they depend on the length. The
    convolution runs in float32 at least.

    Raises `OptionError` if the version is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        version: str = "softmax",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        epsilon: float = 1e-7,
    ) -> None:
        super().__init__()
        if version not in VERSIONS:
            raise OptionError(f"version is {version!r}{nearest(version, VERSIONS)}")
        self.D = nn.Parameter(torch.randn(1, d_model))
        self.kernel = DSSKernel(d_model, d_state, version, dt_min, dt_max, epsilon)
        self.output_linear = ColumnLinear(d_model, d_model)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over the tokens up to and including the current one."""
        y = convolution_with_skip(hidden_states, self.kernel(hidden_states.shape[1]), self.D[0])
        return self.output_linear(functional.gelu(y).transpose(1, 2).to(hidden_states.dtype))


class ColumnLinear(nn.Linear):
    """A linear map whose bias is stored as a column, (out_features, 1)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(self.bias.detach()[:, None])

    def forward(self, input: Float[Tensor, "... in_features"]) -> Float[Tensor, "... out_features"]:
        """Return W x + b."""
        return functional.linear(input, self.weight, self.bias[:, 0])
