"""S5: one state space model with many inputs and outputs, diagonal over complex modes."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError, nearest
from unilinattn.models.hippo import hippo_legs
from unilinattn.models.numerics import causal_convolution, complex_from_pairs, powers, working_dtype

DISCRETIZATIONS = ("zoh", "bilinear")


class DiscreteModes(NamedTuple):
    """x_k = decay x_{k-1} + inputs u_k; y_k = Re(outputs x_k), with the factor 2 of conjugate pairs in outputs."""

    decay: Complex[Tensor, " mode"]
    inputs: Complex[Tensor, "mode d_model"]
    outputs: Complex[Tensor, "d_model mode"]


class S5SSM(nn.Module):
    """The state space model of S5: y_k = Re(C x_k) + D u_k over modes x_k = Lambda_bar x_{k-1} + B_bar u_k.

    With `conj_sym` the system has one mode of each conjugate pair, `d_state / 2` in all, and the output is doubled.
    `clip_eigs` keeps the real parts of Lambda below -1e-4. Initialised with `blocks` copies of the normal part of
    HiPPO-LegS on the diagonal; B and C are drawn real and transformed to the basis of its eigenvectors.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int,
        blocks: int,
        conj_sym: bool,
        discretization: str,
        clip_eigs: bool,
        dt_min: float,
        dt_max: float,
    ) -> None:
        super().__init__()
        self.conj_sym = conj_sym
        self.discretization = discretization
        self.clip_eigs = clip_eigs
        block = d_state // blocks
        start = hippo_legs(block)
        count = block // 2 if conj_sym else block
        poles = start.poles[:count].repeat(blocks).to(torch.complex64)
        vectors = torch.block_diag(*[start.vectors[:, :count]] * blocks).to(torch.complex64)
        inputs = torch.randn(d_state, d_model) / math.sqrt(d_model)
        outputs = torch.randn(d_model, d_state, dtype=torch.complex64) / math.sqrt(d_state)
        self.Lambda_re = nn.Parameter(poles.real.contiguous())
        self.Lambda_im = nn.Parameter(poles.imag.contiguous())
        self.B = nn.Parameter(torch.view_as_real(vectors.mH @ inputs.to(vectors.dtype)))
        self.C = nn.Parameter(torch.view_as_real(outputs @ vectors))
        self.D = nn.Parameter(torch.randn(d_model))
        self.log_step = nn.Parameter(torch.empty(len(poles), 1).uniform_(math.log(dt_min), math.log(dt_max)))

    def modes(self) -> DiscreteModes:
        """Return the discrete system, in complex64 at least."""
        dtype = working_dtype(self.Lambda_re)
        real = self.Lambda_re.to(dtype)
        poles = torch.complex(real.clamp(max=-1e-4) if self.clip_eigs else real, self.Lambda_im.to(dtype))
        step = self.log_step.to(dtype)[:, 0].exp()
        if self.discretization == "zoh":
            decay, gain = torch.exp(step * poles), torch.expm1(step * poles) / poles
        else:
            gain = step / (1 - step / 2 * poles)
            decay = (1 + step / 2 * poles) / (1 - step / 2 * poles)
        outputs = complex_from_pairs(self.C)
        return DiscreteModes(
            decay, gain[:, None] * complex_from_pairs(self.B), 2 * outputs if self.conj_sym else outputs
        )

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix all channels over the tokens up to and including the current one."""
        modes = self.modes()
        u = hidden_states.to(modes.decay.real.dtype)
        drive = (u.to(modes.inputs.dtype) @ modes.inputs.mT).transpose(1, 2)
        states = causal_convolution(drive, powers(modes.decay, u.shape[1])).transpose(1, 2)
        y = (states @ modes.outputs.mT).real + self.D.to(u.dtype) * u
        return y.to(hidden_states.dtype)


class S5(nn.Module):
    """The S5 mixer: one state space model with all channels as input and output, GELU, and a sigmoid gate.

    Takes and returns (batch, length, d_model), without residual or norm: g * sigmoid(W g + b), g = gelu(y), with
    GELU in its tanh form. The layer of Smith, Warrington and Linderman, "Simplified State Space Layers for
    Sequence Modeling" (2023), with the parameter names and shapes of the authors' (JAX) layer: `seq.Lambda_re`,
    `seq.Lambda_im`, `seq.B`, `seq.C` (complex numbers as two real ones), `seq.D`, `seq.log_step`, `out2.weight`
    and `out2.bias`; their Dense kernel is the transpose of `out2.weight`.

    Omitted from the original: dropout, batch norm, the bidirectional model, the other gates, other draws of B and C,
    step rescaling, separate learning rates, and sequences with irregular steps.

    `seq.modes()` returns the discrete system. It runs in float32 at least.

    Raises `OptionError` if the discretisation is unknown, or `2 * blocks` does not divide `d_state`.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        blocks: int = 1,
        conj_sym: bool = True,
        discretization: str = "zoh",
        clip_eigs: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
    ) -> None:
        super().__init__()
        if discretization not in DISCRETIZATIONS:
            raise OptionError(f"discretization is {discretization!r}{nearest(discretization, DISCRETIZATIONS)}")
        if d_state < 2 or blocks < 1 or d_state % (2 * blocks):
            raise OptionError(
                f"d_state is {d_state} and blocks is {blocks}; every block holds conjugate pairs: pass a d_state that "
                "2 * blocks divides."
            )
        self.seq = S5SSM(d_model, d_state, blocks, conj_sym, discretization, clip_eigs, dt_min, dt_max)
        self.out2 = nn.Linear(d_model, d_model)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix all channels over the tokens up to and including the current one."""
        mixed = functional.gelu(self.seq(hidden_states), approximate="tanh")
        return mixed * torch.sigmoid(self.out2(mixed))
