"""Functions of other packages in recorded operators: against their formulas, and wrong or unfinished registrations."""

import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.recording import scans
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn import registry
from unilinattn.call.entries import Entries
from unilinattn.call.functions import meaning_of
from unilinattn.errors import ExactnessError, OptionError, UncoveredError
from unilinattn.frozen.live import LiveRun
from unilinattn.frozen.run import FrozenRun
from unilinattn.mixers import DiagonalDecay, LowRankUpdate, ScalarDecay
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Mix, walk
from unilinattn.registry import visible_functions
from unilinattn.rules.mixing_functions import register_mixing_function, register_plain_function
from unilinattn.testing import relative_error


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    with registry.overridden():
        yield


@pytest.mark.parametrize("name", scans.LAYERS)
def test_scans_of_packages_are_exact(name: str) -> None:
    with scans.installed():
        op = operator(scans.LAYERS[name](), x := draw(2, 7, 8))
    assert op.reconstruction_error() < LIMIT
    cores = [stage.mixer for stage in walk(op.chains["x"]) if isinstance(stage, Mix) and stage.role == "core"]
    assert [type(core) for core in cores] == [ScalarDecay if "SSD" in name else DiagonalDecay]
    y = op.apply(x, bias=False)
    g = draw(*y.shape, seed=1)
    assert float((y * g).sum() - (x * op.adjoint(g)).sum()) < LIMIT * float(y.norm() * g.norm())


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    """A package with a scan: a memory of each head that fades and takes in every value."""
    module = types.ModuleType("a_package")

    def faded(values: Tensor, decay: Tensor, *, sizes: Tensor | None = None) -> Tensor:
        # An autograd function or a kernel would hide this from a mode too.
        with torch._C.DisableTorchFunction():
            return memory(values, decay, sizes)

    module.faded = faded
    sys.modules["a_package"] = module
    yield module
    del sys.modules["a_package"]


def memory(values: Tensor, decay: Tensor, sizes: Tensor | None) -> Tensor:
    parts = [values] if sizes is None else values.split(sizes.diff().tolist(), 1)
    fading = [decay] if sizes is None else decay.split(sizes.diff().tolist(), 1)
    outputs = []
    for part, fade in zip(parts, fading, strict=True):
        state = torch.zeros_like(part[:, 0])
        for t in range(part.shape[1]):
            state = fade[:, t].exp()[..., None] * state + part[:, t]
            outputs.append(state)
    return torch.stack(outputs, 1)


