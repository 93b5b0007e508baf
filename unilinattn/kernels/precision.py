"""Keep the precision of products: autocast would round them to half precision, TF32 their factors to 11 bits."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import backends

Item = TypeVar("Item")
Setting = tuple[Callable[[Any], None], Any, Any]
"""A function that changes a setting of torch, its value for exact products, and its value before."""

AUTOCAST = ("cpu", "cuda")
"""Device types for which autocast is turned off."""

OPERATIONS = tuple(attrgetter("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")(backends))
"""Operations on float32 tensors whose factors torch may round; for cuDNN's convolutions it does so by default."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Turn autocast and TF32 off for every device type; also usable as a decorator."""
    with ExitStack() as stack:
        stack.enter_context(unrounded_products())
        for device in AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_full_precision(items: Iterator[Item]) -> Iterator[Item]:
    """Yield an iterator's items, each computed in full precision; the consumer's setting is unchanged."""
    while True:
        with full_precision():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class _Users:
    """The blocks inside of `unrounded_products` in all threads, and the settings to restore after the last one."""

    lock = threading.Lock()
    blocks: ClassVar[set[object]] = set()
    settings: Sequence[Setting] = ()


@contextmanager
def unrounded_products() -> Iterator[None]:
    """Turn off what rounds the factors of float32 products (TF32, bfloat16) until the last block in any thread ends."""
    block = object()
    try:
        with _Users.lock:
            if not _Users.blocks:
                _Users.settings = _rounding()
                for change, exact, _ in _Users.settings:
                    change(exact)
            _Users.blocks.add(block)
        yield
    finally:
        with _Users.lock:
            _Users.blocks.discard(block)
            if not _Users.blocks:
                for change, _, before in reversed(_Users.settings):
                    change(before)


def _rounding() -> list[Setting]:
    """Return the settings of torch that round factors now."""
    settings: list[Setting] = []
    try:
        convolutions, products = backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        # The process set the precision by operation, which these two cannot tell.
        pass
    else:
        if convolutions:
            settings.append((partial(setattr, backends.cudnn, "allow_tf32"), False, True))
        if products != "highest":
            settings.append((torch.set_float32_matmul_precision, "highest", products))
    precisions = [(operation, operation.fp32_precision) for operation in OPERATIONS]
    for operation, precision in precisions:
        if precision not in ("none", "ieee"):
            settings.append((partial(setattr, operation, "fp32_precision"), "ieee", precision))
    return settings
