"""Small models with registered mixers, for structures that no package has."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unilinattn.models import S4D

VOCABULARY = 9
WIDTH = 6


class Model(nn.Module):
    """Embedding, blocks, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> "Output":
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return Output(self.head(x))


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class TokenWise(nn.Module):
    """A function of each token, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Block(nn.Module):
    """One mixer, called by a forward function."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor], mixer: nn.Module | None = None) -> None:
        super().__init__()
        self.mixer = S4D(WIDTH, 4) if mixer is None else mixer
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("runs", torch.zeros(()))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, x)


def added(block: nn.Module, x: Tensor) -> Tensor:
    return x + block.mixer(x)


def ids(length: int = 7, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
