"""Errors that the library raises on purpose: each message states the given value, the accepted ones and a remedy."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class UnilinattnError(Exception):
    """Base class of every error that this library raises on purpose."""


class InputError(UnilinattnError, ValueError):
    """The inputs of a model or of a tensor operation have the wrong type, dtype, shape or position."""


class OptionError(UnilinattnError, ValueError):
    """An option, method, scope or name is unknown or has a value that is not accepted."""


class UnknownArchitectureError(UnilinattnError):
    """The model has no registered token mixer, or has a token mixer without an adapter.

    `path` is that of the module that mixes tokens outside of the layers in it, None without one, and `layers` are the
    paths of the model's layers.
    """

    def __init__(self, message: str, path: str | None = None, layers: Collection[str] = ()) -> None:
        super().__init__(message)
        self.path, self.layers = path, layers


class UncoveredError(UnilinattnError, NotImplementedError):
    """An adapter or a method does not cover the requested configuration exactly."""


class HostError(UncoveredError):
    """The installed version of a model's package computes wrong values, which an exact map would only repeat."""


class ExactnessWarning(UserWarning):
    """Scores come from a layer whose operator misses the host's output (`trust="warn"`)."""


class SinkWarning(UserWarning):
    """Scores of an attention sink say little about its word."""


class StreamError(UnilinattnError, RuntimeError):
    """A layer's residual stream and output do not add up to the next stream of the host."""


class ModelStateError(UnilinattnError, RuntimeError):
    """The model is in a state that cannot be traced: active dropout, or weights changed since the trace."""


class ExactnessError(UnilinattnError, ArithmeticError):
    """A layer's operator does not reproduce the host's output up to the rounding of its dtype."""


class NonFiniteError(UnilinattnError, ArithmeticError):
    """Scores are NaN or infinite although every layer is finite: they exceed the range of their dtype."""


class ResultFileError(UnilinattnError, ValueError):
    """A saved result is truncated, of another version, or was not written by this library."""


class CheckpointError(UnilinattnError, OSError):
    """A path holds no checkpoint that can be loaded."""


class FactorError(UnilinattnError, ValueError):
    """A factor of an operator holds NaN or infinity where finite numbers are required, or is on another device."""


class MemoryLimitError(UnilinattnError, MemoryError):
    """An operation needs more memory than `max_memory` allows; raised before anything is allocated."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """Return the end of an error message: the closest of the accepted names, if one is close, then all of them."""
    accepted = sorted(choices)
    close = get_close_matches(str(name), accepted, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Accepted: {', '.join(accepted) or 'none'}."
