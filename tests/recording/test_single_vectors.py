"""A vector of each sequence, such as that of a time, which a module adds to the values of its tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import randomize

WIDTH, LENGTH = 8, 9
EXACT = 1e-12


class Modulated(nn.Module):
    """Attention whose values a vector of the sequence scales and shifts (adaLN; Peebles and Xie, "DiT", 2023)."""

    def __init__(self, gate_only: bool = False) -> None:
        super().__init__()
        self.gate_only = gate_only
        self.norm, self.modulation = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def parts(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.modulation(functional.silu(time)).chunk(2, -1)
        h = self.norm(x) * (1 + scale[:, None])
        return (h, scale) if self.gate_only else (h + shift[:, None], scale)

    def weights(self, h: Tensor) -> Tensor:
        return (self.query(h) @ self.key(h).mT / WIDTH**0.5).softmax(-1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h, _ = self.parts(x, time)
        result: Tensor = self.out(self.weights(h) @ self.value(h))
        return result


class Convolved(nn.Module):
    """A convolution to whose output the vector is added, as in the residual blocks of diffusion U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x.mT) + self.project(functional.silu(time))[:, :, None]
        result: Tensor = self.second(functional.silu(h)).mT
        return result


class Maps(nn.Module):
    """The same with the feature maps of an image, (batch, channel, row, column)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.project(functional.silu(time))[:, :, None, None]
        result: Tensor = self.second(functional.silu(h))
        return result


class Denoiser(nn.Module):
    """Tokens of an image and a time, a mixer, and as many tokens of noise."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(3, WIDTH), nn.Embedding(50, WIDTH)
        self.mixer, self.head = mixer, nn.Linear(WIDTH, 3)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.embed(sample)
        return self.head(x + self.mixer(x, self.time(timestep)))


class OfImages(nn.Module):
    """The same for images, between two blocks of which the second has the vector."""

    def __init__(self, pools: bool = False) -> None:
        super().__init__()
        self.embed, self.time = nn.Conv2d(3, WIDTH, 1), nn.Embedding(50, WIDTH)
        self.blocks, self.head = nn.ModuleList([Maps(), Maps()]), nn.Linear(WIDTH, 3)
        self.pools = pools

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.embed(sample)
        for block in self.blocks:
            x = x + block(x, x.mean((2, 3)) if self.pools else self.time(timestep))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def model(mixer: nn.Module) -> Any:
    torch.manual_seed(0)
    return randomize(Denoiser(mixer).double().eval())


def without_biases(host: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in host.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


def inputs(batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(batch, LENGTH, 3, generator=generator, dtype=torch.float64)
    return {"sample": sample, "timestep": torch.tensor([7, 31])[:batch]}


@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_a_port_of_one_token(batch: int) -> None:
    host = model(Modulated())
    (layer,) = ula.trace(host, inputs(batch), progress=False).layers
    op, mixer = layer.operator, layer.module
    assert layer.reconstruction_error() < EXACT
    assert layer.ports == {"x": (batch, LENGTH), "time": (batch, 1)}
    # Attention weights, scales, the norm's deviation and the activation's slope are frozen.
    time = host.time(inputs(batch)["timestep"])
    h, scale = mixer.parts(layer.input, time)
    weights, deviation = mixer.weights(h), (layer.input.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    other = torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64)
    vector = torch.randn(batch, 1, WIDTH, dtype=torch.float64)
    zeros = {"x": torch.zeros_like(other), "time": torch.zeros_like(vector)}
    by_x = op.apply({**zeros, "x": other}) - op.apply(zeros)
    by_time = op.apply({**zeros, "time": vector}) - op.apply(zeros)
    values = (other - other.mean(-1, keepdim=True)) / deviation * (1 + scale[:, None])
    through = mixer.out.weight @ mixer.value.weight
    torch.testing.assert_close(by_x, weights @ values @ through.T, rtol=EXACT, atol=EXACT)
    shift = (torch.sigmoid(time)[:, None] * vector) @ mixer.modulation.weight[WIDTH:].T
    torch.testing.assert_close(by_time, (shift @ through.T).expand_as(by_time), rtol=EXACT, atol=EXACT)


def test_a_vector_that_only_scales_is_a_factor() -> None:
    (layer,) = ula.trace(model(Modulated(gate_only=True)), inputs(), progress=False).layers
    assert layer.reconstruction_error() < EXACT
    assert layer.ports == {"x": (2, LENGTH)}


def test_a_convolution_reads_it_at_every_token() -> None:
    (layer,) = ula.trace(model(Convolved()), inputs(), progress=False).layers
    assert layer.reconstruction_error() < EXACT
    assert layer.ports == {"x": (2, LENGTH), "time": (2, 1)}


@pytest.mark.parametrize("pools", [False, True])
def test_the_maps_of_images_read_it_too(pools: bool) -> None:
    torch.manual_seed(0)
    host = randomize(OfImages(pools).double().eval())
    if pools:
        without_biases(host)
    pixels = torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    traced = ula.trace(host, {**inputs(), "sample": pixels}, progress=False)
    read = [(layer.name, layer.ports) for layer in traced.layers if "time" in layer.ports]
    assert read == [(f"blocks.{block}", {"x": (2, 12), "time": (2, 1)}) for block in range(2)]
    assert max(layer.reconstruction_error() for layer in traced.layers) < EXACT
    result = ula.explain(traced, method="logit", logit=1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10
    assert not pools or bool((result.extras["bias"].abs() < 1e-10 * result.extras["logit"].abs()).all())


@pytest.mark.parametrize("mixer", [Modulated, Convolved])
def test_shares_pass_through_it(mixer: type[nn.Module]) -> None:
    class Pooling(Denoiser):
        """The vector is the mean of the tokens, times a large number."""

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            x = self.embed(sample)
            result: Tensor = self.head(x + self.mixer(x, 9 * x.mean(1)))
            return result[:, 0]

    torch.manual_seed(0)
    host = randomize(Pooling(mixer()).double().eval())
    without_biases(host)
    traced = ula.trace(host, inputs(), progress=False)
    result = ula.explain(traced, method="logit", logit=1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10
    # Without biases the shares of the tokens are all, also what they add through their mean.
    assert bool((result.extras["bias"].abs() < 1e-10 * result.extras["logit"].abs()).all())


def test_vectors_of_another_number_of_sequences_are_refused() -> None:
    class Shared(Modulated):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return super().forward(x, time.expand(len(x), -1))

    with pytest.raises(UncoveredError, match="depends on the tokens and is added to their values"):
        ula.trace(model(Shared()), {**inputs(), "timestep": torch.tensor([7])}, progress=False)
