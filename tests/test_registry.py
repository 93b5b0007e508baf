"""Registration of architectures and methods, and entry points of other packages."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import Tensor, nn

from tests.tracing.models import Block, Model, added, ids
from unilinattn import (
    Attribution,
    Trace,
    explain,
    list_architectures,
    register_architecture,
    register_method,
    registry,
    trace,
)
from unilinattn.call import Call
from unilinattn.errors import OptionError
from unilinattn.mixers import Toeplitz
from unilinattn.models import S4D
from unilinattn.operator.flow import Flow
from unilinattn.options import Options
from unilinattn.registry import Method
from unilinattn.testing import check_architecture


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    with registry.overridden():
        yield
    registry.load_entry_points.cache_clear()


class FadingMixer(nn.Module):
    """A mixer of another package: y_i = sum_j 0.5^(i - j) W x_j."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.into = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, outputs = torch.zeros_like(x[:, 0]), []
        for token in self.into(x).unbind(1):
            hidden = 0.5 * hidden + token
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


def fading(call: Call) -> Flow:
    """Fading memory with one decay rate."""
    kernel = 0.5 ** torch.arange(call.input.shape[1], dtype=call.input.dtype)[None]
    batch, length = call.input.shape[:2]
    mixer = Toeplitz(kernel.expand(6, -1), batch=batch, length=length)
    return Flow(call.input).matrix(call.tensor(call.host.into.weight), role="input").core(mixer)


HOST = f"{__name__}.FadingMixer"


@pytest.mark.long
def test_a_decorated_function_registers_an_architecture_that_passes_the_kit() -> None:
    register_architecture(HOST, name="fading", kind="fading memory")(fading)
    assert list_architectures()["fading"].summary == "Fading memory with one decay rate."
    model = Model(Block(added, FadingMixer()), Block(added))
    verdict = check_architecture(model, ids())
    assert [layer.architecture for layer in verdict.layers] == ["fading", "s4d"]
    assert verdict.masks is None


def test_a_subclass_matches_the_architecture_of_its_base() -> None:
    class Mine(S4D):
        pass

    layer = trace(Model(Block(added, Mine(6, 4))), ids()).layers[0]
    assert (layer.architecture, layer.operator.reconstruction_error() <= 1e-5) == ("s4d", True)


def test_a_name_or_a_host_is_registered_once() -> None:
    with pytest.raises(OptionError, match="architecture 'mamba' or its hosts"):
        register_architecture(HOST, name="mamba", kind="x")(fading)
    host = "unilinattn.models.s4.S4D"
    with pytest.raises(OptionError, match=rf"its hosts \['{host}'\] are registered already; choose another name"):
        register_architecture(host, name="mine", kind="x")(fading)
    assert "mine" not in list_architectures()


def test_a_method_is_registered_once_and_a_misspelt_name_suggests_it() -> None:
    def shares(trace: object, *, target: int) -> None:
        """One line about it.

        More.
        """

    registry.register_method("shares-of-mine")(shares)
    assert registry.method("shares-of-mine").summary == "One line about it."
    with pytest.raises(OptionError, match="method 'shares-of-mine' is registered already"):
        registry.register_method("shares-of-mine")(shares)
    with pytest.raises(OptionError, match="unknown method 'shares-of-min'; did you mean 'shares-of-mine'"):
        registry.method("shares-of-min")


class Distance(Options):
    """The number of tokens between key and query.

    More.
    """

    needs = ("layers",)
    power: float = 1.0


def distance(trace: Trace, options: Distance, *, target: int | None = None) -> Attribution:
    """Compute `Distance`."""
    length = trace.layers[0].output.shape[1]
    scores = torch.arange(length - 1, -1, -1, dtype=torch.float64)[None] ** options.power
    return Attribution(scores=scores, dims=("batch", "key"), method="distance", options=options.model_dump())


def test_a_class_registers_a_method_with_its_name_summary_options_and_needs() -> None:
    function = register_method(Distance)(distance)
    entry = registry.method("distance")
    assert entry == Method(
        "distance", "The number of tokens between key and query.", function, Distance, None, ("layers",)
    )
    observed = trace(Model(Block(added)), ids())
    results = [
        explain(observed, method=Distance(power=2), target=-1),
        explain(observed, method="distance", power=2, target=-1),
        function(observed, power=2, target=-1),
    ]
    assert all(torch.equal(result.scores, results[0].scores) for result in results)
    assert results[0].options == {"power": 2.0}
    with pytest.raises(OptionError, match="distance takes no option 'pwer'; did you mean 'power'"):
        function(observed, pwer=2)


def test_a_class_that_is_not_registered_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown method 'distance'"):
        explain(trace(Model(Block(added)), ids()), method=Distance())


def test_entry_points_are_loaded_on_the_first_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("fading", f"{__name__}:register", "unilinattn.architectures")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: register_architecture(HOST, name="fading", kind="x")(fading))
    registry.load_entry_points.cache_clear()
    assert "fading" in list_architectures()


def test_every_architecture_has_a_summary_and_a_kind() -> None:
    for name, architecture in list_architectures().items():
        assert architecture.summary.endswith("."), name
        assert architecture.kind, name
        assert all(host.count(".") >= 2 for host in architecture.hosts), name
