"""`Stream`: a tensor of one vector per token in a memory-mapped file, written and read in pieces."""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.memory import in_words


class Stream:
    """A tensor (batch, length, channel) in a file without a name, whose disk space is free once the tensor is deleted.

    Writing and reading a piece leaves none of its pages in the resident memory of the process, on Linux.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Reserve the disk space; raise `InputError` if the folder has too little of it."""
        batch, length, width = shape
        size = batch * length * width * dtype.itemsize
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            try:
                # A file with holes would end the process when the disk is full.
                _reserve(file.fileno(), size)
            except OSError as error:
                raise InputError(
                    f"stream_to={str(folder)!r}: a stream of {batch} x {length} x {width} numbers takes "
                    f"{in_words(size)}, and the folder cannot hold it ({error.strerror}); give one with more space."
                ) from error
            self._pages = mmap.mmap(file.fileno(), size)
        self._by_token = torch.frombuffer(self._pages, dtype=dtype).view(length, batch, width)

    @property
    def tensor(self) -> Float[Tensor, "batch length channel"]:
        """The whole tensor, memory-mapped."""
        return self._by_token.transpose(0, 1)

    def write(self, tokens: slice, piece: Float[Tensor, "batch token channel"]) -> None:
        """Write the vectors of some tokens."""
        self.tensor[:, tokens] = piece.detach().to(self.tensor)
        self._release()

    def read(self, tokens: slice) -> Float[Tensor, "batch token channel"]:
        """Return a copy of the vectors of some tokens."""
        piece = self.tensor[:, tokens].clone(memory_format=torch.contiguous_format)
        self._release()
        return piece

    def _release(self) -> None:
        """Unmap the pages from the process; they stay in the file, and in the system's cache as long as it has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)


def _reserve(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)
