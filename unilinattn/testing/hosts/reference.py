"""Tiny configurations of the reference models in `unilinattn.models`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from unilinattn.models import (
    DSS,
    GSS,
    H3,
    S4,
    S5,
    BiMamba,
    Hyena,
    HyenaDNAForCausalLM,
    MixerForCausalLM,
    MultiHyena,
    VisionMamba,
)
from unilinattn.testing.hosts import VOCABULARY, Host


def _language(mixer: Callable[..., nn.Module], width: int = 12, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: MixerForCausalLM(VOCABULARY, width, 1, partial(mixer, width, **settings))


def _space(mixer: Callable[..., nn.Module], width: int = 12, **settings: Any) -> Callable[[], nn.Module]:
    """Build a state space with long steps, so that its kernel is as large as its skip."""
    return _language(mixer, width, **{"dt_min": 0.05, "dt_max": 0.5, **settings})


def _hyena(mixer: Callable[..., nn.Module] = Hyena, width: int = 12, **settings: Any) -> Callable[[], nn.Module]:
    return _language(mixer, width, **{"l_max": 80, "filter_order": 6, **settings})


def _vim(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(img_size=8, patch_size=4, num_classes=5, embed_dim=12, depth=2, d_state=4)
    return lambda: VisionMamba(**{**defaults, **settings})


_image = partial(Host, architecture="vim", length=5, image=(3, 8, 8), masks=None)
_text = partial(Host, layers=1)
_leaking = partial(Host, layers=1, masks=("right",))

HOSTS: tuple[Host, ...] = (
    _image("vim", build=_vim()),
    _image("vim, CLS first, plain sum", build=_vim(cls_position="first", divide_out=False)),
    _image("vim, double CLS, one image", build=_vim(cls_position="double"), length=6, batch=1),
    _image("vim, CLS last, overlapping patches", build=_vim(cls_position="last", stride=2), length=10),
    # The backward direction reads right padding first, so with a bias both sides leak.
    _text("vim, biases", "vim", _language(BiMamba, d_state=3, bias=True), length=7, masks=()),
    _text("vim, no conv bias, wide kernel", "vim", _language(BiMamba, d_state=1, d_conv=7, conv_bias=False), length=9),
    _text("vim, narrow, one token", "vim", _language(BiMamba, expand=1, dt_rank=3), length=1, masks=()),
    _text("vim, chunk and one", "vim", _language(BiMamba, 4, d_state=2), length=65, batch=1, masks=()),
    _text("s4", "s4", _space(S4, d_state=8)),
    _text("s4, one system, two poles", "s4", _space(S4, d_state=2, n_ssm=1), length=33, batch=3),
    _text("s4, shared systems, long kernel", "s4", _space(S4, 6, d_state=4, n_ssm=3), length=66, batch=1),
    _text("s4, one token", "s4", _space(S4, d_state=4), length=1),
    # The softmax kernel depends on the length, so padding on either side changes it.
    _text("dss, softmax", "dss", _space(DSS, d_state=5), masks=()),
    _text("dss, exponential", "dss", _space(DSS, d_state=5, version="exp")),
    _text("dss, softmax, long kernel", "dss", _space(DSS, 6, d_state=3), length=41, batch=1, masks=()),
    _text("dss, exponential, one token", "dss", _space(DSS, d_state=1, version="exp"), length=1),
    _text("s5", "s5", _space(S5, d_state=8)),
    _text("s5, bilinear, two blocks", "s5", _space(S5, d_state=8, blocks=2, discretization="bilinear"), length=9),
    _text("s5, every mode, clipped", "s5", _space(S5, d_state=4, conj_sym=False, clip_eigs=True), length=17, batch=3),
    _text("s5, long kernel, two modes", "s5", _space(S5, 6, d_state=4), length=67, batch=1),
    _text("s5, one token", "s5", _space(S5, d_state=4), length=1),
    _leaking("gss", "gss", _language(GSS, d_state=6)),
    _leaking("gss, narrow inside", "gss", _language(GSS, d_state=3, d_inner=10, d_ssm=7), length=19),
    _leaking("gss, long kernel", "gss", _language(GSS, 8, d_state=5), length=40, batch=1),
    _leaking("gss, one token", "gss", _language(GSS, d_state=2), length=1),
    _leaking("h3", "h3", _space(H3, d_state=6)),
    _leaking("h3, three heads", "h3", _space(H3, d_state=4, head_dim=4), length=9),
    _leaking("h3, one head, shift longer than text", "h3", _space(H3, 6, d_state=16, head_dim=6), length=7),
    _leaking("h3, long kernel", "h3", _space(H3, 6, d_state=4, head_dim=2), length=37, batch=1),
    _leaking("h3, one token", "h3", _space(H3, d_state=2, head_dim=2), length=1),
    _leaking("hyena", "hyena", _hyena()),
    _leaking("hyena, order 3", "hyena", _hyena(order=3, short_filter_order=2), length=11, batch=3),
    _leaking("hyena, order 4, long", "hyena", _hyena(width=6, order=4, modulate=False), length=39, batch=1),
    _leaking("hyena, no short filter, one token", "hyena", _hyena(short_filter_order=1), length=1),
    _leaking("multi-head hyena", "multi-hyena", _hyena(MultiHyena, num_heads=3)),
    _leaking("multi-head hyena, one head", "multi-hyena", _hyena(MultiHyena, width=4, num_heads=1), length=7),
    _leaking("multi-head hyena, a head a channel", "multi-hyena", _hyena(MultiHyena, num_heads=12), length=9),
    _leaking("multi-head hyena, long", "multi-hyena", _hyena(MultiHyena, 6, num_heads=3), length=35, batch=1),
    Host(
        "hyenadna",
        "hyena",
        lambda: HyenaDNAForCausalLM(d_model=8, n_layer=3, d_inner=12, vocab_size=VOCABULARY, l_max=42),
        layers=3,
        length=21,
        masks=None,
    ),
)
"""All configurations; a new host is a new entry."""
