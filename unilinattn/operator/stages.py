"""The stages that a frozen layer is a chain of: token-wise ones, token mixers, and branches that sum chains.

Every stage is affine with a frozen linear part. Vectors come as (batch, length, channel, *columns): columns after
the channel axis ride along, so that one pass serves many right-hand sides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.errors import FactorError, UncoveredError
from unilinattn.kernels.subnormal import flushed
from unilinattn.mixers import CoreMixer
from unilinattn.mixers.base import check_factors
from unilinattn.operator.deferred import Deferred

ROLES = ("input", "shift", "conv", "act", "core", "skip", "gate", "norm", "output")
"""What a stage is for; scopes are cut by these."""


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    """One frozen affine step of a layer."""

    role: str

    @property
    def mixes(self) -> bool:
        """Whether it acts across tokens."""
        return False

    @property
    def groups(self) -> int | None:
        """Number of channels with coefficients of their own, or None where channels mix."""
        return None

    @abstractmethod
    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Map (batch, length, channel, *columns) forward, with or without the stage's bias."""

    @abstractmethod
    def adjoint(self, g: Tensor) -> Tensor:
        """Apply the transpose of the linear part."""

    def unbiased(self) -> "Stage":
        """Return the stage without its bias."""
        # A stage that has a bias is a dataclass with that field.
        return replace(self, bias=None) if getattr(self, "bias", None) is not None else self  # type: ignore[call-arg]

    def at(self, index: Int[Tensor, "batch row"]) -> "Stage":
        """Return a token-wise stage restricted to selected tokens, each sequence its own."""
        return self


