"""RWKV-4: time mixing, a normalised sum of exponential keys with one fixed decay per channel, and channel mixing.

Both are traced as layers: each moves information between tokens and adds to the residual stream.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Call, padded_left, refusing
from unilinattn.call.stored import Stored
from unilinattn.mixers import NormalizedExponential, Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture

_HOST = "transformers.models.rwkv.modeling_rwkv"


@contextmanager
def stand_ins(model: nn.Module, mark: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Replace by copies the output weights that a host rescales in place at its first pass in a mode.

    `mark` receives each layer with its weight and the factor of the copy that it ran with. The model's weights are
    never written to; the recorder restores them after the run.
    """
    hosts: list[Any] = [m for m in model.modules() if isinstance(m, getattr(sys.modules.get(_HOST), "RwkvModel", ()))]
    for host in hosts:
        # The host rescales its weights at the next pass unless these two differ.
        if host.training != host.layers_are_rescaled:
            continue
        for block in host.blocks:
            layers = (block.attention, block.attention.output), (block.feed_forward, block.feed_forward.value)
            for layer, projection in layers:
                weight = projection.weight
                projection.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
                layer.register_forward_pre_hook(partial(_mark_factor, mark, weight.detach(), projection))
    yield


def _mark_factor(
    mark: Callable[[nn.Module, Any], None], weight: Tensor, projection: Any, layer: nn.Module, _: Any
) -> None:
    if weight.is_meta:
        # The host rescales none that accelerate loads for each call.
        return
    largest = weight.abs().argmax()
    rescaled, before = (float(t.flatten()[largest]) for t in (projection.weight.detach(), weight))
    mark(layer, (weight, rescaled / before if before else 1.0))


def _leak(layer: nn.Module, mask: Tensor) -> str | None:
    return "the model takes no notice of its attention mask" if padded_left(mask) else None


@register_architecture(
    "transformers.models.rwkv.modeling_rwkv.RwkvSelfAttention",
    name="rwkv4",
    kind="RWKV-4 (normalised exponential)",
    capture=stand_ins,
    padding_leak=_leak,
    extra_outputs=1,
    check=refusing("state"),
)
def rwkv4(call: Call) -> Flow:
    """RWKV-4's time mixing: token shift, a normalised exponential with a bonus for the token itself, receptance.

    Peng et al., EMNLP Findings 2023, Eq. 11-16. Keys and receptance are frozen; only the values carry. The host
    divides the output weights of block n by 2^(n // rescale_every) at its first evaluation pass; the operator uses the
    weights that ran.
    """
    host = call.host
    frozen = [
        functional.linear(_shifted(call, mix), call.tensor(projection.weight))
        for mix, projection in ((host.time_mix_key, host.key), (host.time_mix_receptance, host.receptance))
    ]
    output = _output_weight(call, host.output)

    flow = Flow(call.input).shift(1 - call.tensor(host.time_mix_value))
    flow.matrix(call.stored(host.value.weight), role="input")
    decay = -torch.exp(call.tensor(host.time_decay))
    flow.core(NormalizedExponential(frozen[0], decay, call.tensor(host.time_first)))
    flow.gate(torch.sigmoid(frozen[1]))
    return flow.matrix(output, role="output")


@register_architecture(
    "transformers.models.rwkv.modeling_rwkv.RwkvFeedForward",
    name="rwkv4_channel",
    kind="RWKV-4 channel mixing (token shift)",
    padding_leak=_leak,
    extra_outputs=1,
    check=refusing("state"),
)
def rwkv4_channel(call: Call) -> Flow:
    """RWKV-4's channel mixing: a token shift, which is the core, an MLP and receptance.

    Peng et al., EMNLP Findings 2023, Eq. 17-19. max(k, 0)^2 is k times the frozen max(k, 0); receptance is frozen. Both
    matrices follow the core, so `unified` is the token shift too.
    """
    host = call.host
    receptance = functional.linear(_shifted(call, host.time_mix_receptance), call.tensor(host.receptance.weight))
    mix = call.tensor(host.time_mix_key).flatten()
    batch, length = call.input.shape[:2]

    flow = Flow(call.input)
    flow.core(Toeplitz(torch.stack([mix, 1 - mix], dim=-1), batch=batch, length=length))
    flow.matrix(call.stored(host.key.weight), role="output").activation("relu2")
    flow.matrix(_output_weight(call, host.value), role="output")
    return flow.gate(torch.sigmoid(receptance))


def _output_weight(call: Call, projection: Any) -> Stored:
    """Return the weight that the host ran with: times the factor that `stand_ins` recorded."""
    if not call.seen:
        return call.stored(projection.weight)
    weight, factor = call.seen[0].record
    return call.stored(weight).then(lambda matrix: matrix * factor)


def _shifted(call: Call, mix: Tensor) -> Tensor:
    return Flow(call.input).shift(1 - call.tensor(mix)).value
