"""Every class of `fla.layers` without an adapter, by its functions: `-rA` lists the errors.

`test_fla` compares recordings of the others with their adapters.
"""

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

SLOW = {"NativeSparseAttention"}


def _names(names: set[str]) -> list:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in sorted(names)]


def _ids() -> torch.Tensor:
    return torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", _names(set(LAYERS) - set(UNCOVERED) - EMPTY))
def test_layers_are_traced_by_their_functions(name: str) -> None:
    (layer,) = trace(build(name), _ids(), progress=False).layers
    print(f"{name} {layer.reconstruction_error():.1e}")
    assert layer.name == "mixer" and layer.architecture == "recorded"
    assert layer.reconstruction_error() <= 1e-5
    stages = [stage for chain in layer.operator.chains.values() for stage in walk(chain)]
    assert any(isinstance(stage, Mix) and stage.role == "core" for stage in stages)


@pytest.mark.parametrize("name", sorted(UNCOVERED))
def test_other_layers_are_refused(name: str) -> None:
    with pytest.raises(
        (UncoveredError, UnknownArchitectureError, NotImplementedError, TypeError), match=UNCOVERED[name]
    ):
        trace(build(name), _ids(), progress=False)


def test_every_class_is_in_the_table_or_has_an_adapter() -> None:
    from fla import layers

    written = {host.rpartition(".")[2] for host in registry._hosts if host.startswith("fla.layers.")}
    assert set(LAYERS) == set(layers.__all__) - written
