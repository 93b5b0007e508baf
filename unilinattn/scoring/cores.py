"""The core mixers of a layer with the values that they mix."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from jaxtyping import Inexact
from torch import Tensor

from unilinattn.kernels.precision import full_precision
from unilinattn.mixers.base import CoreMixer
from unilinattn.operator.stages import Branch, Chain, Mix, Stage, walk
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
    op, every = layer.operator, list[Core]()
    for port, chain in op.chains.items():
        count = sum(map(_is_core, walk(chain)))
        every += islice(_cores(chain, op.inputs[port].to(op.output.dtype)), count)
    return every


def _is_core(stage: Stage) -> bool:
    return isinstance(stage, Mix) and stage.role == "core"


def _cores(chain: Chain, x: Tensor) -> Iterator[Core]:
    for stage in chain:
        if isinstance(stage, Mix) and _is_core(stage):
            yield Core(stage.mixer, x.unflatten(2, (stage.mixer.heads, -1)))
        elif isinstance(stage, Branch) and any(map(_is_core, walk([stage]))):
            for inner in stage.chains:
                yield from _cores(inner, x)
        x = stage.apply(x)
