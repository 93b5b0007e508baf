"""Products of a traced run: a run of the model in the same call takes them, and only for the same inputs."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import unilinattn as ula
from tests.methods.hosts import HOSTS, inputs
from unilinattn.call.attention_interface import Attended, capture
from unilinattn.host.products import Products
from unilinattn.memory import max_memory
from unilinattn.testing import TOLERANCES
from unilinattn.tracing import trace as tracing

LIMIT = TOLERANCES["law", torch.float64]


class Matmuls(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})

    @property
    def count(self) -> int:
        return sum(self.calls[name] for name in ("mm", "addmm", "bmm", "baddbmm"))


@pytest.mark.parametrize(
    ("name", "method", "linear"),
    [("llama", "logit", 6), ("llama", "lrp", 6), ("llama", "attn_lrp", 14), ("gpt2", "logit", 4), ("gpt2", None, 8)],
)
def test_a_call_that_explains_a_model_computes_linear_layers_once(name: str, method: str | None, linear: int) -> None:
    model, given = HOSTS[name].model(), inputs()
    ula.explain(model, given, method=method, target=-1)  # Remembers what a first trace searches for.
    counts, results = [], []
    for of_model in (False, True):
        with Matmuls() as matmuls:
            results.append(
                ula.explain(model, given, method=method, target=-1)
                if of_model
                else ula.explain(ula.trace(model, given), method=method, target=-1)
            )
        counts.append(matmuls.count)
    assert counts[0] - counts[1] == linear
    plain, result = results
    assert float((result.scores - plain.scores).norm()) <= LIMIT * float(plain.scores.norm())


def test_a_traced_call_keeps_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traces = HOSTS["llama"].model(), list[tracing.Trace]()
    built = tracing.Trace.__init__

    def noted(self: tracing.Trace, *args: Any) -> None:
        traces.append(self)
        built(self, *args)

    monkeypatch.setattr(tracing.Trace, "__init__", noted)
    ula.explain(model, inputs(), method="logit", target=-1)
    ula.trace(model, inputs())
    ula.explain(model, inputs(), method="rollout", target=-1)
    assert [each.products for each in traces] == [None, None, None]


def attended_of(model: nn.Module, given: dict[str, Tensor]) -> Attended:
    records = list[Attended]()
    with torch.no_grad(), capture(model, lambda module, record: records.append(record)):
        model(**given)
    return records[0]


def test_the_result_of_an_attention_is_not_read_after_a_write() -> None:
    # In float64 the host rounds its softmax to float32.
    attended = attended_of(HOSTS["llama"].model().float(), inputs())
    assert attended.context is not None
    attended.context.mul_(2)
    assert attended.context is None


def recorded(layer: nn.Linear, x: Tensor) -> tuple[Products, Tensor]:
    products = Products()
    handles = [layer.register_forward_pre_hook(lambda *_: None), layer.register_forward_hook(lambda *_: None)]
    with torch.no_grad():
        result = layer(x)
        products.record(layer, ((x,), {}), result)
    for handle in handles:
        handle.remove()
    return products, result


def linear() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 5).double().requires_grad_(False), torch.randn(2, 4, 6, dtype=torch.float64)


def test_the_recorded_result_has_the_value_and_the_gradient_of_the_layer() -> None:
    layer, x = linear()
    products, result = recorded(layer, x)
    forward, x = products.forward_of(layer, layer.forward), x.requires_grad_()
    assert forward is not None and products.forward_of(nn.Linear(6, 5), layer.forward) is None
    value, slope = forward(x), torch.randn(2, 4, 5, dtype=torch.float64)
    assert value.data_ptr() == result.data_ptr()
    expected = torch.autograd.grad(layer(x), x, slope)[0]
    assert torch.allclose(torch.autograd.grad(value, x, slope)[0], expected, rtol=LIMIT)
    # Each result is used once.
    assert forward(x).data_ptr() != result.data_ptr()
    assert torch.allclose(forward(x), layer(x), rtol=LIMIT)


@pytest.mark.parametrize("change", ["another token", "another order", "written into"])
def test_a_result_of_other_numbers_is_not_used(change: str) -> None:
    layer, x = linear()
    products, result = recorded(layer, x)
    other = x.clone()
    if change == "another token":
        other[1, 2] += 0.1
    elif change == "another order":
        other = other.flip(0)
    else:
        result.mul_(2)
    forward, other = products.forward_of(layer, layer.forward), other.requires_grad_()
    assert forward is not None
    assert torch.allclose(forward(other), layer(other), rtol=LIMIT)


def test_modules_that_compute_more_are_not_recorded() -> None:
    layer, x = linear()
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    assert recorded(layer, x)[0].forward_of(layer, layer.forward) is None

    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    layer = Other(6, 5).double()
    assert recorded(layer, x)[0].forward_of(layer, layer.forward) is None


def test_products_take_no_more_than_the_memory_that_is_allowed() -> None:
    layer, x = linear()
    size = 2 * 4 * 5 * 8
    for limit, is_kept in ((size, True), (size - 1, False)):
        with max_memory(limit):
            products = recorded(layer, x)[0]
        assert (products.forward_of(layer, layer.forward) is not None) == is_kept
