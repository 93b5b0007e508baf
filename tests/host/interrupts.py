"""Injected interrupts: `KeyboardInterrupt` when the n-th line of some files runs, for any n."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Interrupts:
    """Counts the lines that run in files whose names end with one of `files`, and raises at the numbers `at`.

    Python stops tracing when a trace function raises. A profile function restarts it at the next call or return, so
    that a second interrupt can occur while the first one is handled.
    """

    files: tuple[str, ...]
    at: tuple[int, ...] = ()
    lines: list[tuple[str, int]] = field(default_factory=list)
    raised: int = 0

    def run(self, function: Callable[[], Any]) -> bool:
        """Run a function; return whether it raised an interrupt."""
        before = sys.gettrace(), sys.getprofile()
        try:
            if len(self.at) > 1:
                sys.setprofile(self._resume)
            sys.settrace(self._enter)
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 in self.at:
                self.raised += 1
                raise KeyboardInterrupt
        return self._line

    def _resume(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.raised and sys.gettrace() is None:
            above: FrameType | None = frame
            while above is not None:
                if above.f_code.co_filename.endswith(self.files):
                    above.f_trace = self._line
                above = above.f_back
            sys.settrace(self._enter)


def first_and_last(lines: Iterable[tuple[str, int]]) -> list[int]:
    """Return the counts at which each distinct line ran for the first and for the last time."""
    numbered = list(enumerate(lines))
    first = {line: number for number, line in reversed(numbered)}
    last = {line: number for number, line in numbered}
    return sorted({*first.values(), *last.values()})
