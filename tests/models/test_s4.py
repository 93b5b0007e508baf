"""S4D: the recurrence of its paper, state dicts, padding, and precision."""

from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import OptionError
from unilinattn.models import S4D, S4DConfig, S4DForCausalLM
from unilinattn.testing import relative_error


def recurrence(layer: S4D, u: Tensor) -> Tensor:
    """The layer, token by token in float64, from the continuous state space x' = A x + u, y = 2 Re C x + D u."""
    state = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    dt = state["kernel.log_dt"].exp()
    a = torch.complex(-state["kernel.log_A_real"].exp(), state["kernel.A_imag"])
    c = torch.view_as_complex(state["kernel.C"])
    # With u constant over a step, (x, u) is a linear system, whose matrix exponential is the exact step.
    system = torch.zeros(*a.shape, 2, 2, dtype=a.dtype)
    system[..., 0, 0] = a
    system[..., 0, 1] = 1
    step = torch.linalg.matrix_exp(system * dt[:, None, None, None])
    x = torch.zeros(u.shape[0], *a.shape, dtype=a.dtype)
    outputs = []
    for token in u.double().unbind(1):
        x = step[..., 0, 0] * x + step[..., 0, 1] * token[:, :, None]
        outputs.append(2 * (c * x).sum(-1).real + state["D"] * token)
    y = functional.gelu(torch.stack(outputs, dim=1))
    weight, bias = state["output_linear.0.weight"][..., 0], state["output_linear.0.bias"]
    carry, gate = (y @ weight.T + bias).chunk(2, dim=-1)
    return carry * gate.sigmoid()


@pytest.mark.parametrize("length", [1, 2, 37, 130])
def test_the_layer_is_the_recurrence(length: int) -> None:
    layer = S4D(d_model=6, d_state=8).double()
    u = torch.randn(3, length, 6, dtype=torch.float64)
    assert relative_error(layer(u), recurrence(layer, u)) < 1e-12


def test_a_perturbed_layer_differs_from_the_recurrence() -> None:
    layer = S4D(d_model=6, d_state=8).double()
    u = torch.randn(3, 37, 6, dtype=torch.float64)
    truth = recurrence(layer, u)
    for name in ("kernel.A_imag", "kernel.log_dt", "D"):
        with torch.no_grad():
            original = layer.get_parameter(name).clone()
            layer.get_parameter(name).add_(0.01)
            assert relative_error(layer(u), truth) > 1e-6, name
            layer.get_parameter(name).copy_(original)
    assert relative_error(layer(u), truth) < 1e-12


def test_the_kernel_is_real_and_its_impulse_response() -> None:
    layer = S4D(d_model=4, d_state=6).double()
    kernel = layer.kernel(20)
    assert kernel.shape == (4, 20)
    assert kernel.dtype == torch.float64
    torch.testing.assert_close(layer.kernel(5), kernel[:, :5], rtol=1e-12, atol=1e-14)
    dt = layer.kernel.log_dt.exp()
    poles = torch.complex(-layer.kernel.log_A_real.exp(), layer.kernel.A_imag)
    c = torch.view_as_complex(layer.kernel.C)
    x = torch.expm1(dt[:, None] * poles) / poles
    for tap in kernel.unbind(1):
        torch.testing.assert_close(tap, 2 * (c * x).sum(-1).real, rtol=1e-12, atol=1e-13)
        x = x * torch.exp(dt[:, None] * poles)


def test_float32_agrees_with_float64() -> None:
    layer = S4D(d_model=16)
    u = torch.randn(2, 64, 16)
    assert relative_error(layer(u).double(), recurrence(layer, u)) < 2e-6


def test_half_precision_computes_the_kernel_in_float32() -> None:
    layer = S4D(d_model=8).bfloat16()
    u = torch.randn(2, 20, 8, dtype=torch.bfloat16)
    assert layer.kernel(20).dtype == torch.float32
    assert layer(u).dtype == torch.bfloat16
    assert relative_error(layer(u).double(), recurrence(layer, u)) < 2e-2


def test_no_token_sees_a_later_one() -> None:
    layer = S4D(d_model=6).double()
    u = torch.randn(1, 30, 6, dtype=torch.float64)
    changed = u.clone()
    changed[:, 17:] = 100
    assert (layer(u) - layer(changed))[:, :17].abs().max() < 1e-11
    assert (layer(u) - layer(changed))[:, 17:].abs().max() > 1


