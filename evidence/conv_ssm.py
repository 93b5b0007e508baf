"""The simplified models of the Induction paper: a convolution, a selective SSM, or both, without norm or residual."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.call import Call
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.flow import Flow


@dataclass
class Output:
    """The output of `ConvSSMForCausalLM`, named as in transformers."""

    logits: Float[Tensor, "batch length token"]


class SelectiveSSM(nn.Module):
    """H_t = exp(D_t A) H_{t-1} + D_t b_t x_t^T and y_t = c_t^T H_t, with one step size D_t for all channels.

    Takes and returns (batch, length, channel). b_t = W_b x_t, c_t = W_c x_t and D_t = softplus(a . x_t + beta). The
    states are not formed: y_i is the sum over j of alpha_ij x_j, with time and memory quadratic in length.
    Source: Induction Eq. 6-11.
    """

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.to_step = nn.Linear(width, 1)
        self.to_key = nn.Linear(width, state, bias=False)
        self.to_query = nn.Linear(width, state, bias=False)
        self.log_rate = nn.Parameter(torch.linspace(math.log(0.05), math.log(1.0), state))

    def forward(self, x: Float[Tensor, "batch length channel"]) -> Float[Tensor, "batch length channel"]:
        """Mix the tokens before each token into it."""
        step = functional.softplus(self.to_step(x))
        elapsed = step.cumsum(1)
        gaps = (elapsed - elapsed.mT)[..., None]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[..., None]
        decay = torch.where(later, gaps * -self.log_rate.exp(), -torch.inf).exp()
        weights = torch.einsum("bin,bijn,bjn->bij", self.to_query(x), decay, step * self.to_key(x))
        return weights @ x


class ConvSSM(nn.Module):
    """A causal depthwise convolution of two taps, then a selective SSM; either may be absent (Induction Fig. 2b)."""

    def __init__(self, width: int, state: int, *, conv: bool, ssm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2, padding=1, groups=width, bias=False) if conv else None
        self.ssm = SelectiveSSM(width, state) if ssm else None

    def forward(self, x: Float[Tensor, "batch length channel"]) -> Float[Tensor, "batch length channel"]:
        """Return (batch, length, channel)."""
        if self.conv is not None:
            x = self.conv(x.mT)[..., : x.shape[1]].mT
        return x if self.ssm is None else self.ssm(x)


class ConvSSMForCausalLM(nn.Module):
    """An embedding, one `ConvSSM`, and an unembedding."""

    def __init__(self, vocabulary: int, width: int, state: int, *, conv: bool = True, ssm: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = ConvSSM(width, state, conv=conv, ssm=ssm)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Int[Tensor, "batch length"]) -> Output:
        """Return the logits of the next token at every position."""
        return Output(self.head(self.mixer(self.embedding(input_ids))))


@ula.register_architecture("evidence.conv_ssm.ConvSSM", name="conv-ssm", kind="convolution and selective SSM")
def conv_ssm(call: Call) -> Flow:
    """The simplified Mamba of the Induction paper (Eq. 6-11, Fig. 2b)."""
    host = call.host
    flow = Flow(call.input)
    if host.conv is not None:
        flow.conv(*call.affine(host.conv))
    if host.ssm is None:
        return flow
    step = functional.softplus(call.affine(host.ssm.to_step)(flow.value))
    key, query = (call.affine(layer)(flow.value)[:, :, None] for layer in (host.ssm.to_key, host.ssm.to_query))
    rate = -torch.exp(call.tensor(host.ssm.log_rate))[None]
    return flow.core(DiagonalDecay(query, key, step[..., None], key_scale=step, rate=rate))
