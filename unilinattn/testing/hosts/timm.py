"""Tiny vision models of timm; importing this module does not import timm."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from unilinattn.models import register_with_timm
from unilinattn.testing.hosts import Host


def _timm(name: str, *, fused: bool = True, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a small timm model; `fused` selects the fused attention of its modules."""

    def build() -> nn.Module:
        import timm

        register_with_timm()
        model = timm.create_model(name, **{"num_classes": 5, "depth": 2, **settings})
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        return model

    return build


def _vit(name: str = "vit_tiny_patch16_224", **settings: Any) -> Callable[[], nn.Module]:
    return _timm(name, **{"img_size": 8, "patch_size": 4, "embed_dim": 16, "num_heads": 4, **settings})


def _normed(norm: str, **settings: Any) -> Callable[[], nn.Module]:
    return _vit(scale_attn_norm=True, qk_norm=True, norm_layer=norm, **settings)


_attention = partial(Host, architecture="timm-attention", length=5, image=(3, 8, 8), masks=None)
_vim = partial(Host, architecture="vim", length=5, image=(3, 32, 32), masks=None)

HOSTS: tuple[Host, ...] = (
    _attention("timm vit", build=_vit()),
    _attention("timm vit, plain form, no biases", build=_vit(fused=False, qkv_bias=False), batch=3),
    _attention("timm vit, normed queries and keys", build=_vit(qk_norm=True, num_heads=2), batch=1),
    _attention("timm vit, normed output", build=_normed("layernorm"), length=5),
    _attention("timm vit, root-mean-square norms, plain form", build=_normed("rmsnorm", fused=False)),
    _attention("timm vit, average pool, no CLS", build=_vit(class_token=False, global_pool="avg"), length=4),
    _attention("timm vit, layer scale, one patch", build=_vit(img_size=4, init_values=0.5), length=2, image=(3, 4, 4)),
    _attention("timm deit, distilled", build=_vit("deit_tiny_distilled_patch16_224", depth=3), layers=3, length=6),
    _vim("timm vim", build=_timm("vim_tiny_patch16_224", img_size=32, embed_dim=12)),
    _vim("timm vim, stride 8", build=_timm("vim_tiny_patch16_stride8_224", img_size=32, embed_dim=8), length=10),
)
"""All configurations; a new host is a new entry."""
