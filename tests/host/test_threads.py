"""Threads: traces run one after the other, and do not record or change calls of other threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tracing.models import Block, Model, added, ids
from unilinattn import Trace, through_operators, trace
from unilinattn.host.isolation import current_run
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import host


def require_equal(actual: Trace, expected: Trace) -> None:
    assert [layer.name for layer in actual.layers] == [layer.name for layer in expected.layers]
    for one, other in zip(actual.layers, expected.layers, strict=True):
        assert torch.equal(one.input, other.input)
        assert torch.equal(one.output, other.output)
        assert torch.equal(one.operator.apply(one.input), other.operator.apply(other.input))


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions in threads that start together."""
    both = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        both.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def elsewhere(function: Callable[[], Any]) -> Any:
    """Run a function in another thread, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def logits(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(x, **options).logits
    return result


def test_three_threads_trace_one_model() -> None:
    model, x = host("llama, grouped queries").model(), host("llama, grouped queries").inputs()
    expected = trace(model, x)
    with left_as_found(model):
        for result in at_once(*[lambda: trace(model, x)] * 3):
            require_equal(result, expected)


@pytest.mark.long
def test_two_threads_trace_two_models() -> None:
    names = ("llama, grouped queries", "gpt2")
    models, inputs = [host(name).model() for name in names], [host(name).inputs() for name in names]
    expected = [trace(model, x) for model, x in zip(models, inputs, strict=True)]
    gradients = [results.gradient() for results in expected]
    for _ in range(10):
        results = at_once(*(lambda at=at: trace(models[at], inputs[at]) for at in range(2)))
        for at in range(2):
            require_equal(results[at], expected[at])
    for actual, reference in zip(at_once(*(one.gradient for one in expected)), gradients, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(actual, reference, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("same", [True, False], ids=["the traced model", "another model"])
@pytest.mark.parametrize("what", ["trace", "gradient"])
def test_a_plain_call_from_another_thread_is_neither_recorded_nor_altered(
    implementation: str, same: bool, what: str
) -> None:
    model, x = host("llama, grouped queries").model(), host("llama, grouped queries").inputs()
    other = model if same else host("gpt2").model()
    other.set_attn_implementation(implementation)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    plain = logits(other, x), logits(other, x, attention_mask=mask)
    before = trace(model, x)
    expected = before.gradient()
    actual: list[tuple[Tensor, Tensor]] = []

    def meanwhile(*_: object) -> None:
        if current_run() is not None:
            actual.append(elsewhere(lambda: (logits(other, x), logits(other, x, attention_mask=mask))))

    hooks = [module.register_forward_pre_hook(meanwhile) for module in (model, model.model.layers[1])]
    # A model with new hooks is searched once more.
    trace(model, x)
    actual.clear()
    if what == "trace":
        require_equal(trace(model, x), before)
    else:
        gradients = before.gradient()
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    for hook in hooks:
        hook.remove()
    assert len(actual) == 2
    for calls in actual:
        assert all(torch.equal(one, reference) for one, reference in zip(calls, plain, strict=True))


def test_operators_replace_mixers_only_in_the_traced_run() -> None:
    # In float64 the scan and the operator differ by rounding.
    model, x = host("mamba").model().double(), host("mamba").inputs()
    plain, before = logits(model, x), trace(model, x)
    actual: list[Tensor] = []

    def meanwhile(*_: object) -> None:
        if current_run() is not None:
            actual.append(elsewhere(lambda: logits(model, x)))

    hook = model.register_forward_pre_hook(meanwhile)
    before.gradient()
    hook.remove()
    assert len(actual) == 1
    assert torch.equal(actual[0], plain)
    with through_operators(model):
        assert torch.equal(elsewhere(lambda: logits(model, x)), logits(model, x))


def test_a_second_thread_waits_for_the_first() -> None:
    model = Model(Block(added)).eval()
    forward, done = model.blocks[0].mixer.forward, threading.Event()

    def second() -> None:
        with through_operators(model):
            pass
        trace(model, ids())
        done.set()

    thread = threading.Thread(target=second)
    with left_as_found(model):
        with through_operators(model):
            thread.start()
            assert not done.wait(0.2)
            assert vars(model.blocks[0].mixer)["forward"] != forward
        assert done.wait(60)
        thread.join()


def test_a_nested_trace_records_only_its_calls() -> None:
    model, inner = Model(Block(added), Block(added)).eval(), Model(Block(added)).eval()
    expected, nested = trace(model, ids()), []
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: None if nested else nested.append(trace(inner, ids())))
    require_equal(trace(model, ids()), expected)
    hook.remove()
    require_equal(nested[0], trace(inner, ids()))