def test_a_state_dict_of_the_authors_layout_loads() -> None:
    layout = {
        "D": (6,),
        "kernel.C": (6, 4, 2),
        "kernel.log_dt": (6,),
        "kernel.log_A_real": (6, 4),
        "kernel.A_imag": (6, 4),
        "output_linear.0.weight": (12, 6, 1),
        "output_linear.0.bias": (12,),
    }
    published = {name: torch.randn(shape) for name, shape in layout.items()}
    layer = S4D(d_model=6, d_state=8)
    layer.load_state_dict(published, strict=True)
    assert torch.equal(layer.kernel.C, published["kernel.C"])


def test_the_initialisation_is_s4d_lin() -> None:
    kernel = S4D(d_model=5, d_state=8, dt_min=0.01, dt_max=0.02).kernel
    assert torch.allclose(-kernel.log_A_real.exp(), torch.tensor(-0.5))
    assert torch.allclose(kernel.A_imag, torch.pi * torch.arange(4.0).expand(5, 4))
    assert kernel.log_dt.exp().min() >= 0.0099
    assert kernel.log_dt.exp().max() <= 0.0201


def test_gradients_are_finite_and_reach_every_parameter() -> None:
    layer = S4D(d_model=4)
    layer(torch.randn(2, 40, 4)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.fixture
def model() -> S4DForCausalLM:
    return S4DForCausalLM(S4DConfig(vocab_size=11, d_model=8, n_layers=2, d_state=4)).double().eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_padding_does_not_change_real_tokens(model: S4DForCausalLM, side: str, batch: int, dtype: torch.dtype) -> None:
    ids = torch.randint(11, (batch, 9))
    alone = model(ids).logits
    padding = torch.zeros(batch, 4, dtype=torch.long)
    order = (padding, ids) if side == "left" else (ids, padding)
    real = [torch.zeros_like(padding), torch.ones_like(ids)]
    mask = torch.cat(real if side == "left" else real[::-1], dim=1)
    padded = model(torch.cat(order, dim=1), attention_mask=mask.to(dtype)).logits
    logits = padded[:, 4:] if side == "left" else padded[:, :9]
    torch.testing.assert_close(logits, alone, rtol=1e-10, atol=1e-12)


def test_left_padding_without_a_mask_changes_real_tokens(model: S4DForCausalLM) -> None:
    ids = torch.randint(11, (1, 9))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    assert (model(padded).logits[:, 4:] - model(ids).logits).abs().max() > 1e-3


def test_a_block_adds_its_mixer_to_the_stream(model: S4DForCausalLM) -> None:
    block = model.layers[0]
    stream = torch.randn(2, 7, 8, dtype=torch.float64)
    assert torch.equal(block(stream), stream + block.mixer(block.norm(stream)))


def test_the_loss_is_that_of_the_next_token(model: S4DForCausalLM) -> None:
    ids = torch.randint(11, (2, 9))
    labels = ids.clone()
    labels[:, :4] = -100
    output = model(ids, labels=labels)
    logits = output.logits[:, 3:-1].flatten(0, 1)
    assert output.loss is not None
    torch.testing.assert_close(output.loss, nn.CrossEntropyLoss()(logits, ids[:, 4:].flatten()))
    assert model(ids).loss is None


def test_the_head_can_be_tied() -> None:
    config = S4DConfig(vocab_size=11, d_model=8, n_layers=1)
    tied = S4DForCausalLM(S4DConfig(**{**asdict(config), "tie_word_embeddings": True}))
    assert tied.lm_head.weight is tied.embeddings.weight
    untied = S4DForCausalLM(config)
    assert untied.lm_head.weight is not untied.embeddings.weight


def test_a_configuration_is_restored_from_a_dict() -> None:
    config = S4DConfig(vocab_size=11, d_model=8, n_layers=2, d_state=4, dt_max=0.2)
    assert S4DConfig(**asdict(config)) == config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_state": 3}, "d_state is 3"),
        ({"d_state": 0}, "d_state is 0"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"dt_min": 1.0}, "dt_min is 1.0"),
    ],
)
def test_invalid_sizes_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        S4DConfig(**{"vocab_size": 11, "d_model": 8, "n_layers": 1, **wrong})
