"""Softmax attention of timm's vision transformers, which is recorded: ViT, DeiT and every model of the same module."""

from unilinattn.architectures.recorded import recorded
from unilinattn.registry import register_architecture

register_architecture(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    name="timm-attention",
    kind="softmax attention",
    needs_capture=True,
)(recorded)
