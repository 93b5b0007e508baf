"""Negative controls: adapters with typical mistakes, which the kit must refuse with the violated laws."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.architectures.recurrences import frozen
from tests.hosts import named
from tests.laws.test_operator_controls import Transposed
from unilinattn import registry
from unilinattn.call import Call, padded_left
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense, DiagonalDecay, ScalarDecay, Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, run
from unilinattn.registry import Architecture
from unilinattn.testing import LawViolation, check_architecture, examine
from unilinattn.testing.checks import edited
from unilinattn.testing.hosts import host

Edit = Callable[[Call, Chain], Chain]
Override = Callable[[Architecture], None]


@dataclass(frozen=True, eq=False)
class Added(Stage):
    """Adds one vector per token to any input."""

    what: Tensor

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        return x + self.what if bias else x

    def adjoint(self, g: Tensor) -> Tensor:
        return g


def stagewise(edit: Callable[[Stage], Stage | None]) -> Edit:
    return lambda call, chain: edited(chain, edit)


def core(edit: Callable[[object], object]) -> Edit:
    return stagewise(lambda s: replace(s, mixer=edit(s.mixer)) if isinstance(s, Mix) and s.role == "core" else s)


def without_skip(stage: Stage) -> Stage:
    return replace(stage, chains=stage.chains[:1]) if isinstance(stage, Branch) else stage


def without_conv_bias(stage: Stage) -> Stage:
    return replace(stage, bias=None) if stage.role == "conv" else stage


def without_mask(stage: Stage) -> Stage | None:
    return None if isinstance(stage, Scale) and stage.groups == 1 and stage.role in {"input", "act"} else stage


def repeated(mixer: ScalarDecay) -> ScalarDecay:
    """Groups expanded to heads with `repeat`: head 1 gets the key of group 1 instead of group 0."""
    times = mixer.heads // mixer.query.shape[2]
    query, key = (t.repeat(1, 1, times, 1) for t in (mixer.query, mixer.key))
    return ScalarDecay(query, key, mixer.log_decay, key_scale=mixer.key_scale)


def without_delta(mixer: ScalarDecay | DiagonalDecay) -> ScalarDecay | DiagonalDecay:
    """The step size is in the decay but not in the key."""
    if isinstance(mixer, ScalarDecay):
        return ScalarDecay(mixer.query, mixer.key, mixer.log_decay)
    return DiagonalDecay(mixer.query, mixer.key, mixer.log_decay, rate=mixer.rate)


def without_last_delta(mixer: ScalarDecay) -> ScalarDecay:
    """Only the last token's key lacks its step size."""
    last = torch.ones_like(mixer.key_scale[:, -1:])
    scale = torch.cat([mixer.key_scale[:, :-1], last], dim=1)
    return ScalarDecay(mixer.query, mixer.key, mixer.log_decay, key_scale=scale)


def exclusive(mixer: ScalarDecay) -> Dense:
    """Reads the state before the current step's decay: exp(G_{i-1} - G_j) for j < i."""
    growth = torch.exp(-mixer.log_decay).transpose(1, 2).unsqueeze(-1)
    whole = mixer.materialize()
    return Dense((whole * growth).tril(-1) + whole.triu())


def rest_of_the_record(call: Call, chain: Chain) -> Chain:
    """A wrong operator whose bias is the difference from the recorded output."""
    wrong = edited(chain, without_skip)
    assert call.output is not None
    return (*wrong, Added("output", call.output - run(wrong, call.input)))


def rest_of_a_run(call: Call, chain: Chain) -> Chain:
    """The same with the output of another run of the host's module."""
    wrong = edited(chain, without_skip)
    output = call.module(call.input, attention_mask=call.arguments.get("attention_mask"))
    return (*wrong, Added("output", output - run(wrong, call.input)))


def gate_carried(call: Call, chain: Chain) -> Chain:
    """The path of the input is the gate's branch, which mixes no tokens; the scan is frozen."""
    where = next(k for k, stage in enumerate(chain) if stage.role == "gate")
    assert isinstance(chain[where], Scale)
    mixed = run(chain[:where], call.input)
    projection, inner = call.tensor(call.host.in_proj.weight), mixed.shape[2]
    gate = Flow(call.input).matrix(projection[inner:], role="input").activation("silu")
    alone = Toeplitz(torch.ones_like(projection[inner:, :1]), batch=mixed.shape[0], length=mixed.shape[1])
    return (*gate.core(alone).scale(mixed, role="gate").chain, *chain[where + 1 :])


def half_carried(call: Call, chain: Chain) -> Chain:
    """The path of the input is the convolution; the contribution of the core is frozen."""
    where = next(k for k, stage in enumerate(chain) if isinstance(stage, Branch))
    before, after = run(chain[:where], call.input), run(chain[: where + 1], call.input)
    short = Toeplitz(torch.ones_like(before[0, 0, :, None]), batch=before.shape[0], length=before.shape[1])
    # Padded tokens are zero.
    ratio = torch.where(before == 0, before, after / before)
    return (*chain[:where], Mix("core", short), Scale("norm", ratio), *chain[where + 1 :])


