"""A traced model is unchanged after success, an exception, or a keyboard interrupt."""

import inspect
from collections.abc import Callable

import pytest
import torch

# A first trace imports it, and it imports packages that add filters of warnings.
import transformers.modeling_utils  # noqa: F401
from torch import Tensor, nn

from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn import register_architecture, registry, through_operators, trace
from unilinattn.call import Call
from unilinattn.errors import ModelStateError
from unilinattn.host.module_calls import first_tensor
from unilinattn.mixers import Dense
from unilinattn.models import S4D
from unilinattn.operator.flow import Flow
from unilinattn.testing import LawViolation, left_as_found, relative_error
from unilinattn.testing.hosts import host

NAMES = ("mamba", "mamba2", "s4d", "gpt2", "llama, grouped queries", "bert", "vit")


def mixers(model: nn.Module, x: object) -> list[nn.Module]:
    modules = dict(model.named_modules())
    return [modules[layer.name] for layer in trace(model, x).layers]


@pytest.mark.parametrize("name", NAMES)
def test_after_success(name: str) -> None:
    model, x = host(name).model(), host(name).inputs()
    next(iter(model.parameters())).requires_grad_(False)
    list(model.modules())[-1].train()
    with left_as_found(model):
        first = trace(model, x)
        errors = [layer.operator.reconstruction_error() for layer in first.layers]
        first.gradient(logit=lambda output: first_tensor(vars(output).values(), axes=2).sum())
    assert max(errors) <= 1e-5
    again = trace(model, x)
    for one, two in zip(first.layers, again.layers, strict=True):
        assert torch.equal(one.output, two.output)
        assert torch.equal(one.operator.apply(one.input), two.operator.apply(two.input))


class Remembering(nn.Module):
    """A mean of earlier tokens, recorded without an adapter, that keeps its weights for later calls."""

    weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is None or self.weights.shape[0] < x.shape[1]:
            self.weights = torch.ones(x.shape[1], x.shape[1]).tril() / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.weights[: x.shape[1], : x.shape[1]] @ x


def test_recording_a_module_leaves_no_table_in_it() -> None:
    model = Model(Block(added, Remembering()))
    with left_as_found(model):
        (layer,) = trace(model, ids()).layers
    assert layer.architecture == "recorded" and model.blocks[0].mixer.weights is None


def test_a_check_of_an_adapter_that_runs_its_module_leaves_no_table_in_it() -> None:
    with registry.overridden():

        class Checked(Remembering):
            pass

        def run(call: Call) -> None:
            call.module(call.input)

        @register_architecture(f"{__name__}.{Checked.__qualname__}", name="checked", kind="mean", check=run)
        def mean(call: Call) -> Flow:
            """A mean of earlier tokens."""
            length = call.input.shape[1]
            weights = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
            return Flow(call.input).core(Dense(weights.expand(len(call.input), 1, -1, -1)))

        model = Model(Block(added, Checked()))
        with left_as_found(model):
            (layer,) = trace(model, ids()).layers
        assert layer.architecture == "checked" and layer.operator.reconstruction_error() < 1e-6
        assert model.blocks[0].mixer.weights is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", ["trace", "gradient"])
def test_after_an_exception_inside_a_module(name: str, error: type[BaseException], run: str) -> None:
    model, x = host(name).model(), host(name).inputs()
    host_trace = trace(model, x)
    # Gradients run the operators in place of the mixers, so the failure is in a module after the mixers.
    last = mixers(model, x)[-1] if run == "trace" else list(model.modules())[-1]
    forward = last.forward

    def fail(*arguments: object, **options: object) -> Tensor:
        raise error("stop here")

    last.forward = fail
    with left_as_found(model), pytest.raises(error, match="stop here"):
        trace(model, x) if run == "trace" else host_trace.gradient()
    del last.forward
    assert forward == last.forward
    again = trace(model, x)
    assert torch.equal(host_trace.layers[-1].output, again.layers[-1].output)


def test_after_an_exception_of_the_target() -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    host_trace = trace(model, x)

    def fail(output: object) -> Tensor:
        raise KeyboardInterrupt

    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        host_trace.gradient(logit=fail)


def test_through_operators_restores_every_forward() -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    plain = model(x).logits
    with left_as_found(model), pytest.raises(KeyboardInterrupt), through_operators(model):
        assert torch.allclose(model(x).logits, plain, rtol=1e-4, atol=1e-5)
        raise KeyboardInterrupt
    assert torch.equal(model(x).logits, plain)


@pytest.mark.parametrize("how", ["in place", "reassigned", "as an attribute"])
def test_attributes_set_during_a_run_are_restored(how: str) -> None:
    def counts(block: nn.Module, x: Tensor) -> Tensor:
        if how == "in place":
            block.runs.add_(1)
        elif how == "reassigned":
            block.runs = block.runs + 1
        else:
            block.seen = x
        return added(block, x)

    model = Model(Block(counts), Block(added))
    with left_as_found(model):
        trace(model, ids())
    assert float(model.blocks[0].runs) == 0
    assert not hasattr(model.blocks[0], "seen")


