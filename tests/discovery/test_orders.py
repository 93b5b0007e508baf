"""Tokens that a model sorts before the first layer of their stream, such as those of a predictor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.discovery.halves import order_of
from unilinattn.errors import UnknownArchitectureError
from unilinattn.models import S4D

WIDTH, LENGTH = 6, 12
SIGNAL = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


class Predictor(nn.Module):
    """A layer of some vectors, and one of these and as many constants, which a step puts in another order."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.predictor, self.step = S4D(WIDTH, 4), S4D(WIDTH, 4), step

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.encoder(x)
        x = self.step(torch.cat([x, x.new_ones(1).expand_as(x)], dim=1))
        return x + self.predictor(x)


def interleaved(x: Tensor) -> Tensor:
    return x[:, torch.arange(2 * LENGTH).reshape(2, LENGTH).T.flatten()]


def test_tokens_that_are_sorted_before_their_first_layer_do_not_mix() -> None:
    model = Predictor(interleaved).eval()
    trace = ula.trace(model, SIGNAL)
    assert [layer.name for layer in trace.layers] == ["encoder", "predictor"]
    # Vector i of the input is token 2 i of the predictor, and its layer is causal.
    shares = ula.explain(trace, method="logit", logit=lambda output: output[:, 8, 0], progress=False).scores
    assert bool((shares[:, :5] != 0).all())
    assert not bool(shares[:, 5:].any())


@pytest.mark.parametrize(
    "step",
    [lambda x: interleaved(x) + x, lambda x: x + x.flip(1)],
    ids=["beside", "mixed before"],
)
def test_tokens_that_are_sorted_and_mixed_are_refused(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnknownArchitectureError, match="between encoder and predictor"):
        ula.trace(Predictor(step).eval(), SIGNAL)


def test_tokens_that_are_mixed_after_they_are_sorted_are_a_layer() -> None:
    model = Predictor(lambda x: interleaved(x) + interleaved(x).flip(1)).eval()
    layers = ula.trace(model, SIGNAL).layers
    assert [layer.name for layer in layers] == ["encoder", "region_1", "predictor"]
    assert max(layer.operator.reconstruction_error() for layer in layers) < 1e-6


def test_the_order_of_rows_is_that_of_equal_rows_too() -> None:
    first = torch.tensor([[[0.0, 1], [5, 1], [0, 1], [0, 2]]])
    order = order_of(first, first[:, [1, 0, 3, 2]])
    assert order is not None
    assert order.tolist() == [1, 0, 3, 2]
    assert order_of(first, first) is None
    # Each column has the same numbers, but no row does.
    assert order_of(first, torch.tensor([[[0.0, 1], [0, 1], [0, 1], [5, 2]]])) is None
    assert order_of(first, first[:, :2]) is None


def test_a_predictor_that_sorts_its_tokens_is_traced() -> None:
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "mlp_ratio": 1}
    predictor = {f"pred_{name}": value for name, value in sizes.items()}
    config = VJEPA2Config(
        patch_size=4, crop_size=8, frames_per_clip=4, tubelet_size=2, in_chans=1, **sizes, **predictor
    )
    trace = ula.trace(VJEPA2Model(config).eval(), {"pixel_values_videos": torch.randn(1, 4, 1, 8, 8)})
    assert [(stream.name, stream.shape) for stream in trace.streams] == [("encoder", (1, 8)), ("predictor", (1, 16))]
    result = ula.explain(trace, method="logit", progress=False)
    assert result.scores.shape == (1, 8)
