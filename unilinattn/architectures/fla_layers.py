"""Layers of flash-linear-attention whose operators are recorded: named here, they need no search in a model.

The functions that their modules call are registered in the room `scans`.
"""

from unilinattn.architectures.recorded import recorded
from unilinattn.registry import register_architecture

register_architecture(
    "fla.layers.attn.Attention", name="fla_attention", kind="softmax attention", needs_capture=True, extra_outputs=2
)(recorded)
register_architecture(
    "fla.layers.forgetting_attn.ForgettingAttention",
    name="fla_forgetting_attention",
    kind="forgetting attention",
    needs_capture=True,
    extra_outputs=2,
)(recorded)
register_architecture(
    "fla.layers.hgrn2.HGRN2Attention", name="fla_hgrn2", kind="HGRN2", needs_capture=True, extra_outputs=2
)(recorded)
register_architecture(
    "fla.layers.lightnet.LightNetAttention", name="fla_lightnet", kind="LightNet", needs_capture=True, extra_outputs=2
)(recorded)
register_architecture(
    "fla.layers.linear_attn.LinearAttention",
    name="fla_linear_attention",
    kind="linear attention",
    needs_capture=True,
    extra_outputs=2,
)(recorded)
