"""Detect changes of a module's parameters and buffers since a run, by checksums of their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from unilinattn.errors import ModelStateError
from unilinattn.kernels.backend import implementation
from unilinattn.kernels.checksum import tiled

Checksum = tuple[torch.Size, torch.dtype, int | None]
"""Shape, dtype and checksum of a tensor; None in place of the checksum of a tensor whose bytes cannot be read."""


class Checksums:
    """Checksums of tensors that the `Weights` of a model and of its layers share.

    Attributes:
        by_id: the checksum of each tensor by its id.
        is_compared: whether nothing compares the weights now (see `Weights.compared`).
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.by_id: dict[int, Checksum] = {}
        self.is_compared = False


class Weights:
    """Checksums of every parameter and buffer of a module.

    Writes through `.data` do not change a tensor's version counter, so the bytes themselves are compared. Cost: one
    pass over the bytes of the weights at construction and one for each comparison.
    """

    def __init__(self, module: nn.Module, checksums: Checksums | None = None) -> None:
        """Compute the checksums that are not in `checksums`, and add them to it."""
        self._shared = Checksums() if checksums is None else checksums
        self._before = _checksums(module, self._shared.by_id)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Let nothing compare the module or its layers inside the block: one call compares once, just before."""
        before, self._shared.is_compared = self._shared.is_compared, True
        try:
            yield
        finally:
            self._shared.is_compared = before

    def require_same(self, module: nn.Module, name: str, otherwise: str) -> None:
        """Compare a module with the one that the checksums were computed from.

        Raises:
            ModelStateError: if a parameter or buffer changed, was added or was removed; the message ends in
                `otherwise`.
        """
        if self._shared.is_compared:
            return
        now = _checksums(module, {})
        changed = [key for key in {**self._before, **now} if self._before.get(key) != now.get(key)]
        if changed:
            raise ModelStateError(
                f"the weights of {name} changed since the trace ({changed[0]}), so {otherwise}; trace the model again."
            )


def _checksums(module: nn.Module, by_id: dict[int, Checksum]) -> dict[str, Checksum]:
    """Return the checksum of each parameter and buffer by its name; a shared tensor is read once."""
    named: dict[str, Tensor] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is not None:
                named[f"{path}.{name}" if path else name] = tensor
    new = {id(tensor): tensor for tensor in named.values() if id(tensor) not in by_id}
    sums = {key: total for key, tensor in new.items() if (total := _checksum(tensor.detach())) is not None}
    numbers: dict[int, int] = {}
    # A GPU is waited for once, not after each tensor.
    for device in {total.device for total in sums.values()}:
        there = {key: total for key, total in sums.items() if total.device == device}
        numbers |= zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    by_id |= {key: (tensor.shape, tensor.dtype, numbers.get(key)) for key, tensor in new.items()}
    return {name: by_id[id(tensor)] for name, tensor in named.items()}


def _checksum(tensor: Tensor) -> Tensor | None:
    """Return the checksum of a tensor's bytes, on its device; None where they cannot be read."""
    if tensor.device.type == "meta" or type(tensor) not in (Tensor, nn.Parameter):
        # Offloaded weights are loaded for each call only, and torch cannot read other packages' packed formats.
        return None
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu")
    words = _words(tensor)
    if not words.is_cuda:
        return tiled.checksum(words)
    form = implementation("checksum", words.new_empty(0, dtype=torch.float32))
    result: Tensor = form.checksum(words)
    return result


def _words(tensor: Tensor) -> Int64[Tensor, " word"]:
    """Return a tensor's bytes as 64-bit integers, the last one padded with zeros."""
    # A tensor of one element may have any stride and count as contiguous; a part of a buffer may begin inside a word.
    is_copied = tensor.numel() == 1 or tensor.storage_offset() * tensor.element_size() % 8
    raw = tensor.reshape(-1).clone(memory_format=torch.contiguous_format) if is_copied else tensor
    raw = raw.contiguous().reshape(-1).view(torch.uint8)
    rest = -len(raw) % 8
    return (torch.nn.functional.pad(raw, (0, rest)) if rest else raw).view(torch.int64)
