"""The gamma rule: products that have the sign of their sum count more, and the value of the sum stays the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unilinattn.rules.forms import carried, linear_in
from unilinattn.rules.freezing import Freezing
from unilinattn.rules.functions import Product


def emphasised(z: Tensor, positive: Tensor, gamma: float) -> Tensor:
    """Return the sum z of products with another derivative, that of z' = z + gamma P if z > 0, else of z + gamma N.

    P is the sum of the positive products x_j w_jk and biases, and N = z - P that of the negative ones. z' is scaled by
    the constant z / z', so relevance is conserved: R_j = sum_k x_j w'_jk / z'_k R_k, where w'_jk is (1 + gamma) w_jk if
    the product has the sign of z_k. This is the generalised gamma rule of MambaLRP (Jafari et al., 2024), that of
    Montavon et al. (2019) for inputs of both signs. z' has the sign of z and is no smaller.

    Args:
        z: the sum of products.
        positive: P, of the shape of z.
        gamma: at least 0.
    """
    raised = z + gamma * torch.where(z.detach() > 0, positive, z - positive)
    zero = raised.detach() == 0
    return raised * (z.detach() / raised.detach().masked_fill(zero, 1)).masked_fill(zero, 1)


def positive_products(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of the positive products of values and weights, as `product` is of all of them."""
    return product(x.clamp(min=0), weight.clamp(min=0)) + product(x.clamp(max=0), weight.clamp(max=0))


class GammaFreezing(Freezing):
    """Freezes by the half rule, and by the gamma rule in linear layers and convolutions with real weights.

    Args:
        gamma: see `emphasised`.
        applies: tells whether the gamma rule holds where the host runs.
        arguments: those of `Freezing`.
    """

    def __init__(self, gamma: float, applies: Callable[[], bool], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, half=True, **named)
        self._gamma, self._applies = gamma, applies

    def _weighted(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        z = super()._weighted(product, x, weight, bias)
        if carried(weight) or weight.is_complex() or not self._applies():
            return z
        positive = positive_products(lambda live, signed: linear_in(live, product, (live, signed), {}), x, weight)
        return emphasised(z, positive if bias is None else positive + bias.clamp(min=0), self._gamma)