class Layer(nn.Module):
    """A layer of a language model around the scan, in two heads."""

    def __init__(self, scan: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.scan = scan
        self.into, self.fade, self.out = (nn.Linear(width, n) for n in (width, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        decay = nn.functional.logsigmoid(self.fade(x))
        return self.out(self.scan(self.into(x).unflatten(2, (2, -1)), decay).flatten(2))


class Model(nn.Module):
    def __init__(self, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(11, 8), Layer(scan), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        return {"logits": self.head(x + self.layer(x))}


def register(*, key: float = 1.0, **options: Any) -> None:
    @register_mixing_function("a_package.faded", carried="values", packed="sizes", **options)
    def faded(decay: Tensor) -> ScalarDecay:
        one = torch.ones_like(decay[..., None])
        return ScalarDecay(one, key * one, decay)


def test_a_module_that_calls_a_registered_function_is_a_layer(package: types.ModuleType) -> None:
    register()
    model = Model(package.faded).eval()
    trace = ula.trace(model, torch.arange(6)[None], progress=False)
    assert [layer.name for layer in trace.layers] == ["layer"]
    assert trace.layers[0].reconstruction_error() < 1e-6
    shares = FrozenRun(trace).complete_shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-5 and bool(shares.tokens.all())
    assert package.faded is model.layer.scan and meaning_of(package.faded) is None


class Attended(nn.Module):
    """Linear attention of one head, by a function of a package."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (side(x).unsqueeze(2) for side in (self.query, self.key, self.value))
        return self.function(query, key, value).squeeze(2)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.einsum("bij,bjhp->bihp", torch.einsum("bihn,bjhn->bij", query, key).tril(), value)


def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attention`, in whose gradient values have a half of the relevance, and queries and keys a quarter each."""
    sent = attention(query.detach(), key.detach(), value)
    matched = (attention(query, key.detach(), value.detach()) + attention(query.detach(), key, value.detach())) / 2
    return (sent + matched) / 2


def test_values_and_factors_of_a_registered_function_share_its_relevance(package: types.ModuleType) -> None:
    package.attention = attention

    @register_mixing_function("a_package.attention", carried="value")
    def mixer(query: Tensor, key: Tensor) -> ScalarDecay:
        return ScalarDecay(query, key, torch.zeros_like(query[..., 0]))

    model, ids = Model(package.attention).double().eval(), torch.arange(6)[None]
    model.layer = Attended(package.attention).double()
    trace = ula.trace(model, ids, progress=False)
    relevances = LiveRun(trace).relevances(-1, 3)
    content = FrozenRun(trace).shares(-1, 3).tokens
    assert relative_error(relevances.content, content) < LIMIT
    # The same model by hand: the gradient of each token's vector times the vector.
    x = model.embedding(ids).detach().requires_grad_()
    model.layer.function = shared
    (grad,) = torch.autograd.grad(model.head(x + model.layer(x))[0, -1, 3], x)
    assert relative_error(relevances.tokens, (x * grad).sum(-1)) < LIMIT
    assert float(relevances.control.norm()) > 0.01 * float(content.norm())


class GatedOutput(Layer):
    """The scan of activated values, shifted by a constant as by the bias of a norm, with an activated gate."""

    def __init__(self, scan: Callable[..., Tensor], shift: float) -> None:
        super().__init__(scan)
        self.gate, self.shift = nn.Linear(8, 8), shift

    def forward(self, x: Tensor) -> Tensor:
        decay = nn.functional.logsigmoid(self.fade(x))
        values = nn.functional.silu(self.into(x)).unflatten(2, (2, -1))
        return self.out((self.scan(values, decay).flatten(2) + self.shift) * nn.functional.silu(self.gate(x)))


@pytest.mark.parametrize(("shift", "length"), [(1.0, 6), (0.0, 1)])
def test_the_output_of_a_scan_is_the_value_of_its_gate(package: types.ModuleType, shift: float, length: int) -> None:
    register()
    model = Model(package.faded)
    model.layer = GatedOutput(package.faded, shift)
    (layer,) = ula.trace(model.double().eval(), torch.arange(length)[None], progress=False).layers
    assert layer.reconstruction_error() < LIMIT
    # The gate is a constant: the map of the values does not change with it.
    x = draw(1, length, 8)
    values = nn.functional.silu(layer.module.into(layer.input)) / layer.module.into(layer.input)
    carried = (x @ layer.module.into.weight.T * values).unflatten(2, (2, -1))
    read = memory(carried, nn.functional.logsigmoid(layer.module.fade(layer.input)), None).flatten(2)
    expected = (read * nn.functional.silu(layer.module.gate(layer.input))) @ layer.module.out.weight.T
    assert relative_error(layer.operator.apply(x, bias=False), expected.detach()) < LIMIT


def test_a_function_that_is_not_registered_is_refused(package: types.ModuleType) -> None:
    with pytest.raises(ula.UnilinattnError):
        ula.trace(Model(package.faded).eval(), torch.arange(6)[None], progress=False)


def test_a_wrong_formula_is_refused_by_the_reconstruction(package: types.ModuleType) -> None:
    register(key=1.01)
    trace = ula.trace(Model(package.faded).eval(), torch.arange(6)[None], progress=False)
    assert trace.layers[0].reconstruction_error() > 1e-3
    with pytest.raises(ExactnessError, match="layer"):
        ula.explain(trace, method="rollout", target=-1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_functions_are_put_back_after_an_exception(package: types.ModuleType, error: type[BaseException]) -> None:
    register()
    module, before = Layer(package.faded), package.faded
    with pytest.raises(error), visible_functions(module):
        assert meaning_of(package.faded) is not None and meaning_of(module.scan) is not None
        raise error
    assert package.faded is before and module.scan is before


def test_functions_stay_replaced_without_the_restoration(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: without the restoration it would fail."""
    register()
    before: Any = package.faded
    replaced: list[Entries] = []
    put_back = Entries.put_back
    with monkeypatch.context() as patch:
        patch.setattr(Entries, "put_back", lambda self: replaced.append(self))
        with pytest.raises(ValueError), visible_functions(Layer(before)):
            raise ValueError
    assert package.faded is not before
    # For the tests after this one.
    for entries in replaced:
        put_back(entries)
    assert package.faded is before


def test_a_module_in_the_place_of_another_is_scanned(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of loaded modules is the same then."""
    register()
    first, second = types.ModuleType("first_user"), types.ModuleType("second_user")
    monkeypatch.setitem(sys.modules, "first_user", first)
    with visible_functions(nn.Module()):
        pass
    second.faded = package.faded
    monkeypatch.delitem(sys.modules, "first_user")
    monkeypatch.setitem(sys.modules, "second_user", second)
    with visible_functions(nn.Module()):
        assert meaning_of(second.faded) is not None
    assert meaning_of(second.faded) is None


def test_another_thread_runs_the_original(package: types.ModuleType) -> None:
    register()
    results: list[Tensor] = []
    values, decay = draw(1, 3, 2, 4), draw(1, 3, 2)
    with visible_functions(nn.Module()):
        thread = threading.Thread(target=lambda: results.append(package.faded(values, decay)))
        thread.start()
        thread.join()
    assert torch.equal(results[0], memory(values, decay, None))


def test_a_name_that_is_bound_again_is_found(package: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    with visible_functions(nn.Module()):
        pass
    monkeypatch.setitem(vars(sys.modules["__main__"]), "imported_later", package.faded)
    with visible_functions(nn.Module()):
        assert meaning_of(sys.modules["__main__"].imported_later) is not None
    assert sys.modules["__main__"].imported_later is package.faded


class Packed(Layer):
    """The same layer on sequences without their padding, in a batch of one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.flatten().nonzero().flatten()
        sizes = nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        packed = x.flatten(0, 1)[rows][None]
        decay = nn.functional.logsigmoid(self.fade(packed))
        mixed = self.out(self.scan(self.into(packed).unflatten(2, (2, -1)), decay, sizes=sizes).flatten(2))
        result = torch.zeros_like(x).flatten(0, 1)
        result[rows] = mixed[0]
        return result.view(x.shape)


@pytest.mark.parametrize("left", [True, False])
def test_sequences_without_their_padding_are_those_of_the_layer(package: types.ModuleType, left: bool) -> None:
    register()
    mask = torch.ones(3, 6, dtype=torch.long)
    for sequence, count in ((1, 2), (2, 4)):
        mask[sequence, slice(count) if left else slice(6 - count, 6)] = 0
    op = operator(Packed(package.faded), draw(3, 6, 8), mask)
    assert op.reconstruction_error() < LIMIT
    real = mask.bool()[..., None]
    x = draw(3, 6, 8)
    assert torch.equal(op.apply(x * real), op.apply(x)) and not (op.apply(x) * ~real).any()
    # Padding stays where it is: no stage moves the tokens.
    assert [type(s.mixer).__name__ for s in walk(op.chains["x"]) if isinstance(s, Mix)] == ["ScalarDecay"]


def test_padding_between_tokens_is_refused(package: types.ModuleType) -> None:
    register()
    mask = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(UncoveredError, match="padding between real tokens"):
        operator(Packed(package.faded), draw(1, 4, 8), mask)


def test_an_argument_that_is_not_covered_is_refused_by_its_name(package: types.ModuleType) -> None:
    register(refused=("decay",))
    with pytest.raises(UncoveredError, match=r"'faded'.*'decay' is given"):
        operator(Layer(package.faded), draw(2, 5, 8))


def test_a_plain_function_is_recorded_in_place_of_its_kernel(package: types.ModuleType) -> None:
    register()
    package.norm = lambda x: torch.from_numpy(x.detach().numpy() / x.detach().norm(dim=-1, keepdim=True).numpy())
    register_plain_function("a_package.norm")(partial(nn.functional.normalize, dim=-1))

    class Normed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(package.norm(x))

    assert operator(Normed(package.faded), draw(2, 5, 8)).reconstruction_error() < LIMIT


def test_steps_of_a_token_are_summed(package: types.ModuleType) -> None:
    """Two delta rule steps for each token, of which the last is read."""

    def stepped(values: Tensor, keys: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            state, outputs = values.new_zeros(len(values), *keys.shape[2:], values.shape[-1]), []
            for t in range(values.shape[1]):
                missed = values[:, t] - torch.einsum("bhn,bhnp->bhp", keys[:, t], state)
                state = state + keys[:, t].unsqueeze(-1) * missed.unsqueeze(-2)
                outputs.append(state.sum(-2))
            return torch.stack(outputs, 1)

    package.stepped = stepped

    @register_mixing_function("a_package.stepped", carried="values")
    def stages(keys: Tensor) -> LowRankUpdate:
        return LowRankUpdate(torch.ones_like(keys), keys, torch.zeros_like(keys[..., 0]), keys, -keys)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.key, self.out = nn.Linear(8, 16), nn.Linear(8, 12), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            values, keys = (y.unflatten(2, (2, 2, -1)).flatten(1, 2) for y in (self.into(x), self.key(x)))
            return self.out(package.stepped(values, keys).unflatten(1, (-1, 2))[:, :, -1].flatten(2))

    op = operator(Steps(), x := draw(2, 4, 8))
    require_complete(op)
    assert torch.equal(op.apply(x), op.apply(x))


def test_a_name_is_registered_once(package: types.ModuleType) -> None:
    register()
    with pytest.raises(OptionError, match=r"a_package\.faded"):
        register()


def test_stages_may_continue_the_flow(package: types.ModuleType) -> None:
    @register_mixing_function("a_package.faded", carried="values")
    def faded(flow: Flow, values: Tensor, decay: Tensor) -> Flow:
        one = torch.ones_like(decay[..., None])
        return flow.core(ScalarDecay(one, one, decay)).scale(torch.ones_like(values[:, :, 0]), role="gate")

    assert operator(Layer(package.faded), draw(2, 5, 8)).reconstruction_error() < LIMIT
