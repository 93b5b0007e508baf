"""H3: linear attention whose keys pass a shift and whose outer products pass a diagonal state space model."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError
from unilinattn.models.numerics import causal_convolution, complex_from_pairs, powers, working_dtype


class ShiftKernel(nn.Module):
    """The kernels of the shift state space model, one per channel: K_l = sum_n B_n C_{n+l}, zero from `d_state` on.

    Its state holds the last `d_state` inputs. Initialised with B = e_1, for which the taps are C.
    """

    def __init__(self, channels: int, d_state: int) -> None:
        super().__init__()
        self.B = nn.Parameter(functional.one_hot(torch.zeros(channels, dtype=torch.long), d_state).float())
        self.C = nn.Parameter(torch.empty(1, channels, d_state).uniform_(-1, 1) / math.sqrt(d_state))

    def forward(self, length: int) -> Float[Tensor, "channel length"]:
        """Return the first `length` taps of each channel, tap 0 first, in float32 at least."""
        dtype = working_dtype(self.B)
        size = self.B.shape[-1]
        spectrum = torch.fft.rfft(self.B.to(dtype), n=2 * size).conj() * torch.fft.rfft(self.C[0].to(dtype), n=2 * size)
        taps = torch.fft.irfft(spectrum, n=2 * size)[:, : min(size, length)]
        return functional.pad(taps, (0, length - taps.shape[-1]))


class DiagonalKernel(nn.Module):
    """The kernels of a diagonal state space model, one per head, from complex poles in conjugate pairs.

    The bilinear transform with step dt of A_n = -exp(inv_A_real) + i A_imag gives K_l = 2 Re sum_n B_n C_n
    dt / (1 - dt A_n / 2) ((1 + dt A_n / 2) / (1 - dt A_n / 2))^l. Initialised as S4D-Lin: A_n = -1/2 + i pi n, B = 1.
    """

    def __init__(self, heads: int, d_state: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        pairs = d_state // 2
        ones = torch.ones(heads, pairs, dtype=torch.complex64)
        self.log_dt = nn.Parameter(torch.empty(heads).uniform_(math.log(dt_min), math.log(dt_max)))
        self.B = nn.Parameter(torch.view_as_real(ones))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(1, heads, pairs, dtype=torch.complex64)))
        self.inv_A_real = nn.Parameter(torch.full((heads, pairs), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(pairs, dtype=torch.float32).repeat(heads, 1))

    def forward(self, length: int) -> Float[Tensor, "head length"]:
        """Return the first `length` taps of each head, tap 0 first, in float32 at least."""
        dtype = working_dtype(self.log_dt)
        dt = self.log_dt.to(dtype).exp()[:, None]
        half = dt / 2 * torch.complex(-self.inv_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        weights = complex_from_pairs(self.B) * complex_from_pairs(self.C)[0] * dt / (1 - half)
        return 2 * (weights[..., None] * powers((1 + half) / (1 - half), length)).sum(1).real


class H3(nn.Module):
    """The H3 mixer: q_i sum_j K_{i-j} (shift(k))_j v_j per head, and an output projection.

    Takes and returns (batch, length, d_model), without residual or norm. Each head of `head_dim` channels sends
    the outer products of its keys (after the shift, with skip `ssm_k_D`) and values through one convolution
    (with skip `D`) and reads them with its queries; `head_dim` 1 is a product of channels. The layer of Fu, Dao,
    Saab, Thomas, Rudra and Ré, "Hungry Hungry Hippos: Towards Language Modeling with State Space Models" (2023),
    Algorithm 1, with the parameter names and shapes of the published models, whose mixers' state dicts load:
    `q_proj`, `k_proj`, `v_proj`, `ssm_k_kernel.kernel.B` and `.C`, `ssm_k_D`, `kernel.kernel.C`, `.B` (complex
    numbers as two real ones), `.log_dt`, `.inv_A_real`, `.A_imag`, `D`, `output_linear`.

    Omitted from the original: kernels of a fixed maximal length, systems shared by heads, inits other than S4D-Lin,
    zero-order hold, separate learning rates, the step-by-step mode with a state, and the MLP and attention layers
    around it.

    `key_kernel(length)` returns the shift's taps, (d_model, length), `value_kernel(length)` the heads', (d_model /
    head_dim, length). Everything after the projections runs in float32 at least.

    Raises `OptionError` if `head_dim` does not divide `d_model`, or `d_state` is not even and positive.
    """

    def __init__(
        self, d_model: int, d_state: int = 64, head_dim: int = 1, dt_min: float = 0.001, dt_max: float = 0.1
    ) -> None:
        super().__init__()
        if head_dim < 1 or d_model % head_dim:
            raise OptionError(f"head_dim is {head_dim}; pass a divisor of d_model, which is {d_model}.")
        if d_state < 2 or d_state % 2:
            raise OptionError(f"d_state is {d_state}; poles come in conjugate pairs: pass an even number, 2 or more.")
        self.head_dim = head_dim
        self.num_heads = d_model // head_dim
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.ssm_k_kernel = nn.ModuleDict({"kernel": ShiftKernel(d_model, d_state)})
        self.ssm_k_D = nn.Parameter(torch.randn(d_model))
        self.kernel = nn.ModuleDict({"kernel": DiagonalKernel(self.num_heads, d_state, dt_min, dt_max)})
        self.D = nn.Parameter(torch.randn(self.num_heads))
        self.output_linear = nn.Linear(d_model, d_model)

    def key_kernel(self, length: int) -> Float[Tensor, "d_model length"]:
        """Return the taps of the keys' shift, without its skip."""
        return self.ssm_k_kernel["kernel"](length)

    def value_kernel(self, length: int) -> Float[Tensor, "head length"]:
        """Return the taps of the outer products' convolution, without its skip."""
        return self.kernel["kernel"](length)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each head over the tokens up to and including the current one."""
        length = hidden_states.shape[1]
        kernel = self.value_kernel(length)

        def heads(channels: Tensor) -> Tensor:
            return channels.unflatten(1, (self.num_heads, self.head_dim))

        q, k, v = (
            projection(hidden_states).transpose(1, 2).to(kernel.dtype)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = causal_convolution(k, self.key_kernel(length)) + self.ssm_k_D.to(k.dtype)[:, None] * k
        products = heads(k)[:, :, :, None] * heads(v)[:, :, None]
        state = causal_convolution(products, kernel[:, None, None]) + self.D.to(k.dtype)[:, None, None, None] * products
        read = (heads(q)[:, :, :, None] * state).sum(2)
        # Published weights expect heads flattened as (head, channel) at the input and (channel, head) at the output.
        mixed = read.transpose(1, 2).flatten(1, 2).transpose(1, 2)
        return self.output_linear(mixed.to(hidden_states.dtype))