@pytest.fixture
def override() -> Iterator[Override]:
    """Override an architecture until the test ends."""
    with ExitStack() as stack:
        yield lambda architecture: stack.enter_context(registry.overridden(architecture))


@pytest.fixture
def break_adapter(override: Override) -> Callable[[str, Edit], None]:
    def install(name: str, edit: Edit) -> None:
        sound = registry.list_architectures()[name]

        def build(call: Call) -> Flow:
            flow = Flow(call.input)
            for stage in edit(call, sound.build(call).chain):
                flow.stage(stage)
            return flow

        override(replace(sound, build=build))

    return install


def one_layer(name: str) -> nn.Module:
    """Return a host whose second layer, of the same kind, is left out."""
    model = host(name).model()
    parent = model.backbone if hasattr(model, "backbone") else model
    parent.layers = parent.layers[:1]
    return model


BROKEN: dict[str, tuple[str, Edit, set[str]]] = {
    "transposed": ("mamba2", core(Transposed), {"reconstruction", "causality", "recurrence"}),
    "dropped skip": ("mamba", stagewise(without_skip), {"reconstruction", "recurrence"}),
    "repeat for repeat_interleave": ("mamba2", core(repeated), {"reconstruction", "recurrence"}),
    "missing conv bias": ("mamba", stagewise(without_conv_bias), {"reconstruction", "completeness"}),
    "dropped delta": ("mamba", core(without_delta), {"reconstruction", "recurrence"}),
    "dropped last delta": ("mamba2", core(without_last_delta), {"reconstruction", "recurrence"}),
    "exclusive decay": ("mamba2", core(exclusive), {"reconstruction", "recurrence"}),
    "unmasked padding": ("mamba2", stagewise(without_mask), {"reconstruction", "padding"}),
    "bias y - T x from the record": ("mamba", rest_of_the_record, {"bias", "recurrence"}),
    "bias y - T x from a run": ("mamba", rest_of_a_run, {"bias", "recurrence"}),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_adapter_is_refused_by_name(mistake: str, break_adapter: Callable[[str, Edit], None]) -> None:
    name, edit, laws = BROKEN[mistake]
    modules = dict(one_layer(name).double().named_modules())
    recurrence = lambda layer, x: frozen(modules[layer.name], layer, x)  # noqa: E731  named for what it is
    break_adapter(name, edit)
    padding = "padding" in laws
    failures = examine(one_layer(name), host(name).inputs(), recurrence=recurrence, padding=padding).failures
    assert laws <= failures.keys()
    if "bias" in laws:
        assert not failures.keys() & {"reconstruction", "completeness"}
    else:
        assert "bias" not in failures


@pytest.mark.long
def test_a_flow_whose_value_is_not_that_of_its_stages_is_refused(override: Override) -> None:
    sound = registry.list_architectures()["mamba"]

    def build(call: Call) -> Flow:
        flow = sound.build(call)
        value = flow.deferred()
        return flow._continue(lambda: value() * (1 + 1e-9))

    override(replace(sound, build=build))
    failures = examine(one_layer("mamba"), host("mamba").inputs()).failures
    assert failures.keys() == {"reconstruction"}
    assert "the value of the adapter's flow against its stages" in failures["reconstruction"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "outputs"), [(gate_carried, "[1, 2, 3, 4, 5]"), (half_carried, "[4, 5, 6, 7, 8]")], ids=["gate", "half"]
)
def test_only_the_law_mixing_detects_a_frozen_core(
    edit: Edit, outputs: str, break_adapter: Callable[[str, Edit], None]
) -> None:
    break_adapter("mamba", edit)
    failures = examine(one_layer("mamba"), host("mamba").inputs()).failures
    assert failures.keys() == {"mixing"}
    assert failures["mixing"] == f"token 0 at port 'x' moves the host's outputs {outputs}, and T_ij is zero there."


@pytest.mark.long
def test_the_refusal_names_the_law_and_shows_the_table(
    break_adapter: Callable[[str, Edit], None], capsys: pytest.CaptureFixture[str]
) -> None:
    break_adapter("mamba2", stagewise(without_mask))
    entry = host("mamba2")
    with pytest.raises(LawViolation, match="padded on the left, batch of 3: the operator") as caught:
        check_architecture(entry.model(), entry.inputs())
    assert caught.value.law == "reconstruction"
    printed = capsys.readouterr().out
    assert "Mamba2ForCausalLM: 2 layers, broken: reconstruction, padding" in printed
    assert "backbone.layers.0.mixer  Mamba2Mixer as mamba2 (Mamba-2 (SSD))" in printed


