"""`Shares`: the parts of a scalar of a model's output, which add up to it; `Unembedding`: its last linear part."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shares:
    """Parts of a scalar of the output, in float64: tokens + bias + remainder = value, up to rounding.

    Attributes:
        tokens: the share of each token.
        embedding: the part of `tokens` from constants that are added to a token's embedding, such as its position.
        bias: the share of the biases and other constants that are added later.
        remainder: the scalar less its linear part at the output; zero for a logit.
        value: the scalar of the traced output; at length, that of the frozen run.
        depth: the shares of the stream that enters each block, None by default.
    """

    tokens: Float[Tensor, "batch key"]
    embedding: Float[Tensor, "batch key"]
    bias: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]
    depth: Float[Tensor, "depth batch key"] | None = None

    @property
    def gap(self) -> Float[Tensor, " batch"]:
        """The completeness gap |tokens + bias + remainder - value|."""
        return (self.tokens.sum(1) + self.bias + self.remainder - self.value).abs()

    @property
    def size(self) -> Float[Tensor, " batch"]:
        """The sum of the parts' absolute values, whose rounding bounds that of the gap."""
        return self.tokens.abs().sum(1) + self.bias.abs() + self.remainder.abs()


@dataclass(frozen=True, eq=False)
class Unembedding:
    """A scalar of the output as a function of the last residual stream: stream . gradient + bias + remainder = value.

    Attributes:
        stream: the residual stream after the last sum, before the final norm.
        gradient: the gradient of the scalar at the stream, through the frozen final norm and head.
        bias: the part of the biases and other constants after the stream.
        remainder: the scalar less its linear part at the output; zero for a logit.
        value: the scalar of the traced output; at length, that of the frozen run.
    """

    stream: Float[Tensor, "batch query out"]
    gradient: Float[Tensor, "batch query out"]
    bias: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    value: Float[Tensor, " batch"]
