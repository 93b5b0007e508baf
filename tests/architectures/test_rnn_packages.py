"""minGRU, minLSTM and S5 of their packages beside their recurrences, and the calls that their adapters refuse."""

from typing import Any

import pytest
import torch
from minGRU_pytorch.minGRU import g
from s5 import S5
from torch import Tensor, nn

from tests.hosts import named
from unilinattn import explain, trace
from unilinattn.errors import UncoveredError
from unilinattn.host.substitution import through_operators
from unilinattn.models import MixerForCausalLM
from unilinattn.testing import check_architecture, promoted, randomize, relative_error, tolerance
from unilinattn.tracing.layer import Layer

EXACT = tolerance("reconstruction", torch.float64)


def ids(length: int = 19) -> Tensor:
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(0))


def states(decay: Tensor, drive: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + drive_t, token by token."""
    state, result = torch.zeros_like(drive[:, 0]), []
    for a, b in zip(decay.unbind(1), drive.unbind(1), strict=True):
        state = a * state + b
        result.append(state)
    return torch.stack(result, 1)


def min_gru(layer: Layer, carried: Tensor) -> Tensor:
    """Feng et al. (2024), Algorithm 6, with the positive candidate of Appendix B.3 by its slope at the input."""
    project = layer.module.to_hidden_and_gate.weight.double()
    (hidden, gate), (other, _) = ((x.double() @ project.T).chunk(2, -1) for x in (layer.input, carried))
    gate = torch.sigmoid(gate)
    slope = (g(hidden) - 0.5) / hidden
    return layer.module.to_out(states(1 - gate, gate * (slope * other + 0.5)))


def min_lstm(layer: Layer, carried: Tensor) -> Tensor:
    """Feng et al. (2024), Algorithm 8."""
    project = layer.module.to_hidden_and_f_i_gate.weight.double()
    (hidden, forget, enter), (other, _, _) = ((x.double() @ project.T).chunk(3, -1) for x in (layer.input, carried))
    forget, enter = torch.sigmoid(forget), torch.sigmoid(enter)
    slope = (g(hidden) - 0.5) / hidden
    drive = enter / (forget + enter) * (slope * other + 0.5)
    return layer.module.to_out(states(forget / (forget + enter), drive))


@pytest.mark.long
@pytest.mark.parametrize(("name", "recurrence"), [("minGRU", min_gru), ("minLSTM, projected", min_lstm)])
def test_its_operator_is_its_recurrence(name: str, recurrence: Any) -> None:
    host = named(name)
    check_architecture(host.model(), host.inputs(), recurrence=recurrence)


@pytest.mark.parametrize("name", ["minGRU language model", "minLSTM language model"])
def test_a_language_model_runs_through_its_operators(name: str) -> None:
    host = named(name)
    model, inputs = host.model(), host.inputs()
    expected = model(inputs)
    with through_operators(model):
        torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)
    above = trace(model, inputs, substitute_above=4, progress=False)
    assert max(layer.reconstruction_error() for layer in above.layers) < 1e-5
    result = explain(model, inputs, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and float(result.completeness_gap) < 1e-5


def test_a_state_of_an_earlier_call_is_refused() -> None:
    class Continued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = named("minGRU").model().layers[0].mixer
            self.embedding, self.head = nn.Embedding(31, 12), nn.Linear(12, 31)

        def forward(self, input_ids: Tensor) -> Tensor:
            stream = self.embedding(input_ids)
            return self.head(stream + self.mixer(stream, prev_hidden=torch.ones(2, 1, 12)))

    with pytest.raises(UncoveredError, match="was called with 'prev_hidden'"):
        trace(Continued(), ids(), progress=False)


def s5_model(**settings: Any) -> nn.Module:
    """A model with large steps, so that its states decay within its inputs, in the precision of float64."""
    torch.manual_seed(0)
    settings = {"state_width": 8, "dt_min": 0.05, "dt_max": 0.5, **settings}
    return MixerForCausalLM(31, 12, 1, lambda: S5(12, **settings)).eval()


def wide(model: nn.Module) -> nn.Module:
    """The model in float64, its complex parameters too."""
    for parameter in model.double().parameters():
        if parameter.is_complex():
            parameter.data = parameter.data.to(torch.complex128)
    return model


def s5(module: Any, x: Tensor) -> Tensor:
    """Smith et al. (2023), Eq. 2 and 6: zero-order hold, one recurrence for each direction; B by its power."""
    poles, step = module.seq.Lambda, torch.exp(module.seq.log_step)
    decay = torch.exp(step * poles)
    inputs = ((decay - 1) / poles)[:, None] * torch.view_as_complex(module.seq.B)
    drive = (x + 0j) @ (inputs**module.seq.degree).T
    both = [states(decay.expand_as(drive), drive)]
    if module.seq.bidir:
        both.append(states(decay.expand_as(drive), drive.flip(1)).flip(1))
    return (torch.cat(both, -1) @ module.seq.C.T).real + module.seq.D * x


@pytest.mark.parametrize(
    "settings",
    [{}, {"bidir": True}, {"block_count": 2}, {"bcInit": "complex_normal"}, {"degree": 2, "state_width": 12}],
)
def test_s5_is_its_recurrence(settings: dict[str, Any]) -> None:
    with promoted():
        (layer,) = trace(wide(s5_model(**settings)), ids(), progress=False).layers
        operator = layer.operator
    assert layer.kind == "S5 (fixed mixer)"
    assert layer.reconstruction_error() < EXACT
    other = torch.randn(layer.input.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative_error(operator.apply(other), s5(layer.module, other)) < EXACT
    skip = layer.module.seq.D * other
    assert relative_error(operator.apply(other), skip) > 0.01


def test_the_scaled_steps_of_s5_are_those_of_its_call() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Any) -> None:
            super().__init__()
            self.embedding, self.mixer, self.head = nn.Embedding(31, 12), s5_model().layers[0].mixer, nn.Linear(12, 31)
            self.scale = scale

        def forward(self, input_ids: Tensor) -> Tensor:
            stream = self.embedding(input_ids)
            return self.head(stream + self.mixer(stream, step_scale=self.scale))

    assert trace(Scaled(0.5), ids(), progress=False).layers[0].reconstruction_error() < 1e-5
    with pytest.raises(UncoveredError, match="a tensor of step scales"):
        trace(Scaled(torch.tensor([0.5, 2.0])), ids(), progress=False)


def test_liquid_s5_is_refused() -> None:
    with pytest.raises(UncoveredError, match="with liquid=True its input is a decay and a value at once"):
        trace(randomize(s5_model(liquid=True)), ids(), progress=False)
