"""Plain forms of modules of transformers between layers that compute in an autograd function of their own."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from unilinattn.registry import register_plain_form


@register_plain_form("transformers.models.bloom.modeling_bloom.BloomGelu")
def gelu(module: Any, x: Tensor) -> Tensor:
    """Apply the tanh form of GELU."""
    return functional.gelu(x, approximate="tanh")
