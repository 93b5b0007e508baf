"""Functions by which information usually moves between tokens."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unilinattn.call.functions import meaning_of
from unilinattn.call.nested import tensors
from unilinattn.rules.mixing_functions import MixingFunction

MIXING = frozenset(
    {
        "softmax",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "cumsum",
        "logcumsumexp",
        "grid_sample",
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d"),
        *("fft_fft", "fft_fft2", "fft_rfft", "fft_rfft2"),
    }
)
"""Functions of torch that usually move information between tokens."""

PRODUCTS = frozenset({"matmul", "rmatmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
"""Products, of tokens if both operands are computed."""


def mixes_tokens(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a function is one by which tokens usually mix."""
    if isinstance(meaning_of(func), MixingFunction):
        return True
    name = getattr(func, "__name__", "")
    if name in ("conv1d", "conv2d", "conv3d"):
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        # One tap along one axis may lie on channels, the tokens being the channels of the convolution.
        return weight.shape[2:].numel() > 1 or name == "conv1d"
    if name in PRODUCTS:
        # A product with a parameter is over channels.
        return sum(1 for x in tensors((args, kwargs)) if x.ndim > 1 and not isinstance(x, nn.Parameter)) > 1
    if name == "linear":
        x = args[0] if args else kwargs["input"]
        return isinstance(x, Tensor) and x.ndim > 2 and x.stride(-1) != 1
    # Counts of whole numbers, such as positions by a mask, hold no vectors.
    return name in MIXING and any(t.is_floating_point() for t in tensors((args, kwargs)))
