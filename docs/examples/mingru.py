"""minGRU, a linear RNN whose gate reads only the current token, and a small language model with it.

Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024), with the short convolution that
precedes it in their language models. This file does not import unilinattn.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t c_t, with the gate z = sigmoid(W_z u) and the candidate c = W_c u + b_c."""

    def __init__(self, width: int, expansion: int = 2, taps: int = 4) -> None:
        super().__init__()
        inner = expansion * width
        self.conv = nn.Conv1d(width, width, taps, padding=taps - 1, groups=width)
        self.to_gate = nn.Linear(width, inner)
        self.to_candidate = nn.Linear(width, inner)
        self.to_output = nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (batch, length, width) to the same; `mask` (batch, length) is 1 at real tokens and 0 at padding."""
        if mask is not None:
            x = x * mask[..., None]
        u = self.conv(x.mT)[..., : x.shape[1]].mT
        gate, candidate = torch.sigmoid(self.to_gate(u)), self.to_candidate(u)
        if mask is not None:
            gate = gate * mask[..., None]
        state, states = torch.zeros_like(candidate[:, 0]), []
        for z, c in zip(gate.unbind(1), candidate.unbind(1), strict=True):
            state = (1 - z) * state + z * c
            states.append(state)
        return self.to_output(torch.stack(states, dim=1))


class Block(nn.Module):
    """x + MinGRU(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), MinGRU(width)
        self.mlp_norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (batch, length, width) to the same."""
        x = x + self.mixer(self.norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Output(NamedTuple):
    """Output of the model: logits (batch, length, vocabulary)."""

    logits: Tensor


class MinGRUForCausalLM(nn.Module):
    """Embedding, blocks, a last norm, logits."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        """Return the logits of the next token at every position."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return Output(self.head(self.norm(x)))
