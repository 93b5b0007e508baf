"""Recorded operators of modules on images, whose channels are the second axis."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Swin2SRConfig, Swin2SRModel

from tests.recording.test_recorded import LIMIT, draw
from unilinattn import Attribution, Trace, explain, trace
from unilinattn.architectures.recorded import recorded
from unilinattn.call import Call
from unilinattn.call.axes import Axes, axes_of, channel_axis
from unilinattn.host.inputs import bound_arguments
from unilinattn.operator.operator import MixerOperator
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

WIDTH = 6


class Image(nn.Module):
    """A function of an image between convolutions of one pixel."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def operator(module: nn.Module, image: Tensor) -> MixerOperator:
    """Return the recorded operator of a module of images, after checks of its error and of its adjoint."""
    with torch.no_grad():
        output = module(image).flatten(2).mT
    arguments = bound_arguments(module, (image,), {})
    flow = recorded(Call(module, "module", arguments, image.flatten(2).mT, output, axes=Axes(1, 1)))
    op = MixerOperator(flow.chains, inputs=flow.inputs, output=output)
    assert op.reconstruction_error() < LIMIT
    x, g = draw(*image.flatten(2).mT.shape, seed=1), draw(*output.shape, seed=2)
    forward, backward = (op.apply(x, bias=False) * g).sum(), (x * op.adjoint(g)).sum()
    assert float((forward - backward).abs()) < LIMIT * float(x.norm() * g.norm())
    return op


def places(end: float) -> Tensor:
    """Return places in an image, whose edges are -1 and 1."""
    return torch.linspace(-end, end, 12).reshape(1, 2, 3, 2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a pool less the image": lambda x: functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x,
    "an average pool over the end": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "a max pool": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "a max pool over the end": lambda x: functional.max_pool2d(x, 2, 2, ceil_mode=True),
    "the largest of windows": lambda x: x.unflatten(2, (2, 2)).amax(3),
    "an adaptive pool": lambda x: functional.adaptive_avg_pool2d(x, (3, 2)),
    "a larger image": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "values at places that the image decides": lambda x: functional.grid_sample(
        x,
        x.mean((2, 3))[:, :2].sigmoid()[:, None, None] * torch.linspace(-1, 1, 6, dtype=x.dtype).reshape(2, 3, 1),
        align_corners=True,
    ),
    "values beyond the edges": lambda x: functional.grid_sample(
        x,
        torch.linspace(-1.5, 1.5, 12, dtype=x.dtype).reshape(1, 2, 3, 2).expand(2, -1, -1, -1),
        padding_mode="border",
        align_corners=False,
    ),
    "channels that become pixels": lambda x: functional.pixel_shuffle(torch.cat([x, x[:, :2]], 1), 2),
    "pixels that become channels": lambda x: functional.pixel_unshuffle(x[..., :4], 2),
    "groups of channels that alternate": lambda x: torch.channel_shuffle(x, 2) + x.fliplr(),
    "a turned image": lambda x: x.rot90(1, (2, 3)).moveaxis(2, 3) - x.mean((1, 2, 3), keepdim=True),
    "parts of an image": lambda x: torch.hsplit(torch.dsplit(x, 2)[1], 2)[0],
    "slopes of channels": lambda x: functional.prelu(x, torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)) - x,
    "a product that is added": lambda x: torch.addcmul(x, x.sigmoid(), x.mean((2, 3), keepdim=True), value=2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_images_are_exact_stages(name: str) -> None:
    operator(randomize(Image(FUNCTIONS[name]).double()), draw(2, WIDTH, 4, 5))


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_volumes_are_exact_stages(groups: int) -> None:
    module = randomize(nn.Sequential(nn.Conv3d(WIDTH, 4, 2, 2, 1, groups=groups), nn.Conv3d(4, 3, 1)).double())
    operator(module, draw(2, WIDTH, 3, 4, 5))


@pytest.mark.long
def test_a_convolution_whose_image_becomes_tokens_again_has_the_stream_of_the_tokens() -> None:
    sizes = dict(image_size=8, patch_size=1, window_size=4, upscale=2)
    config = Swin2SRConfig(embed_dim=12, depths=[1, 1], num_heads=[2, 2], **sizes)
    model = randomize(Swin2SRModel(config).double().eval())
    made = trace(model, draw(1, 3, 8, 8), progress=False)
    convolved = [layer for layer in made.layers if layer.name.endswith("conv")]
    assert len(convolved) == 2
    for layer in convolved:
        assert layer.residual is not None and layer.residual.shape == layer.output.shape
        step = next(step for step in made.steps if layer in step.layers)
        assert step.stream_error() < 1e-12
    assert bool(explain(made, method="alti", target=-1, progress=False).scores.isfinite().all())


TRANSPOSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "signals": (lambda: nn.ConvTranspose1d(WIDTH, 4, 4, 2, 1), (7,)),
    "images": (lambda: nn.ConvTranspose2d(WIDTH, 4, 4, 2, 1), (4, 5)),
    "groups": (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, 2, 1, output_padding=1, groups=2), (4, 5)),
    "a kernel for each channel": (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, 3, groups=WIDTH), (4, 5)),
    "dilation": (lambda: nn.ConvTranspose2d(WIDTH, 4, (3, 2), 1, dilation=2, bias=False), (4, 5)),
    "volumes": (lambda: nn.ConvTranspose3d(WIDTH, 4, 2, 2), (3, 2, 2)),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_are_exact_stages(name: str) -> None:
    build, size = TRANSPOSED[name]
    module, other = randomize(nn.Sequential(build()).double()), draw(2, WIDTH, *size, seed=1)
    op = operator(module, draw(2, WIDTH, *size))
    with torch.no_grad():
        linear = module(other) - module(torch.zeros_like(other))
    assert relative_error(op.apply(other.flatten(2).mT, bias=False), linear.flatten(2).mT) < LIMIT


