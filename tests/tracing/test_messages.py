"""Errors of invalid inputs; each leaves the model unchanged."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.tracing.models import Block, Model, added, ids
from unilinattn import trace
from unilinattn.errors import FactorError, InputError, OptionError, UncoveredError, UnilinattnError
from unilinattn.models import S4D
from unilinattn.operator.deferred import Deferred
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Scale
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import host, transformers_model


def refused(model: nn.Module, inputs: object, error: type[UnilinattnError], *words: str) -> None:
    with left_as_found(model), pytest.raises(error) as caught:
        trace(model, inputs)
    for word in words:
        assert word in str(caught.value)


class GatedSlotMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.own(x).detach().numpy().cumsum(1))


def test_a_mixer_outside_of_torch_is_refused_with_its_path_and_the_reason() -> None:
    refused(
        Model(Block(added), Block(added, GatedSlotMixer())),
        ids(),
        UncoveredError,
        f"blocks.1.mixer ({__name__}.GatedSlotMixer)",
        "does not depend on its inputs by functions of torch",
        "strict=False, which leaves this layer out",
    )


class InBlocks(nn.Module):
    """A mixer of blocks of tokens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.size)).cumsum(1).flatten(1, 2)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.projection = InBlocks(4), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(self.inner(x))


class SwitchedModel(Model):
    """Takes other blocks for texts that are no multiple of them, as BigBird does."""

    def forward(self, ids: torch.Tensor) -> Any:
        for module in self.modules():
            if isinstance(module, Switched):
                module.inner = InBlocks(1)
        return super().forward(ids)


def test_a_model_that_changes_itself_in_its_first_call_is_traced_after_it() -> None:
    model = SwitchedModel(Block(added, Switched()))
    with pytest.raises(UncoveredError, match=r"raises RuntimeError when it runs again: .* call it once before"):
        _ = trace(model, ids()).layers[0].operator
    model(ids())
    assert trace(model, ids()).layers[0].operator.reconstruction_error() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64], ids=str)
def test_ids_of_the_wrong_dtype_are_refused(dtype: torch.dtype) -> None:
    x = host("mamba").inputs().to(dtype)
    refused(host("mamba").model(), x, InputError, f"input_ids are {dtype} of shape (2, 13)", "integer token ids")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(5, dtype=torch.long), "shape (5,); integer token ids of shape (batch, length)"),
        (torch.zeros(2, 0, dtype=torch.long), "shape (2, 0); at least one sequence of one token"),
        (torch.zeros(0, 5, dtype=torch.long), "shape (0, 5); at least one sequence of one token"),
        (torch.full((1, 4), 31), "input_ids reach from 31 to 31; the model knows ids 0 to 30"),
        (torch.full((1, 4), -1), "input_ids reach from -1 to -1; the model knows ids 0 to 30"),
    ],
    ids=["one axis", "no tokens", "no sequences", "an id too high", "an id too low"],
)
def test_ids_of_the_wrong_shape_or_range_are_refused(x: torch.Tensor, words: str) -> None:
    refused(host("mamba").model(), x, InputError, words)


@pytest.mark.parametrize("inputs", [b"some text", [1, 2, 3], None], ids=str)
def test_inputs_that_are_not_tensors_are_refused(inputs: object) -> None:
    name = type(inputs).__name__
    refused(host("mamba").model(), inputs, InputError, f"inputs are a {name}", "a mapping of the model's keyword")


def test_a_logit_out_of_range_is_refused() -> None:
    model = host("mamba").model()
    host_trace = trace(model, host("mamba").inputs())
    for logit in (31, -1, (0, 31)):
        with left_as_found(model), pytest.raises(InputError, match="is out of range: the model has logits 0 to 30"):
            host_trace.gradient(logit=logit)
    with left_as_found(model), pytest.raises(InputError, match="target 13 is out of range: sequence 0 has 13 real"):
        host_trace.gradient(target=13)


def test_a_model_without_logits_needs_a_function() -> None:
    model = host("mamba").model().backbone
    host_trace = trace(model, host("mamba").inputs())
    with (
        left_as_found(model),
        pytest.raises(InputError, match="MambaModel returns no logits; give `logit` as a function"),
    ):
        host_trace.gradient()
    grads = host_trace.gradient(logit=lambda out: out.last_hidden_state[:, -1].sum())
    assert all(float(grad.abs().sum()) > 0 for grad in grads)


