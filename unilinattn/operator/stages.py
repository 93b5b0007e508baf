"""Stages, whose chains are frozen layers: token-wise stages, token mixers, and branches that sum chains.

Every stage is affine with a frozen linear part. Vectors are (batch, length, channel, *columns); one pass maps all
columns, which are independent right-hand sides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import lcm
from operator import add

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.call.stored import Stored, matrix_of
from unilinattn.errors import FactorError, UncoveredError
from unilinattn.kernels.subnormal import flushed
from unilinattn.mixers import CoreMixer
from unilinattn.mixers.base import check_factors
from unilinattn.operator.carry import current_carry
from unilinattn.operator.deferred import Deferred

WHOLE = "module"
"""The role of a module that is one stage (see `recording.frozen_module`)."""

ROLES = ("input", "shift", "conv", "act", "core", "skip", "gate", "norm", "output", WHOLE)
"""Roles of stages; scopes are defined by them."""


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    """One frozen affine step of a layer."""

    role: str

    @property
    def mixes(self) -> bool:
        """Whether the stage acts across tokens."""
        return False

    @property
    def groups(self) -> int | None:
        """Number of channel groups with separate coefficients, None if the stage mixes channels."""
        return None

    @property
    def has_bias(self) -> bool:
        """Whether the output for a zero input may differ from zero, apart from the chains of a branch."""
        # A stage that has a bias is a dataclass with that field.
        return getattr(self, "bias", None) is not None

    @abstractmethod
    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Map (batch, length, channel, *columns) forward, with or without the stage's bias."""

    @abstractmethod
    def adjoint(self, g: Tensor) -> Tensor:
        """Apply the transpose of the linear part."""

    def unbiased(self) -> "Stage":
        """Return the stage without its bias."""
        return replace(self, bias=None) if self.has_bias else self  # type: ignore[call-arg]

    def at(self, index: Int[Tensor, "batch row"]) -> "Stage":
        """Return a token-wise stage restricted to the tokens at the positions `index`."""
        return self


