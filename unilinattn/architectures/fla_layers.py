"""Layers of flash-linear-attention whose operators are recorded: named here, they need no search in a model.

The functions that their modules call are registered in `fla_scans`, `fla_matrices` and `fla_plain`.
"""

from unilinattn.architectures.recorded import recorded
from unilinattn.registry import register_architecture

KINDS = {
    "fla_attention": ("attn.Attention", "softmax attention"),
    "fla_forgetting_attention": ("forgetting_attn.ForgettingAttention", "forgetting attention"),
    "fla_hgrn2": ("hgrn2.HGRN2Attention", "HGRN2"),
    "fla_lightnet": ("lightnet.LightNetAttention", "LightNet"),
    "fla_linear_attention": ("linear_attn.LinearAttention", "linear attention"),
}
"""The class in `fla.layers` and the kind of mixer, by the name of the architecture."""

for name, (host, kind) in KINDS.items():
    register_architecture(f"fla.layers.{host}", name=name, kind=kind, needs_capture=True, extra_outputs=2)(recorded)
