"""Errors about mixers without an adapter: the module that mixes, the true reason, and remedies that work."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    PoolFormerConfig,
    PoolFormerForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

import unilinattn as ula
from tests.discovery.invented import WIDTH, Projected, Recurrent, hybrid
from tests.methods.refused import recommended
from tests.tracing.models import Output
from unilinattn.errors import UncoveredError, UnknownArchitectureError
from unilinattn.testing.hosts import randomize

IDS = torch.randint(30, (1, 8), generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class Language(nn.Module):
    """A language model of one mixer."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.mixer, self.head = nn.Embedding(31, WIDTH), mixer, nn.Linear(WIDTH, 31)

    def forward(self, input_ids: Tensor) -> Output:
        mixed = self.mixer(self.embed(input_ids))
        return Output(self.head(mixed[0] if isinstance(mixed, tuple) else mixed))


class Cells(nn.Module):
    """A recurrence in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return torch.stack(states, 1)


class SplitHeads(Projected):
    """Attention whose heads are split and merged by modules, as in x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.merge = Rearrange("b n (h d) -> b h n d", h=2), Rearrange("b h n d -> b n (h d)")

    def mix(self, x: Tensor) -> Tensor:
        q = self.split(x)
        return self.merge((q @ q.transpose(-1, -2)).softmax(-1) @ q)


class PatchMixer(nn.Module):
    """A classifier of images that mixes patches by a linear map over their axis, as MLP-Mixer does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tokens, self.head = nn.Conv2d(3, WIDTH, 8, 8), Transposed(), nn.Linear(WIDTH, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.tokens(self.stem(pixel_values).flatten(2).transpose(1, 2)).mean(1))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.over_patches = nn.LayerNorm(WIDTH), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.over_patches(self.norm(x).transpose(1, 2)).transpose(1, 2)


def refusal(model: nn.Module, inputs: Any = IDS) -> str:
    with pytest.raises((UncoveredError, UnknownArchitectureError)) as refused:
        ula.trace(model.eval(), inputs)
    return str(refused.value)


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_nonlinear_recurrence_has_no_operator(build: Callable[..., nn.Module]) -> None:
    models = {
        f"mixer (torch.nn.modules.rnn.{build.__name__}): ": Language(build(WIDTH, WIDTH, batch_first=True)),
        f"backbone.layers.1.mixer ({Recurrent.__module__}.Recurrent): ": hybrid(Recurrent(build)),
    }
    for path, model in models.items():
        message = refusal(model)
        assert message.startswith(path)
        assert "its state passes a nonlinearity at every step" in message
        assert "xLSTM" not in message and "register" not in message
        assert "strict=False, which leaves this layer out" in message


@pytest.mark.parametrize("model", [lambda: Language(Cells()), lambda: hybrid(Cells())], ids=["by itself", "in a Mamba"])
def test_a_recurrence_in_python_has_no_operator(model: Callable[[], nn.Module]) -> None:
    message = refusal(model())
    assert "mixer (tests.discovery.test_unknown.Cells)" in message and "has no operator" in message


def test_what_a_refusal_leaves_out_is_explained_by_the_methods_that_it_names() -> None:
    model = Language(nn.LSTM(WIDTH, WIDTH, batch_first=True)).eval()
    assert "Or trace with strict=False" in refusal(model)
    trace = ula.trace(model, IDS, strict=False)
    with pytest.raises(UncoveredError, match="every layer of Language is opaque") as refused:
        ula.explain(trace, target=-1)
    calls = list(recommended(str(refused.value)))
    assert {"occlusion", "input_x_gradient"} <= {method for method, _ in calls}
    for method, options in calls:
        assert ula.explain(trace, method=method, target=-1, **options).method == method


@pytest.mark.parametrize("model", [lambda: Language(SplitHeads()), lambda: hybrid(SplitHeads())])
def test_a_module_that_rearranges_axes_is_part_of_the_layer_around_it(model: Callable[[], nn.Module]) -> None:
    trace = ula.trace(model().eval(), IDS)
    assert [layer.name.split(".")[-1] for layer in trace.layers if layer.architecture == "recorded"] == ["mixer"]


SMALL = dict(hidden_sizes=[8, 16], depths=[1, 1])
IMAGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ResNet": (
        lambda: ResNetForImageClassification(ResNetConfig(embedding_size=8, layer_type="basic", **SMALL)),
        "ResNetConvLayer",
    ),
    "ConvNeXt": (lambda: ConvNextForImageClassification(ConvNextConfig(num_stages=2, **SMALL)), "ConvNextLayer"),
    "PoolFormer": (
        lambda: PoolFormerForImageClassification(
            PoolFormerConfig(num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], **SMALL)
        ),
        "PoolFormerPooling",
    ),
}
"""Models whose images have their channels in the second axis, with the class of a layer."""


def test_a_classifier_that_mixes_patches_by_a_matrix_is_traced() -> None:
    trace = ula.trace(PatchMixer().eval(), {"pixel_values": PIXELS})
    assert [(layer.name, layer.architecture) for layer in trace.layers] == [("tokens", "recorded")]
    assert trace.layers[0].reconstruction_error() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_and_pools_of_images_are_layers(name: str) -> None:
    build, layer_class = IMAGES[name]
    trace = ula.trace(randomize(build().eval()), {"pixel_values": PIXELS})
    assert layer_class in {type(layer.module).__name__ for layer in trace.layers}
    assert {layer.architecture for layer in trace.layers} == {"recorded"}
    assert all(layer.reconstruction_error() < 1e-5 for layer in trace.layers)


def test_a_model_without_layers_names_the_modules_that_probably_mix() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.head = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Linear(8, 4)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.conv2d(pixel_values, self.kernel).mean((2, 3)))

    message = refusal(Convolved(), {"pixel_values": PIXELS})
    named = r"Its tokens probably mix in the model \(Convolved\); no adapter is registered for it"
    assert re.search(named, message), message
    assert "strict=False" not in message


def test_a_model_without_layers_and_mixing_names_no_module() -> None:
    message = refusal(nn.Sequential(nn.Embedding(31, 6), nn.Linear(6, 9)))
    assert "Sequential ran no module that is a registered token mixer" in message
    assert "and no function by which tokens usually mix" in message and "strict=False" not in message
