"""Processes of one run, as `accelerate launch` and `torchrun` start them, on one machine or several."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import distributed

from unilinattn.errors import UnilinattnError

Key = TypeVar("Key")

_apart: ContextVar[bool] = ContextVar("unilinattn.apart", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Let this process compute all of what it is asked for inside a `with` block: parts of a run that share nothing."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


_groups: WeakKeyDictionary["distributed.ProcessGroup", "distributed.ProcessGroup"] = WeakKeyDictionary()
"""By the default group of torch, the one that gathers values."""


def _group() -> "distributed.ProcessGroup":
    """Return the group that gathers values; makes it, and a default group if the program has none."""
    if not _groups:
        atexit.register(_disconnect)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    everyone = distributed.group.WORLD
    assert everyone is not None
    if everyone not in _groups:
        # Objects are sent over the CPU, even if the program's own process group uses NCCL.
        _groups[everyone] = distributed.new_group(backend="gloo")
    return _groups[everyone]


def _disconnect() -> None:
    # A thread of gloo that still holds a gathered tensor when Python exits aborts the process. The threads of a group
    # end when nothing refers to it: modules of torch may refer to the default group (defaults of arguments of
    # `torch.distributed.nn` do, if it is loaded later), but only `_groups` to this one.
    if distributed.is_initialized():
        distributed.destroy_process_group()
    _groups.clear()


class Processes:
    """The processes that share a run; a program that no launcher started is process 0 of 1.

    Joins the processes of `torch.distributed`. If a launcher started several and the program has not connected them
    (with accelerate, an `Accelerator` or `PartialState` does), connects them by gloo until Python exits.

    Attributes:
        rank: number of this process, from 0.
        count: number of processes.
    """

    def __init__(self) -> None:
        """Connect the processes."""
        self.rank, self.count = 0, 1
        if _apart.get():
            return
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ
        if distributed.is_available() and (distributed.is_initialized() or launched):
            _group()
            self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=_group())
        return values

    def spread(
        self, keys: Sequence[Key], stored: Callable[[Key], Any], compute: Callable[[Sequence[Key]], dict[Key, Any]]
    ) -> dict[Key, Any]:
        """Return the value of every key: the stored ones, and the others computed by the processes in turn.

        `stored` returns None for a key without a value. Every process returns all values. An error in one process is
        raised in each of them, after the others have computed their keys.
        """
        values: dict[Key, Any] = {}
        for others in self.gather({key: value for key in keys if (value := stored(key)) is not None}):
            values.update(others)
        missing = [key for key in keys if key not in values][self.rank :: self.count]
        error: Exception | None = None
        try:
            computed = compute(missing)
        except Exception as raised:
            error, computed = raised, {}
        for rank, (others, message) in enumerate(self.gather((computed, None if error is None else str(error)))):
            if message is not None:
                raise error or UnilinattnError(f"process {rank} of {self.count}: {message}")
            values.update(others)
        return {key: values[key] for key in keys}
