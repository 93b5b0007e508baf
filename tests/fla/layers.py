"""A tiny model around each class of `fla.layers` without an adapter, in a configuration for kernels on a CPU."""

from typing import Any

import torch
from torch import Tensor, nn

_WIDTH = 16
_HEADS = dict(num_heads=2)
_HEAD = dict(num_heads=2, head_dim=8)

LAYERS: dict[str, dict[str, Any]] = {
    "ABCAttention": dict(**_HEADS, num_slots=4),
    "BasedLinearAttention": dict(**_HEADS, num_key_value_heads=2, feature_dim=16),
    "BitAttention": _HEADS,
    "CyclicFlowAttention": dict(**_HEAD, num_slots=16),
    "DeltaFormerAttention": dict(num_heads=1),
    "GatedDeltaNet2": _HEAD,
    "LogLinearMamba2": dict(num_heads=4, head_dim=8, state_size=64, backend="triton"),
    "Mamba3": dict(head_dim=8, state_size=8),
    "MesaNet": _HEAD,
    "MoBA": dict(**_HEADS, moba_chunk_size=4, moba_topk=2),
    "MomAttention": dict(**_HEAD, num_memories=3, topk=2),
    "MomentumDeltaNet": _HEAD,
    "MultiheadLatentAttention": dict(
        num_heads=2, q_lora_rank=8, qk_rope_head_dim=4, kv_lora_rank=8, v_head_dim=8, qk_nope_head_dim=4, qk_head_dim=8
    ),
    "NativeSparseAttention": dict(
        num_heads=16, num_kv_heads=1, head_dim=16, block_size=16, block_counts=2, window_size=3
    ),
    "PaTHAttention": dict(num_heads=1),
    "Parallax": _HEADS,
    "PrecondGatedDeltaNet": _HEAD,
    "PrecondKDA": _HEAD,
    "Raven": dict(**_HEADS, num_slots=4, topk=2, add_gumbel_noise=False),
    "ReBasedLinearAttention": dict(**_HEADS, num_key_value_heads=2, feature_dim=16),
    "RodimusAttention": dict(expand_ratio=4),
    "SlidingWindowSharedKeyAttention": dict(**_HEADS, window_size=3),
    "StickBreakingAttention": _HEADS,
    "WallAttention": _HEADS,
    "YOCOCrossAttention": _HEADS,
    "YOCOGatedRetention": _HEADS,
    "YOCOSharedKVBuilder": _HEADS,
}
"""Arguments of each class, in addition to the width."""

UNCOVERED = {
    "Mamba3": "requires a CUDA device",
    "MomAttention": "'scatter_add'",
    "StickBreakingAttention": "matching fp16/bf16",
}
"""Classes without an operator, and a part of the reason.

Mamba-3 and stick-breaking refuse a CPU or float32, and the mixture of memories gives every memory a sequence of its
tokens.
"""

EMPTY = {"YOCOSharedKVBuilder"}
"""Classes that return keys and values for other layers, and mix no tokens."""


class Model(nn.Module):
    """A language model of one layer, with a norm before it and a residual around it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from fla import layers

        self.embedding = nn.Embedding(11, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.shared = layers.YOCOSharedKVBuilder(_WIDTH, **_HEADS) if name == "YOCOCrossAttention" else None
        self.mixer = getattr(layers, name)(hidden_size=_WIDTH, **LAYERS[name])
        self.head = nn.Linear(_WIDTH, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        normed = self.norm(x)
        shared = () if self.shared is None else self.shared(normed)[:2]
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        if type(self.mixer).__name__ == "MultiheadLatentAttention":
            mask = {"attention_mask": attention_mask}
        mixed = self.mixer(normed, *shared, **mask)
        return self.head(x + (mixed[0] if isinstance(mixed, tuple) else mixed))


def build(name: str) -> nn.Module:
    """Return the model with random weights that hide no parameter."""
    from unilinattn.testing.hosts import randomize

    torch.manual_seed(0)
    return randomize(Model(name)).eval()