def test_an_operator_refuses_invalid_arguments() -> None:
    op = trace(host("mamba").model(), host("mamba").inputs()).layers[0].operator
    name = "backbone.layers.0.mixer"
    with pytest.raises(InputError, match=rf"{name} was frozen on shape \(2, 13, 12\) for port 'x', got \(2, 12, 12\)"):
        op.apply(torch.zeros(2, 12, 12))
    with pytest.raises(InputError, match=r"frozen on shape \(2, 13, 12\) for the output side, got \(1, 13, 12\)"):
        op.adjoint(torch.zeros(1, 13, 12))
    with pytest.raises(InputError, match=r"reads the ports \['x'\], got \['y'\]"):
        op.apply({"y": torch.zeros(2, 13, 12)})
    with pytest.raises(OptionError, match=f"{name} has no port 'y'"):
        op.contributions(0, port="y")
    with pytest.raises(OptionError, match="unknown scope 'unifed'; did you mean 'unified'"):
        op.matrix("unifed")
    with pytest.raises(OptionError, match=r"scope 'layer' has a matrix for every pair.*`contributions\(i\)`"):
        op.rows(0, scope="layer")
    with pytest.raises(OptionError, match=r"heads \[24\] are out of range: this scope has 24 heads, 0 to 23"):
        op.matrix(heads=24)
    with pytest.raises(OptionError, match="unknown activation 'sil'; did you mean 'silu'"):
        op.contributions(0, activation="sil")
    with pytest.raises(InputError, match=r"position 13 is out of range: .* has 13 output positions"):
        op.rows(13)
    with pytest.raises(InputError, match=r"need one row a sequence: got 3, batch is 2"):
        op.contributions(torch.zeros(3, 1, dtype=torch.long))


@pytest.mark.usefixtures("unchecked")
def test_arguments_of_the_wrong_type_are_refused() -> None:
    model, x = S4D(6, 4), torch.randn(2, 5, 6)
    host_trace: Any = trace(model, x)
    op = host_trace.layers[0].operator
    integers = "positions are integers or \\(batch, row\\) integers, got torch."
    with pytest.raises(OptionError, match="unknown reduction over heads 'maximum'; did you mean 'max'"):
        op.matrix(heads="maximum")
    with pytest.raises(InputError, match=rf"{integers}float32 of \(\)"):
        op.rows(0.5)
    with pytest.raises(InputError, match=rf"{integers}bool of \(2,\)"):
        op.rows([True, False])
    with pytest.raises(InputError, match=r"target tensor\(\[0.5000, 1.0000\]\) is no position"):
        host_trace.positions(torch.tensor([0.5, 1.0]))
    with pytest.raises(OptionError, match="stream_to=3; give an existing folder"):
        trace(model, x, stream_to=3)  # type: ignore[arg-type]  # refused, as tested


def test_an_activation_without_a_known_slope_is_refused() -> None:
    model = transformers_model(
        "MambaModel", "MambaConfig", hidden_size=6, num_hidden_layers=1, hidden_act="tanh"
    )().eval()
    with pytest.raises(UncoveredError, match="no frozen slope is known for the activation 'tanh'"):
        trace(model, host("mamba").inputs()).layers[0].operator  # noqa: B018  the property builds it


def test_a_missing_attribute_of_a_host_names_its_version() -> None:
    model = host("mamba").model()
    layer = trace(model, host("mamba").inputs()).layers[0]
    del model.backbone.layers[0].mixer.ssm_state_size
    with pytest.raises(
        UncoveredError, match=r"has no attribute 'ssm_state_size' in transformers \d.*that version changed the host"
    ):
        layer.operator  # noqa: B018  the property builds it


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_a_factor_that_is_not_finite_is_refused_with_its_layer(name: str) -> None:
    model = host(name).model()
    mixers = [module for module in model.modules() if hasattr(module, "D")]
    with torch.no_grad():
        (mixers[1].kernel.C if name == "s4d" else mixers[1].A_log).view(-1)[0] = torch.nan
    host_trace = trace(model, host(name).inputs())
    host_trace.layers[0].operator  # noqa: B018  the property builds it
    with pytest.raises(UnilinattnError, match=rf"{host_trace.layers[1].name}: factor '.*' of shape .* holds \d+ NaN"):
        host_trace.layers[1].operator  # noqa: B018  the property builds it


@pytest.mark.parametrize(
    ("name", "weight", "row", "role"),
    [
        ("mamba", "in_proj", -1, "gate"),
        ("mamba2", "norm", 0, "norm"),
        ("mamba2", "in_proj", 0, "gate"),
    ],
)
def test_a_gate_or_norm_that_is_not_finite_is_refused(name: str, weight: str, row: int, role: str) -> None:
    model = host(name).model()
    mixer = model.backbone.layers[1].mixer
    with torch.no_grad():
        getattr(mixer, weight).weight[row] = torch.nan
    layer = trace(model, host(name).inputs()).layers[1]
    with pytest.raises(FactorError, match=rf"{layer.name}: factor '{role}' of shape .* holds \d+ NaN"):
        layer.operator.apply(layer.operator.inputs)


def test_a_deferred_gate_is_checked_when_it_is_computed() -> None:
    x = torch.randn(1, 4, 2)
    gate = torch.ones(1, 4, 2)
    gate[0, 1] = torch.inf
    op = MixerOperator({"x": (Scale("gate", Deferred(lambda: gate)),)}, inputs={"x": x}, output=x, name="layer 7")
    with pytest.raises(FactorError, match=r"layer 7: factor 'gate' of shape .* holds 2 NaN or infinite"):
        op.apply(x)


def test_a_mixer_without_a_model_can_be_traced() -> None:
    mixer = S4D(6, 4)
    layer = trace(mixer, torch.randn(2, 5, 6)).layers[0]
    assert layer.name == "S4D"
    assert layer.operator.reconstruction_error() <= 1e-5
