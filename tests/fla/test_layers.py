"""Every class of `fla.layers` by its functions, without an adapter: `-rA` lists the errors."""

from collections.abc import Iterator

import pytest
import torch

from tests.fla.layers import EMPTY, LAYERS, UNCOVERED, build
from unilinattn import registry, trace
from unilinattn.errors import UncoveredError, UnknownArchitectureError
from unilinattn.operator.stages import Mix, walk

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:fla"),
    # LightNet's kernel subtracts two empty sums and does not use the result.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning:triton"),
]

ADAPTERS = {"Mamba", "Mamba2", "RWKV7Attention"}
"""Classes that have an adapter: their scans are loops of torch, or a layer passes its values on."""

SLOW = {"NativeSparseAttention"}


@pytest.fixture
def only_functions() -> Iterator[None]:
    """The registry without the adapters of the package's classes."""
    with registry.overridden():
        for host in [host for host in registry._hosts if host.startswith("fla.")]:
            del registry._hosts[host]
        yield


def _names(names: set[str]) -> list:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in sorted(names)]


def _ids() -> torch.Tensor:
    return torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", _names(set(LAYERS) - set(UNCOVERED) - EMPTY - ADAPTERS))
def test_layers_are_traced_by_their_functions(name: str, only_functions: None) -> None:
    (layer,) = trace(build(name), _ids(), progress=False).layers
    print(f"{name} {layer.reconstruction_error():.1e}")
    assert layer.name == "mixer" and layer.architecture == "recorded"
    assert layer.reconstruction_error() <= 1e-5
    stages = [stage for chain in layer.operator.chains.values() for stage in walk(chain)]
    assert any(isinstance(stage, Mix) and stage.role == "core" for stage in stages)


@pytest.mark.parametrize("name", _names(ADAPTERS))
def test_layers_with_an_adapter_are_traced(name: str) -> None:
    (layer,) = trace(build(name), _ids(), progress=False).layers
    assert layer.architecture.startswith("fla_") and layer.reconstruction_error() <= 1e-5


@pytest.mark.parametrize("name", sorted(UNCOVERED))
def test_other_layers_are_refused(name: str) -> None:
    with pytest.raises(
        (UncoveredError, UnknownArchitectureError, NotImplementedError, TypeError), match=UNCOVERED[name]
    ):
        trace(build(name), _ids(), progress=False)


def test_every_class_is_in_the_table() -> None:
    from fla import layers

    assert set(LAYERS) == set(layers.__all__)
