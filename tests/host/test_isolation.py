"""An interrupted or completed trace leaves the model and the process unchanged."""

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

from tests.host.interrupts import Interrupts, first_and_last
from tests.hosts import every, of_turn
from tests.tracing.models import Block, Model, added, ids
from unilinattn import through_operators, trace
from unilinattn.host import isolation
from unilinattn.testing import Host, LawViolation, left_as_found
from unilinattn.testing.state import differences, model_state, process_state

OURS = tuple(
    f"unilinattn/{name}.py"
    for name in (
        "call/attention_interface",
        "architectures/rwkv4",
        "call/entries",
        "host/recorder",
        "host/forwards",
        "host/observer",
        "host/run",
        "host/substitution",
        "tracing/gradients",
        "tracing/recording",
        "tracing/trace",
        "host/isolation",
    )
)
RESTORING = ("unilinattn/host/isolation.py", "unilinattn/call/entries.py")
TORCH = ("torch/nn/modules/module.py", "torch/autograd/grad_mode.py", "torch/overrides.py")
FILES = (*OURS, *TORCH, contextlib.__file__)

HOSTS = {host.name: host for host in every()}
SWEPT = ("llama, grouped queries", "mamba", "rwkv", "jamba")


@cache
def outputs_collected(host: Host) -> tuple[str, ...]:
    """The arguments of a host that request outputs in addition to the logits."""
    model, names = host.model(), []
    for name in ("output_hidden_states", "output_attentions"):
        with torch.no_grad(), contextlib.suppress(TypeError):
            if model(**given(host), **uncached(model), **{name: True}).get(name.removeprefix("output_")) is not None:
                names.append(name)
    return tuple(names)


def given(host: Host) -> dict[str, Any]:
    return {"input_ids" if host.image is None else "pixel_values": host.inputs()}


def uncached(model: nn.Module) -> dict[str, bool]:
    """Disable the cache of hosts without softmax attention, with which a direct call fails."""
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


