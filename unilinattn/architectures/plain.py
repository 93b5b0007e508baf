"""Plain forms of modules of transformers between layers that compute in an autograd function of their own."""

from typing import Any

import torch
from torch import Tensor

from unilinattn.registry import register_plain_form


@register_plain_form("transformers.models.bloom.modeling_bloom.BloomGelu")
def gelu(module: Any, x: Tensor) -> Tensor:
    """Apply the tanh form of GELU with the host's eight digits of sqrt(2 / pi)."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