@pytest.mark.long
def test_a_leak_that_no_adapter_admits_is_refused(override: Override) -> None:
    override(replace(registry.list_architectures()["mamba2"], padding_leak=None))
    failures = examine(one_layer("mamba2, biases"), host("mamba2, biases").inputs()).failures
    assert failures.keys() == {"padding"}
    assert "padded on the left, batch of 3: the host lets padding through" in failures["padding"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("admitted", "what"),
    [
        ("left", "padded on the right, batch of 3: the host lets padding through, and no adapter's `padding_leak`"),
        ("right", "padded on the left, batch of 3: the host lets padding through, and no adapter's `padding_leak`"),
    ],
)
def test_a_leak_that_is_admitted_on_one_side_alone_is_refused(admitted: str, what: str, override: Override) -> None:
    sound = registry.list_architectures()["vim"]
    # Ruff prefers a def; the lambda fits on one line.
    partial = lambda module, mask: "it leaks" if padded_left(mask) == (admitted == "left") else None  # noqa: E731
    override(replace(sound, padding_leak=partial))
    entry = named("vim, biases")
    failures = examine(entry.model(), entry.inputs()).failures
    assert failures.keys() == {"padding"}
    assert what in failures["padding"]


@pytest.mark.parametrize(("side", "batch"), [("right", 3), ("left", 1)])
def test_a_leak_that_there_is_not_is_refused(side: str, batch: int, override: Override) -> None:
    def wrong(module: nn.Module, mask: Tensor) -> str | None:
        return "it leaks" if (len(mask), padded_left(mask)) == (batch, side == "left") else None

    override(replace(registry.list_architectures()["s4d"], padding_leak=wrong))
    failures = examine(one_layer("s4d"), host("s4d").inputs()).failures
    assert failures.keys() == {"padding"}
    assert f"padded on the {side}, batch of {batch}: the host keeps padding out, but" in failures["padding"]


@pytest.mark.long
def test_an_adapter_that_modifies_the_model_is_refused(break_adapter: Callable[[str, Edit], None]) -> None:
    def touch(call: Call, chain: Chain) -> Chain:
        call.module.in_proj.weight.requires_grad_(not call.module.in_proj.weight.requires_grad)
        return chain

    break_adapter("mamba", touch)
    entry = host("mamba")
    failures = examine(entry.model(), entry.inputs(), padding=False).failures
    assert "requires_grad of the model changed" in failures["untouched"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("factor", "what"),
    [(1.01, "the traced model's output against its own output"), (1 + 2.0**-22, "bit for bit")],
)
@pytest.mark.parametrize("name", ["mamba", "llama, grouped queries"])
def test_a_trace_that_changes_what_the_model_returns_is_refused(
    name: str, factor: float, what: str, override: Override
) -> None:
    entry = host(name)
    sound = registry.list_architectures()[entry.architecture]

    @contextmanager
    def capture(model: nn.Module, mark: Callable[[nn.Module, object], None]) -> Iterator[None]:
        handle = model.lm_head.register_forward_hook(lambda module, given, returned: returned * factor)
        with sound.capture(model, mark) if sound.capture else nullcontext():
            yield
        handle.remove()

    override(replace(sound, capture=capture))
    failures = examine(entry.model(), entry.inputs(), padding=False).failures
    assert failures.keys() == {"output"}
    assert what in failures["output"]


def test_a_factor_with_nan_is_refused(break_adapter: Callable[[str, Edit], None]) -> None:
    nothing = Scale("act", torch.full((1, 1, 1), torch.nan))
    break_adapter("mamba", lambda call, chain: (nothing, *chain))
    entry = host("mamba")
    verdict = examine(entry.model(), entry.inputs(), padding=False)
    assert all("factor 'act' of shape (1, 1, 1) holds 1 NaN" in message for message in verdict.failures.values())


@pytest.mark.long
def test_a_weight_with_nan_is_refused(break_adapter: Callable[[str, Edit], None]) -> None:
    def nothing(call: Call) -> Matrix:
        width = call.input.shape[-1]
        return Matrix("input", torch.full_like(call.input[0, 0].expand(width, -1), torch.nan))

    break_adapter("mamba", lambda call, chain: (nothing(call), *chain))
    entry = host("mamba")
    verdict = examine(entry.model(), entry.inputs(), padding=False)
    assert "relative error inf" in verdict.failures["reconstruction"]


def test_an_adapter_that_refuses_is_reported_for_its_layer(break_adapter: Callable[[str, Edit], None]) -> None:
    def refuse(call: Call, chain: Chain) -> Chain:
        raise UncoveredError(f"{call.name} has no such part")

    break_adapter("mamba", refuse)
    entry = host("mamba")
    verdict = examine(entry.model(), entry.inputs(), padding=False)
    assert [layer.failed["build"] for layer in verdict.layers] == [
        f"backbone.layers.{k}.mixer has no such part" for k in range(2)
    ]
