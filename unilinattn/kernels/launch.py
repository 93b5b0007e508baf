"""Shared parts of the Triton kernels: factors with strides, products in a chosen precision, tuning and launching."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from unilinattn.kernels.backend import interpreted

Precision = Literal["ieee", "tf32x3", "tf32", "bf16"]
"""Precision of products' inputs: 24 bits, about 21, 11 or 8; sums are always float32."""

INTERPRETED = tl.constexpr(interpreted())


class Factor(NamedTuple):
    """A tensor (batch, token, head, last) as a kernel takes it: its data and its strides, 0 for a missing axis.

    `head` may be groups that heads share; `last` holds coordinates of a state, or channels.
    """

    data: Any
    batch: int = 0
    token: int = 0
    head: int = 0
    last: int = 0


def factor(tensor: Tensor, axes: str = "batch token head last") -> Factor:
    """Return a tensor with these axes as a kernel takes it."""
    return Factor(tensor, **dict(zip(axes.split(), tensor.stride(), strict=True)))


@triton.jit
@no_type_check
def load(factor, batch, token, head, last, mask):
    """Read entries of a factor as float32, zero where the mask is false; the indices broadcast to the block's shape."""
    # A loop over tokens changes only the last summand; the others, which may have the block's full size, stay.
    offset = batch * factor.batch + head * factor.head + last * factor.last + token * factor.token
    return tl.load(factor.data + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def product(a, b, acc, PRECISION: tl.constexpr):
    """Add the product of two float32 blocks to float32 sums, with inputs rounded to `PRECISION`."""
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if INTERPRETED:
            # Triton's interpreter would multiply the bit patterns of bfloat16 numbers.
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


def tuned(configs: Sequence[dict[str, int]], key: Sequence[str], restore: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator that times the configurations on a GPU, once for each value of `key`.

    A configuration holds block sizes, `num_warps` and `num_stages`. `restore` names the tensors that a kernel adds to.
    The interpreter uses the first configuration without timing.
    """

    def decorate(kernel: Any) -> Any:
        if interpreted():
            return _First(kernel, configs[0])
        options = [
            triton.Config(
                {name: size for name, size in config.items() if not name.startswith("num_")},
                num_warps=config.get("num_warps", 4),
                num_stages=config.get("num_stages", 2),
            )
            for config in configs
        ]
        return triton.autotune(options, key=list(key), restore_value=list(restore) or None)(kernel)

    return decorate


class _First:
    """A kernel with one configuration, with the launch syntax of an autotuned kernel."""

    def __init__(self, kernel: Any, config: dict[str, int]) -> None:
        self.fn, self.config = kernel, config

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            sizes = {**self.config, **options}
            return self.fn[grid(sizes) if callable(grid) else grid](*args, **sizes)

        return launch


def on(like: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's device current, on which Triton launches kernels."""
    return torch.cuda.device(like.device) if like.is_cuda else nullcontext()


def power(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, triton.next_power_of_2(size))
