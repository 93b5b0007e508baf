"""Random core mixers of every structure, in any dtype and length, from ordinary and from extreme factors."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unilinattn.mixers import CoreMixer, Dense, DiagonalDecay, ScalarDecay, Toeplitz

HEADS = 4
STATE = 3

EXTREMES = ("ordinary", "forget at once", "never forget", "zero steps", "mixed", "silent")
"""Distributions of factors; the last five are extreme cases of logarithms, differences and products."""


@dataclass
class Draw:
    """Draws the factors of one mixer."""

    seed: int
    batch: int
    length: int
    dtype: torch.dtype
    extreme: str = "ordinary"
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, self.length, *shape, generator=self.generator, dtype=torch.float64).to(
            self.dtype
        )

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.batch, self.length, *shape, generator=self.generator, dtype=torch.float64)

    def decay(self, *shape: int) -> Tensor:
        """Log-decays, at most zero."""
        ordinary, strong = -self.uniform(*shape), -50 - 5000 * self.uniform(*shape)
        kinds = {
            "ordinary": ordinary,
            "forget at once": strong,
            "never forget": -1e-7 * self.uniform(*shape),
            "zero steps": ordinary * (self.uniform(*shape) < 0.5),
            "silent": torch.zeros_like(ordinary),
        }
        kinds["mixed"] = torch.where(self.uniform(*shape) < 0.2, strong, 0.05 * kinds["zero steps"])
        return kinds[self.extreme].to(self.dtype)

    def steps(self, *shape: int) -> Tensor:
        """Factors of keys: steps, some or all of them zero."""
        steps = self.uniform(*shape)
        if self.extreme == "silent":
            steps = torch.zeros_like(steps)
        if self.extreme in {"zero steps", "mixed"}:
            steps = steps * (self.uniform(*shape) < 0.5)
        return steps.to(self.dtype)

    def weights(self) -> Tensor:
        """Softmax weights, saturated where factors are extreme."""
        sharp = {"ordinary": 1.0, "forget at once": 500.0, "mixed": 50.0}.get(self.extreme, 0.0)
        rows = torch.randn(self.batch, HEADS, self.length, self.length, generator=self.generator, dtype=torch.float64)
        weights = torch.softmax(sharp * rows, dim=-1)
        return (weights * (self.extreme != "silent")).to(self.dtype)

    def kernel(self, taps: int) -> Tensor:
        """Taps with slow, immediate, or no decay."""
        rate = {"forget at once": 500.0, "never forget": 1e-7, "mixed": 20.0}.get(self.extreme, 0.1)
        taps_ = torch.randn(HEADS, taps, generator=self.generator, dtype=torch.float64)
        fading = taps_ * torch.exp(-rate * torch.arange(taps))
        return (fading * (self.extreme != "silent")).to(self.dtype)


@dataclass(frozen=True)
class Structure:
    """A mixer's constructor, its random factors, and the factors of single sequences."""

    name: str
    factors: Callable[[Draw], dict[str, Tensor]]
    build: Callable[..., CoreMixer]
    shared: bool = False
    linear: bool = True

    def mixer(self, draw: Draw) -> CoreMixer:
        """Build the mixer from drawn factors."""
        return self.bind(draw)(**self.factors(draw))

    def bind(self, draw: Draw) -> Callable[..., CoreMixer]:
        """Return the constructor as a function of the factors."""
        if not self.shared:
            return self.build
        return lambda **factors: self.build(**factors, batch=draw.batch, length=draw.length)

    def singles(self, draw: Draw) -> list[CoreMixer]:
        """Build one mixer per sequence."""
        factors = self.factors(draw)
        if self.shared:
            return [self.build(**factors, batch=1, length=draw.length) for _ in range(draw.batch)]
        each = [{k: f if k == "rate" else f[b : b + 1] for k, f in factors.items()} for b in range(draw.batch)]
        return [self.build(**one) for one in each]


STRUCTURES = (
    Structure("dense", lambda d: {"weights": d.weights()}, Dense, linear=False),
    Structure(
        "diagonal decay, S6",
        lambda d: {
            "query": d.normal(1, STATE),
            "key": d.normal(1, STATE),
            "log_decay": -d.decay(HEADS, 1),
            "key_scale": d.steps(HEADS),
            "rate": -(0.5 + torch.rand(HEADS, STATE, generator=d.generator)).to(d.dtype),
        },
        DiagonalDecay,
    ),
    Structure(
        "diagonal decay, a key a head",
        lambda d: {
            "query": d.normal(HEADS, STATE),
            "key": d.normal(HEADS, STATE) * d.steps(HEADS, 1),
            "log_decay": d.decay(HEADS, STATE),
        },
        DiagonalDecay,
    ),
    Structure(
        "diagonal decay, one key for all",
        lambda d: {
            "query": d.normal(1, STATE),
            "key": d.normal(1, STATE),
            "log_decay": d.decay(HEADS, STATE),
        },
        DiagonalDecay,
    ),
    Structure(
        "diagonal decay, groups and resets",
        lambda d: {
            "query": d.normal(2, STATE),
            "key": d.normal(2, STATE),
            "log_decay": d.decay(HEADS, STATE),
            "reset": d.uniform() < 0.1,
        },
        DiagonalDecay,
    ),
    Structure(
        "scalar decay, groups",
        lambda d: {
            "query": d.normal(2, STATE),
            "key": d.normal(2, STATE),
            "log_decay": d.decay(HEADS),
            "key_scale": d.steps(HEADS),
        },
        ScalarDecay,
    ),
    Structure(
        "scalar decay, a key a head",
        lambda d: {"query": d.normal(HEADS, STATE), "key": d.normal(HEADS, STATE), "log_decay": d.decay(HEADS)},
        ScalarDecay,
    ),
    Structure("Toeplitz, a band", lambda d: {"kernel": d.kernel(4)}, Toeplitz, shared=True),
    Structure("Toeplitz, direct", lambda d: {"kernel": d.kernel(32)}, Toeplitz, shared=True),
    Structure("Toeplitz, all tokens", lambda d: {"kernel": d.kernel(d.length)}, Toeplitz, shared=True),
)
