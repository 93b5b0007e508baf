"""Blocks that take (batch, channel, token): these are the vectors of the tokens, as in the example of S4's package."""

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import ModelStateError
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

WIDTH, LENGTH = 6, 10
SIGNAL = torch.randn(2, LENGTH, 3, generator=torch.Generator().manual_seed(0)).double()


class Convolution(nn.Module):
    """A long convolution over the tokens of (batch, channel, token), or of (batch, token, channel) where it turns."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.kernel, self.turns = nn.Parameter(torch.randn(WIDTH, LENGTH)), turns
        # A convolution tells where its channels are.
        self.out = nn.Linear(WIDTH, WIDTH) if turns else nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2) if self.turns else x
        spectrum = torch.fft.rfft(x, n=2 * LENGTH) * torch.fft.rfft(self.kernel, n=2 * LENGTH)
        y = torch.fft.irfft(spectrum, n=2 * LENGTH)[..., :LENGTH]
        return self.out(y.transpose(1, 2) if self.turns else y)


class Block(nn.Module):
    """Turns its input for the layer in it and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Convolution(turns=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, is_nested: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() if is_nested else Convolution(turns=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoded(self.encoder(x))

    def decoded(self, vectors: Tensor) -> Tensor:
        x = vectors.transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.decoder(x.mean(2))


@pytest.mark.parametrize("is_nested", [False, True])
def test_vectors_of_blocks_with_channels_first_have_shares(is_nested: bool) -> None:
    model = randomize(Model(is_nested).double().eval())
    result = ula.explain(model, SIGNAL, method="logit", logit=2, progress=False)
    vectors = model.encoder(SIGNAL).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.decoded(vectors)[:, 2].sum(), vectors)
    assert relative_error(result.scores, (gradient * vectors).sum(2)) < 1e-12


def test_a_model_that_sets_up_weights_in_its_first_call_is_told_to_be_called_before() -> None:
    class SetUp(Convolution):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.is_ready = True
                self.kernel.data.mul_(2)
                with torch.no_grad():
                    self.kernel.mul_(0.5)
            return super().forward(x)

    model = Model(is_nested=False).double().eval()
    model.blocks[0] = SetUp(turns=False).double()
    with pytest.raises(ModelStateError, match="call it once before the trace"):
        ula.trace(model, SIGNAL)
    model(SIGNAL)
    model.blocks[0].is_ready = True
    assert len(ula.trace(model, SIGNAL).layers) == 2
