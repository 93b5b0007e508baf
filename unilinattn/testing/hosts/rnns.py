"""Tiny models of packages of linear RNNs; importing this module imports none of them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from unilinattn.models import MixerForCausalLM
from unilinattn.testing.hosts import VOCABULARY, Host


def _min_rnn(name: str, width: int = 12, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        mixer = getattr(import_module(f"minGRU_pytorch.{name}"), name)
        return MixerForCausalLM(VOCABULARY, width, 1, partial(mixer, width, **settings))

    return build


def _language_model(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = import_module("minGRU_pytorch.minLM").minLM
        built: nn.Module = model(num_tokens=VOCABULARY, **{"dim": 12, "depth": 2, **settings})
        return built

    return build


_gru = partial(Host, architecture="min_gru", layers=1, masks=("right",))
_lstm = partial(Host, architecture="min_lstm", layers=1, masks=("right",))

HOSTS: tuple[Host, ...] = (
    _gru("minGRU", build=_min_rnn("minGRU")),
    _gru("minGRU, wider states, long", build=_min_rnn("minGRU", 6, expansion_factor=1.5), length=67, batch=1),
    _gru("minGRU, one token", build=_min_rnn("minGRU", proj_out=True), length=1),
    _gru("minGRU language model", build=_language_model(), layers=2, masks=None),
    _lstm("minLSTM", build=_min_rnn("minLSTM")),
    _lstm("minLSTM, projected", build=_min_rnn("minLSTM", proj_out=True), length=9, batch=3),
    _lstm("minLSTM language model", build=_language_model(use_lstm=True), layers=2, masks=None),
)
"""All configurations; a new host is a new entry."""