@dataclass(frozen=True, eq=False)
class Matrix(Stage):
    """A weight matrix (out, in) and bias (out) for every token; a complex weight maps complex channels.

    A stored matrix is a weight of the model, which is cast at each use.
    """

    matrix: Inexact[Tensor, "out in"] | Stored
    bias: Float[Tensor, " out"] | None = None

    @property
    def weight(self) -> Inexact[Tensor, "out in"]:
        """The matrix, computed if it is stored."""
        return matrix_of(self.matrix)

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.matrix.shape

    @property
    def is_complex(self) -> bool:
        """Whether the matrix maps complex channels."""
        return self.matrix.is_complex()

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Multiply each token's vector by the weight."""
        return _add_bias(self._product(x, lambda weight: weight), self.bias if bias else None)

    def adjoint(self, g: Tensor) -> Tensor:
        """Multiply each token's vector by the conjugate transpose of the weight."""
        return self._product(g, lambda weight: weight.mH)

    def _product(self, x: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
        weight = self.weight
        if (
            isinstance(self.matrix, Stored)
            and torch.is_grad_enabled()
            and not self.is_complex
            and not weight.requires_grad
        ):
            with self.matrix.saved(weight):
                return _on_channels(form(weight), x)
        return _on_channels(form(weight), x)


@dataclass(frozen=True, eq=False)
class ToComplex(Stage):
    """Convert real channels to complex ones, before stages on complex modes (S5)."""

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Set the imaginary part to zero."""
        return x.to(x.dtype.to_complex())

    def adjoint(self, g: Tensor) -> Tensor:
        """Take the real part: the transpose under the real inner product."""
        return g.real


@dataclass(frozen=True, eq=False)
class ToReal(Stage):
    """Take the real part of complex channels, after stages on complex modes; the map is real-linear."""

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Take the real part."""
        return x.real

    def adjoint(self, g: Tensor) -> Tensor:
        """Set the imaginary part to zero."""
        return g.to(g.dtype.to_complex())


@dataclass(frozen=True, eq=False)
class Scale(Stage):
    """A frozen factor (batch or 1, length or 1, group) for each token and group of consecutive channels.

    A deferred factor is computed when it is first needed, which a map of the core does without. The bias may differ by
    token, (batch or 1, length or 1, channel). `of_value` says that the factor may depend on what it scales, so that the
    derivative of the host's layer is not the stage's. `norm_of` says how a norm's does: it is the number n of channels
    in (sum of squares / n + constant)^(-1/2). `weighs` says that the factor is known to be a weight: a constant, or
    computed from the tokens otherwise than as a norm of what it scales.
    """

    factor: Float[Tensor, "batch length group"] | Deferred
    bias: Float[Tensor, " channel"] | Float[Tensor, "_ _ channel"] | None = None
    of_value: bool = True
    norm_of: int | None = None
    weighs: bool = False

    @property
    def scale(self) -> Float[Tensor, "batch length group"]:
        """The factors, computed if they are deferred."""
        return self.factor() if isinstance(self.factor, Deferred) else self.factor

    def check(self, layer: str) -> None:
        """Raise `FactorError` with the name `layer` if a factor is NaN or infinite, now or when it is computed."""
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
        return _add_bias(product, self.bias if bias else None)

    def adjoint(self, g: Tensor) -> Tensor:
        """Multiply by the same factors."""
        return self.apply(g, bias=False)

    def at(self, index: Int[Tensor, "batch row"]) -> "Scale":
        """Gather the factors of the selected tokens."""
        bias = self.bias if self.bias is None or self.bias.ndim == 1 else _gathered(self.bias, index)
        return replace(self, factor=_gathered(self.scale, index), bias=bias)


@dataclass(frozen=True, eq=False)
class Center(Stage):
    """Subtract the mean over each group of channels: the centring of a norm, which is linear."""

    centred_groups: int = 1

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Subtract each group's mean."""
        grouped = x.unflatten(2, (self.centred_groups, -1))
        return (grouped - grouped.mean(3, keepdim=True)).flatten(2, 3)

    def adjoint(self, g: Tensor) -> Tensor:
        """Subtract each group's mean; the projection is symmetric."""
        return self.apply(g)


@dataclass(frozen=True, eq=False)
class Mix(Stage):
    """A token mixer: one matrix per head, which mixes consecutive channels; bias (channel)."""

    mixer: CoreMixer
    bias: Float[Tensor, " channel"] | None = None

    @property
    def mixes(self) -> bool:
        """Always true."""
        return True

    @property
    def groups(self) -> int | None:
        """Number of heads."""
        return self.mixer.heads

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Apply each head's matrix."""
        carry = current_carry()
        mix = self.mixer.apply if carry is None else partial(carry.apply, self.mixer)
        return _add_bias(_by_heads(mix, x, self.mixer.heads), self.bias if bias else None)

    def adjoint(self, g: Tensor) -> Tensor:
        """Apply each head's transposed matrix."""
        carry = current_carry()
        mix = self.mixer.adjoint if carry is None else partial(carry.adjoint, self.mixer)
        return _by_heads(mix, g, self.mixer.heads)


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
        """Least common multiple of the chains' groups, None if a chain mixes channels."""
        return channel_groups(stage for chain in self.chains for stage in chain)

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Sum the outputs of the chains."""
        return reduce(add, (run(chain, x, bias=bias) for chain in self.chains))

    def unbiased(self) -> "Branch":
        """Return the branch without the biases of its chains."""
        return replace(self, chains=tuple(tuple(stage.unbiased() for stage in chain) for chain in self.chains))

    def at(self, index: Int[Tensor, "batch row"]) -> "Branch":
        """Restrict all stages of its chains."""
        return replace(self, chains=tuple(tuple(stage.at(index) for stage in chain) for chain in self.chains))

    def adjoint(self, g: Tensor) -> Tensor:
        """Sum the outputs of the chains' adjoints."""
        return reduce(add, (run_adjoint(chain, g) for chain in self.chains))


@dataclass(frozen=True, eq=False)
class Unmapped(Stage):
    """A part of a host that cannot be expressed, with `width` output channels; any use raises `reason`."""

    reason: str
    width: int

    @property
    def has_bias(self) -> bool:
        """Always true: its output is unknown."""
        return True

    def unbiased(self) -> Stage:
        """Return the stage unchanged."""
        return self

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


def run_on_zeros(chain: Sequence[Stage], x: Tensor) -> Tensor:
    """Apply the stages to zeros of the shape of `x`, without the products with zeros of the first stages."""
    x = x.new_zeros(()).expand(x.shape)
    for position, stage in enumerate(chain):
        if isinstance(stage, Matrix):
            x = x.to(torch.promote_types(x.dtype, stage.matrix.dtype))[..., :1].expand(-1, -1, stage.shape[0])
            if stage.bias is not None:
                return run(chain[position + 1 :], x + stage.bias)
        elif isinstance(stage, Mix) and not stage.has_bias:
            x = x[:, :1].expand(-1, stage.mixer.shape[2], *x.shape[2:])
        elif not isinstance(stage, Scale) or stage.has_bias:
            return run(chain[position:], x.contiguous())
    return x.contiguous()


def run_adjoint(chain: Sequence[Stage], g: Tensor) -> Tensor:
    """Apply the transposes of the stages' linear parts, from the last stage to the first."""
    for stage in reversed(chain):
        g = stage.adjoint(g)
    return g


def walk(chain: Sequence[Stage]) -> Iterator[Stage]:
    """Yield every stage of a chain, including those inside branches."""
    for stage in chain:
        yield stage
        if isinstance(stage, Branch):
            for inner in stage.chains:
                yield from walk(inner)


def channel_groups(stages: Iterator[Stage] | Sequence[Stage]) -> int | None:
    """Return the least common multiple of the stages' groups, None if a stage mixes channels."""
    total = 1
    for stage in stages:
        # Read once: that of a branch reads those of its stages, and branches may be nested deeply.
        groups = stage.groups
        if groups is None:
            return None
        total = lcm(total, groups)
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
    if x.shape[3:] == (1,):
        # One product for all tokens, not one for each.
        return (x.squeeze(3) @ weight.T).unsqueeze(3)
    return (weight @ x.flatten(3)).unflatten(3, x.shape[3:])


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + _columns(bias, product.ndim - 3)


def _gathered(factors: Float[Tensor, "_ length group"], index: Int[Tensor, "batch row"]) -> Tensor:
    """Return the factors of some tokens; factors that all tokens share are unchanged."""
    if factors.shape[1] == 1:
        return factors
    return factors.expand(len(index), -1, -1).gather(1, index[..., None].expand(-1, -1, factors.shape[2]))


def _columns(factor: Tensor, count: int) -> Tensor:
    """Append `count` axes of size 1, over which the factor broadcasts."""
    return factor.reshape(*factor.shape, *([1] * count)) if count else factor


def _by_heads(mix: Callable[[Tensor], Tensor], x: Tensor, heads: int) -> Tensor:
    """Apply a mixer to (batch, length, head, channel x columns), and restore the axes."""
    # A head has one matrix for its channels and for all right-hand sides: with 4 heads of 8 channels and 5 columns,
    # (batch, length, 32, 5) is 4 heads of 40 channels.
    mixed = mix(x.unflatten(2, (heads, -1)).flatten(3))
    return mixed.unflatten(3, (x.shape[2] // heads, *x.shape[3:])).flatten(2, 3)
