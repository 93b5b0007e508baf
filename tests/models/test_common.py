"""Causality, gradients, precision and training of every reference mixer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from unilinattn.models import DSS, GSS, H3, S4, S4D, S5, BiMamba, Hyena, MixerForCausalLM, MultiHyena
from unilinattn.testing import relative_error

CAUSAL: dict[str, Callable[[int], nn.Module]] = {
    "S4D": lambda width: S4D(width, 8),
    "S4": lambda width: S4(width, 8),
    "S5": lambda width: S5(width, 8),
    "DSS, softmax": lambda width: DSS(width, 8, "softmax"),
    "DSS, exp": lambda width: DSS(width, 8, "exp"),
    "GSS": lambda width: GSS(width, 6, d_ssm=4),
    "H3, heads of one channel": lambda width: H3(width, 8, 1),
    "H3, heads of four channels": lambda width: H3(width, 8, 4),
    "Hyena of order 2": lambda width: Hyena(width, 64),
    "Hyena of order 3": lambda width: Hyena(width, 64, order=3),
    "multi-head Hyena": lambda width: MultiHyena(width, 64, 2),
}
MIXERS = {**CAUSAL, "BiMamba": lambda width: BiMamba(width, 4)}


@pytest.mark.parametrize("name", CAUSAL)
def test_no_token_sees_a_later_one(name: str) -> None:
    layer = CAUSAL[name](8).double()
    u = torch.randn(1, 30, 8, dtype=torch.float64)
    changed = u.clone()
    changed[:, 17:] += 10
    difference = (layer(u) - layer(changed)).abs()
    assert difference[:, :17].max() < 1e-10 * difference.max()
    assert (difference[:, 17:] > 1e-6).any(dim=-1).all()


@pytest.mark.parametrize("name", MIXERS)
def test_gradients_reach_every_parameter(name: str) -> None:
    layer = MIXERS[name](8)
    layer(torch.randn(2, 12, 8)).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", MIXERS)
def test_lower_precision_agrees_with_float64(name: str) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        layer, u = MIXERS[name](8).to(dtype), torch.randn(2, 64, 8).to(dtype)
        y = layer(u)
        assert y.dtype == dtype
        assert relative_error(y.double(), layer.double()(u.double())) < limit


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("DSS, exp", "H3, heads of one channel")])
def test_training_drops_the_loss(name: str) -> None:
    # Eighty steps teach a two-layer model to repeat the previous token, which requires memory.
    model = MixerForCausalLM(vocab_size=6, d_model=16, n_layers=2, mixer=lambda: CAUSAL[name](16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        ids = torch.randint(6, (8, 2)).repeat(1, 6)
        loss = model(ids, labels=ids).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert losses[-1] < 0.5 * losses[0]
