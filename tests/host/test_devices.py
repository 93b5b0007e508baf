"""Tensors are created on the device of their module, tested on simulated devices."""

import pytest
import torch
from torch import Tensor, nn

from tests.host.elsewhere import HERE, THERE, Resident, devices, settle
from tests.tracing.models import Block, Model, ids
from unilinattn import trace
from unilinattn.operator.operator import MixerOperator
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import host

NAMES = ("mamba", "mamba2", "s4d", "gpt2", "llama, grouped queries", "gemma 3, sliding window", "bert", "t5, encoder")

USES = {
    "apply": lambda op: op.apply(op.inputs),
    "adjoint": lambda op: op.adjoint(op.output),
    "bias": lambda op: op.bias,
    "a row": lambda op: op.rows(-1),
    "rows": lambda op: op.rows([0, 3, 2], scope="mixer", heads="max"),
    "matrix": lambda op: op.matrix("unified" if "Center" not in repr(op.chains) else "core", heads=None),
    "contributions": lambda op: op.contributions([1, 4]),
    "left_multiply": lambda op: op.left_multiply(op.rows([2, 1])),
}


def used(op: MixerOperator) -> dict[str, Tensor]:
    return {name: use(op) for name, use in USES.items()}


@pytest.mark.long
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "name", [*NAMES[:1], *NAMES[2:4], *(pytest.param(name, marks=pytest.mark.slow) for name in (NAMES[1], *NAMES[4:]))]
)
def test_tensors_of_an_operator_stay_on_its_device(name: str, padded: bool) -> None:
    model, x = host(name).model(), host(name).inputs()
    mask = torch.ones_like(x)
    mask[-1, 9:] = 0
    inputs = {"input_ids": x, "attention_mask": mask} if padded else {"input_ids": x}
    expected = [used(layer.operator) for layer in trace(model, inputs).layers]
    settle(model, HERE)
    with devices():
        host_trace = trace(model, {key: Resident(value, HERE) for key, value in inputs.items()})
        for layer, reference in zip(host_trace.layers, expected, strict=True):
            assert layer.operator.reconstruction_error() <= 1e-5
            for use, result in used(layer.operator).items():
                assert result.device == HERE, use
                assert isinstance(result, Resident)
                assert relative_error(result.data_in_memory, reference[use]) <= 1e-5, use


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "gpt2"])
def test_gradients_stay_on_the_device_of_the_model(name: str) -> None:
    model, x = host(name).model(), host(name).inputs()
    expected = trace(model, x).gradient()
    settle(model, HERE)
    with devices():
        gradients = trace(model, Resident(x, HERE)).gradient()
        for grad, reference in zip(gradients, expected, strict=True):
            assert grad.device == HERE
            assert torch.allclose(grad.data_in_memory, reference, rtol=1e-4, atol=1e-6)


def test_operators_of_a_model_on_several_devices_are_on_the_device_of_their_layer() -> None:
    def moved(block: nn.Module, x: Tensor) -> Tensor:
        reference = block.mixer.D.device
        return x + block.mixer(x.to(reference)).to(x.device)

    model = Model(Block(moved), Block(moved)).eval()
    whole = [layer.operator for layer in trace(model, ids()).layers]
    settle(model, HERE)
    settle(model.blocks[1], THERE)
    with devices():
        host_trace = trace(model, Resident(ids(), HERE))
        assert [layer.output.device for layer in host_trace.layers] == [HERE, THERE]
        for layer, reference in zip(host_trace.layers, whole, strict=True):
            assert layer.operator.apply(layer.input).device == layer.output.device
            assert relative_error(layer.operator.rows(2).data_in_memory, reference.rows(2)) <= 1e-6
            assert layer.operator.reconstruction_error() <= 1e-5


def test_operations_across_simulated_devices_raise() -> None:
    x = torch.randn(3)
    with devices(), pytest.raises(RuntimeError, match=r"same device, but found \['cpu', 'meta:0'\]"):
        Resident(x, HERE) + x
    with devices(), pytest.raises(RuntimeError, match=r"same device, but found \['meta:0', 'meta:1'\]"):
        Resident(x, HERE) * Resident(x, THERE)
    with devices():
        assert (Resident(x, HERE).to(THERE) + torch.ones(3, device=THERE)).device == THERE
        assert (Resident(x, HERE) * torch.tensor(2.0)).device == HERE
