"""Keep an operator's dtype: autocast would round products to half precision."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")

AUTOCAST = ("cpu", "cuda")
"""Device types for which autocast is turned off."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Turn autocast off for every device type; also usable as a decorator."""
    with ExitStack() as stack:
        for device in AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_full_precision(items: Iterator[Item]) -> Iterator[Item]:
    """Yield an iterator's items, each computed with autocast off; the consumer's setting is unchanged."""
    while True:
        with full_precision():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