def test_layers_tell_the_axis_of_channels() -> None:
    convolution, linear = nn.Conv2d(WIDTH, 8, 2, 2), nn.Linear(WIDTH, 8)
    image, rows = draw(2, WIDTH, 4, 5), draw(2, 4, 5, WIDTH)
    assert axes_of(convolution, image, draw(2, 8, 2, 2)) == Axes(1, 1)
    assert axes_of(linear, rows, draw(2, 4, 5, 8)) == Axes(-1, -1)
    assert axes_of(convolution, image, draw(2, 4, 8)) == Axes(1, -1)
    assert axes_of(nn.AvgPool2d(3, 1, 1), image, image) == Axes(1, 1)
    assert axes_of(nn.AdaptiveAvgPool2d(1), image, draw(2, WIDTH, 1, 1)) == Axes(1, 1)
    assert axes_of(nn.Tanh(), image, image) is None
    # A convolution between permutations (SAM's neck), and axes of tokens as long as an axis of channels.
    assert axes_of(convolution, rows, draw(2, 4, 5, 8)) == Axes(-1, -1)
    narrow = nn.Sequential(nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(4, 5, 1))
    assert axes_of(narrow, draw(2, 4, 4, WIDTH), draw(2, 4, 4, 5)) == Axes(-1, -1)
    assert axes_of(narrow, draw(2, WIDTH, 4, 4), draw(2, 5, 4, 4)) == Axes(1, 1)
    # In a pyramid the lateral convolution, of other channels, comes first.
    pyramid = nn.Sequential(nn.Conv2d(5, 8, 1), nn.Conv2d(8, 8, 3, padding=1))
    assert axes_of(pyramid, draw(2, 8, 5, 5), draw(2, 8, 5, 5)) == Axes(1, 1)
    assert axes_of(pyramid, draw(2, 5, 5, 8), draw(2, 5, 5, 8)) == Axes(-1, -1)
    # As many rows and columns as channels enter.
    head = nn.Sequential(nn.Linear(4, 8), nn.Conv2d(8, 5, 1))
    assert axes_of(head, draw(2, 4, 4, 4), draw(2, 5, 4, 4)) == Axes(1, 1)
    assert axes_of(head, draw(2, 4, 4, 4), draw(2, 4, 4, 5)) == Axes(-1, -1)
    assert axes_of(nn.Upsample(scale_factor=2), image, draw(2, WIDTH, 8, 10)) == Axes(1, 1)
    assert axes_of(nn.Conv1d(WIDTH, 4, 1), draw(2, WIDTH, 4), draw(2, 4, WIDTH)) == Axes(1, 1)
    signal = draw(2, 4, 10)
    assert axes_of(nn.AvgPool1d(2), signal, draw(2, 4, 5)) == Axes(1, 1)
    assert axes_of(nn.Tanh(), signal, signal) == Axes(-1, -1)


