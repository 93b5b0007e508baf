"""Recorded operators equal those of the adapters, which are written by hand, on the registered hosts."""

import pytest
import torch

from tests.hosts import every, named
from unilinattn.architectures.recorded import recorded
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.host.isolation import in_gradient_mode, isolated
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Mix, walk
from unilinattn.registry import UNREGISTERED
from unilinattn.testing import promoted, relative_error
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import trace

QUICK = ("gpt2", "bert", "mamba", "mamba2", "qwen3 next", "s4d")

OTHERWISE = {
    "RwkvFeedForward": "its token shift is one gather for all channels",
    "RwkvSelfAttention": "its token shift is one gather for all channels",
    "xLSTMLayer": "the steps of its loop are several cores",
    "MiniMaxLightningAttention": "of the two products of its chunks another factor is frozen",
    "Lfm2ShortConv": "each of its two gates may be the value of the other",
    "H3": "each of its three projections may be the gate of the others",
    "Hyena": "each of its projections may be the gate of the others",
    "MultiHyena": "each of its projections may be the gate of the others",
    "ZambaMambaMixer": "each of its Mamba heads is a core",
}
"""Modules that recording decomposes exactly, but in another way than their adapter."""

UNROLLED = ("RecurrentGemmaRecurrentBlock", "BiMamba")
"""Modules with a loop over tokens, whose steps are recorded as terms of a sum."""

WHOLE = ("S5",)
"""Modules that are one stage as a whole."""

UNRECORDED = ("minGRU", "minLSTM")
"""Modules whose values are sums of exponentials of logarithms, which has no rule."""

FIRST = {host.architecture: host.name for host in reversed(every()) if host.architecture != UNREGISTERED}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in dict.fromkeys([*QUICK, *FIRST.values(), "gpt neox, parallel", "vit", "t5, encoder"])
]


def recorded_operator(layer: Layer) -> MixerOperator:
    """Return the operator that the functions of a layer's module give."""
    call = Call(layer.module, layer.name, layer.arguments, layer.input, layer.output)
    flow = in_gradient_mode(False, lambda: isolated(layer.module, lambda: recorded(call)))
    return MixerOperator(flow.chains, inputs=flow.inputs, output=layer.output, mask=layer.mask, name=layer.name)


def cores(operator: MixerOperator) -> set[str]:
    stages = (stage for chain in operator.chains.values() for stage in walk(chain))
    return {stage.mixer.structure for stage in stages if isinstance(stage, Mix) and stage.role == "core"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_operator_equals_the_written_one(name: str) -> None:
    host = named(name)
    compared = 0
    with promoted():
        layers = trace(host.model().double(), host.inputs(), progress=False).layers
        for layer in {type(layer.module): layer for layer in reversed(layers)}.values():
            module = type(layer.module).__name__
            compared += 1
            if module in UNRECORDED:
                with pytest.raises(UncoveredError):
                    recorded_operator(layer)
                continue
            written, operator = layer.operator, recorded_operator(layer)
            assert operator.reconstruction_error() < 1e-12
            if module in OTHERWISE:
                continue
            x = torch.randn(layer.input.shape, generator=torch.Generator().manual_seed(0)).double()
            both = [op.apply({op.ports[0]: x}, bias=False) for op in (operator, written)]
            assert relative_error(*both) < 1e-12
            if module in (*UNROLLED, *WHOLE):
                continue
            assert cores(operator) == cores(written)
            maps = [op.matrix("core", heads=None).flatten(1) for op in (operator, written)]
            assert relative_error(*maps) < 1e-12
    assert compared
