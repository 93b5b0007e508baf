"""RWKV-4: exponential keys with a fixed decay a channel, divided by their sum, between token shift and receptance."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, padded_left
from unilinattn.flow import Flow
from unilinattn.mixers import NormalizedExponential
from unilinattn.registry import register_architecture

_HOST = "transformers.models.rwkv.modeling_rwkv"


@contextmanager
def stand_ins(model: nn.Module, mark: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Let a host that rescales its weights in place at a first pass do so to copies, noting each layer's weight.

    The weights themselves are not written to; the copies are gone afterwards.
    """
    hosts: list[Any] = [m for m in model.modules() if isinstance(m, getattr(sys.modules.get(_HOST), "RwkvModel", ()))]
    with ExitStack() as stack:
        for host in hosts:
            # The host's own test for weights that are not yet as its mode wants them.
            if host.training != host.layers_are_rescaled:
                continue
            stack.callback(setattr, host, "layers_are_rescaled", host.layers_are_rescaled)
            for block in host.blocks:
                for projection in (block.attention.output, block.feed_forward.value):
                    own = projection.weight
                    projection.weight = nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad)
                    stack.callback(setattr, projection, "weight", own)
                hook = block.attention.register_forward_pre_hook(lambda layer, _: mark(layer, layer.output.weight))
                stack.callback(hook.remove)
        yield


def _leak(layer: nn.Module, mask: Tensor) -> str | None:
    return "the model takes no notice of its attention mask" if padded_left(mask) else None


@register_architecture(
    f"{_HOST}.RwkvSelfAttention",
    name="rwkv4",
    kind="RWKV-4 (normalised exponential)",
    capture=stand_ins,
    leak=_leak,
    extras=1,
)
def rwkv4(call: Call) -> Flow:
    """RWKV-4's time mixing: token shift, a normalised exponential with a bonus for the token itself, receptance.

    Peng et al., EMNLP Findings 2023, Eq. 11-16. Keys and receptance are frozen; only the values carry. The host
    halves its output weights block by block at its first evaluation pass; those that ran are those used here.
    """
    call.refuse("state")
    host = call.host
    frozen = [
        functional.linear(_shifted(call, mix), call.weight(projection.weight))
        for mix, projection in ((host.time_mix_key, host.key), (host.time_mix_receptance, host.receptance))
    ]
    output = call.seen[0].record if call.seen else host.output.weight

    flow = Flow(call.input).shift(1 - call.weight(host.time_mix_value))
    flow.matrix(call.weight(host.value.weight), role="input")
    decay = -torch.exp(call.weight(host.time_decay))
    flow.core(NormalizedExponential(frozen[0], decay, call.weight(host.time_first)))
    flow.gate(torch.sigmoid(frozen[1]))
    return flow.matrix(call.weight(output), role="output")


def _shifted(call: Call, mix: Tensor) -> Tensor:
    return Flow(call.input).shift(1 - call.weight(mix)).value
