"""GSS: a diagonal state space model on few channels, whose output is gated on many."""

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from unilinattn.models.numerics import convolution_with_skip, working_dtype


class GSSKernel(nn.Module):
    """The simplified DSS of GSS: LayerNorm, one fixed causal convolution per channel with unit step, and a skip.

    K_l = Re sum_n C_n (exp(Lambda_n) - 1) / Lambda_n exp(Lambda_n l) with poles Lambda_n = -exp(Lambda_real) +
    i exp(Lambda_imag) shared by all channels; then y = K * norm(u) + param_D norm(u). Initialised at random.
    """

    def __init__(self, d_ssm: int, d_state: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_ssm)
        self.Lambda_real = nn.Parameter(torch.randn(d_state))
        self.Lambda_imag = nn.Parameter(torch.randn(d_state))
        self.C_real = nn.Parameter(torch.randn(d_ssm, d_state))
        self.C_imag = nn.Parameter(torch.randn(d_ssm, d_state))
        self.param_D = nn.Parameter(torch.randn(d_ssm))

    def poles(self) -> Complex[Tensor, " state"]:
        """Return Lambda, in complex64 at least."""
        dtype = working_dtype(self.Lambda_real)
        return torch.complex(-self.Lambda_real.to(dtype).exp(), self.Lambda_imag.to(dtype).exp())

    def kernel(self, length: int) -> Float[Tensor, "d_ssm length"]:
        """Return the first `length` taps of each channel, tap 0 first, in float32 at least."""
        poles = self.poles()
        dtype = poles.real.dtype
        weights = torch.complex(self.C_real.to(dtype), self.C_imag.to(dtype)) * torch.expm1(poles) / poles
        steps = torch.arange(length, device=poles.device, dtype=dtype)
        return (weights @ torch.exp(poles[:, None] * steps)).real

    def forward(self, hidden_states: Float[Tensor, "batch length d_ssm"]) -> Float[Tensor, "batch length d_ssm"]:
        """Mix each channel over the tokens up to and including the current one."""
        y = convolution_with_skip(self.norm(hidden_states), self.kernel(hidden_states.shape[1]), self.param_D)
        return y.transpose(1, 2).to(hidden_states.dtype)


class GSS(nn.Module):
    """The GSS mixer: out((gate dss(gelu(v x))) * gelu(u x)).

    Takes and returns (batch, length, d_model). The residual and the norm before the layer belong to the block; the norm
    inside the state space model is part of the layer, as in the original. The layer of Mehta, Gupta, Cutkosky
    and Neyshabur, "Long Range Language Modeling via Gated State Spaces" (2022), Section 3.2, with the parameter
    names of the public gated-state-spaces-pytorch: `to_u.0.weight`, `to_v.0.weight`, `dss.norm`,
    `dss.Lambda_real`, `dss.Lambda_imag`, `dss.C_real`, `dss.C_imag`, `dss.param_D`, `to_gate.weight`,
    `to_out.weight` and `.bias`. `d_inner` defaults to 4 d_model, `d_ssm` to d_model / 4, as in the paper.

    Omitted from the original: the variant that reads sequences backwards, and the hybrid with attention.

    `dss.kernel(length)` returns the kernels, (d_ssm, length). The convolution runs in float32 at least.
    """

    def __init__(self, d_model: int, d_state: int = 512, d_inner: int | None = None, d_ssm: int | None = None) -> None:
        super().__init__()
        d_inner = 4 * d_model if d_inner is None else d_inner
        d_ssm = max(d_model // 4, 1) if d_ssm is None else d_ssm
        self.to_u = nn.Sequential(nn.Linear(d_model, d_inner, bias=False), nn.GELU())
        self.to_v = nn.Sequential(nn.Linear(d_model, d_ssm, bias=False), nn.GELU())
        self.dss = GSSKernel(d_ssm, d_state)
        self.to_gate = nn.Linear(d_ssm, d_inner, bias=False)
        self.to_out = nn.Linear(d_inner, d_model)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix the narrow channels over the tokens up to and including the current one, then gate and project."""
        mixed = self.dss(self.to_v(hidden_states))
        return self.to_out(self.to_gate(mixed) * self.to_u(hidden_states))
