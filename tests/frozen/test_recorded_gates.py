"""Gates of recorded modules in the frozen run by the half rule: they share relevance as those of adapters do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.frozen.detached import scalar_of
from tests.hosts import named
from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn import registry
from unilinattn.frozen import layers
from unilinattn.frozen.passes import FREEZE, HALF
from unilinattn.frozen.run import frozen
from unilinattn.frozen.shares import Shares
from unilinattn.operator.flow import Flow
from unilinattn.testing import Host, promoted
from unilinattn.tracing.trace import Trace, trace

GATED = ("mamba", "mamba2", "minimax", "minimax, two heads, relu", "qwen3 next", "recurrent gemma", "lfm2, biases")
"""Hosts whose recorded modules have the stages of their adapters, with gates inside and outside of mixing functions."""


@contextmanager
def without_adapters(host: Host) -> Iterator[None]:
    """Record the modules of a host that have an adapter."""
    classes = {
        cls for layer in trace(host.model(), host.inputs(), progress=False).layers for cls in layer_classes(layer)
    }
    with registry.overridden():
        for name in classes & registry._hosts.keys():
            del registry._hosts[name]
        yield


def layer_classes(layer: layers.Layer) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(layer.module).__mro__}


def exact(host: Host) -> Trace:
    return trace(host.model(), host.inputs(), progress=False)


def relevance(traced: Trace) -> Shares:
    return frozen(traced, rule=HALF).complete_shares(-1, scalar_of(traced))


def difference(name: str) -> float:
    host = named(name)
    with promoted():
        written = relevance(exact(host)).tokens
        with without_adapters(host):
            traced = exact(host)
            assert any(layer.architecture == registry.UNREGISTERED for layer in traced.layers)
            recorded = relevance(traced).tokens
    return float((recorded - written).abs().max() / written.abs().max())


IN_CODE = pytest.mark.skipif(
    transformers.__version__ == "5.6.2", reason="transformers 5.6.2 scans in the modules of Mamba, by other products"
)


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=IN_CODE if "mamba" in n else ()) for n in GATED])
def test_recorded_gates_have_the_relevance_of_written_ones(name: str) -> None:
    assert difference(name) <= 1e-12


@pytest.mark.long
def test_frozen_gates_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen_stages(layer: layers.Layer, port: str, x: Tensor) -> Flow:
        flow = Flow(x)
        for stage in layer.operator.chains[port]:
            flow.stage(stage)
        return flow

    flow_of = layers._flow
    monkeypatch.setattr(
        layers, "_flow", lambda layer, *rest: (frozen_stages if layer.is_recorded else flow_of)(layer, *rest)
    )
    assert difference("qwen3 next") > 1e-2


class Gated(nn.Module):
    """A running mean of the values times a gate."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.projection, self.gate = nn.Linear(WIDTH, 2 * WIDTH), gate

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.projection(x).chunk(2, -1)
        return value.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1) * self.gate(gate)


def gated(gate: Callable[[Tensor], Tensor]) -> Trace:
    torch.manual_seed(0)
    model = Model(Block(added, Gated(gate)), Block(added, Gated(gate))).double()
    return trace(model, ids(), progress=False)


def gates_matter(traced: Trace) -> bool:
    by_rule = [frozen(traced, rule=rule).complete_shares(-1, 1).tokens for rule in (HALF, FREEZE)]
    return float((by_rule[0] - by_rule[1]).abs().max() / by_rule[1].abs().max()) > 1e-3


@pytest.mark.long
def test_a_gate_shares_relevance_unless_it_is_a_level_or_has_no_rule() -> None:
    assert gates_matter(gated(functional.silu))
    assert gates_matter(gated(lambda gate: gate))
    assert not gates_matter(gated(torch.sigmoid))
    assert not gates_matter(gated(lambda gate: functional.silu(gate[..., :1])))
    # The frozen run has no rule for this function, so that the gate stays a constant.
    assert not gates_matter(gated(lambda gate: torch.fft.irfft(torch.fft.rfft(gate, dim=1), n=gate.shape[1], dim=1)))


def test_gates_that_are_squares_or_halves_are_counted_once() -> None:
    def squared(gate: Tensor) -> Tensor:
        return gate * gate

    for gate in (squared, lambda gate: functional.silu(gate) * gate):
        shares = relevance(gated(gate))
        assert float((shares.gap / shares.size).max()) <= 1e-12


class Watching:
    """Counts the calls of a module, and cannot be copied."""

    calls = 0

    def __deepcopy__(self, memo: object) -> "Watching":
        raise AssertionError("the owner of a hook was copied")

    def __call__(self, *_: object) -> None:
        self.calls += 1


def test_modules_in_low_precision_are_copied_without_the_owners_of_their_hooks() -> None:
    model = Model(Block(added, Gated(functional.silu))).bfloat16()
    watching = Watching()
    model.blocks[0].mixer.projection.register_forward_hook(watching.__call__)
    shares = relevance(trace(model, ids(), progress=False))
    assert watching.calls and float((shares.gap / shares.size).max()) <= 1e-2
