"""Signals, (batch, channel, step): the convolutions over steps are layers, and channels are never taken for tokens."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.call.axes import Axes, axes_of
from unilinattn.testing import relative_error

WIDTH = 16
SIZES = [(3, 3, 12), (3, 5, 20), (1, 1, 40), (5, 3, WIDTH), (WIDTH, WIDTH, 12), (WIDTH, WIDTH, WIDTH), (12, 3, 12)]
"""Channels that enter, channels that leave, and steps."""


class Signal(nn.Module):
    """A residual network of convolutions between two matrices of channels, whose first one may be a convolution too."""

    def __init__(self, entering: int, leaving: int, taps: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv1d(entering, WIDTH, taps, padding=taps // 2)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.last = nn.Conv1d(WIDTH, leaving, 1)

    def step(self, layer: nn.Module, h: Tensor) -> Tensor:
        return h + functional.relu(layer(h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = self.step(layer, h)
        return self.last(h)


class Block(nn.Module):
    """One residual step as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + functional.relu(self.conv(h))


class Blocks(Signal):
    """The same network of modules."""

    def __init__(self, entering: int, leaving: int, taps: int = 1) -> None:
        super().__init__(entering, leaving, taps)
        self.layers = nn.ModuleList([Block(), Block()])

    def step(self, layer: nn.Module, h: Tensor) -> Tensor:
        output: Tensor = layer(h)
        return output


class Inline(Signal):
    """This network calls the functions of convolution with its kernels."""

    def __init__(self, entering: int, leaving: int, taps: int = 1) -> None:
        super().__init__(entering, leaving, taps)
        self.layers = nn.ModuleList()
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + functional.relu(functional.conv1d(h, self.kernel, padding=1)))


def built(cls: type[Signal], entering: int, leaving: int, steps: int, taps: int = 1) -> tuple[Signal, Tensor]:
    torch.manual_seed(0)
    return cls(entering, leaving, taps).double().eval(), torch.randn(2, entering, steps, dtype=torch.float64)


def reads(model: nn.Module, x: Tensor) -> Tensor:
    """Return whether each step of the output moves with each step of the input, by derivatives, (step, step)."""
    jacobian = torch.autograd.functional.jacobian(lambda first: model(first)[0], x)[:, :, 0]
    return jacobian.norm(dim=(0, 2)) > 0


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("cls", [Signal, Blocks])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_convolutions_over_steps_are_the_layers(sizes: tuple[int, int, int], cls: type[Signal], taps: int) -> None:
    model, x = built(cls, *sizes, taps)
    trace = ula.trace(model, x)
    assert [layer.name for layer in trace.layers] == ["first"] * (taps == 3) + ["layers.0", "layers.1"]
    assert torch.equal(ula.explain(trace, method="rollout").scores[0] != 0, reads(model, x))


@pytest.mark.parametrize("sizes", SIZES)
def test_the_vectors_of_a_step_are_those_of_its_tap(sizes: tuple[int, int, int]) -> None:
    model, x = built(Signal, *sizes)
    conv = model.layers[0]
    assert isinstance(conv, nn.Conv1d)
    vectors = ula.trace(model, x).layers[0].operator.contributions(5)
    with torch.no_grad():
        h = model.first(x)
    expected = torch.zeros_like(vectors)
    for tap, step in enumerate((4, 5, 6)):
        expected[:, step] = h[:, :, step] @ conv.weight.detach()[:, :, tap].T
    assert relative_error(vectors, expected) < 1e-12


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes != (WIDTH, WIDTH, WIDTH)])
def test_a_convolution_in_the_forward_of_a_model_has_its_channels_second(sizes: tuple[int, int, int]) -> None:
    model, x = built(Inline, *sizes)
    trace = ula.trace(model, x)
    assert [layer.name for layer in trace.layers] == ["region_0"]
    assert torch.equal(ula.explain(trace, method="rollout").scores[0] != 0, reads(model, x))


def test_a_pool_in_the_forward_of_a_model_is_a_layer_over_steps() -> None:
    class Pooled(Signal):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            first, second = self.layers
            return self.last(self.step(second, functional.avg_pool1d(self.step(first, h), 3)))

    model, x = built(Pooled, 3, 4, 12)
    trace = ula.trace(model, x)
    assert [layer.name for layer in trace.layers] == ["layers.0", "region_1", "layers.1"]
    pooled = torch.eye(4, device=x.device).repeat_interleave(3, 1) > 0
    assert torch.equal(trace.layers[1].operator.matrix("core")[0] != 0, pooled)


def test_another_number_of_steps_is_another_stream() -> None:
    class Halved(Signal):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.halving = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for layer in self.layers:
                h = self.step(layer, h)
            return self.last(self.halving(h))

    torch.manual_seed(0)
    model = Halved().double().eval()
    trace = ula.trace(model, torch.randn(2, 3, 12, dtype=torch.float64))
    assert [layer.name for layer in trace.layers] == ["layers.0", "layers.1", "halving"]
    assert [stream.shape for stream in trace.streams] == [(2, 12), (2, 6)]


def test_of_as_many_steps_as_channels_a_convolution_reads_channels_first() -> None:
    square = torch.zeros(2, WIDTH, WIDTH)
    assert axes_of(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), square, square) == Axes(1, 1)
    assert axes_of(nn.Linear(WIDTH, WIDTH), square, square) == Axes(-1, -1)
    strided = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)
    assert axes_of(strided, torch.zeros(2, 2 * WIDTH, WIDTH), square) == Axes(-1, -1)
    assert axes_of(strided, torch.zeros(2, WIDTH, 2 * WIDTH), square) == Axes(1, 1)
    mixed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
    assert axes_of(mixed, square, square) == Axes(-1, -1)
