"""Injected interrupts: `KeyboardInterrupt` when the n-th line of some files runs, for any n."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Interrupts:
    """Counts the lines that run in files whose names end with one of `files`, and raises at one of the counts."""

    files: tuple[str, ...]
    interrupted: int | None = None
    lines: list[tuple[str, int]] = field(default_factory=list)

    def run(self, function: Callable[[], Any]) -> bool:
        """Run a function; return whether it raised an interrupt."""
        before = sys.gettrace()
        try:
            sys.settrace(self._enter)
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self.interrupted:
                raise KeyboardInterrupt
        return self._line


def first_and_last(lines: Iterable[tuple[str, int]]) -> list[int]:
    """Return the counts at which each distinct line ran for the first and for the last time."""
    numbered = list(enumerate(lines))
    first = {line: number for number, line in reversed(numbered)}
    last = {line: number for number, line in numbered}
    return sorted({*first.values(), *last.values()})
