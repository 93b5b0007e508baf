"""Long inputs: traces in which operators replace the mixers, the check on a prefix, and restored forwards."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.hosts import LARGE, every, every_host
from tests.shared import exact_trace
from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn import trace
from unilinattn.call import Call
from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import InputError, UncoveredError
from unilinattn.host import substitution
from unilinattn.models import S4D
from unilinattn.operator.flow import Flow
from unilinattn.operator.reconstruction import worst_error
from unilinattn.registry import list_architectures, overridden
from unilinattn.testing import left_as_found, relative_error, rounding_limit
from unilinattn.testing.hosts import Host, host, reference

STANDING_IN = ("mamba", "mamba, biases", "mamba2", "s4d")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Substitution begins above 6 tokens, and the prefix has 5."""
    monkeypatch.setitem(globals(), "trace", partial(ula.trace, substitute_above=6))
    monkeypatch.setattr(substitution, "PREFIX", 5)


def ordinary(monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: object, **options: Any) -> ula.Trace:
    """A trace without substitution."""
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "trace", partial(ula.trace, substitute_above=8192))
        return trace(model, inputs, **options)


@every_host(every(), "entry", usual=("mamba, biases", "s4d, two poles, slow"), large=LARGE, turn=1)
def test_substitution_gives_the_trace_of_the_host(entry: Host, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if entry.name == "xlstm, training kernel":
        # This host accepts only multiples of its chunk of 8 tokens.
        monkeypatch.setattr(substitution, "PREFIX", 8)
    model, x = entry.model(), entry.inputs()
    plain, host_trace = ordinary(monkeypatch, model, x), trace(model, x)
    exact = exact_trace(entry)
    assert [layer.name for layer in host_trace.layers] == [layer.name for layer in plain.layers]
    assert [len(step.layers) for step in host_trace.steps] == [len(step.layers) for step in plain.steps]
    for one, two, true in zip(plain.layers, host_trace.layers, exact.layers, strict=True):
        # The two float32 runs may differ by the rounding of the host, measured against float64.
        for part in ("input", "output"):
            value, reference = getattr(one, part), getattr(true, part)
            limit = rounding_limit(relative_error(value, reference), torch.float32)
            assert relative_error(getattr(two, part), value) <= limit
        assert one.prefix_error is None
        assert two.multiplier == pytest.approx(one.multiplier, rel=1e-5)
        if two.prefix_error is not None:
            assert two.output.shape[1] > 6
            assert 0 <= two.prefix_error <= 1e-5
            assert two.reconstruction_error() == two.prefix_error
            assert two.operator.reconstruction_error() == pytest.approx(two.prefix_error, abs=limit)
    if entry.name in STANDING_IN:
        assert all(layer.prefix_error is not None for layer in host_trace.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_substitution_begins_above_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host(name).model(), torch.randint(7, (1, substitution.SUBSTITUTE_ABOVE + 1))
    host_trace = trace(model, x)
    assert trace(model, x[:, :-1]).layers[0].prefix_error is None
    monkeypatch.setitem(globals(), "trace", partial(ula.trace, substitute_above=x.shape[1]))
    for one, two in zip(trace(model, x).layers, host_trace.layers, strict=True):
        assert two.prefix_error is not None
        assert two.operator.expected.shape[1] == 2048
        assert relative_error(two.output, one.output) <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_layers_that_cannot_be_substituted_run_unchanged(name: str, short: None) -> None:
    assert all(layer.prefix_error is None for layer in trace(host(name).model(), host(name).inputs()).layers)


@pytest.mark.parametrize("name", ["dss, softmax", "vim, biases"])
def test_layers_that_depend_on_later_tokens_run_unchanged(name: str, short: None) -> None:
    (entry,) = (entry for entry in reference.HOSTS if entry.name == name)
    (layer,) = trace(entry.model(), entry.inputs()).layers
    assert layer.prefix_error is None
    assert layer.reconstruction_error() <= 1e-5


def test_an_operator_that_is_not_causal_is_only_built_on_the_prefix(short: None) -> None:
    (entry,) = (entry for entry in reference.HOSTS if entry.name == "vim, biases")
    sound, lengths = list_architectures()[entry.architecture], []

    def build(call: Call) -> Flow:
        lengths.append(call.input.shape[1])
        return sound.build(call)

    model = entry.model()
    trace(model, entry.inputs())  # only the first trace of a model searches for unregistered mixers
    with overridden(replace(sound, build=build)):
        trace(model, entry.inputs())
    assert lengths == [substitution.PREFIX]


@pytest.mark.parametrize("name", STANDING_IN)
def test_rollouts_are_equal(name: str, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host(name).model().double(), host(name).inputs()
    plain, host_trace = ordinary(monkeypatch, model, x), trace(model, x)
    for target in (-1, 2, None):
        one, two = (ula.explain(t, method="rollout", target=target).scores for t in (plain, host_trace))
        assert relative_error(two, one) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions(dtype: torch.dtype, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba2").model().to(dtype), host("mamba2").inputs()
    host_trace = trace(model, x)
    for one, two in zip(ordinary(monkeypatch, model, x).layers, host_trace.layers, strict=True):
        assert two.output.dtype == one.output.dtype
        assert relative_error(two.output, one.output) <= layer_tolerance(dtype) * 2
        assert two.prefix_error is not None and two.prefix_error <= layer_tolerance(dtype)


def test_up_to_the_threshold_the_host_runs_and_no_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    monkeypatch.setitem(globals(), "trace", partial(ula.trace, substitute_above=x.shape[1]))
    assert [layer.prefix_error for layer in trace(model, x).layers] == [None, None]
    monkeypatch.setitem(globals(), "trace", partial(ula.trace, substitute_above=x.shape[1] - 1))
    monkeypatch.setattr(substitution, "PREFIX", 5)
    assert None not in [layer.prefix_error for layer in trace(model, x).layers]


class Shifted(S4D):
    """An S4D with a term that its adapter lacks."""

    def __init__(self, by: float) -> None:
        super().__init__(WIDTH, 4)
        self.by = by

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.by


def test_half_precision_is_compared_in_float32() -> None:
    # The norm of this tensor overflows float16.
    large = torch.full((1, 64, 64), 3e4, dtype=torch.float16)
    assert worst_error(large * 1.001, large) == pytest.approx(1e-3, rel=0.2)


class Late(S4D):
    """An S4D that differs from its adapter only after the prefix, where it is not checked."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = super().forward(hidden_states)
        return torch.cat([mixed[:, :5], mixed[:, 5:] + 1], dim=1)


@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_an_operator_that_differs_from_the_host_is_refused(by: float, short: None) -> None:
    model = Model(Block(added), Block(added, Shifted(by)))
    message = r"blocks\.1\.mixer: above 6 tokens .* first 5 tokens by .+ \(relative; 1e-04 .+a larger substitute_above"
    with left_as_found(model), pytest.raises(UncoveredError, match=message):
        trace(model, ids(12))
    trace(model, ids(6))


def test_the_error_is_that_of_the_prefix_and_its_message_says_so(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Block(added, Late(WIDTH, 4)))
    (layer,) = trace(model, ids(12)).layers
    assert layer.reconstruction_error() <= 1e-5
    assert layer.operator.reconstruction_error() <= 1e-5
    assert "the host's own on the first 5 tokens" in repr(layer)
    assert "the host's own on the first 5 tokens" in repr(layer.operator)
    (plain,) = ordinary(monkeypatch, model, ids(12)).layers
    assert plain.reconstruction_error() > 0.1
    assert "first 5 tokens" not in repr(plain)
    # The operator keeps the output of the host on the prefix: changing it gives a large error.
    layer.operator.expected.add_(1)
    assert layer.operator.reconstruction_error() > 0.1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", STANDING_IN)
def test_forwards_and_hooks_are_restored(name: str, error: type[BaseException], short: None) -> None:
    model, x = host(name).model(), host(name).inputs()
    forwards = {path: module.forward for path, module in model.named_modules()}
    with left_as_found(model):
        trace(model, x)
    behind = list(model.modules())[-1]
    behind.forward = lambda *arguments, **options: (_ for _ in ()).throw(error("stop here"))
    with left_as_found(model), pytest.raises(error, match="stop here"):
        trace(model, x)
    del behind.forward
    assert {path: module.forward for path, module in model.named_modules()} == forwards
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_forwards_are_restored_after_a_failure_in_the_check(short: None) -> None:
    class Failing(S4D):
        def forward(self, hidden_states: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Model(Block(added, Failing(WIDTH, 4)))
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        trace(model, ids(12))
    assert "forward" not in model.blocks[0].mixer.__dict__


def test_a_forward_set_on_the_instance_is_restored(short: None) -> None:
    model = Model(Block(added))
    mixer = model.blocks[0].mixer
    forward = mixer.forward = lambda *arguments: S4D.forward(mixer, *arguments)
    trace(model, ids(12))
    assert mixer.__dict__["forward"] is forward


def test_one_operator_exists_at_a_time(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    first, second = trace(model, x).layers
    operator = first.operator
    assert first.operator is operator
    assert second.operator is not operator
    assert first.operator is not operator
    assert torch.equal(first.operator.apply(first.input), operator.apply(first.input))
    first, second = ordinary(monkeypatch, model, x).layers
    operator = first.operator
    assert (second.operator, first.operator)[1] is operator
    other = copy.copy(first)
    vars(other).pop("operator")
    assert other.operator is not operator
    assert first.operator is operator


def test_padding(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba2").model(), host("mamba2").inputs()
    for side in (slice(10, None), slice(0, 3)):
        mask = torch.ones_like(x)
        mask[1, side] = 0
        inputs = {"input_ids": x, "attention_mask": mask}
        plain, host_trace = ordinary(monkeypatch, model, inputs), trace(model, inputs)
        for one, two in zip(plain.layers, host_trace.layers, strict=True):
            assert two.prefix_error is not None
            assert relative_error(two.output[mask.bool()], one.output[mask.bool()]) <= 1e-5
    mask[1, :6] = 0
    with pytest.raises(InputError, match=r"no real token among the first 5, .* 13 tokens; pad on the right"):
        trace(model, {"input_ids": x, "attention_mask": mask})


def held(value: object) -> dict[int, int]:
    """The bytes of all storages that an object references."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {place: size for part in parts for place, size in held(part).items()}


@pytest.mark.parametrize(("name", "between"), [("mamba", 0), ("mamba2", 0), ("llama, grouped queries", 1)])
def test_a_trace_stores_three_tensors_per_layer(name: str, between: int, short: None) -> None:
    """Plus the stream after the last layer, or after each layer if an MLP changes the stream between layers."""
    model = host(name).model()
    length = 32 if between else 4096
    host_trace = trace(model, torch.randint(7, (1, length)))
    storages: dict[int, int] = {}
    for layer in host_trace.layers:
        layer.operator.apply(layer.input)
        # Of the other tensors that a layer returned, `structure` stores one element each.
        left_out = ("expected", "structure", *(("arguments",) if between else ()))
        storages |= held({key: value for key, value in vars(layer).items() if key not in left_out})
    width, count = host_trace.layers[0].input.shape[2], len(host_trace.layers)
    assert sum(storages.values()) == 4 * length * width * (3 * count + (count if between else 1))


def test_ports_are_available_without_an_operator(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba2").model(), host("mamba2").inputs()
    plain, found = ordinary(monkeypatch, model, x), trace(model, x)
    assert plain.layers[0].ports == {"x": (2, 13)}
    monkeypatch.setattr(type(found.layers[0]), "flow", None)
    for layer in found.layers:
        assert layer.ports == {"x": (2, 13)}
        assert layer.reconstruction_error() == layer.prefix_error


class Counted:
    """A head that records the number of positions of its input."""

    def __init__(self, model: nn.Module) -> None:
        self.widths: list[int] = []
        model.lm_head.register_forward_pre_hook(lambda module, args: self.widths.append(args[0].shape[1]))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_logits_are_computed_only_at_the_targets(name: str, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host(name).model().double(), host(name).inputs()
    mask = torch.ones_like(x)
    mask[1, 10:] = 0
    inputs = {"input_ids": x, "attention_mask": mask}
    plain = ordinary(monkeypatch, model, inputs)
    counted = Counted(model)
    # A model with new hooks is searched once more.
    trace(model, inputs)
    counted.widths.clear()
    host_trace = trace(model, inputs)
    assert counted.widths == [2]
    last = torch.tensor([9, 12])
    assert relative_error(host_trace.output.logits, plain.output.logits[:, last]) <= 2e-6
    assert trace(model, x).output.logits.shape[1] == 1
    assert trace(model, {"input_ids": x, "labels": x}).output.logits.shape[1] == 13
    del counted.widths[:]
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (-1, {}, 2),
        (2, {"logit": 4}, 1),
        ([5, -2], {"logit": (3, 6)}, 2),
        (-1, {"logit": lambda out: out.logits[:, 3].square().sum()}, 13),
    ]
    for target, options, width in cases:
        gradients = host_trace.gradient(target, **options)
        assert counted.widths.pop() == width
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "trace", partial(ula.trace, substitute_above=8192))
            expected = plain.gradient(target, **options)
        for actual, gradient in zip(gradients, expected, strict=True):
            assert relative_error(actual, gradient) <= 2e-6
    del counted.widths[:]
    several = list(host_trace.gradients([2, -1], logit=4))
    assert counted.widths == [1, 2]
    for actual, target in zip(several, (2, -1), strict=True):
        for one, two in zip(actual, host_trace.gradient(target, logit=4), strict=True):
            assert relative_error(one, two) <= 2e-6


@pytest.mark.parametrize("keep", [3, torch.tensor([10, 4, 12])], ids=["a number", "positions"])
def test_a_target_without_logits_is_refused(keep: int | Tensor) -> None:
    model, x = host("mamba").model().double(), host("mamba").inputs()
    plain, host_trace = trace(model, x), trace(model, {"input_ids": x, "logits_to_keep": keep})
    for target in (-1, [10, 12]):
        for one, two in zip(plain.gradient(target, 1), host_trace.gradient(target, 1), strict=True):
            assert relative_error(two, one) <= 2e-6
    with pytest.raises(InputError, match="computed no logits for position 3: the inputs have logits_to_keep"):
        host_trace.gradient(3, 1)
    odd = trace(model, {"input_ids": x, "logits_to_keep": torch.tensor([[1], [2]])})
    with pytest.raises(InputError, match="give an int, or a tensor with one axis"):
        odd.gradient(-1, 1)


def test_a_host_that_modifies_its_argument_receives_a_copy_of_the_prefix(short: None) -> None:
    class Overwriting(S4D):
        def forward(self, hidden_states: Tensor) -> Tensor:
            mixed = super().forward(hidden_states)
            hidden_states.zero_()
            return mixed

    model = Model(Block(added), Block(lambda block, x: block.mixer(x * 1), Overwriting(WIDTH, 4)))
    host_trace = trace(model, ids(12))
    layer = host_trace.layers[1]
    assert relative_error(host_trace.output.logits, model(ids(12)).logits) <= layer_tolerance(torch.float32)
    assert layer.input.abs().amax() > 0
    assert layer.input[:, :5].abs().amax() > 0


def test_a_bar_counts_the_layers(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            steps.append(f"{options['desc']} of {options['total']}, {'hidden' if options['disable'] else 'shown'}")

        def update(self) -> None:
            steps.append("step")

        def close(self) -> None:
            steps.append("closed")

    monkeypatch.setattr("unilinattn.progress._Bar", Bar)
    monkeypatch.setattr("unilinattn.progress.watched", lambda: True)
    model, x = host("mamba").model(), host("mamba").inputs()
    for shown, word in ((True, "shown"), (False, "hidden")):
        del steps[:]
        trace(model, x, progress=shown)
        assert steps[:4] == [f"trace of 2, {word}", "step", "step", "closed"]


def pixels(how: Callable[[Tensor], Tensor]) -> bool:
    return substitution.may_be_long({"pixel_values": how(torch.zeros(2, 3, 64, 64)), "flag": True}, 8192)


def test_short_inputs_do_not_trigger_substitution() -> None:
    assert not substitution.may_be_long({"input_ids": torch.zeros(3, 8192, dtype=torch.long)}, 8192)
    assert substitution.may_be_long({"input_ids": torch.zeros(3, 8193, dtype=torch.long)}, 8192)
    assert pixels(lambda images: images)
    assert not pixels(lambda images: images[:, :1])
