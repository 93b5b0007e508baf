"""Small models of many packages, each with the inputs of a run: what the builders of `tools.systems` have in common.

A builder imports its package, so that only its own model is missing where the package is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS = 31, 16, 12
"""Sizes of the language models."""

Built = tuple[nn.Module, Any]
"""A model and its inputs."""


@dataclass(frozen=True)
class System:
    """A model of a package.

    Attributes:
        name: unique, the model in words.
        package: the distribution that has its code; "torch" for models that are written here from torch's modules.
        build: returns the model and its inputs.
        random: whether its weights are drawn anew; its own are kept where they must fit together.
    """

    name: str
    package: str
    build: Callable[[], Built]
    random: bool = True


SYSTEMS: dict[str, System] = {}
"""All systems by name."""


def system(name: str, package: str, *, random: bool = True) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register a builder."""

    def decorate(build: Callable[[], Built]) -> Callable[[], Built]:
        assert name not in SYSTEMS
        SYSTEMS[name] = System(name, package, build, random)
        return build

    return decorate


class Language(nn.Module):
    """A language model around a module that maps (batch, token, channel), or (token, batch, channel), to the same."""

    def __init__(self, body: nn.Module, *, batch_first: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body, self.head = body, nn.Linear(width, VOCABULARY, bias=False)
        self._batch_first = batch_first

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of each token."""
        x = self.embedding(input_ids)
        x = x if self._batch_first else x.transpose(0, 1)
        x = self.body(x)
        return self.head(x if self._batch_first else x.transpose(0, 1))


class Residual(nn.Module):
    """x + layer(norm(x))."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.layer(self.norm(x))


def ids(length: int = TOKENS) -> Tensor:
    """Return token ids of two sequences."""
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def image(size: int, batch: int = 2) -> Tensor:
    """Return images of random pixels."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def residuals(make: Callable[[], nn.Module], width: int = WIDTH) -> nn.Module:
    """Return a language model of two residual layers."""
    return Language(nn.Sequential(*(Residual(make(), width) for _ in range(2))), width=width)


def names(packages: Sequence[str] = ()) -> list[str]:
    """Return the names of the systems of some packages, by default of all."""
    return [entry.name for entry in SYSTEMS.values() if not packages or entry.package in packages]