def sweep(model: nn.Module, run: Callable[[], object], files: tuple[str, ...], sample: int | None) -> int:
    """Interrupt a run at the first and last execution of each line, or of some; return the number of interrupts."""
    # The first run fills caches, without which there are more lines.
    run()
    counting = Interrupts(files)
    assert not counting.run(run)
    chosen = first_and_last(counting.lines)
    chosen = chosen if sample is None else chosen[len(chosen) // (2 * sample) :: len(chosen) // sample]
    before, around = model_state(model), process_state()
    for count in chosen:
        interrupts = Interrupts(files, count)
        assert interrupts.run(run), f"interrupt {count} was swallowed or did not occur"
        changed = differences(before, model_state(model)) | differences(around, process_state())
        path, line = interrupts.lines[count]
        assert not changed, f"interrupted at {Path(path).name}:{line}, {count}: {changed}"
    # A lock that is not released would block another thread forever.
    assert "owner=0" in repr(isolation.LOCK)
    return len(chosen)


def runs(model: nn.Module, x: object) -> dict[str, Callable[[], object]]:
    host_trace = trace(model, x)

    def operators() -> None:
        for layer in host_trace.layers:
            vars(layer).pop("operator", None)
            layer.operator  # noqa: B018  the property builds it

    def gradient() -> None:
        # The first gradient of a trace decides which logit is explained.
        vars(host_trace).pop("explained_logit", None)
        host_trace.gradient()

    return {"trace": lambda: trace(model, x), "gradient": gradient, "operators": operators}


@pytest.mark.parametrize("count", [25, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["trace", "gradient", "operators"])
def test_an_interrupt_on_lines_of_the_restoration(what: str, count: int | None) -> None:
    model = Model(Block(added)).eval()
    assert sweep(model, runs(model, ids())[what], RESTORING, count) >= (count or 51)


@pytest.mark.parametrize("what", ["trace", "gradient"])
@pytest.mark.parametrize("name", SWEPT)
def test_an_interrupt_on_some_lines_of_a_run(name: str, what: str) -> None:
    model, x = HOSTS[name].model(), HOSTS[name].inputs()
    sweep(model, runs(model, x)[what], FILES, 2)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trace", "gradient", "operators"])
@pytest.mark.parametrize("name", SWEPT)
def test_an_interrupt_on_any_line_of_a_run(name: str, what: str) -> None:
    model, x = HOSTS[name].model(), HOSTS[name].inputs()
    # Most lines are those of every host and run.
    count = (150 if what == "trace" else 40) if name == SWEPT[0] else 10
    assert sweep(model, runs(model, x)[what], FILES, count) >= count


@pytest.mark.slow
def test_an_interrupt_on_any_line_of_an_adapter_that_changes_its_module() -> None:
    model, x = HOSTS["rwkv"].model(), HOSTS["rwkv"].inputs()
    assert sweep(model, runs(model, x)["trace"], ("unilinattn/architectures/rwkv4.py",), None) >= 20


@pytest.mark.long
def test_the_sweep_detects_a_restoration_that_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Callable[[], object], restore: Callable[[], object]) -> object:
        try:
            return run()
        finally:
            restore()

    model = Model(Block(added)).eval()
    run = runs(model, ids())["trace"]
    monkeypatch.setattr(isolation, "finished", once)
    with pytest.raises(AssertionError, match=r"interrupted at isolation\.py:\d+, .*hooks"):
        sweep(model, run, RESTORING, None)


def test_the_sweep_detects_a_swallowed_interrupt() -> None:
    model = Model(Block(added)).eval()

    def run() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            trace(model, ids())

    with pytest.raises(AssertionError, match="was swallowed"):
        sweep(model, run, RESTORING, 3)


def test_forwards_are_restored_after_an_interrupted_block() -> None:
    model = Model(Block(added)).eval()

    def run() -> None:
        with through_operators(model):
            model(ids())

    sweep(model, run, ("unilinattn/host/forwards.py", "unilinattn/call/entries.py", contextlib.__file__), None)


@pytest.mark.long
def test_a_generator_closed_late_after_an_interrupt_changes_nothing() -> None:
    model, x = HOSTS["llama, grouped queries"].model(), HOSTS["llama, grouped queries"].inputs()
    trace(model, x)  # only the first trace of a model searches for unregistered mixers
    counting = Interrupts((contextlib.__file__,))
    assert not counting.run(lambda: trace(model, x))
    for number in first_and_last(counting.lines)[::8]:
        errors = []

        def run(errors: list[BaseException] = errors) -> None:
            try:
                trace(model, x)
            except KeyboardInterrupt as error:
                errors.append(error)

        Interrupts((contextlib.__file__,), number).run(run)
        model.set_attn_implementation("eager")
        assert len(errors) == 1
        with left_as_found(model):
            errors.clear()
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("where", ["argument", "configuration"])
@pytest.mark.parametrize(
    "name",
    [
        "llama, grouped queries",
        "gpt2",
        "mamba",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("jamba", "bert", "t5, encoder", "qwen3 next")),
    ],
)
def test_a_host_collects_the_same_outputs_after_a_trace(name: str, where: str) -> None:
    for collected in outputs_collected(HOSTS[name]):
        require_outputs_as_before(HOSTS[name], collected, where)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(of_turn(every(), 0)))
def test_hosts_are_unchanged_with_any_collected_outputs(name: str) -> None:
    host = HOSTS[name]
    for turn, collected in enumerate(outputs_collected(host), crc32(name.encode())):
        require_outputs_as_before(host, collected, ("argument", "configuration")[turn % 2])


def require_outputs_as_before(host: Host, collected: str, where: str) -> None:
    """Trace a host that collects outputs, before and after it installs its hooks; compare its outputs."""
    model, expected, options = host.model(), host.model(), {collected: True}
    if where == "configuration":
        for one in (model, expected):
            if hasattr(one.config, "_attn_implementation"):
                one.config._attn_implementation = "eager"
            setattr(one.config, collected, True)
        options = {}
    for _ in range(2):
        with left_as_found(model):
            host_trace = trace(model, {**given(host), **options})
        assert host_trace.layers
        with torch.no_grad():
            actual, plain = (one(**given(host), **uncached(one), **options) for one in (model, expected))
        key = collected.removeprefix("output_")
        assert len(actual[key]) == len(plain[key])
        # A trace runs eager attention, which returns weights that other implementations do not.
        more = len(host_trace.output[key]) - len(plain[key])
        assert more == 0 or (key == "attentions" and more > 0)


def test_hooks_that_remain_are_detected() -> None:
    model = HOSTS["llama, grouped queries"].model()
    with pytest.raises(LawViolation, match="hooks of the model changed"), left_as_found(model):
        model(**given(HOSTS["llama, grouped queries"]), output_hidden_states=True)


def test_running_statistics_of_norms_in_training_are_restored() -> None:
    """The kernels that write them count no version."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    isolation.isolated(model, lambda: model(torch.randn(8, 4)))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model(torch.randn(8, 4))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
