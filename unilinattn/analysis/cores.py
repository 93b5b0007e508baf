"""The core mixers of a layer with the values that they mix."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Inexact
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.kernels.precision import full_precision
from unilinattn.mixers.base import CoreMixer
from unilinattn.operator.stages import Branch, Chain, Mix
from unilinattn.tracing.layer import Layer


@dataclass(frozen=True, eq=False)
class Core:
    """A core mixer of a traced layer, and the values (batch, key, head, channel) that it mixes in the model."""

    mixer: CoreMixer
    value: Inexact[Tensor, "batch key head channel"]


@full_precision()
def cores(layer: Layer) -> list[Core]:
    """Return the core mixers of a layer in the order of its stages; most layers have one, ViM one for each direction.

    Runs the stages up to the last core. Raises the errors of `Layer.operator`.
    """
    op = layer.operator
    return [core for port, chain in op.chains.items() for core in _cores(chain, op.inputs[port].to(op.output.dtype))]


def core_of(layer: Layer, index: int) -> Core:
    """Return the core number `index` of a layer; raise `OptionError` if it has fewer."""
    every = cores(layer)
    if not 0 <= index < len(every):
        raise OptionError(f"core={index} is out of range: {layer.name} has {len(every)} core mixers, numbered from 0.")
    return every[index]


def _cores(chain: Chain, x: Tensor) -> Iterator[Core]:
    for stage in chain:
        if isinstance(stage, Branch):
            for inner in stage.chains:
                yield from _cores(inner, x)
        elif isinstance(stage, Mix) and stage.role == "core":
            yield Core(stage.mixer, x.unflatten(2, (stage.mixer.heads, -1)))
        x = stage.apply(x)