class Attention(nn.Module):
    """Attention of the pixels of an image, whose keys are convolved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        q, k, v = (each.flatten(2).mT for each in (x, keys, self.values(keys)))
        return ((q @ k.mT).softmax(-1) @ v).mT.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Pyramid(nn.Module):
    """A stem of two convolutions, two stages of blocks, and a strided convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, WIDTH, 3, 2, 1))
        self.stages = nn.ModuleList(
            [nn.Sequential(Block(WIDTH)), nn.Sequential(nn.Conv2d(WIDTH, 8, 3, 2, 1), Block(8))]
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def explained(traced: Trace, **options: int) -> Attribution:
    """Return the scores of a method that adds up, after a check of every layer."""
    assert all(layer.reconstruction_error() < LIMIT for layer in traced.layers)
    result = explain(traced, method="logit", target=-1, **options)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10
    return result


def test_a_pyramid_is_explained_by_the_tokens_of_its_first_stage() -> None:
    model = randomize(Pyramid().double().eval())
    traced = trace(model, draw(2, 3, 16, 20))
    names = ["stages.0.0.attention", "stages.1.0", "stages.1.1.attention"]
    assert [layer.name for layer in traced.layers] == names
    assert [tuple(layer.input.shape[:2]) for layer in traced.layers] == [(2, 20), (2, 20), (2, 6)]
    result = explained(traced)
    assert result.scores.shape == (2, 20)
    assert result.grid == (4, 5) and result.patches == tuple(range(20))


@pytest.mark.long
def test_a_pool_between_blocks_that_is_no_module_is_a_layer() -> None:
    class Pooled(Pyramid):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stages[0](self.stem(x))
            return self.head(self.stages[1](functional.avg_pool2d(x, 3, 1, 1)).mean((2, 3)))

    traced = trace(randomize(Pooled().double().eval()), draw(2, 3, 16, 20))
    assert [layer.name for layer in traced.layers] == [
        "stages.0.0.attention",
        "region_0",
        "stages.1.0",
        "stages.1.1.attention",
    ]
    assert all(layer.reconstruction_error() < LIMIT for layer in traced.layers)


@pytest.mark.long
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True)])
def test_a_norm_over_pixels_between_blocks_is_a_layer(norm: nn.Module) -> None:
    class Normed(Pyramid):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stages[1](self.norm(self.stages[0](self.stem(x)))).mean((2, 3)))

    traced = trace(randomize(Normed().double().eval()), draw(2, 3, 16, 20))
    assert [layer.name for layer in traced.layers][1:] == ["norm", "stages.1.0", "stages.1.1.attention"]
    explained(traced)


class Row(nn.Module):
    """Attention of a sequence, added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RowAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class RowAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ x.mT).softmax(-1) @ self.value(x)


class Words(nn.Module):
    """Two blocks, and a module between them whose channels are the second axis."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.words, self.between, self.head = nn.Embedding(30, WIDTH), between, nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList([Row(), Row()])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.layers[0](self.words(input_ids))
        return self.head(self.layers[1](self.between(x.mT).mT).mean(1))


def test_a_pool_of_torch_between_blocks_is_a_layer() -> None:
    traced = trace(randomize(Words(nn.AvgPool1d(2)).double().eval()), torch.arange(28).view(2, 14))
    assert [layer.name for layer in traced.layers] == ["layers.0.attention", "between", "layers.1.attention"]
    assert explained(traced, logit=1).scores.shape == (2, 14)


class Towers(Words):
    """Words in blocks, and an image that is convolved before other blocks read it."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.image = Tower()

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return super().forward(input_ids) + self.image(pixel_values)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, WIDTH, 3, 2, 1))
        self.blocks, self.head = nn.ModuleList([Row(), Row()]), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_convolutions_of_pixels_in_a_second_tower_are_no_layers() -> None:
    inputs = {"input_ids": torch.arange(24).view(2, 12), "pixel_values": draw(2, 3, 16, 20)}
    traced = trace(randomize(Towers().double().eval()), inputs)
    blocks = ["layers.0", "layers.1", "image.blocks.0", "image.blocks.1"]
    assert [layer.name for layer in traced.layers] == [f"{block}.attention" for block in blocks]


def test_of_two_numbers_of_channels_the_first_layer_that_reads_and_the_last_that_writes_decide() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    # The second axis has 4 channels, which the first layer reads and the last one writes.
    assert channel_axis(module, (2, 4, 6)) == channel_axis(module, (2, 4, 6), writes=True) == 1
    assert channel_axis(module, (2, 6, 4)) == channel_axis(module, (2, 6, 4), writes=True) == -1
