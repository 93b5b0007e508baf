"""S4D: a fixed convolution by a diagonal state space model, and a small causal language model."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError
from unilinattn.models.language_model import MixerForCausalLM
from unilinattn.models.numerics import complex_from_pairs, convolution_with_skip, working_dtype


class S4DKernel(nn.Module):
    """The convolution kernels of S4D, one per channel, from complex poles in conjugate pairs.

    With step dt, poles A_n (real part -exp(log_A_real), imaginary part A_imag) and weights C_n of a channel,
    zero-order hold gives K_l = 2 Re sum_n C_n (exp(dt A_n) - 1) / A_n exp(dt A_n l), with an input
    matrix of ones. Initialised as S4D-Lin: A_n = -1/2 + i pi n.
    """

    def __init__(self, d_model: int, d_state: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        pairs = d_state // 2
        low, high = math.log(dt_min), math.log(dt_max)
        self.log_dt = nn.Parameter(torch.empty(d_model).uniform_(low, high))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(d_model, pairs, dtype=torch.complex64)))
        self.log_A_real = nn.Parameter(torch.full((d_model, pairs), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(pairs, dtype=torch.float32).repeat(d_model, 1))

    def forward(self, length: int) -> Float[Tensor, "d_model length"]:
        """Return the first `length` taps of each channel, tap 0 first, in float32 at least."""
        dtype = working_dtype(self.log_dt)
        dt = self.log_dt.to(dtype).exp()[:, None]
        poles = torch.complex(-self.log_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        weights = complex_from_pairs(self.C) * torch.expm1(dt * poles) / poles
        steps = torch.arange(length, device=dt.device, dtype=dtype)
        powers = torch.exp((dt * poles)[:, :, None] * steps)
        return 2 * (weights[:, :, None] * powers).sum(dim=1).real


class S4D(nn.Module):
    """The S4D mixer: one fixed causal convolution per channel, a skip, GELU, and a gated output projection.

    Takes and returns (batch, length, d_model), without residual or norm: y = K * u + D u, then
    GLU(W gelu(y) + b). The layer of Gu, Gupta, Goel and Ré, "On the Parameterization and Initialization of
    Diagonal State Space Models" (2022), with the parameter names and shapes of the authors' minimal S4D, whose
    state dicts load: `D`, `kernel.log_dt`, `kernel.C` (a complex number as two real ones),
    `kernel.log_A_real`, `kernel.A_imag`, `output_linear.0.weight` and `.bias`.

    Omitted from the original: dropout, the channels-first layout, bidirectional kernels, several kernels per channel,
    inits other than S4D-Lin, discretisation other than zero-order hold, separate learning rates for dt and A, and the
    step-by-step mode with a state.

    `kernel(length)` returns the kernels, (d_model, length). The convolution runs in float32 at least.
    """

    def __init__(self, d_model: int, d_state: int = 64, dt_min: float = 0.001, dt_max: float = 0.1) -> None:
        super().__init__()
        self.d_model = d_model
        self.d_state = d_state
        self.D = nn.Parameter(torch.randn(d_model))
        self.kernel = S4DKernel(d_model, d_state, dt_min, dt_max)
        self.output_linear = nn.Sequential(nn.Conv1d(d_model, 2 * d_model, kernel_size=1), nn.GLU(dim=-2))

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over the tokens up to and including the current one."""
        y = convolution_with_skip(hidden_states, self.kernel(hidden_states.shape[1]), self.D)
        return self.output_linear(functional.gelu(y).to(hidden_states.dtype)).transpose(1, 2)


@dataclass(frozen=True)
class S4DConfig:
    """Sizes of an `S4DForCausalLM`; `S4DConfig(**dataclasses.asdict(config))` is the same configuration.

    Raises `OptionError` if a size is below 1, `d_state` is odd, or not 0 < `dt_min` <= `dt_max`.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    d_state: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; pass 1 or more.")
        if self.d_state < 2 or self.d_state % 2:
            raise OptionError(
                f"d_state is {self.d_state}; poles come in conjugate pairs: pass an even number, 2 or more."
            )
        if not 0 < self.dt_min <= self.dt_max:
            raise OptionError(f"dt_min is {self.dt_min} and dt_max is {self.dt_max}; pass 0 < dt_min <= dt_max.")


class S4DForCausalLM(MixerForCausalLM):
    """A causal language model of S4D blocks: embedding, blocks, final LayerNorm, head.

    The blocks are those of `MixerForCausalLM`; S4D maps zero to a zero state, so padding on either side reaches no real
    token.
    """

    def __init__(self, config: S4DConfig) -> None:
        mixer = partial(S4D, config.d_model, config.d_state, config.dt_min, config.dt_max)
        super().__init__(config.vocab_size, config.d_model, config.n_layers, mixer, config.layer_norm_eps)
        self.config = config
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embeddings.weight