def test_a_model_that_changes_its_weights_is_refused() -> None:
    def rescales(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.mixer.D.mul_(0.5)
        return added(block, x)

    with pytest.raises(ModelStateError, match=r"changed its own parameters \['blocks.0.mixer.D'\]"):
        trace(Model(Block(rescales)), ids())


def test_a_model_in_train_mode_without_dropout_is_traced_in_train_mode() -> None:
    model, x = host("mamba2").model().train(), host("mamba2").inputs()
    with left_as_found(model):
        assert max(layer.operator.reconstruction_error() for layer in trace(model, x).layers) <= 1e-5
    assert model.training


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_active_dropout_is_refused(name: str) -> None:
    model, x = host(name).model().train(), host(name).inputs()
    with left_as_found(model), pytest.raises(ModelStateError, match=r"train mode and dropout with p = 0\.1 .*eval\(\)"):
        trace(model, x)


def test_active_dropout_of_one_module_is_refused_and_unused_dropout_is_not() -> None:
    model = Model(Block(lambda block, x: block.dropout(added(block, x)))).eval()
    trace(model, ids())
    model.blocks[0].dropout.train()
    with pytest.raises(ModelStateError, match=r"dropout with p = 0\.5"):
        trace(model, ids())
    model.blocks[0].dropout.p = 0.0
    trace(model, ids())


def test_dropout_inside_an_attention_function_is_refused() -> None:
    def attends(block: nn.Module, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        drop = 0.3 if block.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=drop)
        return block.mixer(mixed.transpose(1, 2).flatten(2))

    model = Model(Block(attends)).train()
    with pytest.raises(ModelStateError, match=r"dropout with p = 0\.3"):
        trace(model, ids())


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module.D, "data", 2 * module.D),
        lambda module: module.half(),
        lambda module: torch.nn.init.normal_(module.D),
        lambda module: module.kernel.register_parameter("log_dt", nn.Parameter(module.kernel.log_dt + 1)),
        lambda module: module.load_state_dict({k: v + 0.1 for k, v in module.state_dict().items()}),
        lambda module: module.D.data.add_(1),
        lambda module: module.D.data.copy_(module.D.data.flip(0)),
        lambda module: module.D.data.__setitem__(0, 7.0),
    ],
    ids=[
        *("other data", "another dtype", "in place", "another parameter", "another state dict"),
        *("in place through data", "a permutation through data", "one number through data"),
    ],
)
@pytest.mark.parametrize("use", ["operator", "gradient"])
def test_weights_that_changed_after_the_trace_are_refused(change: Callable[[nn.Module], object], use: str) -> None:
    model = Model(Block(added), Block(added))
    host_trace = trace(model, ids())
    change(model.blocks[1].mixer)
    host_trace.layers[0].operator  # noqa: B018  a layer with unchanged weights
    with pytest.raises(ModelStateError, match=r"weights of .* changed since the trace \(.*\), .* trace the model"):
        host_trace.layers[1].operator if use == "operator" else host_trace.gradient()


def test_an_existing_operator_is_not_affected_by_changed_weights() -> None:
    model = Model(Block(added))
    layer = trace(model, ids()).layers[0]
    output = layer.operator.apply(layer.input)
    with torch.no_grad():
        model.blocks[0].mixer.D.add_(1)
    assert torch.equal(layer.operator.apply(layer.input), output)


class Overwriting(S4D):
    """Overwrites its argument after reading it, as some hosts do to save memory."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = super().forward(hidden_states)
        hidden_states.zero_()
        return mixed


class Counting(S4D):
    """Counts its runs in a buffer."""

    def __init__(self, d_model: int, d_state: int) -> None:
        super().__init__(d_model, d_state)
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    "around",
    [
        lambda block, x: block.mixer(x).add_(x),
        lambda block, x: x.add_(block.mixer(x)),
        lambda block, x: block.mixer(x * 1).mul_(2),
    ],
    ids=["into the output", "into the stream", "a factor on the output"],
)
def test_outputs_are_recorded_before_in_place_changes(around: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Model(Block(around)).eval().double()
    host_trace = trace(model, ids())
    assert host_trace.layers[0].operator.reconstruction_error() <= 1e-12
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    (grad,) = host_trace.gradient(logit=0)
    # After the mixer: a factor, the head, and the last token's logit 0.
    expected = torch.zeros_like(grad)
    expected[:, -1] = model.head.weight[0] * (2 if "mul_" in inspect.getsource(around) else 1)
    assert relative_error(grad, expected) <= 1e-12


def test_inputs_are_recorded_before_in_place_changes() -> None:
    model = Model(Block(lambda block, x: block.mixer(x * 1), Overwriting(WIDTH, 4)))
    layer = trace(model, ids()).layers[0]
    assert torch.equal(layer.input, model.embed(ids()))
    assert layer.operator.reconstruction_error() <= 1e-5


def test_buffers_that_every_run_changes_may_change() -> None:
    model = Model(Block(added, Counting(WIDTH, 4)))
    host_trace = trace(model, ids())
    host_trace.gradient()
    assert host_trace.layers[0].operator.reconstruction_error() <= 1e-5
    assert int(model.blocks[0].mixer.runs) == 0


def test_the_kit_detects_changes_of_the_model() -> None:
    model = host("s4d").model()
    with (
        pytest.raises(LawViolation, match=r"tensors of the model changed: \['layers.0.mixer.D'\]"),
        left_as_found(model),
    ):
        model.layers[0].mixer.D.data.add_(1)
    with pytest.raises(LawViolation, match="hooks of the model changed"), left_as_found(model):
        model.register_forward_hook(lambda *_: None)
    with pytest.raises(LawViolation, match="training flags of the model changed"), left_as_found(model):
        model.train()
    with pytest.raises(LawViolation, match="gradients of the model changed"), left_as_found(model):
        model(host("s4d").inputs()).logits.sum().backward()
