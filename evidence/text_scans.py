"""Chunked forms of two linear RNNs in which a training on a CPU spends little time.

They compute the same function as the scans of transformers' Mamba-2 and gated delta rule, and stand in for them while a
model is trained. The large products run in bfloat16 under autocast; decays and the solution of triangular systems stay
in float32.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32
"""Tokens of a chunk; the length of a sequence is a multiple of it."""


def short_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Causal depthwise convolution and SiLU, as a sum of shifted copies: x is [batch, channel, length]."""
    x = hidden_states.transpose(1, 2)
    width, length = weight.shape[1], x.shape[1]
    padded = functional.pad(x, (0, 0, width - 1, 0))
    total = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
    for lag in range(width):
        total = total + padded[:, lag : lag + length] * weight[:, lag].to(x.dtype)
    return functional.silu(total).transpose(1, 2)


def mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    **_: Any,
) -> Tensor:
    """The scan of Mamba-2 with one group, from a zero state (Dao and Gu 2024, section 6)."""
    batch, length, heads, width = hidden_states.shape
    step = functional.softplus(_wide(dt) + dt_bias)
    x = (hidden_states * step[..., None].to(hidden_states.dtype)).reshape(batch, -1, CHUNK, heads, width)
    x = x.permute(0, 1, 3, 2, 4)
    keys, queries = (factor.reshape(batch, -1, CHUNK, factor.shape[-1]) for factor in (B, C))
    total = (step * A).reshape(batch, -1, CHUNK, heads).transpose(2, 3).cumsum(-1)
    weights = (queries @ keys.transpose(-1, -2))[:, :, None] * decays(total).to(keys.dtype)
    output = weights @ x
    written = (x * (total[..., -1:] - total).exp()[..., None].to(x.dtype)).transpose(-1, -2) @ keys[:, :, None]
    state = torch.zeros_like(_wide(written[:, 0]))
    states = []
    chunk_decay = total[..., -1].exp()[..., None, None]
    for chunk in range(written.shape[1]):
        states.append(state)
        state = state * chunk_decay[:, chunk] + written[:, chunk]
    read = queries[:, :, None] @ torch.stack(states, 1).to(queries.dtype).transpose(-1, -2)
    output = output + read * total.exp()[..., None].to(read.dtype)
    output = output.permute(0, 1, 3, 2, 4).reshape(batch, length, heads, width)
    return output + hidden_states * D[:, None].to(hidden_states.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule with normalised queries and keys, from a zero state (Yang et al. 2025, section 3.3)."""
    batch, length, heads, width = value.shape
    query, key, value = (factor.transpose(1, 2).unflatten(2, (-1, CHUNK)) for factor in (query, key, value))
    query, key = (_normalised(_wide(factor)) for factor in (query, key))
    query = query * query.shape[-1] ** -0.5
    strength = _wide(beta).transpose(1, 2).unflatten(2, (-1, CHUNK))[..., None]
    total = _wide(g).transpose(1, 2).unflatten(2, (-1, CHUNK)).cumsum(-1)
    pairwise = decays(total)
    keys = key * strength
    system = _wide(keys @ key.transpose(-1, -2)) * pairwise
    right = torch.cat([_wide(value) * strength, keys * total.exp()[..., None]], -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solution.split([width, key.shape[-1]], -1)
    inside = (query @ key.transpose(-1, -2)) * pairwise
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    chunk_decay = total[..., -1].exp()[..., None, None]
    state = key.new_zeros(batch, heads, key.shape[-1], width)
    outputs = []
    for chunk in range(length // CHUNK):
        new = values[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + inside[:, :, chunk] @ new)
        state = state * chunk_decay[:, :, chunk] + key[:, :, chunk].transpose(-1, -2) @ new
    return torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2).contiguous().to(value.dtype), None


def decays(total: Tensor) -> Tensor:
    """exp(total_i - total_j) for j <= i, and zero above the diagonal; `total` is the running sum of the logarithms."""
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    return (total[..., None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(factor: Tensor) -> Tensor:
    return factor * torch.rsqrt(factor.square().sum(-1, keepdim=True) + 1e-6)


FORMS = {
    "transformers.models.mamba2.modeling_mamba2": {
        "mamba2_chunk_scan": mamba2_scan,
        "causal_conv1d_fn": short_convolution,
    },
    "transformers.models.qwen3_5.modeling_qwen3_5": {
        "torch_chunk_gated_delta_rule": gated_delta_rule,
        "causal_conv1d_fn": short_convolution,
    },
}
"""The functions that are replaced, by module."""


@contextmanager
def fast_scans() -> Iterator[None]:
    """Replace the scans and convolutions of both hosts by the forms of this module."""
    originals = []
    for path, forms in FORMS.items():
        module = importlib.import_module(path)
        for name, form in forms.items():
            originals.append((module, name, getattr(module, name)))
            setattr(module, name, form)
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
