"""Hosts without an adapter: their operators are read from the functions that they call."""

from collections.abc import Callable
from typing import Any

from torch import nn

from unilinattn.testing.hosts.basic import IDS, Host, causal_model, family, transformers_model

_WIDTH = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, **IDS)
_ENCODER = dict(**_WIDTH, intermediate_size=12, max_position_embeddings=128)
_GPT = dict(n_embd=16, n_layer=2, n_head=4, n_positions=128, **IDS)

_causal = dict(length=9)


def _masked(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a masked language model, given the common name of its class and configuration."""
    return transformers_model(f"{name}ForMaskedLM", f"{name}Config", **settings)


_megatron = family("recorded", _masked, "MegatronBert", **_ENCODER)
_deberta = family("recorded", _masked, "DebertaV2", **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"])
_fnet = family("recorded", _masked, "FNet", **{k: v for k, v in _ENCODER.items() if k != "num_attention_heads"})
_gptj = family("recorded", causal_model, "GPTJ", **_GPT, rotary_dim=4)
_codegen = family("recorded", causal_model, "CodeGen", **_GPT, rotary_dim=4)
_bloom = family("recorded", causal_model, "Bloom", hidden_size=16, n_layer=2, n_head=4)
_falcon = family("recorded", causal_model, "Falcon", **_WIDTH)
_mpt = family("recorded", causal_model, "Mpt", d_model=16, n_layers=2, n_heads=4)
_gpt_neo = family(
    "recorded",
    causal_model,
    "GPTNeo",
    **dict(hidden_size=16, num_layers=2, num_heads=4, window_size=4, attention_types=[[["global", "local"], 1]]),
)
HOSTS: tuple[Host, ...] = (
    _gptj("gpt-j", length=9),
    _megatron("megatron bert"),
    _deberta("deberta v2", length=7),
    _fnet("fnet", length=11, masks=None),
    _codegen("codegen"),
    _bloom("bloom"),
    _falcon("falcon"),
    _falcon("falcon, alibi", dict(alibi=True, new_decoder_architecture=True, num_kv_heads=2), length=7),
    _mpt("mpt", length=7),
    _gpt_neo("gpt neo, global and local"),
)
"""Configurations; a new host is a new entry."""
