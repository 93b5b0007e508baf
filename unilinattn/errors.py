"""Every error that the library raises on purpose, each saying what came, what is accepted and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class UnilinattnError(Exception):
    """Base class: catch it to catch everything that this library raises on purpose."""


class InputError(UnilinattnError, ValueError):
    """The inputs of a model or of a tensor operation have the wrong type, dtype, shape or position."""


class OptionError(UnilinattnError, ValueError):
    """An option, method, scope or name is unknown or has a value that is not accepted."""


class UnknownArchitectureError(UnilinattnError):
    """A model holds no token mixer that is registered, or one that no adapter knows."""


class UncoveredError(UnilinattnError, NotImplementedError):
    """A known host or method was asked for something that its adapter does not cover exactly."""


class ModelStateError(UnilinattnError, RuntimeError):
    """The model is in a state that cannot be traced: active dropout, or weights changed since the trace."""


class ResultFileError(UnilinattnError, ValueError):
    """A saved result is truncated, of another version, or was not written by this library."""


class CheckpointError(UnilinattnError, OSError):
    """A path holds no checkpoint that can be loaded."""


class FactorError(UnilinattnError, ValueError):
    """A factor of an operator holds NaN or infinity where a finite number is needed, or lies on another device."""


class MemoryLimitError(UnilinattnError, MemoryError):
    """An operation needs more memory than `max_memory` allows: nothing was allocated."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """Return the tail of an error message: the accepted names, the closest one first if there is one."""
    accepted = sorted(choices)
    close = get_close_matches(str(name), accepted, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Accepted: {', '.join(accepted) or 'none'}."