@dataclass(frozen=True, eq=False)
class Matrix(Stage):
    """A weight matrix on every token: weight (out, in), bias (out); a complex weight reads complex channels."""

    weight: Inexact[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Multiply each token's vector by the weight."""
        product = _on_channels(self.weight, x)
        return product if self.bias is None or not bias else product + _columns(self.bias, x.ndim - 3)

    def adjoint(self, g: Tensor) -> Tensor:
        """Multiply each token's vector by the transposed weight, conjugated where it is complex."""
        return _on_channels(self.weight.mH, g)


@dataclass(frozen=True, eq=False)
class ToComplex(Stage):
    """Read real channels as complex ones; with `ToReal` it frames a chain over complex modes (S5)."""

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Set the imaginary part to zero."""
        return x.to(x.dtype.to_complex())

    def adjoint(self, g: Tensor) -> Tensor:
        """Take the real part: the transpose under the real inner product."""
        return g.real


@dataclass(frozen=True, eq=False)
class ToReal(Stage):
    """Take the real part of complex channels: real-linear, its transpose under the real inner product."""

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Take the real part."""
        return x.real

    def adjoint(self, g: Tensor) -> Tensor:
        """Set the imaginary part to zero."""
        return g.to(g.dtype.to_complex())


@dataclass(frozen=True, eq=False)
class Scale(Stage):
    """A frozen factor for each token and group of consecutive channels: scale (batch|1, length|1, group).

    A deferred factor is computed when it is first needed: many uses of a layer stop before its gate.
    """

    factor: Float[Tensor, "batch length group"] | Deferred
    bias: Float[Tensor, " channel"] | None = None

    @property
    def scale(self) -> Float[Tensor, "batch length group"]:
        """The factors themselves."""
        return self.factor() if isinstance(self.factor, Deferred) else self.factor

    def check(self, layer: str) -> None:
        """Raise `FactorError` with the layer's name for NaN or infinity in the factors, now or when they are made."""
        refuse = partial(_refuse_infinite, self.role, layer)
        if isinstance(self.factor, Deferred):
            self.factor.check(refuse)
        else:
            refuse(self.factor)

    @property
    def groups(self) -> int | None:
        """Number of groups of channels that share a factor."""
        return self.scale.shape[-1]

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Multiply each group of channels by its factor."""
        groups = self.scale.shape[-1]
        product = (x.unflatten(2, (groups, -1)) * _columns(self.scale, x.ndim - 2)).flatten(2, 3)
        return product if self.bias is None or not bias else product + _columns(self.bias, x.ndim - 3)

    def adjoint(self, g: Tensor) -> Tensor:
        """Multiply by the same factors."""
        return self.apply(g, bias=False)

    def at(self, index: Int[Tensor, "batch row"]) -> "Scale":
        """Gather the factors of the selected tokens."""
        if self.scale.shape[1] == 1:
            return self
        batch, groups = index.shape[0], self.scale.shape[2]
        scale = self.scale.expand(batch, -1, -1).gather(1, index[..., None].expand(-1, -1, groups))
        return replace(self, factor=scale)


@dataclass(frozen=True, eq=False)
class Center(Stage):
    """Subtract the mean over each group of channels: a norm's centring, linear as it is."""

    centred_groups: int = 1

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Subtract each group's mean."""
        grouped = x.unflatten(2, (self.centred_groups, -1))
        return (grouped - grouped.mean(3, keepdim=True)).flatten(2, 3)

    def adjoint(self, g: Tensor) -> Tensor:
        """Subtract each group's mean: the projection is symmetric."""
        return self.apply(g)


@dataclass(frozen=True, eq=False)
class Mix(Stage):
    """A token mixer: one matrix a head, each head serving consecutive channels; bias (channel)."""

    mixer: CoreMixer
    bias: Float[Tensor, " channel"] | None = None

    @property
    def mixes(self) -> bool:
        """Always: that is what it is for."""
        return True

    @property
    def groups(self) -> int | None:
        """Number of heads."""
        return self.mixer.heads

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Mix along time, head by head."""
        mixed = _by_heads(self.mixer.apply, x, self.mixer.heads)
        return mixed if self.bias is None or not bias else mixed + _columns(self.bias, x.ndim - 3)

    def adjoint(self, g: Tensor) -> Tensor:
        """Mix along time with each head's transposed matrix."""
        return _by_heads(self.mixer.adjoint, g, self.mixer.heads)


@dataclass(frozen=True, eq=False)
class Branch(Stage):
    """The sum of several chains on the same input; an empty chain is the identity."""

    chains: tuple["Chain", ...]

    @property
    def mixes(self) -> bool:
        """Whether one of its chains acts across tokens."""
        return any(stage.mixes for chain in self.chains for stage in chain)

    @property
    def groups(self) -> int | None:
        """Least common number of channels with coefficients of their own, None where a chain mixes channels."""
        return channel_groups(stage for chain in self.chains for stage in chain)

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Add up what the chains return."""
        total = run(self.chains[0], x, bias=bias)
        for chain in self.chains[1:]:
            total = total + run(chain, x, bias=bias)
        return total

    def unbiased(self) -> "Branch":
        """Return the branch with no bias on any stage of its chains."""
        return replace(self, chains=tuple(tuple(stage.unbiased() for stage in chain) for chain in self.chains))

    def at(self, index: Int[Tensor, "batch row"]) -> "Branch":
        """Restrict every stage of every chain."""
        return replace(self, chains=tuple(tuple(stage.at(index) for stage in chain) for chain in self.chains))

    def adjoint(self, g: Tensor) -> Tensor:
        """Add up what the chains' adjoints return."""
        total = run_adjoint(self.chains[0], g)
        for chain in self.chains[1:]:
            total = total + run_adjoint(chain, g)
        return total


@dataclass(frozen=True, eq=False)
class Unmapped(Stage):
    """A part of a host that no adapter can express, `width` channels wide at its end: any use raises the reason."""

    reason: str
    width: int

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Raise `UncoveredError` with the reason."""
        raise UncoveredError(self.reason)

    def adjoint(self, g: Tensor) -> Tensor:
        """Raise `UncoveredError` with the reason."""
        raise UncoveredError(self.reason)


Chain = tuple[Stage, ...]


def run(chain: Sequence[Stage], x: Tensor, *, bias: bool = True) -> Tensor:
    """Apply the stages in order to (batch, length, channel, *columns)."""
    for stage in chain:
        x = stage.apply(x, bias=bias)
    return x


def run_adjoint(chain: Sequence[Stage], g: Tensor) -> Tensor:
    """Apply the transposes of the stages' linear parts, last stage first."""
    for stage in reversed(chain):
        g = stage.adjoint(g)
    return g


def walk(chain: Sequence[Stage]) -> Iterator[Stage]:
    """Yield every stage of a chain, those inside branches too."""
    for stage in chain:
        yield stage
        if isinstance(stage, Branch):
            for inner in stage.chains:
                yield from walk(inner)


def channel_groups(stages: Iterator[Stage] | Sequence[Stage]) -> int | None:
    """Return the least number of channels that tells the stages' coefficients apart, None if one mixes channels."""
    total = 1
    for stage in stages:
        if stage.groups is None:
            return None
        total = lcm(total, stage.groups)
    return total


def _refuse_infinite(role: str, layer: str, factor: Tensor) -> None:
    try:
        check_factors(**{role: factor})
    except FactorError as error:
        raise FactorError(f"{layer}: {error}") from None


def _on_channels(weight: Tensor, x: Tensor) -> Tensor:
    """Contract the channel axis of (batch, length, channel, *columns) with a (out, channel) matrix."""
    x = flushed(x)
    if x.ndim == 3:
        return x @ weight.T
    return (weight @ x.flatten(3)).unflatten(3, x.shape[3:])


def _columns(factor: Tensor, count: int) -> Tensor:
    """Append axes of size one, so that a factor broadcasts over what stands after its own axes."""
    return factor.reshape(*factor.shape, *([1] * count)) if count else factor


def _by_heads(mix: Callable[[Tensor], Tensor], x: Tensor, heads: int) -> Tensor:
    """Let a mixer see (batch, length, head, everything else) and put the axes back."""
    mixed = mix(x.unflatten(2, (heads, -1)).flatten(3))
    return mixed.unflatten(3, (x.shape[2] // heads, *x.shape[3:])).flatten(2, 3)
