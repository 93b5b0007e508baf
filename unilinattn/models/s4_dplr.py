"""S4: a fixed convolution by a state space model with a diagonal plus low-rank matrix."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError
from unilinattn.models.hippo import hippo_legs
from unilinattn.models.numerics import complex_from_pairs, convolution_with_skip, working_dtype


class DPLRSystem(NamedTuple):
    """x' = (diag(poles) - p p*) x + b u, y = Re c x, per channel, with both poles of each conjugate pair."""

    poles: Complex[Tensor, "channel state"]
    low_rank: Complex[Tensor, "channel state"]
    inputs: Complex[Tensor, "channel state"]
    outputs: Complex[Tensor, "channel state"]
    dt: Float[Tensor, "channel 1"]


class S4Kernel(nn.Module):
    """The convolution kernels of S4, one per channel, from x' = (diag(A) - P P*) x + B u, y = C x.

    The bilinear transform with step dt gives K_l = C Abar^l Bbar. Its spectrum at the roots of unity comes from
    the truncated generating function, which the Woodbury identity turns into four Cauchy-like sums (Gu, Goel and
    Ré, "Efficiently Modeling Long Sequences with Structured State Spaces", 2022, Appendix C.3): linear in the
    state, plus one dense matrix power per channel. Initialised with HiPPO-LegS.
    """

    l_kernel: Tensor

    def __init__(self, d_model: int, d_state: int, n_ssm: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        pairs = d_state // 2
        start = hippo_legs(d_state)

        def copies(values: Tensor) -> nn.Parameter:
            half = torch.view_as_real(values[:pairs].to(torch.complex64))
            return nn.Parameter(half.repeat(1, n_ssm, 1, 1))

        self.inv_dt = nn.Parameter(torch.empty(d_model, 1).uniform_(math.log(dt_min), math.log(dt_max)))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(1, d_model, pairs, dtype=torch.complex64)))
        self.B = copies(start.inputs)
        self.P = copies(start.low_rank)
        self.A_real = nn.Parameter(torch.log(-start.poles.real[:pairs].float()).repeat(n_ssm, 1))
        self.A_imag = nn.Parameter(-start.poles.imag[:pairs].float().repeat(n_ssm, 1))
        self.register_buffer("l_kernel", torch.tensor(0))

    def system(self) -> DPLRSystem:
        """Return the continuous system of every channel, in complex64 at least; channels take the systems in turn."""
        dtype = working_dtype(self.A_real)
        channels = self.C.shape[1]

        def every_channel(half: Tensor) -> Tensor:
            full = torch.cat([half, half.conj()], dim=-1)
            return full.repeat(channels // full.shape[0], 1)

        return DPLRSystem(
            every_channel(torch.complex(-self.A_real.to(dtype).exp(), -self.A_imag.to(dtype))),
            every_channel(complex_from_pairs(self.P)[0]),
            every_channel(complex_from_pairs(self.B)[0]),
            every_channel(complex_from_pairs(self.C)[0]),
            self.inv_dt.to(dtype).exp(),
        )

    def forward(self, length: int) -> Float[Tensor, "d_model length"]:
        """Return the first `length` taps of each channel, tap 0 first, in float32 at least."""
        poles, p, b, c, dt = self.system()
        # The series is truncated at `length`: sum_{l < L} K_l z^l = c (I - Abar^L z^L) (I - Abar z)^-1 Bbar.
        truncated = c - (c[:, None] @ torch.linalg.matrix_power(transition(poles, p, dt), length))[:, 0]
        angles = torch.arange(length // 2 + 1, device=dt.device, dtype=dt.dtype) * (-2 * math.pi / length)
        z = torch.polar(torch.ones_like(angles), angles)
        # Multiplied by 1 + z, because the quotient (1 - z) / (1 + z) has a pole at z = -1.
        weight = dt / 2 * (1 + z)
        inverse = 1 / ((1 - z)[:, None] - weight[..., None] * poles[:, None])

        def resolvent(left: Tensor, right: Tensor) -> Tensor:
            return ((left * right)[:, None] * inverse).sum(-1)

        b = dt * b
        correction = resolvent(truncated, p) * weight * resolvent(p.conj(), b) / (1 + weight * resolvent(p.conj(), p))
        return torch.fft.irfft(resolvent(truncated, b) - correction, n=length)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load C from the authors' C (I - Abar^L), L = `l_kernel`, which their code stores after its first run."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.l_kernel:
            return
        with torch.no_grad():
            system = [factor.to(torch.complex128) for factor in self.system()]
            poles, p, _, c, dt = system
            power = torch.linalg.matrix_power(transition(poles, p, dt.real), int(self.l_kernel))
            identity = torch.eye(power.shape[-1], dtype=power.dtype, device=power.device)
            plain = torch.linalg.solve((identity - power).mT, c)
            self.C.copy_(torch.view_as_real(plain[None, :, : self.C.shape[2]]))
            self.l_kernel.zero_()


def transition(
    poles: Complex[Tensor, "channel state"],
    low_rank: Complex[Tensor, "channel state"],
    dt: Float[Tensor, "channel 1"],
) -> Complex[Tensor, "channel state state"]:
    """Return the bilinear transform (I - dt/2 A)^-1 (I + dt/2 A) of A = diag(poles) - p p*."""
    dense = torch.diag_embed(poles) - low_rank[:, :, None] * low_rank.conj()[:, None]
    half = dt[:, :, None] / 2 * dense
    identity = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)
    return torch.linalg.solve(identity - half, identity + half)


class S4Convolution(nn.Module):
    """One fixed causal convolution per channel with a skip: K * u + D u, in float32 at least."""

    def __init__(self, d_model: int, kernel: S4Kernel) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.randn(1, d_model))
        self.kernel = kernel

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over the tokens up to and including the current one."""
        return convolution_with_skip(hidden_states, self.kernel(hidden_states.shape[1]), self.D[0]).transpose(1, 2)


class S4(nn.Module):
    """The S4 mixer: one fixed causal convolution per channel, a skip, GELU, and a gated output projection.

    Takes and returns (batch, length, d_model), without residual or norm: y = K * u + D u, then
    GLU(W gelu(y) + b). The layer of Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State
    Spaces" (2022), with the parameter names and shapes of the authors' fourth version, whose blocks' state dicts
    load: `layer.D`, `layer.kernel.C`, `.B` and `.P` (complex numbers as two real ones), `.A_real`, `.A_imag`,
    `.inv_dt`, `.l_kernel`, `output_linear.0.weight` and `.bias`. The channels take the
    `n_ssm` systems (default: one per channel) in turn.

    Omitted from the original: dropout, several kernels per channel, bidirectional kernels, rank above one, inits other
    than HiPPO-LegS and its clipping of B, other transforms of dt and A, gates and bottlenecks around the layer,
    sampling rates, separate learning rates, and the step-by-step mode with a state.

    `layer.kernel(length)` returns the kernels, (d_model, length). The convolution runs in float32 at least.

    Raises `OptionError` if `d_state` is not even and positive, or `n_ssm` does not divide `d_model`.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        n_ssm: int | None = None,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
    ) -> None:
        super().__init__()
        if d_state < 2 or d_state % 2:
            raise OptionError(f"d_state is {d_state}; poles come in conjugate pairs: pass an even number, 2 or more.")
        n_ssm = d_model if n_ssm is None else n_ssm
        if n_ssm < 1 or d_model % n_ssm:
            raise OptionError(f"n_ssm is {n_ssm}; pass a divisor of d_model, which is {d_model}.")
        self.layer = S4Convolution(d_model, S4Kernel(d_model, d_state, n_ssm, dt_min, dt_max))
        self.output_linear = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GLU(dim=-1))

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over the tokens up to and including the current one."""
        y = functional.gelu(self.layer(hidden_states))
        return self.output_linear(y.to(hidden_states.dtype))
